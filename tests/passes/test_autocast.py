"""Chains under autocast: float32 weights, computed in bfloat16, inside and around a model."""

import contextlib
import copy

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Backend, codes_of, kinds_of
from toy_models import llama

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def three_chains(p, x):
    with torch.autocast(**BF16) if p.inside else contextlib.nullcontext():
        y = F.linear(0.5 * F.linear(x, p.a), p.b, p.bias)
        y = F.linear(y, p.base) + 2.0 * F.linear(F.linear(y, p.la), p.lb)
        return F.silu(F.linear(F.linear(y, p.g), p.h)) * F.linear(F.linear(y, p.q), p.r)


def model_of(inside):
    firsts = dict.fromkeys(("a", "g", "q"), (8, 64)) | {"la": (4, 64)}
    seconds = dict.fromkeys(("b", "h", "r"), (64, 8)) | {"lb": (64, 4)}
    model = models.Model(three_chains, **firsts, **seconds, base=(64, 64), bias=(64,))
    model.inside = inside
    return model


def compiled(model, x, around):
    """Return the results of the model before and after, and what was found."""
    results = Backend(VERIFIED)
    with torch.autocast(**BF16) if around else contextlib.nullcontext():
        return model(x), torch.compile(model, backend=results)(x), results


@pytest.mark.parametrize("inside", [True, False])
def test_a_region_and_a_model_under_autocast_and_gradients_of_float32_weights(inside):
    model, x = model_of(inside), torch.randn(2, 5, 64)
    right = copy.deepcopy(model).double()
    right.inside = False
    truth = torch.autograd.grad(right(x.double()).square().mean(), list(right.parameters()))
    want, got, (result,) = compiled(model, x, not inside)
    assert kinds_of(result) == ["lowrank", "lora", "gated_mlp_up"]
    assert not result.declined
    assert got.dtype == want.dtype == torch.bfloat16
    for y in (want, got):
        grads = torch.autograd.grad(y.float().square().mean(), list(model.parameters()))
        for grad, known in zip(grads, truth, strict=True):
            # Each gradient is a product of at most eight bfloat16 factors in a row.
            bound = 8 * 8 * 2.0**-8 * float(known.abs().max())
            assert grad.dtype == torch.float32
            assert float((grad.double() - known).abs().max()) <= bound


def test_peft_branches_under_autocast():
    peft = pytest.importorskip("peft")
    model, ids = llama(32, 64), torch.arange(12).view(2, 6)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(model, config).train()
    counts = []
    for around in (False, True):
        found = Backend({"strict": True})
        with torch.autocast(**BF16) if around else contextlib.nullcontext():
            torch.compile(model, backend=found)(ids, use_cache=False)
        counts.append(sum(m.kind == "lora" for r in found for m in r.matches))
    assert counts == [3, 3]


CASTS = {
    "a weight": (
        lambda p, x: F.linear(F.linear(x, p.a.to(x.dtype)), p.b.to(x.dtype)), "bf16 x", []),
    "a middle that is wider for a while": (
        lambda p, x: F.linear((F.linear(x, p.a).float() * 0.3).to(x.dtype), p.b), "bf16", []),
    "a middle that is narrower": (
        lambda p, x: F.linear((F.linear(x, p.a).bfloat16() * 0.3).float(), p.b), "", ["dtype"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_casts_by_hand(name):
    function, dtypes, codes = CASTS[name]
    model, x = models.Model(function, a=(8, 64), b=(48, 8)), torch.randn(5, 64)
    model = model.bfloat16() if dtypes == "bf16" else model
    _, _, (result,) = compiled(model, x.bfloat16() if dtypes else x, False)
    assert kinds_of(result) == ([] if codes else ["lowrank"])
    assert codes_of(result) == codes


def test_two_regions_are_not_one_chain():
    model, x = model_of(False), torch.randn(2, 64)

    def half(x):
        h = F.linear(x, model.a)
        with torch.autocast(**BF16):
            return F.linear(h, model.b)

    results = Backend(VERIFIED)
    want, got = half(x), torch.compile(half, backend=results)(x)
    assert torch.equal(want, got)
    assert not results[0].matches
    assert codes_of(results[0]) in (["region"], ["dtype"])
