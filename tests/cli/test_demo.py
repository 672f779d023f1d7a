"""The main job end to end: as `make demo` runs it, and in seconds on a model of random weights."""

import contextlib
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from nmm_compiler.cli import demo, demo_models
from nmm_compiler.cli.main import main
from nmm_compiler.prediction.model import ModelPrediction


@pytest.mark.long
def test_demo_of_the_language_model_gains_and_says_where():
    pytest.importorskip("gguf")
    done = subprocess.run(
        [sys.executable, "-m", "nmm_compiler.cli.main", "demo", "--ratio", "0.1", "--json"],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip
    said = done.stderr
    assert done.returncode == 0, done.stdout + said
    assert "torchao" not in said
    assert "Warning" not in said
    (run,) = json.loads(done.stdout)
    assert run["passed"]
    predicted = ModelPrediction.from_dict(run["prediction"])
    assert predicted.gain["prefill"] > 1.01
    assert predicted.gain["decode"] > 0.99  # no layer is slower than dense
    before, after = (float(x) for x in run["quality"].split("tokens")[0].split()[1:4:2])
    assert 10 < before < after < 2 * before
    assert predicted.headline(run["quality"]) in " ".join(said.split())
    assert "the same on llama-3.2-1b" in said
    assert "pays most: trn2" in said


class Letters:
    """A tokenizer of bytes."""

    def __call__(self, text, return_tensors=None):
        import torch

        ids = [byte % 64 for byte in text.encode()]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def decode(self, ids, **more):
        return "letters"

    def save_pretrained(self, directory):
        pass


class SameProcess(contextlib.nullcontext):
    """An executor that works here, when it is asked for a result: nothing is imported twice."""

    def __init__(self, *count, **more):
        super().__init__()

    def submit(self, work, *arguments):
        return SimpleNamespace(result=lambda: work(*arguments))

    def shutdown(self, **more):
        pass


def test_every_step_is_checked_and_saved(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    monkeypatch.setattr(demo_models.models, "language_model", lambda: (model, Letters()))
    monkeypatch.setattr(demo, "_plan", lambda model, ratios, target: f"plan of {model} {ratios}")
    monkeypatch.setattr(demo.concurrent.futures, "ProcessPoolExecutor", SameProcess)
    out = tmp_path / "models"
    line = ["demo", "--ratio", "0.3", "--json", "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(line)
    figures, said = capsys.readouterr()
    assert ended.value.code == 0, said
    (run,) = json.loads(figures)
    dense, low = (json.loads((out / d / "config.json").read_text()) for d in ("dense", "ratio-0.3"))
    assert "quantization_config" not in dense
    assert low["quantization_config"]["quant_method"] == "nmm_lowrank"
    assert "plan of llama-3.2-1b [0.1, 0.2, 0.3]" in said
    assert len(run["proofs"]) == len(run["comparisons"]) >= 1
    assert all(proof["passed"] and proof["elements"] > 0 for proof in run["proofs"])
    assert 0 < run["agreement"]["difference"] <= run["agreement"]["tolerance"]
    assert re.fullmatch(r"perplexity [0-9.]+ -> [0-9.]+ on 1,536 tokens .*", run["quality"])
    assert all(0 < one["fused"] < one["separate"] for one in run["comparisons"])

    monkeypatch.setattr(demo_models, "_distance", lambda got, exact: float("nan"))
    with pytest.raises(SystemExit) as ended:
        main(line[:-2])
    assert ended.value.code == 1, "no figure is no agreement"
    assert "a check FAILED" in capsys.readouterr().err
