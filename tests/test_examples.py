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


@pytest.mark.long
def test_a_decoder_layer_is_five_launches():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "decoder_layer.py"), "--tokens", "1"],
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("5 launches") == 4  # dense and low-rank, in two dtypes
    assert done.stdout.count("the whole layer") == 2


@pytest.mark.long
def test_a_trainer_trains_a_low_rank_model():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune_lowrank.py")],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    loss = float(done.stdout.split("loss ")[-1].split(";")[0])
    assert loss < 3.5  # of 64 equally likely tokens: 4.16
    assert "loaded again with 7 low-rank layers" in done.stdout
