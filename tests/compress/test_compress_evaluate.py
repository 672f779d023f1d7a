"""Evaluation over lm-eval: figures that are right, local tasks, and the shell."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("lm_eval")
from nmm_compiler.compress import hf
from nmm_compiler.compress.apply import compress
from nmm_compiler.compress.evaluate import (
    PRESETS,
    evaluate,
    expand,
    local_tasks,
    perplexity_error,
)
from nmm_compiler.errors import EvaluationError, OptionTypeError, UnknownNameError


def tokenizer():
    """One token per byte, and an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<end>": 256}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def make():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=256, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    return LlamaForCausalLM(shape).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of a dense model and of its low-rank form."""
    base = tmp_path_factory.mktemp("models")
    model = make()
    model.save_pretrained(base / "dense")
    tokenizer().save_pretrained(base / "dense")
    compress(model, 0.3, align=4, progress=False)
    hf.save_pretrained(model, base / "small", tokenizer=tokenizer())
    return base / "dense", base / "small"


def test_the_local_tasks_run_on_a_dense_and_a_compressed_model(saved):
    report = evaluate(saved[1], dense=saved[0], limit=6, batch_size=2)
    found = {(score.task, score.metric): score for score in report.scores}
    assert found.keys() == {
        ("manual_perplexity", "word_perplexity"),
        ("manual_next_sentence", "acc"),
        ("manual_next_sentence", "acc_norm"),
    }
    for score in report.scores:
        assert math.isfinite(score.value)
        assert score.error is not None
        assert score.error > 0 or score.value in (0, 1)
        assert score.lower_is_better == (score.metric == "word_perplexity")
    one = found["manual_perplexity", "word_perplexity"]
    assert one.value != one.dense
    assert "±" in str(report)
    assert "(lower" in str(report)  # the table may wrap "(lower is better)"
    again = evaluate(make(), "manual_perplexity", tokenizer=tokenizer(), limit=6)
    assert again.scores[0].value == pytest.approx(one.dense, rel=1e-4)


def test_perplexity_is_that_of_the_model(tmp_path):
    """By word: exp of the summed loss of all bytes over the number of words."""
    task = local_tasks(tmp_path)["manual_perplexity"]
    path = task["dataset_kwargs"]["data_files"]["test"]
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(next(file))["text"] for _ in range(3)]
    model, words, total = make(), 0, 0.0
    for text in texts:
        ids = torch.tensor(tokenizer()(text)["input_ids"])
        words += len(text.split())
        for start in range(0, len(ids), 512):  # windows, each begun by what came before it
            piece = ids[start : start + 512]
            before = ids[start - 1 : start] if start else torch.tensor([256])
            joined = torch.cat([before, piece])[None, :-1]
            with torch.no_grad():
                logits = model(joined).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, piece, reduction="sum"))
    (score,) = evaluate(model, "manual_perplexity", tokenizer=tokenizer(), limit=3).scores
    if all(len(tokenizer()(text)["input_ids"]) <= 512 for text in texts):
        assert score.value == pytest.approx(math.exp(total / words), rel=1e-3)
    assert score.value > 1


def test_the_error_of_a_perplexity_is_its_spread_over_samples():
    """Against the spread of the perplexities of 2000 draws of 200 items."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(20, 60, (2000, 200), generator=generator).double()
    losses = -words * (1.5 + 0.3 * torch.randn(2000, 200, generator=generator).double())
    drawn = torch.exp(-losses.sum(1) / words.sum(1))
    error = perplexity_error(list(zip(losses[0].tolist(), words[0].tolist(), strict=True)))
    # The spread is known to 1 / sqrt(2 * 2000), the error of one draw to about 1 / sqrt(2 * 200).
    assert error == pytest.approx(float(drawn.std()), rel=4 * (1 / 4000 + 1 / 400) ** 0.5)
    assert perplexity_error([(1.0, 2.0)]) is None


def test_the_local_choices_have_one_answer_each(tmp_path):
    described = local_tasks(tmp_path)["manual_next_sentence"]
    lines = open(described["dataset_kwargs"]["data_files"]["test"]).read().splitlines()  # noqa: SIM115
    rows = [json.loads(line) for line in lines]
    assert len(rows) > 200
    assert all(len(set(row["choices"])) >= 2 and 0 <= row["gold"] < 4 for row in rows)
    places = [sum(row["gold"] == i for row in rows) for i in range(4)]
    assert min(places) > len(rows) / 8  # no place gives the answer away


def test_names_are_checked_before_anything_runs(saved):
    assert expand("local,arc_easy,local") == [*PRESETS["local"], "arc_easy"]
    assert len(PRESETS["paper"]) == len(set(PRESETS["paper"])) == 9
    with pytest.raises(OptionTypeError, match="tokenizer"):
        evaluate(make(), limit=1)
    with pytest.raises(OptionTypeError, match="limit"):
        evaluate(saved[0], limit=0)


@pytest.mark.long
def test_the_presets_are_tasks_that_lm_eval_has(saved):
    from lm_eval.tasks import TaskManager

    with pytest.raises(UnknownNameError, match="did you mean 'arc_easy'"):
        evaluate(saved[0], "arc_eazy")

    manager = TaskManager()
    assert all(manager.match_tasks([name]) for name in PRESETS["paper"])


@pytest.mark.long
def test_a_task_without_its_data_says_so(saved, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EvaluationError, match="download their data"):
        evaluate(saved[0], "piqa", limit=1)


def test_the_command_prints_and_writes_the_figures(saved, tmp_path):
    options = ["--dense", str(saved[0]), "--limit", "2", "--json", str(tmp_path / "r.json")]
    done = subprocess.run(
        [sys.executable, "-m", "nmm_compiler", "eval", str(saved[1]), *options], cwd=tmp_path,
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "bars and remarks of libraries in a pipe"
    assert "manual_next_sentence" in done.stdout
    assert "longer than the model takes: cut at the beginning" in done.stdout
    assert len(json.loads((tmp_path / "r.json").read_text())["scores"]) == 3


@pytest.mark.long
def test_lm_eval_from_a_shell_loads_the_directory(saved, tmp_path):
    """`lm_eval --model hf --model_args pretrained=DIR`, which never heard of this package."""
    described = local_tasks(tmp_path)["manual_perplexity"]
    (tmp_path / "manual.yaml").write_text(json.dumps(described))  # JSON is YAML
    run = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
        f"pretrained={saved[1]},dtype=float32", "--tasks", "manual_perplexity", "--limit", "6",
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
        "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(run, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tmp_path / "out").rglob("results*.json")
    shell = json.loads(path.read_text())["results"]["manual_perplexity"]["word_perplexity,none"]
    (score,) = evaluate(saved[1], "manual_perplexity", limit=6).scores
    assert shell == pytest.approx(score.value, rel=1e-4)
