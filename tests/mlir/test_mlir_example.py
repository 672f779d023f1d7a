"""examples/export_mlir.py runs and prints a kernel call in each form."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch_mlir")

EXAMPLE = Path(__file__).parents[2] / "examples" / "export_mlir.py"


def test_the_example_prints_three_forms(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    parts = printed.split("// ---- ")[1:]
    assert [part.split(" ", 1)[0] for part in parts] == ["torch", "linalg", "stablehlo"]
    for part in parts:
        assert part.count('nmm.family = "lowrank"') == 1
        assert part.count("call @nmm_lowrank_matmul_") == 1
