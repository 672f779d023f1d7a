"""The main job end to end: as `make demo` runs it, and in seconds on a model of random weights."""

import contextlib
import copy
import dataclasses
import json
import time

import pytest
from processes import Executor, ran

from nmm_compiler.cli import demo
from nmm_compiler.codegen.check_against_float64 import Proof
from nmm_compiler.prediction.model import ModelPrediction
from nmm_compiler.prediction.predict import predict


@pytest.mark.long
def test_demo_of_the_language_model_gains_and_says_where(tmp_path):
    pytest.importorskip("gguf")
    started = time.monotonic()
    done = ran("-m", "nmm_compiler", "demo", "--json", timeout=600, COLUMNS="160",
               NMM_CACHE_DIR=str(tmp_path / "empty"))  # fmt: skip
    assert "about a minute" in done.stderr
    assert "torchao" not in done.stderr
    assert "Warning" not in done.stderr
    assert time.monotonic() - started < 150, "of cores that others use, too"
    run = json.loads(done.stdout)
    assert run["passed"]
    forms = {p.form: p for p in map(ModelPrediction.from_dict, run["predictions"])}
    taken = forms[run["form"]]
    assert taken.tpot_us < forms["bf16"].tpot_us < forms["lowrank:0.2"].tpot_us
    before, after = run["perplexity"]
    assert before > 10
    assert after < 1.02 * before
    assert run["verdict"][0].startswith(f"trn2: take {run['form']} (")


def test_every_kernel_that_a_time_is_made_of_is_proved():
    """Those with a norm inside, whose lines say what they take apart, too, and rows of several."""
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 512,
    }  # fmt: skip
    made = predict(config, prompt=256, context=512, price="closed_form")
    assert any("_rms" in one.spec.short() for one in made.lines if one.spec is not None)
    for one in made.lines:
        name = "" if one.spec is None else one.spec.short()
        assert name == one.what.partition(";")[0] * (one.kind in ("kernel", "attention")), one


@pytest.mark.parametrize(
    ("form", "target"),
    [("fp8+32", "trn2"), pytest.param("mxfp4+32", "trn3", marks=pytest.mark.long)],
)
@pytest.mark.usefixtures("closed_form_only")
def test_every_step_is_checked(form, target, monkeypatch, nmm):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
        vocab_size=64, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()

    def letters(text, return_tensors):
        return {"input_ids": torch.tensor([[byte % 64 for byte in text.encode()]])}

    monkeypatch.setattr(demo.models, "language_model", lambda: (copy.deepcopy(model), letters))
    # An executor that works here: nothing is imported twice.
    here = lambda *count, **more: contextlib.nullcontext(Executor())  # noqa: E731
    monkeypatch.setattr(demo.concurrent.futures, "ProcessPoolExecutor", here)
    monkeypatch.setattr(demo.models, "LANGUAGE_MODEL", "toy")
    monkeypatch.setattr(demo, "_LENGTH", 32)
    # predictions take a public name, a path or a config
    predicted = demo.predicted_forms
    monkeypatch.setattr(
        demo, "predicted_forms", lambda name, *more: predicted(config.to_dict(), *more)
    )
    run = json.loads(nmm("demo", "--form", form, "--target", target, "--json", code=0).out)
    assert run["form"] == form
    assert len(run["proofs"]) >= 6, "attention, q/k/v, o and the MLP, of a prompt and of a token"
    assert all(proof["passed"] and proof["elements"] > 0 for proof in run["proofs"])
    assert run["perplexity"][0] != run["perplexity"][1], "the weights were rounded"
    assert {p["weights"] for p in run["predictions"]} > {form}
    wrong = [dataclasses.replace(Proof.from_dict(one), passed=False) for one in run["proofs"]]
    monkeypatch.setattr(demo, "proofs_of", lambda *kernels: wrong)
    ended = nmm("demo", "--form", "bf16", "--target", target, code=1)
    assert "a check FAILED" in ended.out
    for words in (
        "perplexity",
        "prefill ms",
        "decode ms",
        "taken",
        "take ",
        "low rank alone loses",
    ):
        assert words.strip() in " ".join(ended.out.split()), words
