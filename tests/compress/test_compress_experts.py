"""Stacked experts: factorized one by one, kept as stacks, saved and loaded."""

import copy

import pytest
import torch

from nmm_compiler.lowrank_models import experts, hf
from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.ranks import Shape, allocate_global

transformers = pytest.importorskip("transformers", minversion="5.0")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip
KINDS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}


def make(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS[kind]})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def ids(seed=1):
    return torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model):
    return model(ids()).logits


def layers(model):
    return {n: m for n, m in model.named_modules() if n.endswith(".experts")}


@pytest.mark.parametrize("kind", KINDS)
def test_split_and_joined_the_layer_is_the_same(kind):
    model = make(kind)
    expected, before = logits(model), list(model.state_dict())
    experts.split(model)
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()
    assert len(layers(model)) == 2
    experts.join(model)
    assert list(model.state_dict()) == before
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_full_rank_chains_compute_what_the_dense_experts_do(kind):
    """Rank 31 of 32 directions with one left out of the weights: nothing is lost."""
    model = make(kind)
    for layer in layers(model).values():
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer, name).data
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            s[:, 12:] = 0
            getattr(layer, name).data = (u * s[:, None]) @ v
    expected = logits(model)
    report = compress(model, rank=12, include="experts")
    assert len(report.compressed) == 2 * 2 * 4
    assert (logits(model) - expected).norm() <= 1e-4 * expected.norm()
    for layer in layers(model).values():
        assert layer.gate_up_factors.down.shape == (4, 12, 32)
        assert layer.down_factors.up.shape == (4, 32, 12)
        assert not hasattr(layer, "gate_up_proj")


@pytest.mark.parametrize("kind", KINDS)
def test_calibrated_experts_are_saved_and_loaded(kind, tmp_path):
    model = make(kind)
    before = sum(p.numel() for p in model.parameters())
    report = compress(model, 0.3, calibration=[{"input_ids": ids(s)} for s in (2, 3)], align=4)
    ranks = {}
    for layer in report.layers:
        if ".experts." in layer.name:
            ranks.setdefault(layer.name.rpartition(".")[0], set()).add(layer.rank)
    assert len(ranks) == 4
    assert all(len(found) == 1 for found in ranks.values())  # one rank for all of a stack
    assert report.achieved_ratio >= 0.3
    assert sum(p.numel() for p in model.parameters()) < before
    expected = logits(model)
    assert torch.isfinite(expected).all()
    hf.save(model, tmp_path / "a")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert loaded.config.quantization_config.saved == model.config.quantization_config.saved
    assert torch.equal(logits(loaded), expected)


def test_experts_that_no_token_reaches_get_their_own_best_rank():
    model = make("Mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[3] = -100.0 * layer.mlp.gate.weight.data[0].abs()
    few = [{"input_ids": ids()[:1, :2]}]
    statistics = calibrate(model, few)
    unreached = [n for n in statistics.inputs if ".experts." in n]
    assert len(unreached) < 2 * 2 * 4
    report = compress(model, 0.3, calibration=statistics, align=4)
    assert torch.isfinite(logits(model)).all()
    assert any(layer.output_error is None for layer in report.compressed)


def test_a_stack_counts_as_many_matrices_in_the_allocation():
    losses = {"one": [float(32 - i) for i in range(33)], "four": [float(32 - i) for i in range(33)]}
    ranks = allocate_global(
        [Shape("one", 64, 64), Shape("four", 64, 64, count=4)], losses, 0.5, align=1
    )
    kept = (ranks["one"] or 32) + 4 * (ranks["four"] or 32)
    assert kept <= 0.5 * 5 * 32
    assert (ranks["one"] or 32) > ranks["four"]  # the same gain at a quarter of the price


def test_a_compiled_layer_gives_the_same():
    model = make("Mixtral")
    compress(model, rank=8, include="experts")
    layer = model.model.layers[0].mlp.experts
    x = torch.randn(6, 32)
    index = torch.tensor([[0, 1], [2, 3], [0, 2], [0, 3], [1, 2], [0, 1]])
    weights = torch.rand(6, 2)
    with torch.no_grad():
        expected = layer(x, index, weights)
        traced = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)
        got = traced(x, index, weights)
    assert (got - expected).norm() <= 1e-5 * expected.norm()
