"""The main job end to end: as `make demo` runs it, and in seconds on a model of random weights."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Executor, Future

import pytest

from nmm_compiler.cli import demo
from nmm_compiler.prediction.model import ModelPrediction


@pytest.mark.long
def test_demo_of_the_language_model_gains_and_says_where(tmp_path):
    pytest.importorskip("gguf")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "nmm_compiler.cli.main", "demo", "--ratio", "0.1", "--json"],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "COLUMNS": "160", "NMM_CACHE_DIR": str(tmp_path / "empty")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "about a minute" in done.stderr
    assert "torchao" not in done.stderr
    assert "Warning" not in done.stderr
    assert time.monotonic() - started < 150, "of cores that others use, too"
    run = json.loads(done.stdout)
    assert run["passed"]
    dense, low = map(ModelPrediction.from_dict, run["predictions"])
    assert dense.ttft_us > low.ttft_us
    assert low.tpot_us / dense.tpot_us < 1.01
    before, after = run["perplexity"]
    assert 10 < before < after < 2 * before
    assert run["verdict"][0].startswith("trn2: take ")


class Letters:
    """A tokenizer of bytes."""

    def __call__(self, text):
        return {"input_ids": [byte % 64 for byte in text.encode()]}


class SameProcess(Executor):
    """An executor that works here, at once: nothing is imported twice."""

    def __init__(self, *count, **more):
        pass

    def submit(self, work, *arguments):
        done = Future()
        done.set_result(work(*arguments))
        return done


def test_every_step_is_checked(monkeypatch, nmm):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    monkeypatch.setattr(demo.models, "language_model", lambda: (model, Letters()))
    monkeypatch.setattr(demo.concurrent.futures, "ProcessPoolExecutor", SameProcess)
    monkeypatch.setattr(demo, "_LAYERS", ["mlp"])
    run = json.loads(nmm("demo", "--ratio", "0.3", "--json", code=0).out)
    assert len(run["proofs"]) == len(run["calls"]) >= 1
    assert all(proof["passed"] and proof["elements"] > 0 for proof in run["proofs"])
    assert 0 < run["agreement"]["difference"] <= run["agreement"]["tolerance"]
    assert all(0 < call["fused"] < call["separate"] for call in run["calls"])
    assert [p["ratio"] for p in run["predictions"]] == [None, 0.3]
    monkeypatch.setattr(demo, "agreement", lambda *models: (float("nan"), 1.0))
    ended = nmm("demo", "--ratio", "0.3", code=1)
    assert "a check FAILED" in ended.out, "no figure is no agreement"
    for words in ("perplexity", "prefill ms", "decode ms", "take "):
        assert words in ended.out, words
