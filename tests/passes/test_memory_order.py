"""What reads the memory order of a value gets the graph's own, however far behind a fused call."""

import pytest
import torch
from models import Model
from torch import fx

from nmm_compiler.passes.pipeline import run

READERS = {
    "as_strided": lambda y: y.as_strided((24, 6), (6, 1)),
    "function": lambda y: torch.as_strided(y, (24, 6), (6, 1)),
    "stride": lambda y: y.stride(),
    "is_contiguous": lambda y: y.is_contiguous(),
    "view": lambda y: y.mT.view(-1),
}
BETWEEN = {"next to it": lambda y: y, "behind": torch.tanh, "further": lambda y: (y * 2).sin() + 1}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("between", BETWEEN)
def test_the_memory_order_that_is_read_is_the_graphs_own(reader, between):

    def function(p, x):
        return READERS[reader](BETWEEN[between]((p.b @ (p.a @ x.mT)).mT))

    model = Model(function, a=(4, 32), b=(24, 4)).requires_grad_(False)
    x = torch.randn(6, 32)
    result = run(fx.symbolic_trace(model), (x,))
    assert len(result.rewritten) == 1
    # two orders of adding 32 and 4 fp32 products near 1, doubled at most
    torch.testing.assert_close(result.graph_module(x), model(x), rtol=0, atol=2.0**-24 * 36 * 4)
