"""The examples that no room's own tests run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.long
def test_llama_layer_prefill_and_decode():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "llama_mlp.py")],
        capture_output=True, text=True, timeout=1500, check=False,
        env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("proofs") == 2
    assert "gated_mlp" in done.stdout
