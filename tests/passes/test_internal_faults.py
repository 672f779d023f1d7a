"""Steps are dumped and checked; an internal fault drops the place that met it, and no other."""

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from models import Backend, Pair, three
from torch import fx, nn

from nmm_compiler import backend
from nmm_compiler.errors import InternalFaultError
from nmm_compiler.passes import layout, pipeline
from nmm_compiler.passes.emit import calls
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import canonical, read_graph as table
from nmm_compiler.passes.pipeline import run
from nmm_compiler.passes.rules.lowrank import LowRankChain
from nmm_compiler.passes.rules.shared import SharedX

X = torch.randn(6, 32)
aten = torch.ops.aten


def traced():
    return fx.symbolic_trace(three())


def breaks(function, when=lambda *args: True, at="before"):
    """Return a function that raises before or after its work, when its arguments say so."""

    def broken(*args, **kwargs):
        hit = when(*args)
        if at == "after" and hit:
            function(*args, **kwargs)
        if hit:
            raise IndexError("boom")
        return function(*args, **kwargs)

    return broken


def final(name):
    """Return a function that says whether a call ends at a node."""
    return lambda call, *_: call.final.name == name


def of_several(call, *_):
    """Say whether a call has several results."""
    return bool(call.members)


def second(hit):
    return lambda first, *rest: hit(*rest)


# What breaks, and the kinds of the matches that are left: all three chains but for what is said.
FAULTS = {
    "reading a node": (table.TABLE, "tanh", {}, ["shared_x", "lowrank"]),
    "matching": (
        LowRankChain, "check", {"when": lambda r, c, k: k[0].name[:3] == "s_b"}, ["shared_x"],
    ),
    "matching one of a group": (
        LowRankChain, "check", {"when": lambda r, c, k: k[0].name[:3] == "q_b"}, ["lowrank"] * 2,
    ),
    "joining": (SharedX, "combine", {}, ["lowrank"] * 3),
    "absorbing": (layout, "_absorb_transpose", {}, ["shared_x", "lowrank"]),
    "layout": (layout, "_decide", {"when": second(final("p_b"))}, ["shared_x", "lowrank"]),
    "emission": (calls.Call, "emit", {"when": final("s_b"), "at": "after"}, ["shared_x"]),
    "emission of a group": (
        calls.Call, "emit", {"when": of_several, "at": "after"}, ["lowrank"] * 3,
    ),
    "emission before": (calls.Call, "emit", {"when": final("s_b")}, ["shared_x"]),
    "lint": (fx.Graph, "lint", {"when": lambda g: _rewritten(g) > 1}, []),
    # before there is a graph to drop a place from
    "reading values": (pipeline, "collect_values", {}, []),
    "reading effects": (canonical.Effects, "__init__", {}, []),
}  # fmt: skip


def _rewritten(graph):
    return sum(str(n.target).startswith("nmm.") for n in graph.nodes)


@pytest.fixture
def broken(monkeypatch, request):
    owner, name, how, kinds = FAULTS[request.param]
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, breaks(owner[name], **how))
    else:
        monkeypatch.setattr(owner, name, breaks(getattr(owner, name), **how))
    return kinds


@pytest.mark.parametrize("broken", FAULTS, indirect=True)
def test_internal_fault_drops_one_place_and_is_raised_under_strict(broken):
    module = traced()
    with pytest.raises(InternalFaultError, match="a fault in nmm_compiler, IndexError while") as e:
        run(module, (X,), {"strict": True})
    assert isinstance(e.value.__cause__, IndexError)
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = run(module, (X,))
    ours = [str(w.message) for w in caught if str(w.message).startswith("nmm: ")]
    places = {d.at for d in result.declined if d.code == "internal"}
    assert places
    (text,) = ours
    assert "a fault in nmm_compiler, IndexError while" in text
    assert sorted(m.kind for m in result.matches) == sorted(broken)
    for got, want in zip(result.graph_module(X), module(X), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert got.stride() == want.stride()
    if not broken:
        assert result.graph_module.code == module.code
    # Nothing of a half-made emission is left: every node is read.
    loose = [n for n in result.graph_module.graph.nodes if not n.users and n.op != "output"]
    assert not loose


def test_sizes_that_stand_nowhere_are_a_refusal(monkeypatch):
    first, second = nn.Linear(32, 3, bias=False), nn.Linear(3, 32)

    def model(x, m, n):
        pairs = (x[m][:, None] + x[n][None]).permute(2, 0, 1)
        turned = torch.einsum("kij,rk,nr->nji", pairs, first.weight, second.weight)
        return turned, second(first(x))

    found = Backend({"strict": True})
    monkeypatch.setattr(Editor, "_symbolic_sizes", lambda self, near: {})
    arguments = (X, X[:, 0] > 0, X[:, 1] > -1)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        got = torch.compile(model, backend=found, fullgraph=True)(*arguments)
        torch.testing.assert_close(got, model(*arguments), rtol=1e-5, atol=1e-5)
    (refused,) = found[0].declined
    assert (refused.code, refused.node) == ("shape", "turned")
    assert "u0" in refused.reason
    assert "u1" in refused.reason
    assert len(found[0].matches) == 1


def test_internal_faults_everywhere_leave_the_graph_as_it_was(monkeypatch):
    monkeypatch.setattr(calls.Call, "prepare_x", breaks(calls.Call.prepare_x))
    layers = nn.Sequential(*(nn.Sequential(Pair(32, 3, 32), nn.ReLU()) for _ in range(20)))
    module = fx.symbolic_trace(layers)
    with pytest.warns(UserWarning, match=r"a fault in nmm_compiler.*and \d+ more"):
        result = run(module, (X,))
    assert not result.matches
    assert result.graph_module.code == module.code
    assert sum(d.code == "internal" for d in result.declined) <= 9


def test_internal_fault_is_in_the_backends_report_and_its_program_runs(monkeypatch, capsys):
    monkeypatch.setattr(calls.Call, "emit", breaks(calls.Call.emit, when=of_several))
    options = {"inner": "eager", "kernels": "lazy"}
    model = three()
    backend.reset()
    compiled = torch.compile(model, backend="nmm", options=options)
    with pytest.warns(UserWarning, match="a fault in nmm_compiler") as caught:
        got = compiled(X)
    torch.testing.assert_close(got, model(X), rtol=1e-5, atol=1e-5)
    report = backend.last_report()
    assert report.chains == 3
    assert report.fallback is None
    assert "a fault in nmm_compiler, IndexError while emitting" in str(report.declined)
    (text,) = [str(w.message) for w in caught if "a fault in nmm_compiler" in str(w.message)]
    program = text.partition("run: python ")[2].partition(" ; ")[0]
    text = Path(program).read_text(encoding="utf-8")
    assert '"strict": True' in text
    monkeypatch.undo()  # the program rewrites the same graph, and nothing is broken any more
    exec(compile(text, program, "exec"), {"__name__": "program"})
    assert capsys.readouterr().out.strip() == "no fault"


# -- the steps -----------------------------------------------------------------------------------

NAMES = ["read", "match", "combine", "lay_out", "emit", "lint"]


def test_dump_writes_the_graph_after_each_step(tmp_path, monkeypatch):
    monkeypatch.setenv("NMM_DUMP", str(tmp_path / "new"))
    for _ in range(2):
        run(traced(), (X,))
    files = sorted((tmp_path / "new").iterdir())
    assert [f.name for f in files] == [f"{i:03d}_{n}.py" for i, n in enumerate(NAMES * 2)]
    texts = {f.stem[4:]: f.read_text(encoding="utf-8") for f in files}
    assert "# p_b.product: Product(" in texts["read"]
    assert texts["match"].count("# lowrank at") == 3
    assert "# shared_x at" in texts["combine"]
    assert "lowrank_matmul" not in texts["lay_out"].split("def forward")[1]
    assert "lowrank_matmul_shared_x" in texts["emit"].split("def forward")[1]
    for text in texts.values():
        compile(text, "dump", "exec")


def _turn_what_is_changed_outside(graph, match):
    match.data.out_layout, match.data.rounded = "col", True


# What a step may get wrong, and the words of the check that finds it.
WRONG = {
    "combine": (SharedX, "combine",
                lambda rule, graph, ms: [*ms, dataclasses.replace(ms[0], rule="shared_x")],
                "both take over node"),
    "layout": (layout, "_absorb_transpose", _turn_what_is_changed_outside,
               "is turned, and changed outside"),
    "emit": (calls.Call, "finish", lambda call, editor, y: editor.call(torch.Tensor.double, y),
             r"is torch.float64 .* in place of"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_steps_make_is_checked(monkeypatch, name):
    assert [step.__name__ for step in pipeline.PASSES] == NAMES
    owner, method, wrong, words = WRONG[name]
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises(InternalFaultError, match=words):
        run(traced(), (X,), {"strict": True})
    with pytest.warns(UserWarning, match="a fault in nmm_compiler"):
        assert not run(traced(), (X,)).matches
