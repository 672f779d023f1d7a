"""Views and casts of one tensor as another: they read the second for its shape or dtype only."""

import pytest
import torch
from fuzz_graphs import TWO_TENSOR
from models import Model, Pair
from torch import fx, nn

from nmm_compiler.passes.pipeline import run

aten = torch.ops.aten


def beside(kind, name, role, dtype):
    """Return y = b(a(x)) and a w beside it; both turned, so that y is best made [n, m]."""

    def function(p, x):
        y = p.pair(x)
        one, two = (p.w, y) if role == "asked" else (y, p.w)
        if kind == "call_function":
            z = getattr(aten, name).default(one, two)
        elif name == "reshape of size":
            z = one.reshape(two.size())
        else:
            z = getattr(one, name)(two)
        return z.t().cumsum(0), y.t().cumsum(0)

    return Model(function, pair=Pair(32, 3, 24), w=torch.randn(6, 24, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("role", ["asked", "viewed"])
@pytest.mark.parametrize(("name", "kind"), TWO_TENSOR)
def test_two_tensor_view_is_one_of_the_tensor_that_it_views(kind, name, role, dtype):
    model, x = beside(kind, name, role, dtype), torch.randn(6, 32)
    result = run(fx.symbolic_trace(model), (x,), {"strict": True})
    assert [m.kind for m in result.rewritten] == ["lowrank"]
    for got, want in zip(result.graph_module(x), model(x), strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_two_tensor_cast_does_not_turn_the_tensor_it_asks():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 3, bias=False), nn.Linear(3, 24)

        def forward(self, x, w):
            return self.b(self.a(x)).type_as(w).t().cumsum(0)

    x, w = torch.randn(6, 32), torch.randn(6, 24, dtype=torch.float64)
    result = run(fx.symbolic_trace(Cast()), (x, w), {"strict": True})
    (holder,) = (n for n in result.graph_module.graph.nodes if n.name == "w")
    assert [user.name.rpartition("_")[0] for user in holder.users] == ["type_as"]
    assert result.transposes_after == 0
