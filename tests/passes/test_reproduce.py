"""The script of a match: it finds the match again in its own nodes, and notices when it cannot."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import rewrite_gallery as gallery

import nmm_compiler as nmm
from nmm_compiler.errors import ModelError, UnknownNameError
from nmm_compiler.passes.faults import literal
from nmm_compiler.passes.graph.capture import all_graphs
from nmm_compiler.passes.pipeline import run

ROOT = Path(__file__).parents[2]


def ends(script, capsys):
    """Return (exit code, output) of a script."""
    with pytest.raises(SystemExit) as ended:
        exec(compile(script, "script.py", "exec"), {"__name__": "script"})
    return int(ended.value.code), capsys.readouterr().out


# Views between the match and the tensors, modules by path, a group, a whole MLP, weights alone.
CASES = [
    ("matmul_op", "S"), ("swiglu_transposed", "S"), ("sequential_dropout", "S"), ("qkv", "S"),
    ("lora_dropout_branch", "S"), ("to_same_dtype", "E"), ("checkpointed", "D"),
    ("one_u_two_v", "D"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *CASES,
        *(pytest.param(case.name, level, marks=pytest.mark.long)
          for case in gallery.CASES for level in "SDE" if case.expected(level) != "n/a"),
    ],
)  # fmt: skip
def test_a_script_finds_the_match_again(name, level, capsys):
    (case,) = (c for c in gallery.CASES if c.name == name)
    module, inputs = gallery.capture(case, level)
    result = run(module, inputs)
    assert result.matches or (name, level) not in CASES
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


def test_matches_are_named_by_node_or_module_over_all_graphs():
    model = torch.nn.Sequential(low_rank(), torch.nn.ReLU(), torch.nn.Linear(96, 64), low_rank())
    report = nmm.explain(model, torch.randn(4, 64))
    first, second = report.matches
    assert report.reproducer() == report.reproducer(first)
    assert first.name not in (second.name, second.module)
    assert report.reproducer(second.name) == report.reproducer(second) != report.reproducer()
    with pytest.raises(UnknownNameError, match="unknown match 'nowhere'"):
        report.reproducer("nowhere")


def test_a_graph_without_shapes_needs_inputs():
    graph, x = torch.fx.symbolic_trace(low_rank()), torch.randn(4, 64)
    result = nmm.rewrite(graph, (x,))
    assert "torch.randn(256)" in result.reproducer(inputs=(x,))
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
    made = eval(literal(value), {"torch": torch})
    assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), value.dtype)


def test_explain_writes_a_script_that_runs_alone(tmp_path, monkeypatch, nmm):
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(
        "import torch\n\n\ndef make():\n    model = torch.nn.Sequential(torch.nn.Linear(64, 8, "
        "bias=False), torch.nn.Linear(8, 96))\n    return model, {'input': torch.randn(4, 64)}\n"
    )
    nmm("explain", "small.py:make", "--repro", "match.py", code=0)
    done = subprocess.run(
        [sys.executable, "match.py"], capture_output=True, text=True, check=False, timeout=300,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_code_that_passed_dynamos_limit_of_recompiles_still_has_graphs():
    class Scaled(nn.Module):
        def forward(self, x):
            return 2 * x

    compiled = torch.compile(Scaled(), backend="eager", dynamic=False)
    for size in range(1, 12):
        compiled(torch.ones(size))
    assert len(all_graphs(Scaled(), (torch.ones(2),), {})) == 1
