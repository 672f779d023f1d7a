"""LoRA with one or several adapters: one call, equal values, gradients for each adapter."""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, Backend, kernel_calls
from torch import fx, nn
from toy_models import ModelOfAnyInputs

from nmm_compiler.passes.pipeline import run

K, R, N = 64, 8, 48


class Adapted(models.Model):
    """A base and three adapters, the second stored as [inputs, outputs]."""

    def base(self, x):
        return F.linear(x, self.w, self.d)

    def one(self, x):
        return F.linear(F.linear(x, self.a), self.b)

    def two(self, x):
        return x @ self.u @ self.v

    def three(self, x):
        return F.linear(F.linear(x, self.a3), self.b3)


SIZES = {
    "w": (N, K), "d": (N,), "c": (R,), "a": (R, K), "b": (N, R), "u": (K, 4), "v": (4, N),
    "a3": (2, K), "b3": (N, 2), "t": torch.tensor(0.7),
}  # fmt: skip
Layer = functools.partial(Adapted, **SIZES)


def _in_place(p, x):
    y = p.base(x)
    y += p.one(x) * 2
    y += p.two(x) * 0.5
    return y


def _shared_inner(p, x):
    h = F.linear(x, p.a)
    return p.base(x) + F.linear(h, p.b) + 2 * F.linear(h, p.b)


SPELLINGS = {
    "in place": (_in_place, 2, 12),
    "scaled sum of adapters": (lambda p, x: p.base(x) + 0.5 * (p.one(x) + p.two(x)), 2, 12),
    "base last": (lambda p, x: 3 * p.two(x) - p.one(x) + p.base(x), 2, 12),
    "three": (lambda p, x: p.base(x) + p.one(x) + p.two(x) + p.three(x), 3, 14),
    "scale as a tensor": (lambda p, x: p.base(x) + p.one(x) * p.t + p.two(x), 2, 12),
    "biases": (lambda p, x: p.base(x) + 2 * F.linear(F.linear(x, p.a, p.c), p.b, p.d), 1, 8),
    "one inner product, two adapters": (_shared_inner, 2, 16),
    "activation behind": (lambda p, x: F.gelu(p.base(x) + p.one(x) + p.two(x)), 2, 12),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_call_and_a_gradient_for_each_adapter(name):
    function, chains, rank = SPELLINGS[name]
    model, x, found = Layer(function), torch.randn(2, 5, K) / 8, Backend(VERIFIED)
    got = torch.compile(model, backend=found, dynamic=False)(x.clone())
    (match,) = found[0].matches
    assert (match.kind, match.info["chains"], match.info["r"]) == ("lora", chains, rank)
    ((_, spec),) = kernel_calls(found[0].graph_module)
    assert spec.r == rank
    leaves = list(model.parameters())
    one, two = (
        torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
        for y in (model(x.clone()), got)
    )
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)


def _old_name(p, x):
    y = p.base(x)
    y.add_(p.one(x))
    return y + p.two(x)  # y, which the sum wrote


def _read_between(p, x):
    y = p.base(x)
    y += p.one(x)
    z = y * 2
    y += p.two(x)
    return y, z


def _branch_is_written(p, x):
    h = p.one(x)
    y = h.add_(p.base(x))
    return y + h + p.two(x)


def _seen_through_a_view(p, x):
    y = p.base(x)
    seen = y.view(-1)
    y += p.one(x)
    y += p.two(x)
    return y, seen


def _two_in_place_by_one_name(p, x):
    z = x[0]
    y = z @ p.w.t()
    y.addmm_(F.linear(z, p.a), p.b.t())
    y.addmm_(z @ p.u, p.v, alpha=0.5)
    return y


@pytest.mark.parametrize(
    ("function", "chains"),
    [
        (_old_name, 2),
        (_read_between, 1),
        (_branch_is_written, 1),
        (_seen_through_a_view, 1),
        (_two_in_place_by_one_name, 2),
    ],
)
def test_what_in_place_sums_write_is_read_as_written(function, chains):
    found = Backend(VERIFIED)
    torch.compile(Layer(function), backend=found, dynamic=False)(torch.randn(2, 5, K) / 8)
    assert {m.info["chains"] for m in found[0].matches} == {chains}


def test_adapters_that_are_together_too_wide_are_fused_one_by_one():
    a, b = torch.randn(12, 32) / 6, torch.randn(32, 12) / 4
    w = torch.randn(32, 32) / 6

    def f(x, w, a, b):
        return F.linear(x, w) + F.linear(F.linear(x, a), b) + F.linear(F.linear(x, a), b)

    module = fx.symbolic_trace(f)
    result = run(module, (torch.randn(4, 32), w, a, b))
    assert sorted(m.kind for m in result.matches) == ["lora", "lowrank"]
    assert "rank_too_large" in {d.code for d in result.declined}


def test_adapters_that_are_inputs_beside_a_stored_base():
    """The adapters come with each call."""

    def function(p, x, a, b, u, v):
        return p.base(x) + 2 * F.linear(F.linear(x, a), b) + x @ u @ v

    model, x = ModelOfAnyInputs(function, base=nn.Linear(K, N)), torch.randn(5, K) / 8
    found = Backend()
    compiled = torch.compile(model, backend=found, dynamic=False)
    for _ in range(2):
        shapes = ((R, K), (N, R), (K, 4), (4, N))
        adapters = [torch.randn(s) * s[-1] ** -0.5 for s in shapes]
        results = [call(x, *adapters) for call in (compiled, model)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert len(found) == 1
    assert [(m.kind, m.info["chains"]) for m in found[0].matches] == [("lora", 2)]
