"""The products of a backward pass, as calls of this package's ops.

For y = (x u) v with tokens in the rows of x and of the gradient g of y:

    p = x u, q = g v^T        [tokens, rank], p kept transposed: [rank, tokens]
    dx = q u^T                if no factor is trained, the low-rank product (g v^T) u^T
    du = x^T q, dv = p^T g    sums over the tokens

Each is a call with the executor of the forward pass, so it goes through the same lowering, cache,
launches and fallbacks, and is differentiable again. No operand is copied to transpose it: x^T, v^T
and the like are layouts of the call. A gradient that is not needed is not computed, and neither is
a result of which only the gradient is read: frozen weights under LoRA cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.ops.references import as_matrix

_FLIPPED = {"row": "col", "col": "row"}


def as_stored(t: Tensor) -> tuple[Tensor, str]:
    """Return a matrix as it is stored, and its layout: a transposed view is its base and "col"."""
    columns, rows = (type(stride) is int and stride == 1 for stride in t.stride())
    return (t.t(), "col") if columns and not rows else (t, "row")


class ByKernels:
    """Computes the products of a reference with kernels, in both passes."""

    def __init__(self, executor: str, target: str) -> None:
        self._where = {"executor": executor, "target": target}

    def chain(
        self, x: Tensor, weights: Sequence[Tensor], layouts: Sequence[str], bias: Tensor | None,
        out_layout: str, base: tuple[Tensor, str] | None = None, scale: float = 1.0, *,
        read: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return what `ByTorch.chain` returns; without `read`, anything with its gradient."""
        rows = left = as_matrix(x)
        own = bias if base is None and scale == 1.0 else None
        if len(weights) == 2 and any(one.requires_grad for one in weights):
            (u, *weights), (of_u, *layouts) = weights, layouts
            needed = read or weights[0].requires_grad
            left = _Through.apply(self, needed, [of_u], "col", rows, None, u)
        y: Tensor = _Through.apply(self, read, layouts, "row", left, own, *weights)
        y = y if scale == 1.0 else y * scale
        if base is not None:
            w, of_w = base
            y = y + _Through.apply(self, read, [of_w], "row", rows, bias, w)
        elif bias is not None and own is None:
            y = y + bias
        return y.t() if out_layout == "col" else y.reshape(*x.shape[:-1], y.shape[-1])

    def times(
        self, x: Tensor, weights: Sequence[Tensor], layouts: Sequence[str],
        bias: Tensor | None = None, out: str = "row",
    ) -> Tensor:  # fmt: skip
        """Return x w + bias, or x u v + bias; out: how a kernel stores it."""
        stored, x_layout = as_stored(x)
        said = {"x_layout": x_layout, "out_layout": out, **self._where}
        if len(weights) == 2:
            ways = dict(zip(("u_layout", "v_layout"), layouts, strict=True))
            y = torch.ops.nmm.lowrank_matmul(stored, *weights, bias, **ways, **said)
        else:
            (w,), (way,) = weights, layouts
            y = torch.ops.nmm.matmul_as_stored(stored, w, bias, w_layout=way, **said)
        return y if out == "row" else y.t()

    def summed(self, left: Tensor, right: Tensor, layout: str) -> Tensor:
        """Return left^T right, the gradient of a weight between them, in the weight's layout."""
        stored, of_left = as_stored(left)
        other, of_right = as_stored(right)
        return torch.ops.nmm.matmul_as_stored(
            stored, other, x_layout=_FLIPPED[of_left], w_layout=of_right, out_layout=layout,
            token_axis="k", **self._where,
        )  # fmt: skip


class _Through(torch.autograd.Function):
    """y = x w + bias on matrices, or x u v + bias for factors that are not trained."""

    @staticmethod
    def forward(
        ctx: Any, by: ByKernels, read: bool, layouts: Sequence[str], out: str, x: Tensor, bias: Any,
        *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.by, ctx.layouts = by, layouts
        ctx.save_for_backward(x, *weights)
        if read:
            return by.times(x, weights, layouts, bias, out)
        n = weights[-1].shape[layouts[-1] == "row"]
        return x.new_empty(1).expand(x.shape[0], n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        need_x, need_bias, *need = ctx.needs_input_grad[4:]
        flipped = [_FLIPPED[way] for way in reversed(ctx.layouts)]
        return (
            None, None, None, None,
            ctx.by.times(grad, weights[::-1], flipped) if need_x else None,
            grad.sum(0) if need_bias else None,
            *(ctx.by.summed(x, grad, ctx.layouts[0]) if one else None for one in need),
        )  # fmt: skip
