"""Gated MLPs and epilogues however their activation is spelled, and gates that are declined."""

import functools
import math

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, codes_of, kinds_of, trace_and_run

from nmm_compiler.passes.pipeline import run

K, R, N = 64, 8, 48
C = math.sqrt(2 / math.pi)


class Gates(models.Model):
    """Two low-rank projections, and a merged one of twice the width."""

    def gate(self, x):
        return F.linear(F.linear(x, self.a), self.b, self.d)

    def up(self, x):
        return F.linear(F.linear(x, self.ga), self.gb)


SIZES = {"a": (R, K), "b": (N, R), "d": (N,), "ga": (R, K), "gb": (N, R), "merged": (2 * N, R)}
Model = functools.partial(Gates, **SIZES, s=(R,), one=torch.tensor(0.7))


def rewritten(function):
    """Return the result for a model that computes `function`, its values checked."""
    x = torch.randn(2, 5, K) / 4
    result = trace_and_run(Model(function), x, **VERIFIED)
    assert not run(result.graph_module, (x,)).matches
    return result


SPELLED = {
    "x sigmoid(x)": (lambda x: x * torch.sigmoid(x), "silu"),
    "x / (1 + exp(-x))": (lambda x: x / (1 + torch.exp(-x)), "silu"),
    "gelu_new": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0)))),
        "gelu_tanh",
    ),
    "gelu_fast": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
        "gelu_tanh",
    ),
    "erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "clamp": (lambda x: x.clamp(min=0), "relu"),
    "threshold": (lambda x: F.threshold(x, 0.0, 0.0), "relu"),
    "bilinear": (lambda x: x, "identity"),
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_gate_and_an_epilogue(name):
    act, activation = SPELLED[name]
    for function in (
        lambda p, x: act(p.gate(x)) * p.up(x),
        lambda p, x: p.up(x) * act(p.gate(x)),
    ):
        (match,) = rewritten(function).matches
        assert (match.kind, match.info["activation"]) == ("gated_mlp_up", activation)
    (match,) = rewritten(lambda p, x: act(p.gate(x).view(10, N))).matches
    assert (match.kind, match.info["activation"]) == ("lowrank", activation)


# What no kernel computes: by name where it has one, and the chains are fused by themselves.
OTHERS = {
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
    "leaky_relu": (F.leaky_relu, "leaky_relu"),
    "almost silu": (lambda x: x * torch.sigmoid(x + 1e-3), None),
    "almost gelu": (lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3))), None),
    "another x": (lambda x: x * torch.sigmoid(x.flip(0)), None),
    "clamped above": (lambda x: x.clamp(0, 6), None),
    "written inside": (lambda x: x * torch.sigmoid(x).mul_(1.0), None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_are_no_gate(name):
    act, activation = OTHERS[name]
    result = rewritten(lambda p, x: act(p.gate(x)) * p.up(x))
    assert result.chains == 2
    assert not any(m.kind == "gated_mlp_up" for m in result.matches)
    reasons = [d.reason for d in result.declined if d.code == "no_kernel"]
    assert bool(reasons) == (activation is not None)
    assert all(activation in reason for reason in reasons)


def test_an_inner_step_that_is_read_elsewhere_keeps_the_expression():
    def f(p, x):
        y = p.gate(x)
        gate = torch.sigmoid(y)
        return y * gate + gate

    (match,) = rewritten(f).matches
    assert match.info["activation"] == "identity"


# -- what stands in a gate ----------------------------------------------------------------------

SCALED = {
    "a number": lambda p, x: F.silu(p.gate(x) * 0.5) * p.up(x),
    "before the bias": lambda p, x: F.silu(F.linear(F.linear(x, p.a) * 2, p.b, p.d)) * p.up(x),
    "a tensor": lambda p, x: F.silu(p.gate(x)) * (p.up(x) * p.one),
    "singular values": lambda p, x: F.silu(p.gate(x)) * F.linear(F.linear(x, p.ga) * p.s, p.gb),
}


@pytest.mark.parametrize("name", SCALED)
def test_scales_are_folded_into_low_rank_gates(name):
    (match,) = rewritten(SCALED[name]).matches
    assert match.kind == "gated_mlp_up"


HALVES = {
    "split": lambda y: y.split(N, -1),
    "slice": lambda y: (y[..., :N], y[..., N:]),
    "chunk, up first": lambda y: y.chunk(2, -1)[::-1],
}


@pytest.mark.parametrize("cut", HALVES)
def test_halves_of_one_projection_however_they_are_cut(cut):
    def f(p, x):
        gate, up = HALVES[cut](F.linear(F.linear(x, p.a), p.merged))
        return F.silu(gate) * up

    result = rewritten(f)
    assert codes_of(result) == ["no_kernel"]
    assert kinds_of(result) == ["lowrank"]


def test_gradients_through_a_spelled_gate():
    act = SPELLED["gelu_new"][0]
    model = Model(lambda p, x: act(p.gate(x) * 0.5) * (p.up(x) * p.one))
    x = torch.randn(6, K) / 4
    graph = trace_and_run(model, x).graph_module
    leaves = [model.a, model.b, model.d, model.ga, model.gb, model.one]
    one, two = (torch.autograd.grad(m(x).square().sum(), leaves) for m in (model, graph))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)
