"""The backend's own duties: options, the untouched graph, faults, reports."""

import ast
import dataclasses
import functools
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from backend.small_models import FactorPair
from torch import nn
from torch._dynamo.backends.registry import register_backend
from torch._inductor.exc import InvalidCxxCompiler

from nmm_compiler.backend import compile_graph as backend
from nmm_compiler.errors import OptionTypeError, UnknownNameError
from nmm_compiler.options import Options
from nmm_compiler.passes import pipeline

QUICK = {"kernels": "lazy", "inner": "capture"}
captured: list[torch.fx.GraphModule] = []


@register_backend(name="capture")
def capture(gm, example_inputs):
    captured.append(gm)
    return gm.forward


@pytest.fixture(autouse=True)
def nothing_captured():
    captured.clear()
    yield
    captured.clear()


def pair(inputs=16, rank=2, outputs=12):
    return FactorPair(nn.Linear(inputs, outputs), rank)


def targets(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def check(model, *inputs, options=QUICK, chains=1, **compile_options):
    compiled = torch.compile(model, backend="nmm", options=options, **compile_options)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
    assert sum(r.chains for r in backend.reports()) == chains
    return compiled


@pytest.mark.parametrize(
    ("options", "target", "executor"),
    [(QUICK, "trn2", "auto"),
     (Options(target="trn3", executor="reference", **QUICK), "trn3", "reference")],
)  # fmt: skip
def test_a_chain_becomes_one_op_call_that_says_all(options, target, executor):
    check(pair(), torch.randn(4, 16), options=options)
    (call,) = [n for n in captured[0].graph.nodes if str(n.target).startswith("nmm.")]
    assert str(call.target) == "nmm.lowrank_matmul.default"
    assert (call.kwargs["target"], call.kwargs["executor"]) == (target, executor)
    assert call.meta["example_value"].shape == (4, 12)


def test_a_graph_without_chains_goes_to_the_inner_backend_untouched():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 12), nn.ReLU()))
    nodes = list(gm.graph.nodes)
    backend.nmm(gm, [torch.randn(4, 16)], options=QUICK)
    assert captured[0] is gm
    assert list(gm.graph.nodes) == nodes
    assert backend.last_report().matches == backend.last_report().kernels == ()


def fail(*_, error=ZeroDivisionError, **__):
    raise error("a fault in a pass")


def test_a_fault_in_the_passes_leaves_the_graph_as_it_was_with_one_warning(monkeypatch):
    monkeypatch.setattr(pipeline, "run", fail)
    model, x = pair(), torch.randn(4, 16)
    with warnings.catch_warnings(record=True, action="always") as caught:
        check(model, x, chains=0)
    assert [str(w.message) for w in caught if "nmm" in str(w.message)] == [
        "nmm: the passes failed: ZeroDivisionError: a fault in a pass; the graph goes to "
        "'capture' as it was, and options={'strict': True} gives the traceback"
    ]
    assert not any(t.startswith("nmm.") for t in targets(captured[0]))
    assert "a fault in a pass" in backend.last_report().fallback


@pytest.mark.parametrize(
    ("error", "strict"), [(ZeroDivisionError, True), (KeyboardInterrupt, False)]
)
def test_strict_raises_the_fault_and_ctrl_c_is_never_swallowed(monkeypatch, error, strict):
    monkeypatch.setattr(pipeline, "run", functools.partial(fail, error=error))
    gm = torch.fx.symbolic_trace(pair())
    with pytest.raises(error, match="a fault in a pass"):
        backend.nmm(gm, [torch.randn(4, 16)], options={**QUICK, "strict": strict})
    assert captured == []


@register_backend(name="hates_nmm")
def hates_nmm(gm, example_inputs):
    if any(t.startswith("nmm.") for t in targets(gm)):
        raise NotImplementedError("an op I do not know")
    return gm.forward


def test_an_inner_backend_that_refuses_our_ops_gets_the_untouched_graph():
    with pytest.warns(UserWarning, match="an op I do not know"):
        check(pair(), torch.randn(4, 16), options={**QUICK, "inner": "hates_nmm"}, chains=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**QUICK, "inner": "hates_nmm", "strict": True}, "an op I do not know"),
        ({"inner": "indctor"}, "indctor"),
        ({"tarjet": "trn2"}, "unknown option 'tarjet'; did you mean 'target'"),
        (7, "a dict or an nmm_compiler.Options"),
    ],
)
def test_what_cannot_be_compiled_with_is_named(options, words):
    with pytest.raises(Exception, match=words):
        torch.compile(pair(), backend="nmm", options=options)(torch.randn(4, 16))


def test_mode_reaches_inductor_and_is_refused_elsewhere(monkeypatch):
    gm, x = torch.fx.symbolic_trace(pair()), [torch.randn(4, 16)]
    for name in ("eager", "aot_eager"):
        with pytest.raises(OptionTypeError, match=f"modes are inductor's, and '{name}'") as refused:
            backend.nmm(gm, x, mode="max-autotune", options={**QUICK, "inner": name})
        remedy = str(refused.value).partition("pass options=")[2].partition(" or run")[0]
        assert Options.make(ast.literal_eval(remedy)).price == "simulated"
    for name in ("eager", "inductor"):
        with pytest.raises(UnknownNameError, match="did you mean 'max-autotune'"):
            backend.nmm(gm, x, mode="max-autotun", options={**QUICK, "inner": name})
    seen = {}

    def stand_in(gm, example_inputs, config_patches):
        seen.update(config_patches)
        return gm.forward

    monkeypatch.setattr(backend, "lookup_backend", lambda name: stand_in)
    backend.nmm(gm, x, mode="max-autotune", options={**QUICK, "inner": "inductor"})
    assert seen["max_autotune"] is True


def test_graph_breaks_give_one_report_for_each_graph():
    first, second = pair(), pair(12, 2, 16)

    def model(x):
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    check(model, torch.randn(4, 16), chains=2)
    assert [r.chains for r in backend.reports()] == [1, 1]
    assert [r.graph for r in backend.reports()] == sorted(r.graph for r in backend.reports())


def test_chains_in_nested_regions_are_rewritten():
    layer = pair()

    @torch.compiler.nested_compile_region
    def region(x):
        return layer(x).relu()

    def model(x):
        return region(x) + region(x + 1)

    check(model, torch.randn(4, 16), chains=1)
    inner = [c for c in captured[0].modules() if isinstance(c, torch.fx.GraphModule)]
    assert any("nmm.lowrank_matmul.default" in targets(c) for c in inner)


def test_the_report_is_handed_over_printed_kept_and_plain_json(capsys):
    seen = []
    check(pair(), torch.randn(4, 16), options={**QUICK, "report": seen.append})
    assert seen == backend.reports()
    assert backend.last_report() is seen[-1]
    data = json.loads(seen[0].to_json())
    assert data["chains"] == len(data["matches"]) == 1
    assert data["matches"][0].startswith("lowrank m=4, k=16, r=2, n=12 at ")
    assert data["inner"] == "capture"
    assert set(data["phases_ms"]) == {"passes", "kernels", "inner"}
    torch._dynamo.reset()
    assert backend.reports() == []
    check(pair(), torch.randn(4, 16), options={**QUICK, "report": True})
    assert capsys.readouterr().out.strip() == str(backend.last_report())


def test_equal_options_do_not_recompile():
    model, x = pair(), torch.randn(4, 16)
    for _ in range(3):
        torch.compile(model, backend="nmm", options=dict(QUICK))(x)
        torch.compile(model, backend="nmm", options=dict(QUICK))(x)
    assert len(captured) == 1
    assert Options(**QUICK) == Options.make(QUICK)
    assert dataclasses.replace(Options(), freeze=True) != Options()


def test_without_a_cxx_compiler_auto_is_eager_with_one_warning(monkeypatch):
    def none_found():
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none_found)
    backend._inner_of_cpu.cache_clear()
    with warnings.catch_warnings(record=True, action="always") as caught:
        names = [backend.inner_name("auto", [torch.randn(2)]) for _ in range(2)]
    backend._inner_of_cpu.cache_clear()
    assert names == ["eager", "eager"]
    assert len(caught) == 1
    assert "install g++" in str(caught[0].message)


def test_auto_inner_follows_the_device(monkeypatch):
    monkeypatch.setattr(backend, "Tensor", SimpleNamespace)
    tensors = {kind: SimpleNamespace(device=torch.device(kind)) for kind in ("xla", "cpu", "cuda")}
    names = {kind: backend.inner_name("auto", [one, 3]) for kind, one in tensors.items()}
    assert names == {"xla": "openxla", "cpu": "inductor", "cuda": "inductor"}
    assert backend._INNER_OF_DEVICE["neuron"] == "neuron"
    assert backend.inner_name("aot_eager", []) == "aot_eager"
