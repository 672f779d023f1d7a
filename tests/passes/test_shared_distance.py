"""Calls that share x become one only if their results lie close together in the graph."""

import pytest
import torch
from torch import nn

import nmm_compiler as nmm
from nmm_compiler.passes.rules.shared import NEAR


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
