"""Products and epilogues in plain PyTorch, of which the ops' references consist.

An op's reference defines what the op computes, and it is the CPU path. It differentiates, batches
and casts like any PyTorch code, because it calls only `linear`, `matmul` and activations. `x u v`
is two products with the intermediate rounded once to the operands' dtype, as in the original model.
There are no checks here, to save microseconds; PyTorch's own products check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nmm_compiler.errors import UnknownNameError

linear = torch._C._nn.linear


def _gelu_tanh(y: Tensor) -> Tensor:
    return torch.nn.functional.gelu(y, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda y: y,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
}


def as_matrix(x: Tensor) -> Tensor:
    """Return x [..., k] with its tokens in rows, of which there may be none."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def activate(y: Tensor, name: str) -> Tensor:
    """Return activation `name` of `y`; raises UnknownNameError for one that the ops do not have."""
    if name == "identity":
        return y
    function = ACTIVATIONS.get(name)
    if function is None:
        raise UnknownNameError("activation", name, tuple(ACTIVATIONS))
    return function(y)


def rms_norm(h: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return gain * h / sqrt(mean(h * h) + eps) over the last axis, in float32 at least."""
    wide = h if h.dtype == torch.float64 else h.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (gain * scaled.to(h.dtype)).to(h.dtype)


def product(x: Tensor, w: Tensor, layout: str, bias: Tensor | None, out_layout: str) -> Tensor:
    """Return x [..., k] times w plus bias; "col" w is [n, k], a "col" result is a new [n, m]."""
    if out_layout == "row":
        if layout == "col":
            return linear(x, w, bias)
        return torch.matmul(x, w) if bias is None else linear(x, w.t(), bias)
    stationary = w if layout == "col" else w.t()
    moving = as_matrix(x).t()
    if bias is None:
        return torch.mm(stationary, moving)
    return torch.addmm(bias.unsqueeze(1), stationary, moving)


def layouts_of(out_layout: str, out_layouts: Sequence[str] | None, count: int) -> Sequence[str]:
    """Return the layout of each of `count` results."""
    return [out_layout] * count if out_layouts is None else out_layouts


def chain(
    x: Tensor, weights: Sequence[Tensor], layout: str, bias: Tensor | None, out_layout: str = "row"
) -> Tensor:
    """Return x times [u, v], or x times a dense [w], plus bias."""
    for w in weights[:-1]:
        x = linear(x, w) if layout == "col" else torch.matmul(x, w)
    return product(x, weights[-1], layout, bias, out_layout)
