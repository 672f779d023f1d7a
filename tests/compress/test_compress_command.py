"""`nmm compress` as users meet it: ranks, pickles, Ctrl-C, a full disk, a fresh process."""

import json
import os
import shutil

import pytest
import torch
from toy_models import llama


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory):
    """A small random Llama in four shards."""
    directory = tmp_path_factory.mktemp("llama")
    model = llama(128, 352, 4, 100, num_key_value_heads=4)
    model.save_pretrained(directory, max_shard_size="1MB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def test_one_rank_for_all_and_a_file_in_the_way(nmm, saved_llama, tmp_path):
    out = tmp_path / "out"
    line = ["compress", saved_llama, out, "--rank", "16", "--include", "up_proj"]
    nmm(*line, code=0)
    report = json.loads((out / "compression.json").read_text())["compression"]
    ranks = {layer["name"]: layer["rank"] for layer in report["layers"] if layer["rank"]}
    assert set(ranks.values()) == {16}
    assert all(name.endswith("up_proj") for name in ranks)
    shutil.rmtree(out)
    out.write_text("")
    assert "is a file" in nmm(*line, code=2).err


def test_a_base_and_its_branch_are_written_with_their_bytes(nmm, saved_llama, tmp_path):
    for rank in ("0", "32"):
        words = ("--base", "mxfp4", "--rank", rank, "--include", "mlp", "--factors", "mxfp8")
        told = nmm("compress", saved_llama, tmp_path / rank, *words, "--json", code=0).out
        report = json.loads((tmp_path / rank / "compression.json").read_text())
        assert json.loads(told) == report
        layers = report["compression"]["layers"]
        assert {layer["base"] for layer in layers} == {"mxfp4"}
        base = 128 * 352 * 17 // 32
        branch = int(rank) * (128 + 352) * 33 // 32
        assert {layer["bytes"] for layer in layers} == {base + branch}


def test_a_pickle_is_never_executed(nmm, saved_llama, tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_bytes((saved_llama / "config.json").read_bytes())
    torch.save({"model.norm.weight": Payload()}, directory / "pytorch_model.bin")
    nmm("compress", directory, tmp_path / "out", "--ratio", "0.2", code=2)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()
