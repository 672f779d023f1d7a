"""The gallery of spellings: each level finds exactly what is written beside the case."""

import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import rand_strided

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import rewrite_gallery as gallery

import nmm_compiler as nmm
from nmm_compiler.errors import ModelError
from nmm_compiler.passes.pipeline import RULES, run
from nmm_compiler.passes.reproduce import literal
from nmm_compiler.passes.rules import Rule
from nmm_compiler.passes.rules.lowrank import LowRankChain

# Products of two norms below 1, summed over at most 64 + 8 terms, rounded a few times in fp32.
BOUND = 2.0**-23 * (gallery.K + gallery.R + 8) * 2
QUICK_DYNAMO = (
    "matmul_op", "linear_both_biases", "gpt2_conv1d", "feature_major", "einsum3", "conv2d",
    "inplace_between", "autocast", "vmap", "lora_iadd", "swiglu_transposed", "qkv", "one_u_two_v",
    "mla", "no_grad_edge", "checkpointed", "inplace_view",
)  # fmt: skip


QUICK = {
    *(("D", name) for name in QUICK_DYNAMO),
    *(("A", name) for name in ("matmul_op", "einsum2", "lora_linear", "swiglu_mlp", "bmm_expand")),
}
CASES = {c.name: c for c in gallery.CASES}


def levels():
    """Return every case at every level that has it; many are long."""
    for name, one in CASES.items():
        for level in gallery.LEVELS:
            quick = level == "S" or (level, name) in QUICK
            if one.expected(level) != "n/a":
                yield pytest.param(name, level, marks=[] if quick else pytest.mark.long)


def test_names_are_unique():
    assert len(CASES) == len(gallery.CASES)


@pytest.mark.parametrize(("name", "level"), list(levels()))
def test_every_level(name, level):
    found, error, result = gallery.try_case(CASES[name], level)
    assert found == CASES[name].expected(level), str(result)
    assert error <= BOUND


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("name", [n for n, one in CASES.items() if one.expect != "no:training"])
def test_the_default_backend_computes_what_eager_does(name):
    """It compiles the graph with inductor; cases with dropout draw other numbers there."""
    torch.manual_seed(1)
    x, model = CASES[name].x(), gallery.Holder(CASES[name].function)
    model = model.double() if x.dtype == torch.float64 else model
    compiled = torch.compile(model, backend="nmm", options={"strict": True})
    wanted, got = (torch.utils._pytree.tree_leaves(run(x.clone())) for run in (model, compiled))
    for one, other in zip(wanted, got, strict=True):
        error, size = (one.double() - other.double()).abs().max(), one.double().abs().max()
        assert error <= 2 * BOUND * max(1.0, size)


@pytest.mark.parametrize("name", [n for n in QUICK_DYNAMO if CASES[n].expected("S") != "n/a"])
def test_rules_say_all_forms_that_their_matches_end_at(name, monkeypatch):
    module, inputs = gallery.capture(CASES[name], "S")
    results = [run(module, inputs)]
    for rule in RULES:
        if rule.ends_at != ():  # else it joins what others find, and proposes nothing
            monkeypatch.setattr(type(rule), "ends_at", None)
    results.append(run(module, inputs))
    said = [[str(d) for d in (*r.matches, *r.declined)] for r in results]
    assert said[0] == said[1]


def test_a_pattern_of_its_own_is_asked_everywhere():
    class Mine(LowRankChain):
        def pattern(self, graph, node):
            yield from ()

    class Named(LowRankChain):
        name = "named"

    assert Rule.ends_at is None
    assert Mine.ends_at is None
    assert Named.ends_at == LowRankChain.ends_at


# The script of a match: it finds the match again in its own nodes, and notices when it cannot.


def ends(script, captured):
    """Return (exit code, output) of a script."""
    with pytest.raises(SystemExit) as ended:
        exec(compile(script, "script.py", "exec"), {"__name__": "script"})
    return int(ended.value.code), captured.readouterr().out


# Views between the match and the tensors, modules by path, a group, a whole MLP, weights alone.
SCRIPTS = [
    ("matmul_op", "S"), ("swiglu_transposed", "S"), ("sequential_dropout", "S"), ("qkv", "S"),
    ("lora_dropout_branch", "S"), ("to_same_dtype", "E"), ("checkpointed", "D"),
    ("one_u_two_v", "D"), ("scale_diag", "S"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *SCRIPTS,
        *(pytest.param(case.name, level, marks=pytest.mark.long)
          for case in gallery.CASES for level in "SDE" if case.expected(level) != "n/a"),
    ],
)  # fmt: skip
def test_a_script_finds_the_match_again(name, level, capsys):
    module, inputs = gallery.capture(CASES[name], level)
    result = run(module, inputs)
    assert result.matches or (name, level) not in SCRIPTS
    for match in result.matches:
        code, said = ends(result.reproducer(match, inputs), capsys)
        assert code == 0, said
        assert match.kind in said
        assert "of what rounding explains" in said


def low_rank():
    return torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(8, 96))


def test_a_script_ends_with_1_where_nothing_is_found(capsys):
    result = nmm.rewrite(low_rank(), (torch.randn(4, 64),))
    script = result.reproducer()
    code, said = ends(script.replace("options={", 'options={"rules": ["-lowrank"], '), capsys)
    assert code == 1
    assert "0 matched" in said


def test_a_script_of_any_graph_of_a_model():
    model = torch.nn.Sequential(low_rank(), torch.nn.ReLU(), torch.nn.Linear(96, 64), low_rank())
    report = nmm.explain(model, torch.randn(4, 64))
    first, second = report.matches
    assert report.reproducer() == report.reproducer(first)
    assert report.reproducer(second) != report.reproducer()
    with pytest.raises(ModelError, match="no match to reproduce: 0 matched"):
        nmm.explain(torch.nn.ReLU(), torch.randn(4, 64)).reproducer()


def test_a_graph_without_shapes_needs_inputs():
    graph, x = torch.fx.symbolic_trace(low_rank()), torch.randn(4, 64)
    result = nmm.rewrite(graph, (x,))
    assert "rand_strided([4, 64], [64, 1], torch.float32)" in result.reproducer(inputs=(x,))
    with pytest.raises(ModelError):
        result.reproducer()


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(3, 4).t(),
        torch.empty(4, 1).expand(4, 3),
        torch.empty(2, 0, 3),
        torch.empty(5, dtype=torch.float8_e4m3fn),
        torch.zeros(3, dtype=torch.int32),
        torch.empty(()),
    ],
)
def test_a_tensor_is_written_with_its_strides(value):
    made = eval(literal(value), {"torch": torch, "rand_strided": rand_strided})
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)


def test_explain_writes_a_script_that_runs_alone(tmp_path, monkeypatch, nmm, capfd):
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(
        "import torch\n\n\ndef make():\n    model = torch.nn.Sequential(torch.nn.Linear(64, 8, "
        "bias=False), torch.nn.Linear(8, 96))\n    return model, {'input': torch.randn(4, 64)}\n"
    )
    nmm("explain", "small.py:make", "--repro", "match.py", code=0)
    assert ends(Path("match.py").read_text(), capfd)[0] == 0
