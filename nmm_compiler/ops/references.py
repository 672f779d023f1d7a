"""What the ops of linear layers compute, in plain PyTorch.

An op's reference defines what the op computes, and it is the CPU path. It differentiates, batches
and casts like any PyTorch code, because it calls only `linear`, `matmul` and activations. `x u v`
is two products with the intermediate rounded once to the operands' dtype, as in the original model.
There are no checks here, to save microseconds; PyTorch's own products check.

A reference takes `by`, which computes its products: PyTorch, or for a backward pass the kernels
(by_kernels.py). An expression outside of `by.chain` is PyTorch's either way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.kernels.linear.specs import RANK_AXES
from nmm_compiler.ops.operands import Given

linear = torch._C._nn.linear
tracing = torch._C._len_torch_dispatch_stack


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda y: y,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


def as_matrix(x: Tensor) -> Tensor:
    """Return x [..., k] with its tokens in rows, of which there may be none."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def activate(y: Tensor, name: str) -> Tensor:
    """Return activation `name` of `y`; raises UnknownNameError for one that the ops do not have."""
    function = ACTIVATIONS.get(name)
    if function is None:
        raise UnknownNameError("activation", name, tuple(ACTIVATIONS))
    return function(y)


def rms_norm(h: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return gain * h / sqrt(mean(h * h) + eps) over the last axis, in float32 at least."""
    wide = _wide(h)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (gain * scaled.to(h.dtype)).to(h.dtype)


def product(x: Tensor, w: Tensor, layout: str, bias: Tensor | None = None) -> Tensor:
    """Return x [..., k] times w plus bias; "col" w is [n, k]."""
    if layout == "col":
        return linear(x, w, bias)
    return torch.matmul(x, w) if bias is None else linear(x, w.t(), bias)


def normed(x: Tensor, said: Given) -> Tensor:
    """Return the norm of x over its features, as x lies; said: all arguments of the call.

    Its statistics are in float32, its value is rounded once.
    """
    if said.get("norm", "none") == "none":
        return x
    rows = x.t() if said["x_layout"] == "col" else x
    wide = _wide(rows)
    if said["norm"] == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + said["norm_eps"])
    if said["norm_gain"] is not None:
        wide = wide * (_wide(said["norm_gain"]) + said["norm_offset"])
    if said["norm_bias"] is not None:
        wide = wide + _wide(said["norm_bias"])
    made = wide.to(x.dtype)
    return made.t() if said["x_layout"] == "col" else made


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


class ByTorch:
    """Computes the products of a reference with PyTorch."""

    @staticmethod
    def chain(
        x: Tensor, weights: Sequence[Tensor], layouts: Sequence[str], bias: Tensor | None,
        out_layout: str, base: tuple[Tensor, str] | None = None, scale: float = 1.0, *,
        read: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return scale x u v + x base + bias for weights (u, v), or x w + bias for (w,).

        read: whether anything but the gradient of the result is used.
        """
        h = x
        if len(weights) == 2:
            h = linear(x, weights[0]) if layouts[0] == "col" else torch.matmul(x, weights[0])
        plain = base is None and scale == 1.0
        if plain and layouts[-1] == "col" and out_layout == "row":
            return linear(h, weights[-1], bias)  # most calls, without another Python call
        y = product(h, weights[-1], layouts[-1], bias if plain else None)
        y = y if scale == 1.0 else y * scale  # inductor drops the alpha of a sum (torch 2.13)
        if base is not None:
            y = product(x, *base, bias) + y
        elif not plain and bias is not None:
            y = y + bias
        return y if out_layout == "row" else as_matrix(y).t().contiguous()


# The sum over the processes of a group: a collective of torch.distributed, by the group's name. Its
# gradient is that of the result, which every rank has. A DTensor knows its devices and what it is
# on each: a Partial one becomes its sum, and no other one changes.


def check_group(tp: int, tp_axis: str, group: str) -> None:
    """Raise UnknownNameError or SpecError unless a call says what it sums, and over which group."""
    check_name("tp_axis", tp_axis, RANK_AXES)
    if not group:
        raise SpecError(
            f"tp={tp}, tp_axis={tp_axis!r} without a group; pass group=, the name of a process "
            "group: mesh.get_group().group_name"
        )


def summed(t: Any, group: str) -> Tensor:
    """Return the sum of t over the processes of the group."""
    # by name: an import of the class takes most of a second
    if type(t) is not Tensor and type(t).__name__ == "DTensor":
        from torch.distributed.tensor import Replicate

        return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)
    return _Summed.apply(t, group) if t.requires_grad else _all_reduce(t, group)


def _all_reduce(t: Tensor, group: str) -> Tensor:
    functional: Any = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(t.contiguous(), "sum", group))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, group: str) -> Tensor:
        return _all_reduce(t, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def lowrank_matmul(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    w: Tensor | None = None,
    inner_bias: Tensor | None = None,
    inner_gain: Tensor | None = None,
    *,
    scale: float = 1.0,
    activation: str = "identity",
    inner_activation: str = "identity",
    inner_eps: float = 1e-6,
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    w_layout: str = "row",
    tp: int = 1,
    tp_axis: str = "",
    group: str = "",
    target: str = "trn2",
    executor: str = "reference",
    by: Any = ByTorch,
    inner_factor: Tensor | None = None,
    read: bool = False,
) -> Tensor:
    """Return activation(x w + scale * p v + bias), p = inner_activation(x u + inner_bias).

    inner_gain: p is the RMS norm of that, with inner_eps under the root, times the gain.
    inner_factor: p is that times numbers of each token, [..., rank]. tp,
    tp_axis: the operands are one rank's, as LowRankSpec says; group: the name of the process group
    that sums. read: as in `chain`; of an activation it is.
    """
    if tp > 1:
        check_group(tp, tp_axis, group)
    if x_layout == "col":
        x = x.t()
    read = read or activation != "identity"
    shaped = inner_bias is not None or inner_gain is not None or inner_activation != "identity"
    if not shaped and tp == 1 and inner_factor is None:
        base = None if w is None else (w, w_layout)
        weights, layouts = (u, v), (u_layout, v_layout)
        y = by.chain(x, weights, layouts, bias, out_layout, base, scale, read=read)
    else:
        h = by.chain(x, (u,), (u_layout,), None if tp > 1 else inner_bias, "row")
        if tp > 1:
            h = summed(h, group)
            h = h if inner_bias is None else h + inner_bias
        h = activate(h, inner_activation)
        if inner_gain is not None:
            h = rms_norm(h, inner_gain, inner_eps)
        h = h if inner_factor is None else h * inner_factor
        own = bias if w is None else None
        y = by.chain(h, (v,), (v_layout,), own, out_layout, None, scale, read=read)
        if w is not None:
            y = by.chain(x, (w,), (w_layout,), bias, out_layout, read=read) + y
    return activate(y, activation) if read else y


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "identity",
    x_layout: str = "row",
    out_layout: str = "row",
    w_layout: str = "row",
    token_axis: str = "m",
    target: str = "trn2",
    executor: str = "reference",
    by: Any = ByTorch,
    read: bool = False,
) -> Tensor:
    """Return activation(x w + bias).

    token_axis: the size that counts tokens: "m" of x [m, k], or "k", which the product sums over.
    read: as in `chain`; of an activation it is.
    """
    read = read or activation != "identity"
    rows = x.t() if x_layout == "col" else x
    y = by.chain(rows, (w,), (w_layout,), bias, out_layout, read=read)
    return activate(y, activation) if read else y
