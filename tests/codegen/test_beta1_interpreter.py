"""Emitted NKI Beta 1 in an interpreter that is not ours."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
INSTALL = (
    "git clone https://github.com/Deep-Learning-Profiling-Tools/triton-viz; "
    "pytest tests/codegen --triton-viz triton-viz"
)


def lines_of(script, *arguments):
    """Return what a benchmark prints; it has to succeed."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_every_family_is_right_in_triton_viz(request, target):
    clone = request.config.getoption("--triton-viz", default=None)
    if clone is None:
        pytest.skip(INSTALL)
    lines = lines_of("beta1_interpreter.py", clone, "--target", target)
    assert len(lines) == 28
    assert all(": right, " in line for line in lines)
