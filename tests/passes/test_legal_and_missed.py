"""Chains with something between that commutes, repeats or adds up: fused, or named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nmm_compiler.passes.pipeline import rewrite, run

VERIFIED = {"verify": True, "strict": True}
L = F.linear
X = torch.randn(2, 6, 64)


class Model(nn.Module):
    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.function = function

        def weight(*shape):
            return nn.Parameter(torch.randn(shape).to(dtype) / shape[-1] ** 0.5)

        self.a, self.b, self.c, self.d = weight(8, 64), weight(48, 8), weight(6, 64), weight(48, 6)
        self.one, self.out, self.narrow = weight(1, 64), weight(48, 1), weight(48, 4)
        self.bias, self.e = weight(8), weight(48, 8)
        self.table, self.experts, self.backs = weight(100, 8), weight(4, 64, 8), weight(4, 8, 48)
        self.c1, self.c2, self.c3 = weight(8, 64, 1, 1), weight(48, 8, 1, 1), weight(8, 64, 3, 3)
        self.patch = weight(8, 3, 4, 4)

    def forward(self, x):
        return self.function(self, x)


def found(function, x, dtype=torch.float32):
    """Rewrite with all checks on, and compare both with the float64 result."""
    model = Model(function, dtype).requires_grad_(False)
    result = rewrite(model, (x,), options=VERIFIED)
    want, got = model(x), result.graph_module(x)
    exact = Model(function).requires_grad_(False)
    exact.load_state_dict(model.state_dict())
    truth = exact.double()(x.double() if x.is_floating_point() else x)
    flat = [y if isinstance(y, tuple) else (y,) for y in (want, got, truth)]
    for before, after, right in zip(*flat, strict=True):
        unit = torch.finfo(before.dtype).eps * float(right.abs().max())
        error, had = (float((y.double() - right).abs().max()) for y in (after, before))
        # Another order of sums of 64 and 8 terms, each rounded once at most.
        assert error <= 2 * had + 8 * unit
    return result


FUSED = {
    "a factor for each token": (lambda p, x: L(L(x, p.a) * x[..., :1], p.b), ["lowrank"]),
    "a bias before it": (lambda p, x: L(x[..., :1] * L(x, p.a, p.bias), p.b), ["lowrank"]),
    "two of them": (lambda p, x: L(L(x, p.a) * x[..., :1] * 0.5 * x[..., 1:2], p.b), ["lowrank"]),
    "feature-major": (lambda p, x: (p.b @ ((p.a @ x.mT) * 0.5)).mT, ["lowrank"]),
    "the same product twice": (lambda p, x: (L(L(x, p.a), p.b), L(L(x, p.a), p.e)),
                               ["shared_u"]),
    "a sum of chains": (lambda p, x: L(L(x, p.a), p.b) - 0.5 * L(L(x, p.c), p.d), ["lora"]),
    "a scaled sum": (lambda p, x: 0.5 * (L(L(x, p.a), p.b) + L(L(x, p.c), p.d)), ["lora"]),
    "rank 1": (lambda p, x: L(L(x, p.one), p.out), ["lowrank"]),
    "rank 1, the other way round": (lambda p, x: (p.out @ (p.one @ x.mT)).mT, ["lowrank"]),
    "a made weight": (lambda p, x: L(L(x, p.a * 0.5), torch.cat([p.b[:20], p.b[20:]])),
                      ["lowrank"]),
}  # fmt: skip
NAMED = {
    "a bias behind the factor": (lambda p, x: L(L(x, p.a) * x[..., :1] + p.bias, p.b),
                                 "factor_shape"),
    "a mask of tokens": (lambda p, x: L(L(x, p.a) * (x[..., :1] > 0), p.b), "dtype"),
    "masked_fill": (lambda p, x: L(L(x, p.a).masked_fill(x[..., :1] > 0, 0.0), p.b), "opaque"),
    "the last token": (lambda p, x: L(L(x, p.a)[:, -1], p.b), "opaque"),
    "some tokens": (lambda p, x: L(L(x, p.a)[:, 1:], p.b), "opaque"),
    "chunks": (lambda p, x: [L(h, p.narrow) for h in L(x, p.a).chunk(2, -1)][1], "opaque"),
    "joined values": (lambda p, x: L(torch.cat([L(x, p.a), L(x, p.c)], -1),
                                     torch.cat([p.b, p.d], -1)), "concatenated"),
    "experts": (lambda p, x: torch.bmm(torch.bmm(x, p.experts), p.backs), "batched_weight"),
    "1x1 with a stride": (lambda p, x: F.conv2d(F.conv2d(x, p.c1, stride=2), p.c2), "convolution"),
    "1x1, then a stride": (lambda p, x: F.conv2d(F.conv2d(x, p.c1), p.c2, stride=2),
                           "convolution"),
    "3x3, then 1x1": (lambda p, x: F.conv2d(F.conv2d(x, p.c3), p.c2), "convolution"),
    "patches": (lambda p, x: L(F.conv2d(x, p.patch, stride=4).flatten(2).mT, p.b), "convolution"),
    "no sum": (lambda p, x: L(x, p.a)[..., None] * p.b.t(), "unsummed"),
    "no sum, the other way round": (lambda p, x: p.b * L(x, p.a)[..., None, :], "unsummed"),
    "an embedding": (lambda p, x: L(F.embedding(x, p.table), p.b), "embedding"),
}  # fmt: skip
INPUTS = {
    "experts": torch.randn(4, 5, 64), "patches": torch.randn(2, 3, 16, 16),
    "an embedding": torch.arange(12).view(2, 6),
    **dict.fromkeys(("1x1 with a stride", "1x1, then a stride", "3x3, then 1x1"),
                    torch.randn(2, 64, 6, 6)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_fused(name, dtype):
    function, kinds = FUSED[name]
    result = found(function, X.to(dtype), dtype)
    assert [m.kind for m in result.matches] == kinds
    assert not result.declined


@pytest.mark.parametrize("name", NAMED)
def test_named(name):
    function, code = NAMED[name]
    result = found(function, INPUTS.get(name, X))
    assert code in [d.code for d in result.declined]
    assert all(d.remedy for d in result.declined)


def test_what_stands_outside_of_a_kernel_is_not_turned_with_its_result():
    """An addend or a factor of each token, where only the transposed result is read: square, so
    that a mixed up order has a valid shape."""

    class Turned(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.u, self.v, self.s, self.t = (
                nn.Parameter(torch.randn(shape) / 8, requires_grad=False)
                for shape in ((64, 4), (4, 64), (64, 4), (4, 64))
            )
            self.first = first

        def forward(self, x, r):
            y = self.first(self, x, r)
            return self.t.t() @ (self.s.t() @ y.t()), torch.cumsum(y.t(), 0)

    inputs = torch.randn(64, 64), torch.randn(64, 64)
    for first in (
        lambda p, x, r: torch.addmm(r, x @ p.u, p.v),
        lambda p, x, r: ((x @ p.u) * r[:, :1]) @ p.v,
    ):
        result = rewrite(Turned(first), inputs, options=VERIFIED)
        assert [m.kind for m in result.rewritten] == ["lowrank", "lowrank"]


def test_a_write_between_equal_products_keeps_them_apart():
    def written(p, x):
        one = L(L(x, p.a), p.b)
        x.mul_(2.0)
        return one, L(L(x, p.a), p.b)

    model = Model(written).requires_grad_(False)
    from torch import fx

    result = run(fx.symbolic_trace(model), (X.clone(),), VERIFIED)
    assert [m.kind for m in result.rewritten] == ["lowrank", "lowrank"]
