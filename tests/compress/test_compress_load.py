"""Damaged directories and files are refused in one line that names what is wrong."""

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from compress_models import stack
from safetensors.torch import load_file

from nmm_compiler.errors import FileError
from nmm_compiler.lowrank_models.hf import load
from nmm_compiler.lowrank_models.modules import lowrank_layers
from nmm_compiler.lowrank_models.save import load_factors

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    from nmm_compiler.lowrank_models import hf

    stress = importlib.import_module("benchmarks.stress.save")
    directory = tmp_path_factory.mktemp("saved") / "model"
    hf.save(stress.model(1, 2), directory, max_shard_size="60KB")
    return directory


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("config.json", "[" * 100_000, "config.json is not JSON"),
        ("config.json", "[1]", "config.json holds a list"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"x": "../x"}}', r"names '\.\./x'"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"x": "g.safetensors"}}',
            "g.* is missing",
        ),
        ("model.safetensors", "", "SafetensorError"),
    ],
)
def test_damaged_files_are_named(file, text, reason, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "a")
    (tmp_path / "a" / file).write_text(text)
    with pytest.raises(FileError, match=reason) as caught:
        load(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_a_config_that_describes_another_model_is_refused(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    for key, value, reason in (
        ("hidden_size", 10**9, "hidden_size 1000000000"),
        ("intermediate_size", 1 << 23, "intermediate_size 8388608"),
        ("num_hidden_layers", 3, "weights lack model.layers.2"),
        ("architectures", ["Evil"], "has no such model"),
    ):
        path.write_text(json.dumps({**config, key: value}))
        with pytest.raises(FileError, match=reason):
            load(tmp_path / "a")
    config["num_hidden_layers"] = 2
    path.write_text(json.dumps({**config, "architectures": None}))
    assert type(load(tmp_path / "a")).__name__ == "LlamaModel"
    config["quantization_config"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(FileError, match="copy the whole directory again"):
        load(tmp_path / "a")


# Models that earlier versions saved load, and compute what they did (`saved/`).

SAVED = Path(__file__).parent / "saved"
# Another machine sums in another order: at most 64 terms a product, some 20 products in a row.
BOUND = 20 * 64 * torch.finfo(torch.float32).eps


def close(found, name):
    expected = load_file(SAVED / "expected.safetensors")[name]
    assert (found - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize("name", ["llama", "llama-fp8", "llama-int8", "gpt2", "qwen3-moe"])
@torch.no_grad()
def test_directories_of_version_0_1_load(name):
    pytest.importorskip("transformers")
    model = load(SAVED / name)
    assert lowrank_layers(model)
    close(model(input_ids=torch.arange(14).reshape(2, 7)).logits, name)


@torch.no_grad()
def test_a_file_of_factors_of_version_0_1_loads():
    model = stack()
    assert len(load_factors(model, SAVED / "stack.safetensors")) == len(lowrank_layers(model))
    close(model(torch.linspace(-1, 1, 3 * 32).reshape(3, 32)), "stack")
