"""The products of a backward pass, as calls of this package's ops.

For y = (x u) v with tokens in the rows of x and of the gradient g of y:

    p = x u, q = g v^T        [tokens, rank], kept transposed: [rank, tokens]
    dx = q u^T                dense of q, or the low-rank product (g v^T) u^T where q is not needed
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
        factors = weights if len(weights) == 2 else (None, None)
        w, w_layout = base or ((None, "row") if len(weights) == 2 else (weights[0], layouts[0]))
        ways = (*layouts[:2], w_layout) if len(weights) == 2 else ("row", "row", w_layout)
        y: Tensor = _Linear.apply(self, read, ways, scale, as_matrix(x), *factors, w, bias)
        return y.t() if out_layout == "col" else y.reshape(*x.shape[:-1], y.shape[-1])

    def times(
        self, x: Tensor, w: Tensor, layout: str, bias: Tensor | None = None, out: str = "row"
    ) -> Tensor:
        """Return x w + bias; out: how a kernel stores it."""
        stored, x_layout = as_stored(x)
        y = torch.ops.nmm.matmul_as_stored(
            stored, w, bias, x_layout=x_layout, w_layout=layout, out_layout=out, **self._where
        )
        return y if out == "row" else y.t()

    def summed(self, left: Tensor, right: Tensor, layout: str) -> Tensor:
        """Return left^T right, the gradient of a weight between them, in the weight's layout."""
        stored, of_left = as_stored(left)
        other, of_right = as_stored(right)
        return torch.ops.nmm.matmul_as_stored(
            stored, other, x_layout=_FLIPPED[of_left], w_layout=of_right, out_layout=layout,
            token_axis="k", **self._where,
        )  # fmt: skip

    def low_rank(
        self, x: Tensor, factors: Sequence[Tensor], w: Tensor | None, bias: Tensor | None,
        layouts: Sequence[str], scale: float,
    ) -> Tensor:  # fmt: skip
        """Return scale (x u) v + x w + bias as one call."""
        stored, x_layout = as_stored(x)
        ways = dict(zip(("u_layout", "v_layout", "w_layout"), layouts, strict=True))
        return torch.ops.nmm.lowrank_matmul(
            stored, *factors, bias, w, x_layout=x_layout, scale=scale, **ways, **self._where
        )


class _Linear(torch.autograd.Function):
    """y = scale (x u) v + x w + bias on matrices; u and v, or w, may be absent."""

    @staticmethod
    def forward(
        ctx: Any, by: ByKernels, read: bool, layouts: tuple[str, str, str], scale: float, x: Tensor,
        u: Any, v: Any, w: Any, bias: Any,
    ) -> Tensor:  # fmt: skip
        ctx.by, ctx.layouts, ctx.scale, ctx.p = by, layouts, scale, None
        ctx.save_for_backward(x, u, v, w)
        of_u, of_v, of_w = layouts
        if not read:
            last, way = (w, of_w) if v is None else (v, of_v)
            return x.new_empty(1).expand(x.shape[0], last.shape[way == "row"])
        if v is None:
            return by.times(x, w, of_w, bias)
        if not ctx.needs_input_grad[6]:
            return by.low_rank(x, (u, v), w, bias, layouts, scale)
        ctx.p = by.times(x, u, of_u, out="col")
        plain = w is None and scale == 1.0
        y = by.times(ctx.p, v, of_v, bias if plain else None)
        if not plain:
            y = y * scale if w is None else y * scale + by.times(x, w, of_w)
            y = y if bias is None else y + bias
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, u, v, w = ctx.saved_tensors
        by, (of_u, of_v, of_w) = ctx.by, ctx.layouts
        need_x, need_u, need_v, need_w, need_bias = ctx.needs_input_grad[4:]
        found: list[Any] = [None] * 5
        if need_bias:
            found[4] = grad.sum(0)
        if need_w:
            found[3] = by.summed(x, grad, of_w)
        if v is None:
            if need_x:
                found[0] = by.times(grad, w, _FLIPPED[of_w])
            return None, None, None, None, *found
        scaled = grad if ctx.scale == 1.0 else grad * ctx.scale
        if need_v:  # a derivative of this pass goes through p, which is then computed again
            again = ctx.p is None or torch.is_grad_enabled()
            p = by.times(x, u, of_u, out="col") if again else ctx.p
            found[2] = by.summed(p, scaled, of_v)
        if need_x and (w is not None or not need_u):
            ways = [_FLIPPED[way] for way in (of_v, of_u, of_w)]
            found[0] = by.low_rank(grad, (v, u), w, None, ways, ctx.scale)
        if need_u:
            q = by.times(scaled, v, _FLIPPED[of_v], out="col")
            found[1] = by.summed(x, q, of_u)
            if need_x and w is None:
                found[0] = by.times(q, u, _FLIPPED[of_u])
        return None, None, None, None, *found
