"""Pointwise operations between kernels whose operands lie in ways that only some layouts allow."""

import functools

import models
import pytest
import torch
from torch import fx

from nmm_compiler.options import Options
from nmm_compiler.passes.pipeline import run

K, R, N = 64, 8, 48


# Factors a [k, r] b [r, n] c [n, r] d [r, k], a vector over n, columns over tokens.
Model = functools.partial(
    models.Model,
    a=(K, R),
    b=(R, N),
    c=(N, R),
    d=(R, K),
    bias=(N,),
    five=(5, 1),
    three=(3, 1, 1),
    full=(3, 5, N),
    turned=(N, 5),
)


def up(p, x):
    return x @ p.a @ p.b


def down(p, y):
    return y @ p.c @ p.d


def two_layouts(p, x):
    y = torch.tanh(up(p, x))
    return down(p, y), y.mT.contiguous(), y.sum(-1)


def swapped(p, x):
    """The tokens of one operand are in another order than those of the other."""
    return down(p, torch.tanh(up(p, x)).transpose(0, 1) + up(p, x.transpose(0, 1)))


CASES = {
    "some tokens": lambda p, x: down(p, torch.tanh(up(p, x)) * p.five),
    "other tokens": lambda p, x: down(p, torch.tanh(up(p, x)) * p.three),
    "tokens swapped": lambda p, x: down(p, torch.tanh(up(p, x).transpose(0, 1))),
    "tokens swapped and added": swapped,
    "tokens swapped behind": lambda p, x: down(p, torch.tanh(up(p, x)).transpose(0, 1)),
    "features in the middle": lambda p, x: down(p, torch.tanh(up(p, x).mT).mT),
    "a full operand": lambda p, x: down(p, torch.tanh(up(p, x)) + p.full),
    "broadcast over a batch": lambda p, x: down(p, torch.tanh(up(p, x)) + p.full[0]),
    "a turned operand": lambda p, x: down(p, torch.tanh(up(p, x[0])) + p.turned.mT),
    "one of its rows": lambda p, x: down(p, (lambda y: torch.tanh(y) + y[:1])(up(p, x))),
    "a slice of the features": lambda p, x: torch.tanh(up(p, x)[..., :8]) @ p.b[:, :K],
    "both orders read": two_layouts,
    "read twice": lambda p, x: (lambda y: (down(p, y), down(p, y * 2), y))(torch.tanh(up(p, x))),
    "heads": lambda p, x: torch.tanh(up(p, x).unflatten(-1, (4, 12)).transpose(1, 2)).flatten(1),
    "heads joined": lambda p, x: down(
        p, torch.tanh(up(p, x).unflatten(-1, (4, 12))).transpose(1, 2).flatten(-2).view(3, 5, N)
    ),
    "in place": lambda p, x: (lambda y: (y.mul_(2.0), down(p, torch.tanh(y)), y))(up(p, x)),
    "in place behind": lambda p, x: (lambda y: (down(p, y), y.mul_(2.0)))(torch.tanh(up(p, x))),
    "where": lambda p, x: down(p, torch.where(up(p, x) > 0, up(p, x), p.bias)),
    "features by row": lambda p, x: down(p, torch.softmax(torch.tanh(up(p, x)), -1)),
    "tokens by column": lambda p, x: down(p, torch.tanh(up(p, x)).cumsum(1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_strides_are_the_graphs(name, dtype):
    model = Model(CASES[name]).requires_grad_(False).to(dtype)
    x = torch.randn(3, 5, K).to(dtype)
    result = run(fx.symbolic_trace(model), (x.clone(),), Options(strict=True))
    want, got = (
        torch.utils._pytree.tree_leaves(m(x.clone())) for m in (model, result.graph_module)
    )
    assert result.rewritten
    for one, two in zip(want, got, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
        # four products of at most K terms near 1 in a row, each rounded once more in the dtype
        bound = K * 4 * torch.finfo(torch.float32).eps + 8 * torch.finfo(dtype).eps
        assert float((one - two).abs().max()) <= bound * max(1.0, float(one.abs().max()))


@pytest.mark.parametrize(("readers", "layout"), [(2, "row"), (3, "row"), (4, "col")])
def test_three_transposes_while_loading_cost_one_in_the_graph(readers, layout):
    """Each kernel wants its x turned, one reader outside as it is; equal costs change nothing."""

    def forward(p, x):
        y = up(p, x)
        through = [torch.tanh, torch.sigmoid, torch.relu, torch.exp][:readers]
        return [down(p, function(y)) for function in through] + [y.cumsum(0)]

    model = Model(forward).requires_grad_(False)
    (choice, *_) = run(fx.symbolic_trace(model), (torch.randn(3, 5, K),)).layouts
    assert (choice.row_cost, choice.col_cost) == (readers * N, 3 * N)
    assert (choice.layout, choice.through) == (layout, readers)
