"""Chains under autocast: float32 weights, computed in bfloat16, inside and around a model."""

import contextlib
import copy

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Backend, kinds_of
from toy_models import llama

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def three_chains(p, x):
    with torch.autocast(**BF16) if p.inside else contextlib.nullcontext():
        y = F.linear(0.5 * F.linear(x, p.a), p.b, p.bias)
        y = F.linear(y, p.base) + 2.0 * F.linear(F.linear(y, p.la), p.lb)
        return F.silu(F.linear(F.linear(y, p.g), p.h)) * F.linear(F.linear(y, p.q), p.r)


@pytest.mark.parametrize("inside", [True, False])
def test_a_region_and_a_model_under_autocast_and_gradients_of_float32_weights(inside):
    firsts = dict.fromkeys(("a", "g", "q"), (8, 64)) | {"la": (4, 64)}
    seconds = dict.fromkeys(("b", "h", "r"), (64, 8)) | {"lb": (64, 4)}
    model = models.Model(three_chains, **firsts, **seconds, base=(64, 64), bias=(64,))
    model.inside, x, found = False, torch.randn(2, 5, 64), Backend(VERIFIED)
    right = copy.deepcopy(model).double()
    truth = torch.autograd.grad(right(x.double()).square().mean(), list(right.parameters()))
    model.inside = inside
    with contextlib.nullcontext() if inside else torch.autocast(**BF16):
        want, got = model(x), torch.compile(model, backend=found)(x)
    (result,) = found.results
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
