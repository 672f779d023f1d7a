"""Chains cut by a graph break or by the edge of an operator's own graph: named, and mended."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nmm_compiler.passes.pipeline import explain, rewrite

X = torch.randn(2, 6, 64)


class Model(nn.Module):
    def __init__(self, function, r=8):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b = nn.Parameter(torch.randn(r, 64)), nn.Parameter(torch.randn(48, r))
        self.requires_grad_(False)

    def forward(self, x):
        return self.function(self, x)


def down(p, x):
    return F.linear(x, p.a)


def up(p, h):
    return F.linear(h, p.b)


def broken(p, x):
    h = down(p, x)
    torch._dynamo.graph_break()
    return up(p, h)


def broken_with_steps(p, x):
    h = down(p, x).transpose(0, 1)
    torch._dynamo.graph_break()
    return up(p, 2.0 * h.transpose(0, 1))


def later_graph(p, x):
    h = down(p, x)
    torch._dynamo.graph_break()
    z = x.sin()
    torch._dynamo.graph_break()
    return up(p, h), z


def inside(p, x):
    return checkpoint(lambda h: up(p, h), down(p, x), use_reentrant=False)


def behind(p, x):
    return up(p, checkpoint(lambda y: down(p, y), x, use_reentrant=False))


def branches(p, x):
    return torch.cond(x.sum() > 0, lambda h: up(p, h), lambda h: up(p, -h), (down(p, x),))


CUT = {
    broken: "graph break", broken_with_steps: "graph break", later_graph: "graph break",
    inside: "keep both products", behind: "keep both products", branches: "keep both products",
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("function", CUT, ids=lambda f: f.__name__)
def test_a_cut_chain_is_named(function):
    found = explain(Model(function), X)
    assert not found.matches
    assert {d.code for d in found.declined} == {"two_graphs"}
    assert all(CUT[function] in d.remedy for d in found.declined)


def test_the_remedies_fuse():
    def whole(p, x):
        return up(p, down(p, x))

    def both_inside(p, x):
        return checkpoint(lambda y: whole(p, y), x, use_reentrant=False)

    for function in (whole, both_inside):
        found = explain(Model(function), X)
        assert [m.kind for m in found.matches] == ["lowrank"]
        assert not found.declined


def test_a_region_without_gradients_in_an_exported_program():
    def crossing(p, x):
        with torch.no_grad():
            h = down(p, x)
        return up(p, h)

    model = Model(crossing)
    model.requires_grad_(True)
    assert [d.code for d in rewrite(model, (X,)).declined] == ["two_graphs"]


def test_dense_products_in_two_graphs_are_no_chain():
    assert not explain(Model(broken, r=60), X).declined
    assert not explain(Model(lambda p, x: (down(p, x), x), r=8), X).declined
