"""`nmm compress` as users meet it: ranks, pickles, Ctrl-C, a full disk, a fresh process."""

import json
import os
import shutil
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

COMMAND = [sys.executable, "-m", "nmm_compiler.cli.main", "compress"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def saved_llama(tmp_path_factory):
    """A small random Llama in four shards."""
    directory = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=100,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(directory, max_shard_size="1MB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


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
    assert "this is a file" in nmm(*line, code=2).err


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
