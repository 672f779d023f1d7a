"""Calibration statistics against direct computation, and what is refused."""

import math

import pytest
import torch
from compress_models import stack, tokens
from torch import nn
from toy_models import Model, ModelOfAnyInputs

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.calibrate import as_batches, collect
from nmm_compiler.lowrank_models.moments import SecondMoment, regularize, shrinkage_of
from nmm_compiler.lowrank_models.select import find_sites

EPS = torch.finfo(torch.float64).eps


def collected(model, batches, **keywords):
    return collect(model, find_sites(model)[0], batches, **keywords)


def test_input_moments_are_those_of_the_activations():
    model, batches = stack(), tokens()
    statistics = collected(model, batches)
    x = torch.cat([batch.reshape(-1, 32) for batch in batches]).double()
    moment = statistics.inputs["layers.0.q"]
    assert moment.tokens == len(x) == statistics.tokens
    assert (moment.total - x.T @ x).norm() <= EPS * len(x) * moment.total.norm()
    assert moment.fourth == pytest.approx(float(x.square().sum(1).square().sum()))
    assert torch.equal(statistics.inputs["layers.0.k"].total, moment.total)  # they read one tensor
    assert statistics.inputs["layers.0.up"] is not moment
    assert not any(module._forward_hooks for module in model.modules())


def test_gradient_moments_are_gauss_newton_for_features():
    """For y = W x the gradient of signs . y is the signs: E[g g^T] is the identity."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5, bias=False))
    batches = [torch.randn(500, 6) for _ in range(20)]
    statistics = collected(model, batches, gradients=True)
    last, first = (statistics.gradients[name] for name in "10")
    off = last.total / last.tokens - torch.eye(5, dtype=torch.float64)
    assert off.abs().max() <= 5 / math.sqrt(10_000)  # five standard errors of a mean of signs
    weight = model[1].weight.detach().double()
    spread = (weight.abs().sum(0)).square().max()
    assert (first.total / first.tokens - weight.T @ weight).abs().max() <= 5 * spread / math.sqrt(
        10_000
    )


def test_gradient_moments_are_fisher_for_logits():
    """For logits z, E[g g^T] with labels from the model is diag(p) - p p^T."""

    model = Model(lambda m, x: {"logits": m.head(x)}, head=nn.Linear(4, 3))
    x = torch.randn(1, 4).expand(20_000, 4)
    got = collected(model, [x], gradients=True).gradients["head"]
    p = model(x[:1])["logits"].softmax(-1)[0].double().detach()
    assert (got.total / got.tokens - (p.diag() - torch.outer(p, p))).abs().max() <= 5 / math.sqrt(
        20_000
    )


def test_padding_is_not_counted():
    model = ModelOfAnyInputs(lambda m, x, attention_mask: m.linear(x), linear=nn.Linear(4, 4))
    x = torch.randn(2, 3, 4)
    x[1, 2] = math.nan  # what padding holds must not matter
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"x": x, "attention_mask": mask}
    moment = collected(model, [batch]).inputs["linear"]
    assert moment.tokens == 5
    rows = x[mask.bool()].double()
    assert torch.allclose(moment.total, rows.T @ rows, rtol=EPS * 100)


def test_layers_that_share_an_input_only_sometimes_are_kept_apart():
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    model = ModelOfAnyInputs(lambda m, x, same: m.a(x) + m.b(x if same else 2 * x), **layers)
    x = torch.randn(8, 4)
    found = collected(model, [(x, True), (x, False)]).inputs
    wide = x.double().T @ x.double()
    assert torch.allclose(found["a"].total, 2 * wide, rtol=EPS * 100)
    assert torch.allclose(found["b"].total, 5 * wide, rtol=1e-6)  # 2 x was computed in float32


def test_modes_and_gradient_flags_are_put_back():
    model = stack().train()
    model.layers[0].q.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    collected(model, tokens(1), gradients=True)
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())


def test_shrinkage_is_the_published_estimate():
    """Against the definition of Ledoit and Wolf, computed vector by vector."""
    torch.manual_seed(0)
    x = torch.randn(30, 6, dtype=torch.float64) * torch.logspace(0, -1, 6, dtype=torch.float64)
    moment = SecondMoment(6)
    for piece in x.split(7):
        moment.add(piece)
    mean = x.T @ x / 30
    scale = mean.trace() / 6
    target = scale * torch.eye(6, dtype=torch.float64)
    distance = (mean - target).square().sum()
    error = sum((torch.outer(v, v) - mean).square().sum() for v in x) / 30 / 29
    assert shrinkage_of(moment) == pytest.approx(float(error / distance), rel=1e-9)
    damped = regularize(moment, damping=0.5, shrinkage=0.0).dense()
    assert torch.allclose(damped, mean + 0.5 * target)
    assert torch.linalg.eigvalsh(regularize(moment).dense())[0] > 0
    one = SecondMoment(6)
    one.add(x[:1])
    assert shrinkage_of(one) == 1.0


def test_a_layer_that_sees_only_zeros_gets_the_identity():
    moment = SecondMoment(4)
    moment.add(torch.zeros(10, 4))
    assert torch.equal(regularize(moment).dense(), torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("given", "kind"),
    [(iter(()), "tuple_iterator"), (7, "int"), ("a text", "str"), (["a text"], "list")],
)
def test_what_is_no_calibration_is_named(given, kind):
    with pytest.raises(ModelError, match=f"a {kind}, has no batches of numbers"):
        as_batches(given)


def test_numbers_that_are_not_finite_are_named():
    model, bad = stack(), tokens(2)
    bad[1][0, 3, 4] = math.nan
    with pytest.raises(ModelError, match=r"input of layers\.0\.q .*NaN.* batch 1"):
        collected(model, bad)
    assert not any(module._forward_hooks for module in model.modules())
    model.layers[1].up.weight.data[0, 0] = math.inf
    with pytest.raises(ModelError, match=r"input of layers\.1\.down"):
        collected(model, tokens(1))


def in_place(m, x):
    y = m.a(x).exp()
    return y.mul_(y)


@pytest.mark.parametrize(
    ("forward", "text", "passes"),
    [
        (lambda m, x: m.a(x), r"no inputs of 1 of 2 layers: b; .*exclude", False),
        (lambda m, x: {"thing": m.b(m.a(x))}, "wrap it in a module", True),
        (in_place, r'Model cannot be differentiated.*"whitened"', False),
    ],
)
def test_what_cannot_be_collected_says_what_to_pass(forward, text, passes):
    """passes: without gradients all is well."""
    model, batches = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), [torch.randn(3, 4)]
    with pytest.raises(ModelError, match=text):
        collected(model, batches, gradients=True)
    if passes:
        assert collected(model, batches).inputs["a"].tokens == 3
