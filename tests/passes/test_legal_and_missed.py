"""Chains with something between that commutes, repeats or adds up: fused, or named."""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, codes_of, kinds_of

from nmm_compiler.passes.pipeline import rewrite

L = F.linear
X = torch.randn(2, 6, 64)


SHAPES = {
    "a": (8, 64), "b": (48, 8), "c": (6, 64), "d": (48, 6), "one": (1, 64), "out": (48, 1),
    "bias": (8,), "e": (48, 8), "experts": (4, 64, 8),
    "backs": (4, 8, 48), "c1": (8, 64, 1, 1), "c2": (48, 8, 1, 1),
    "column": (48,), "kernel": (48, 8, 3, 3),
    "w": (64, 48), "gates": (4, 64),
    "token": (6, 1),
}  # fmt: skip
Model = functools.partial(models.Model, **SHAPES)


def found(function, x, dtype=torch.float32):
    """Rewrite with all checks on."""
    return rewrite(Model(function).to(dtype).requires_grad_(False), (x,), options=VERIFIED)


FUSED = {
    "the same product twice": (lambda p, x: (L(L(x, p.a), p.b), L(L(x, p.a), p.e)),
                               ["shared_u"]),
    "a sum of chains": (lambda p, x: L(L(x, p.a), p.b) - 0.5 * L(L(x, p.c), p.d), ["lora"]),
    "rank 1": (lambda p, x: L(L(x, p.one), p.out), ["lowrank"]),
    "a sum of products first": (lambda p, x: L((x[..., None, :] * p.a).sum(-1), p.b), ["lowrank"]),
    "sums that keep their axis": (
        lambda p, x: ((x[..., None, :] * p.a).sum(-1, True) * p.b.t()).sum(-2, keepdim=True),
        ["lowrank"],
    ),
    "an expert by index": (lambda p, x: x @ p.experts[x[0, 0, 0].long() % 4] @ p.backs[0],
                           ["lowrank"]),
    "a stride before both": (
        lambda p, x: F.conv2d(F.conv2d(x[:, :, ::2, ::2], p.c1), p.c2), ["lowrank"]),
    "a made weight": (lambda p, x: L(L(x, p.a * 0.5), torch.cat([p.b[:20], p.b[20:]])),
                      ["lowrank"]),
    "a middle that is wider for a while": (
        lambda p, x: L((L(x, p.a).float() * 0.3).to(x.dtype), p.b), ["lowrank"]),
    # whatever it holds
    "an addend of weight zero": (
        lambda p, x: torch.addmm(x.new_full((48,), torch.nan), L(x[0], p.a), p.b.t(), beta=0),
        ["lowrank"]),
}  # fmt: skip
# More are in examples/gallery/left_alone.py and in test_remedies.py.
NAMED = {
    **{name: (lambda p, x, step=step: L(step(L(x, p.a)), p.b), "between") for name, step in {
        "two steps": lambda h: F.relu(h).square(),
        "glu": lambda h: torch.cat([F.glu(h, -1), F.glu(h, -1)], -1),
        "picked": lambda h: h[:, [0, 2]],
        "max": lambda h: h.amax(1),
        "1 minus": lambda h: 1 - h,
    }.items()},
    "a bias behind the factor": (lambda p, x: L(L(x, p.a) * x[..., :1] + p.bias, p.b),
                                 "between"),
    "joined values": (lambda p, x: L(torch.cat([L(x, p.a), L(x, p.c)], -1),
                                     torch.cat([p.b, p.d], -1)), "between"),
    "stacked values": (lambda p, x: torch.einsum(
        "bsir,inr->bsn", torch.stack([L(x, p.a), x @ p.experts[0]], 2),
        torch.stack([p.b, p.e])), None),
    "features in another order": (
        lambda p, x: L(L(x, p.a).unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2), p.b),
        "shape"),
    "a bias for each token": (lambda p, x: L(L(x, p.a) + p.token, p.b), "between"),
    "a mask, then a bias of pixels": (lambda p, x: F.conv2d(
        F.conv2d(x.mT[..., None], p.c1) * x.mT[:, :1, :, None], p.c2, p.column), "between"),
    "a factor for each batch, tokens joined": (
        lambda p, x: L((L(x, p.a) * x[:, :1, :1]).view(-1, 8), p.b), "between"),
    "gathered experts": (lambda p, x: torch.bmm(torch.bmm(
        x, p.experts[x[:, 0, 0].argsort()]), p.backs[x[:, 0, 0].argsort()]), None),
    "gated experts": (lambda p, x: torch.einsum(
        "bsk,ekr,ern,bse->bsn", x, p.experts, p.backs, L(x, p.gates)), None),
    "1x1 with a bias, then a stride": (
        lambda p, x: F.conv2d(F.conv2d(x, p.c1, p.bias), p.c2, stride=2), None),
    "1x1, then 3x3": (lambda p, x: F.conv2d(F.conv2d(x, p.c1), p.kernel, padding=1),
                      None),
    "1x1 with a stride": (lambda p, x: F.conv2d(F.conv2d(x, p.c1, stride=2), p.c2), None),
    "a factory as second factor": (lambda p, x: L(L(x, p.a), torch.ones(48, 8, dtype=x.dtype)),
                                   None),
}  # fmt: skip
INPUTS = dict.fromkeys(
    ("1x1 with a stride", "1x1, then 3x3", "1x1 with a bias, then a stride",
     "a stride before both"),
    torch.randn(2, 64, 6, 6))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_fused(name, dtype):
    function, kinds = FUSED[name]
    result = found(function, INPUTS.get(name, X).to(dtype), dtype)
    assert kinds_of(result) == kinds
    assert not result.declined


@pytest.mark.parametrize("name", NAMED)
def test_named(name):
    function, code = NAMED[name]
    result = found(function, INPUTS.get(name, X))
    assert not result.matches
    assert code is None or code in codes_of(result)
    assert all(d.remedy for d in result.declined)


def test_a_factor_that_is_an_input_is_named_and_keys_are_not():
    """Attention on queries of a product and on keys from outside is no chain."""
    model = Model(lambda p, x: L(x["x"] @ x["u"], p.b)).requires_grad_(False)
    result = rewrite(model, ({"x": X, "u": torch.randn(64, 8)},))
    assert codes_of(result) == ["weight"]
    model = Model(lambda p, x: x["x"] @ p.w + x["x"] @ x["u"] @ x["v"]).requires_grad_(False)
    result = rewrite(model, ({"x": X, "u": torch.randn(64, 8), "v": torch.randn(8, 48)},))
    assert kinds_of(result) == ["lora"]
    model = Model(lambda p, x: L(x["x"], p.a) @ x["k"].mT).requires_grad_(False)
    assert not rewrite(model, ({"x": X, "k": torch.randn(2, 5, 8)},)).declined
    same = Model(lambda p, x: L(x, p.a) @ p.a @ x.mT).requires_grad_(False)
    assert not rewrite(same, (X[0],)).declined


def test_what_stands_outside_of_a_kernel_is_not_turned_with_its_result():
    """An addend, where only the transposed result is read: square, so that a mixed up order has a
    valid shape."""

    def turned(p, x):
        y = torch.addmm(torch.sin(x), x @ p.u, p.v)
        return p.t.t() @ (p.s.t() @ y.t()), torch.cumsum(y.t(), 0)

    shapes = {"u": (64, 4), "v": (4, 64), "s": (64, 4), "t": (4, 64)}
    model = models.Model(turned, **shapes).requires_grad_(False)
    result = rewrite(model, (torch.randn(64, 64),), options=VERIFIED)
    assert kinds_of(result) == ["lowrank", "lowrank"]
