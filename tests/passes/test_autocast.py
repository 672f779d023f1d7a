"""Chains under autocast: float32 weights, computed in bfloat16, inside and around a model."""

import contextlib
import copy

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Backend, codes_of, kinds_of
from torch import nn
from toy_models import llama

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


class Model(nn.Module):
    def __init__(self, inside):
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.a, self.b = nn.Linear(64, 8, bias=False), nn.Linear(8, 64)
        self.base = nn.Linear(64, 64)
        self.la, self.lb = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.g, self.h = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        self.q, self.r = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)

    def forward(self, x):
        with torch.autocast(**BF16) if self.inside else contextlib.nullcontext():
            y = self.b(0.5 * self.a(x))
            y = self.base(y) + 2.0 * self.lb(self.la(y))
            return F.silu(self.h(self.g(y))) * self.r(self.q(y))


def compiled(model, x, around):
    """Return the results of the model before and after, and what was found."""
    results = Backend(VERIFIED)
    with torch.autocast(**BF16) if around else contextlib.nullcontext():
        return model(x), torch.compile(model, backend=results)(x), results


def assert_no_worse(want, got, truth):
    """A rewrite takes roundings of the middle away; at most those of results are left."""
    before, after = (float((y.detach().double() - truth).abs().max()) for y in (want, got))
    assert after <= 2 * before


def exact(model, x):
    inside, model.inside = model.inside, False
    y = model.double()(x.double())
    model.float().inside = inside
    return y


@pytest.mark.parametrize("inside", [True, False])
def test_a_region_and_a_model_under_autocast(inside):
    model, x = Model(inside), torch.randn(2, 5, 64)
    with torch.no_grad():
        truth = exact(model, x)
        want, got, (result,) = compiled(model, x, not inside)
    assert kinds_of(result) == ["lowrank", "lora", "gated_mlp_up"]
    assert not result.declined
    assert got.dtype == want.dtype == torch.bfloat16
    assert_no_worse(want, got, truth)


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_reach_float32_weights(inside):
    model, x = Model(inside), torch.randn(2, 5, 64)
    right = copy.deepcopy(model).double()
    right.inside = False
    truth = torch.autograd.grad(right(x.double()).square().mean(), list(right.parameters()))
    want, got, (result,) = compiled(model, x, not inside)
    assert result.matches
    for y in (want, got):
        grads = torch.autograd.grad(y.float().square().mean(), list(model.parameters()))
        for grad, known in zip(grads, truth, strict=True):
            # Each gradient is a product of at most eight bfloat16 factors in a row.
            bound = 8 * 8 * 2.0**-8 * float(known.abs().max())
            assert grad.dtype == torch.float32
            assert float((grad.double() - known).abs().max()) <= bound


def test_peft_branches_under_autocast():
    peft = pytest.importorskip("peft")
    model, ids = llama(32, 64, 2), torch.arange(12).view(2, 6)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(model, config).train()
    counts = []
    for around in (False, True):
        found = Backend({"strict": True})
        with torch.autocast(**BF16) if around else contextlib.nullcontext():
            torch.compile(model, backend=found)(ids, use_cache=False)
        counts.append(sum(m.kind == "lora" for r in found for m in r.matches))
    assert counts == [6, 6]


def test_a_cast_weight_is_a_weight():
    def cast(p, x):
        return F.linear(F.linear(x, p.a.to(x.dtype)), p.b.to(x.dtype))

    model = models.Model(cast, a=(8, 64), b=(48, 8))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    want, got, (result,) = compiled(model, x, False)
    assert kinds_of(result) == ["lowrank"]
    assert_no_worse(want, got, exact_chain(x, model.a, model.b))


def exact_chain(x, a, b):
    with torch.no_grad():
        return F.linear(F.linear(x.double(), a.bfloat16().double()), b.bfloat16().double())


def test_a_middle_that_is_wider_for_a_while():
    def wide(p, x):
        return F.linear((F.linear(x, p.a).float() * 0.3).to(x.dtype), p.b)

    def narrow(p, x):
        return F.linear((F.linear(x, p.a).bfloat16() * 0.3).float(), p.b)

    shapes = {"a": (8, 64), "b": (48, 8)}
    model, x = models.Model(wide, **shapes).bfloat16(), torch.randn(5, 64, dtype=torch.bfloat16)
    want, got, (result,) = compiled(model, x, False)
    assert kinds_of(result) == ["lowrank"]
    assert_no_worse(want, got, 0.3 * exact_chain(x, model.a, model.b))
    model, x = models.Model(narrow, **shapes), torch.randn(5, 64)
    _, _, (result,) = compiled(model, x, False)
    assert not result.matches
    assert codes_of(result) == ["dtype"]


def test_two_regions_are_not_one_chain():
    model, x = Model(False), torch.randn(2, 64)

    def half(x):
        h = model.a(x)
        with torch.autocast(**BF16):
            return model.b(h)

    results = Backend(VERIFIED)
    want, got = half(x), torch.compile(half, backend=results)(x)
    assert torch.equal(want, got)
    assert not results[0].matches
    assert codes_of(results[0]) in (["region"], ["dtype"])
