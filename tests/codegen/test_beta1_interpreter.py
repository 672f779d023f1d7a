"""Emitted NKI Beta 1 in an interpreter that is not ours (benchmarks/beta1_interpreter.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "beta1_interpreter.py"
INSTALL = (
    "git clone https://github.com/Deep-Learning-Profiling-Tools/triton-viz; "
    "pytest tests/codegen --triton-viz triton-viz"
)


def test_every_family_is_right_in_triton_viz(request):
    clone = request.config.getoption("--triton-viz", default=None)
    if clone is None:
        pytest.skip(INSTALL)
    command = [sys.executable, str(SCRIPT), "--checkout", clone]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    assert all(": right, " in line for line in lines)
