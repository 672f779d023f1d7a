"""Reports as records and text; the command line."""

import json
import os
import shutil

import pytest
import torch
from compress_models import stack, tokens

from nmm_compiler.cli import on_models as command
from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.report import CompressionReport


@pytest.mark.parametrize("calibration", [None, tokens()])
def test_reports_survive_json(calibration):
    """And have no column that says nothing."""
    report = compress(stack(), 0.3, calibration=calibration, align=4)
    again = CompressionReport.from_json(report.to_json())
    assert again == report
    assert again.ranks() == report.ranks()
    assert str(again) == str(report)
    head = str(report).split("\n\n")[1].splitlines()[0].split()
    assert ("output" in head, "weight" in head) == (calibration is not None, True)


@pytest.fixture(scope="module")
def saved_bert(tmp_path_factory):
    """A small random BERT with a word-piece tokenizer, on disk."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (directory / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(directory / "vocab.txt")).save_pretrained(directory)
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=len(words),
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(directory)
    return directory


def test_a_directory_becomes_a_low_rank_directory(nmm, saved_bert, tmp_path):
    transformers = pytest.importorskip("transformers")
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n \n")
    assert "no text" in nmm("compress", saved_bert, out, "--text", text, code=2).err
    assert "--text" in nmm("compress", saved_bert, out, "--recover", "5", code=2).err
    assert not out.exists()
    text.write_text("\n".join(f"the fox number {i} ran over a hill" for i in range(30)))
    words = ("--text", text, "--rank", "16", "--recover", "5")
    assert "held-out loss" in nmm("compress", saved_bert, out, *words, code=0).out
    report = json.loads((out / "compression.json").read_text())
    assert report["compression"]["achieved_ratio"] >= 0.2
    assert report["recovery"]["steps"] == 5
    model = transformers.AutoModelForMaskedLM.from_pretrained(out)
    names = {layer["name"] for layer in report["compression"]["layers"] if layer["rank"]}
    assert all(type(model.get_submodule(n)).__name__ == "LowRankLinear" for n in names)
    transformers.AutoTokenizer.from_pretrained(out)


def test_text_for_a_causal_model_is_one_stream(tmp_path, monkeypatch):
    def tokenizer(text, **_):
        return {"input_ids": torch.tensor([list(text.encode())])}

    model = type("ToyForCausalLM", (), {})()
    path = tmp_path / "text.txt"
    path.write_text("abc\n\ndefgh\nij")
    monkeypatch.setattr(command, "_LENGTH", 4)
    monkeypatch.setattr(command, "_BATCH", 2)
    batches = command.read_batches(path, tokenizer, model)
    ids = torch.cat([b["input_ids"] for b in batches])
    assert bytes(ids.flatten().tolist()) == b"abc\ndefgh\nij"
    with pytest.raises(ModelError, match="tokenizer"):
        command.read_batches(path, None, model)


# `nmm compress` as users meet it: ranks, pickles, Ctrl-C, a full disk, a fresh process.


def test_a_base_and_one_rank_for_all_and_a_file_in_the_way(nmm, saved_bert, tmp_path):
    out = tmp_path / "out"
    words = ("--base", "mxfp4", "--rank", "32", "--include", "intermediate", "--factors", "mxfp8")
    line = ("compress", saved_bert, out, *words)
    told = nmm(*line, "--json", code=0).out
    report = json.loads((out / "compression.json").read_text())
    assert json.loads(told) == report
    layers = report["compression"]["layers"]
    assert len(layers) == 2
    size = 64 * 128 * 17 // 32 + 32 * (64 + 128) * 33 // 32
    assert {(one["base"], one["rank"], one["bytes"]) for one in layers} == {("mxfp4", 32, size)}
    shutil.rmtree(out)
    out.write_text("")
    assert "is a file" in nmm(*line, code=2).err


def test_a_pickle_is_never_executed(nmm, saved_bert, tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes((saved_bert / "config.json").read_bytes())
    torch.save({"model.norm.weight": Payload()}, directory / "pytorch_model.bin")
    nmm("compress", directory, tmp_path / "out", "--ratio", "0.2", code=2)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()
