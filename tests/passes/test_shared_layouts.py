"""Calls that share x: each result has the layout that its readers want; near ones are one call."""

import pytest
import torch
from models import Model, Pair, calls_of, compiled, kernel_calls
from torch import nn

import nmm_compiler as nmm
import nmm_compiler.ops.registration
from nmm_compiler.passes.rules.shared import NEAR


def fork():
    """Return two chains of one x: one feeds another chain, the other is returned as it is."""
    parts = {"into": Pair(64, 8, 96), "out": Pair(64, 8, 48), "down": Pair(96, 8, 64)}
    return Model(lambda p, x: (p.down(p.into(x)), p.out(x)), **parts)


def test_a_result_for_another_kernel_is_col_and_its_neighbour_row():
    model, x = fork(), torch.randn(2, 12, 64)
    result = nmm.rewrite(model, (x,))
    shared, down = calls_of(result)
    assert shared.kwargs["out_layouts"] == ["col", "row"]
    assert down.kwargs["x_layout"] == "col"
    assert result.transposes_after == 0
    (match,) = [m for m in result.matches if m.rule == "shared_x"]
    assert match.info["out_layout"] == "col,row"
    # fp32 sums of at most 96 terms of size ~1, four products in a row: 4 * 96 * 2^-24 < 3e-5
    torch.testing.assert_close(result.graph_module(x), model(x), rtol=3e-5, atol=3e-5)
    (_, spec), _ = kernel_calls(result.graph_module)
    assert spec.family == "lowrank_shared"
    assert (spec.m, spec.pairs) == (24, ((8, (96,)), (8, (48,))))
    assert (spec.result_layouts(), spec.bias) == (("col", "row"), True)


def test_layouts_of_each_result_through_torch_compile():
    model, x = fork(), torch.randn(2, 12, 64)
    options = {"inner": "aot_eager", "strict": True, "kernels": "lazy"}
    got, want = compiled(model, **options, executor="reference")(x), model(x)
    torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5)
    upstream, weights = [torch.randn_like(y) for y in want], list(model.parameters())
    gradients = [torch.autograd.grad(y, weights, upstream) for y in (got, want)]
    # sums over 24 tokens on top of the chains' own
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


class Far(nn.Module):
    """Two chains of one x, with other work of some nodes between them."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        for i, shape in enumerate([(64, 8), (8, 96), (64, 8), (8, 48)]):
            self.register_buffer(f"w{i}", torch.randn(shape))

    def forward(self, x, z):
        first = x @ self.w0 @ self.w1
        for _ in range(self.between):
            z = torch.relu(z)
        return first, x @ self.w2 @ self.w3, z


@pytest.mark.parametrize(
    ("between", "rules"),
    [(0, ["shared_x"]), (46, ["shared_x"]), (47, ["lowrank"] * 2), (200, ["lowrank"] * 2)],
)
def test_results_at_most_48_nodes_apart_share_a_call(between, rules):
    assert NEAR == 48
    # the second result is two products behind the nodes between
    result = nmm.rewrite(Far(between), (torch.randn(24, 64), torch.randn(3)))
    assert [match.rule for match in result.matches] == rules
