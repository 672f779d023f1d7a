"""Results have the strides that the model gave them, at the output and wherever it is seen."""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from models import VERIFIED, trace_and_run

# Two chains of 32 features, and a dense weight.
SIZES = {"a": (4, 32), "b": (24, 4), "ga": (4, 32), "gb": (24, 4), "w": (24, 32)}
Model = functools.partial(models.Model, **SIZES)


def left(p, x):
    return p.b @ (p.a @ x.mT)  # [..., 24, tokens]


def other(p, x):
    return p.gb @ (p.ga @ x.mT)


CASES = {
    "left": left,
    "activation": lambda p, x: F.silu(left(p, x).mT),
    "gated": lambda p, x: (F.silu(left(p, x)) * other(p, x)).mT,
    "lora": lambda p, x: (p.w @ x.mT + 2 * left(p, x)).mT,
    "viewed behind": lambda p, x: torch.tanh(left(p, x).mT).mT.view(-1),
    "two readers": lambda p, x: (lambda y: (y, y.mT.sin(), y.sum(-1)))(left(p, x)),
    "heads": lambda p, x: F.linear(F.linear(x, p.a), p.b).unflatten(-1, (4, 6)).transpose(-2, -3),
    "convolution": lambda p, x: F.conv1d(F.conv1d(x.mT, p.a[..., None]), p.b[..., None]),
}


def _written(p, x):
    y = left(p, x).mT
    y.select(-1, 0).fill_(0.25)
    return y + 1


def _pointwise_written(p, x):
    y = torch.tanh(left(p, x).mT)
    seen = y.mT.view(-1)
    seen.mul_(2.0)
    return y


CASES |= {"written": _written, "pointwise behind, written": _pointwise_written}


@pytest.mark.parametrize("shape", [(6, 32), (2, 5, 32)])
@pytest.mark.parametrize("name", CASES)
def test_strides_at_the_output(name, shape):
    model = Model(CASES[name]).requires_grad_(False)
    result = trace_and_run(model, torch.randn(*shape), **VERIFIED)  # which compares strides, too
    # A convolution without a batch dimension is left as it is.
    assert bool(result.matches) == ((name, shape) != ("convolution", (6, 32)))


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

    model = Model(function).requires_grad_(False)
    x = torch.randn(6, 32)
    result = trace_and_run(model, x)
    assert len(result.matches) == 1
    # two orders of adding 32 and 4 fp32 products near 1, doubled at most
    torch.testing.assert_close(result.graph_module(x), model(x), rtol=0, atol=2.0**-24 * 36 * 4)
