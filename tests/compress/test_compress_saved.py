"""Models that earlier versions saved load, and compute what they did (`saved/`)."""

from pathlib import Path

import pytest
import torch
from compress_models import stack
from safetensors.torch import load_file

from nmm_compiler.lowrank_models.load import load
from nmm_compiler.lowrank_models.modules import lowrank_layers
from nmm_compiler.lowrank_models.save import load_factors

SAVED = Path(__file__).parent / "saved"
MODELS = ["llama", "llama-fp8", "llama-int8", "gpt2", "qwen3-moe"]
IDS = torch.arange(14).reshape(2, 7)
# Another machine sums in another order: at most 64 terms a product, some 20 products in a row.
BOUND = 20 * 64 * torch.finfo(torch.float32).eps


def close(found, name):
    expected = load_file(SAVED / "expected.safetensors")[name]
    assert (found - expected).norm() <= BOUND * expected.norm()


@pytest.mark.parametrize("name", MODELS)
def test_directories_of_version_0_1_load(name):
    pytest.importorskip("transformers")
    model = load(SAVED / name)
    assert lowrank_layers(model)
    with torch.no_grad():
        close(model(input_ids=IDS).logits, name)


def test_a_file_of_factors_of_version_0_1_loads():
    model = stack()
    assert len(load_factors(model, SAVED / "stack.safetensors")) == len(lowrank_layers(model))
    with torch.no_grad():
        close(model(torch.linspace(-1, 1, 3 * 32).reshape(3, 32)), "stack")
