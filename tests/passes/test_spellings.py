"""Every spelling of two factors is found: 11 first products, 7 second ones, 2-D to 4-D inputs.

Whatever stands between them, the report has an entry: a match, or a refusal with a remedy.
"""

import itertools

import models
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from nmm_compiler.passes.pipeline import explain, run

K, R, N = 64, 8, 48
FIRST = {
    "F.linear": lambda p, x: F.linear(x, p.a),
    "F.linear with a bias": lambda p, x: F.linear(x, p.a, p.c),
    "nn.Linear": lambda p, x: p.down(x),
    "@": lambda p, x: x @ p.u,
    "torch.matmul": lambda p, x: torch.matmul(x, p.u),
    "method": lambda p, x: x.matmul(p.u),
    "@ .T": lambda p, x: x @ p.a.T,
    "@ .t()": lambda p, x: x @ p.a.t(),
    "einsum": lambda p, x: torch.einsum("...k,kr->...r", x, p.u),
    "tensordot": lambda p, x: torch.tensordot(x, p.u, dims=1),
    "inner": lambda p, x: torch.inner(x, p.a),
}
SECOND = {
    "F.linear": lambda p, h: F.linear(h, p.b),
    "nn.Linear": lambda p, h: p.up(h),
    "@": lambda p, h: h @ p.v,
    "@ + bias": lambda p, h: torch.matmul(h, p.v) + p.d,
    "einsum": lambda p, h: torch.einsum("...r,nr->...n", h, p.b),
    "feature-major": lambda p, h: (p.b @ h.mT).mT,
    "scaled": lambda p, h: (0.5 * h) @ p.v,
}
BETWEEN = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "softmax": lambda h: torch.softmax(h, -1),
    "square": torch.square, "power": lambda h: h**2, "clamp": lambda h: h.clamp(-1, 1),
    "exp": torch.exp, "abs": torch.abs, "round": torch.round, "normalize": F.normalize,
    "layer norm": lambda h: F.layer_norm(h, (R,)), "relu, squared": lambda h: F.relu(h).square(),
    "glu": lambda h: torch.cat([F.glu(h, -1), F.glu(h, -1)], -1), "dropout": F.dropout,
    "sorted": lambda h: torch.sort(h, -1)[0], "flip": lambda h: h.flip(-1),
    "roll": lambda h: h.roll(1, -1), "half": lambda h: torch.cat([h[..., :4]] * 2, -1),
    "last": lambda h: h[:, -1:], "picked": lambda h: h[:, [0, 2]],
    "mean": lambda h: h.mean(1, keepdim=True), "sum": lambda h: h.sum(1),
    "max": lambda h: h.amax(1),
    "cumsum": lambda h: h.cumsum(1), "padded tokens": lambda h: F.pad(h, (0, 0, 1, 0)),
    "repeat": lambda h: h.repeat(1, 2, 1), "interleaved": lambda h: h.repeat_interleave(2, 1),
    "joined": lambda h: torch.cat([h, h], 1), "in place": lambda h: h.mul_(2.0),
    "plus 1": lambda h: h + 1, "1 minus": lambda h: 1 - h, "lerp": lambda h: torch.lerp(h, h, 0.3),
    "masked": lambda h: h.masked_fill(h > 0, 0.0), "where": lambda h: torch.where(h > 0, h, 0.0),
    "divided": lambda h: h / h.norm(dim=-1, keepdim=True), "times itself": lambda h: h * h,
    "plus itself": lambda h: h + torch.sin(h), "pool": lambda h: F.avg_pool1d(h.mT, 2).mT,
    "finite": torch.nan_to_num, "float64": lambda h: h.double().to(h.dtype),
}  # fmt: skip


def model_of(function):
    """Return a model with two linear layers and weights of the same sizes."""
    weights = {"u": (K, R), "v": (R, N), "a": (R, K), "b": (N, R), "c": (R,), "d": (N,)}
    layers = {"down": nn.Linear(K, R, bias=False), "up": nn.Linear(R, N)}
    return models.Model(function, **weights, **layers).requires_grad_(False).eval()


def rewritten(function, *shape):
    x = torch.randn(*shape, K)
    return run(fx.symbolic_trace(model_of(function)), (x,), {"verify": True, "strict": True})


@pytest.mark.parametrize("first", FIRST)
def test_every_pair_of_spellings_is_one_call(first):
    shapes = itertools.cycle([(5,), (2, 3), (2, 2, 3)])
    for second, shape in zip(SECOND, shapes, strict=False):
        result = rewritten(lambda p, x: SECOND[second](p, FIRST[first](p, x)), *shape)  # noqa: B023
        assert [m.kind for m in result.rewritten] == ["lowrank"], (second, shape, str(result))
        assert not result.declined, (second, shape)


@pytest.mark.parametrize("between", BETWEEN)
def test_nothing_between_two_factors_is_passed_over_in_silence(between):
    step = BETWEEN[between]
    for first, second in (("F.linear", "F.linear"), ("nn.Linear", "nn.Linear"), ("@", "@")):
        result = rewritten(lambda p, x: SECOND[second](p, step(FIRST[first](p, x))), 2, 6)  # noqa: B023
        assert not result.rewritten, (first, second)
        assert result.declined, (first, second)
        assert all(d.reason and d.remedy for d in result.declined)


def test_a_chain_across_a_graph_break_is_not_passed_over_in_silence():
    model = model_of(lambda p, x: (x @ p.u)[x[..., 0] > 0] @ p.v)
    torch._dynamo.reset()
    found = explain(model, torch.randn(2, 6, K))
    assert len(found.results) == 2
    assert "2 graphs" in str(found)
    assert "graph_breaks" in str(found)
