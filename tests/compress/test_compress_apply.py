"""`compress` on whole models: what is replaced, what is left alone, and what is refused."""

import copy
import math

import pytest
import torch
from compress_models import check_reasons, stack, tokens, unchanged
from torch import nn
from toy_models import Model

from nmm_compiler.errors import (
    CapacityError,
    ModelError,
    OptionTypeError,
    ShapeError,
)
from nmm_compiler.lowrank_models import apply as module
from nmm_compiler.lowrank_models.apply import compress
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers

ToyExperts = type("ToyExperts", (Model,), {})


@torch.no_grad()
def relative_output_error(model, original, batches):
    a = torch.cat([model(b) for b in batches])
    b = torch.cat([original(b) for b in batches])
    return float((a - b).norm() / b.norm())


def least_error(dense, layer):
    """Return the relative error of the best matrix of a layer's rank, by singular values."""
    squares = torch.linalg.svdvals(dense.get_submodule(layer.name).weight.double()).square()
    return float((squares[layer.rank :].sum() / squares.sum()).sqrt())


def test_every_linear_becomes_two_and_the_report_says_so():
    model, dense = stack(), stack()
    biases = model.layers[0].q.bias
    report = compress(model, 0.2, align=4)
    assert len(lowrank_layers(model)) == len(report.layers) == 8
    assert 0.2 <= report.achieved_ratio < 0.3
    assert report.model_parameters_after == sum(p.numel() for p in model.parameters())
    q = model.layers[0].q
    assert q.bias is biases
    assert model.layers[0].k.bias is None
    assert [type(child) for child in q.children()] == [nn.Linear, nn.Linear]
    assert report.ranks()["layers.0.q"] == q.rank
    for layer in report.layers:
        # Both are the same error, but for the rounding of the factors to float32.
        assert layer.weight_error == pytest.approx(least_error(dense, layer), abs=1e-5)
        assert layer.rank % 4 == 0


def test_the_weight_property_is_the_product():
    model = stack()
    compress(model, 0.3, align=4)
    layer = model.layers[0].up
    x = torch.randn(7, 32)
    eps = torch.finfo(torch.float32).eps
    norms = layer.down.weight.detach().norm() * layer.up.weight.detach().norm()
    bound = 4 * eps * 32 * float(norms * x.norm())
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert (layer(x) - expected).norm() <= bound
    assert (layer.in_features, layer.out_features) == (32, 64)
    with pytest.raises(ShapeError):
        LowRankLinear.from_factors(torch.zeros(3, 4), torch.zeros(5, 2))


def test_calibrated_methods_are_better_where_they_should_be():
    original, batches = stack(), tokens()
    held_out = tokens(seed=7)
    errors = {}
    for method, data in (("svd", None), ("whitened", batches), ("two-sided", batches)):
        model = copy.deepcopy(original)
        asked = "whitened" if method == "whitened" else "auto"
        report = compress(model, 0.3, calibration=data, align=4, method=asked)
        assert report.method == method
        assert report.achieved_ratio >= 0.3
        assert report.calibration_tokens == (0 if data is None else 320)
        errors[method] = relative_output_error(model, original, held_out)
    assert errors["whitened"] < 0.8 * errors["svd"]
    assert errors["two-sided"] < errors["whitened"]


def test_ranks_that_are_given():
    model = stack()
    report = compress(model, rank={"layers.1.up": 5, "up": 8, "layers.1.down": 4})
    assert report.ranks() == {"layers.0.up": 8, "layers.1.up": 5, "layers.1.down": 4}
    assert {x.note for x in report.layers if x.rank is None} == {"no rank given: kept dense"}
    model = stack()
    report = compress(model, ratio=0.3, align=8, include="up")
    assert report.ranks() == {"layers.0.up": 8, "layers.1.up": 8}
    model = stack()
    report = compress(model, rank=16, include="q")  # 16 * 64 = 32 * 32: saves nothing
    assert not report.ranks()
    assert "break-even" in report.layers[0].note


def test_ratio_zero_changes_nothing():
    model = stack()
    for keywords in ({}, {"calibration": tokens(1)}):
        with unchanged(model):
            report = compress(model, 0, **keywords)
        assert (report.achieved_ratio, report.compressed) == (0.0, ())


def test_tied_shared_converted_and_foreign_layers():
    body = nn.Linear(32, 32)
    model = Model(
        lambda m, ids: m.head(m.again(m.body(m.embed(ids)))), embed=nn.Embedding(50, 32),
        body=body, again=body, attention=nn.MultiheadAttention(32, 2), hooked=nn.Linear(32, 32),
        head=nn.Linear(32, 50, bias=False), done=LowRankLinear(32, 4, 32),
        experts=ToyExperts(None, gate_up=torch.zeros(4, 8, 8)),
    )  # fmt: skip
    model.hooked.register_forward_hook(lambda *a: None)
    model.head.weight = model.embed.weight
    report = compress(model, 0.3, align=4)
    assert [layer.name for layer in report.layers] == ["body"]
    assert model.body is model.again
    assert isinstance(model.body, LowRankLinear)
    check_reasons(
        report.skipped, ("head", "tied to embed.weight"), ("hooked", "hooks"),
        ("done", r"already low-rank \(rank 4\)"), ("attention.out_proj", "never calls it"),
        ("attention", "MultiheadAttention multiplies"),
        ("experts", "ToyExperts multiplies by a weight"),
    )  # fmt: skip
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 50)


def test_meta_models_get_shapes_only():
    with torch.device("meta"):
        model = stack()
    report = compress(model, 0.2, align=4)
    assert all(p.is_meta for p in model.parameters())
    assert report.achieved_ratio >= 0.2
    real = stack()
    assert compress(real, 0.2, align=4).ranks() == report.ranks()
    with torch.device("meta"):
        model = stack()
    with pytest.raises(OptionTypeError, match="meta"):
        compress(model, 0.2, calibration=tokens(1))


def test_dtype_training_mode_and_gradients_carry_over():
    model, dense = stack().to(torch.bfloat16).train(), stack().to(torch.bfloat16)
    model.layers[0].q.weight.requires_grad_(False)
    report = compress(model, 0.3, align=4)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.layers[0].up.down.training
    assert not model.layers[0].q.up.weight.requires_grad
    assert model.layers[0].q.bias.requires_grad
    assert model.layers[0].up.down.weight.requires_grad
    eps = torch.finfo(torch.bfloat16).eps
    for layer in report.layers:  # rounding both factors adds at most about eps of |W|
        assert layer.weight_error <= math.hypot(least_error(dense, layer), 2 * eps) + 1e-6


def stack_with_nan():
    model = stack()
    model.layers[1].up.weight.data[2, 2] = math.nan
    return model


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (nn.Sequential(nn.ReLU()), ModelError, r"no nn\.Linear or Conv1D"),
        (nn.Linear(32, 32), ModelError, "wrap it"),
        ("model", OptionTypeError, "Module"),
        (stack_with_nan(), ModelError, r"layers\.1\.up"),
        (
            nn.Sequential(ToyExperts(None, up=torch.zeros(4, 8, 8))),
            ModelError,
            "ToyExperts multiplies",
        ),
    ],
)
def test_what_cannot_be_compressed_is_named_and_left_alone(model, error, words):
    with pytest.raises(error, match=words):
        compress(model, 0.2, align=4)
    assert model == "model" or not lowrank_layers(model)


def test_an_interrupt_leaves_a_working_model(monkeypatch):
    batches, real, count = tokens(), module.factorize, []

    def interrupted(*a, **k):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return real(*a, **k)

    model = stack()
    monkeypatch.setattr(module, "factorize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress(model, 0.3, calibration=batches, align=4)
    assert torch.isfinite(model(batches[0])).all()
    assert len(lowrank_layers(model)) == 2


def test_calibration_that_does_not_fit_is_refused_after_the_first_batch(monkeypatch):
    model, passes = stack(), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    monkeypatch.setattr("nmm_compiler.lowrank_models.calibrate.available_bytes", lambda: 100_000)
    with pytest.raises(CapacityError, match=r"0\.00 GiB can be had: pass method"):
        compress(model, 0.3, calibration=tokens(), align=4)
    assert len(passes) == 1
    assert not lowrank_layers(model)


def test_layers_that_cannot_be_judged_or_factorized_stay_dense_and_do_not_count():
    def pooled(m, x):
        hidden = m.body(x)
        return {"last_hidden_state": hidden, "pooled": m.pooler(hidden)}

    torch.manual_seed(0)
    model = Model(pooled, body=stack(), pooler=nn.Linear(32, 32))
    report = compress(model, 0.3, calibration=tokens(), align=4)
    pooler = {layer.name: layer for layer in report.layers}["pooler"]
    assert pooler.rank is None
    assert not pooler.counted
    assert "does not depend" in pooler.note
    assert report.achieved_ratio >= 0.3
    report = compress(stack(), 0.2, align=16)  # 32 x 32 breaks even below 16
    assert {layer.name for layer in report.layers if not layer.counted} == {
        f"layers.{i}.{name}" for i in (0, 1) for name in ("q", "k")
    }
    assert "no multiple of 16" in report.layers[0].note
    assert report.achieved_ratio >= 0.2


@pytest.mark.parametrize(("ratio", "base"), [(0.2, None), (0.4, None), (0.5, "mxfp4")])
def test_statistics_collected_once_serve_many_calls(ratio, base):
    sizes, batches = {"width": 64, "inner": 96}, tokens(width=64)
    statistics = module.calibrate(stack(**sizes), batches, base=base)
    a, b = stack(**sizes), stack(**sizes)
    first = compress(a, ratio, base=base, calibration=statistics, align=8)
    assert first == compress(b, ratio, base=base, calibration=batches, align=8)
    assert torch.equal(a(batches[0]), b(batches[0]))
