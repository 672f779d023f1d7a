"""The products of a backward pass: calls of this package's ops, or PyTorch's own.

For y = (x u) v with tokens in the rows of x and of the gradient g of y:

    p = x u, q = g v^T        [tokens, rank], kept transposed: [rank, tokens]
    dx = q u^T                dense of q, or the low-rank product (g v^T) u^T where q is not needed
    du = x^T q, dv = p^T g    sums over the tokens

Each is a call with the executor of the forward pass, so it goes through the same lowering, cache,
launches and fallbacks, and is differentiable again. No operand is copied to transpose it: x^T, v^T
and the like are layouts of the call. Activations are matrices with tokens in rows here; one that is
stored transposed is a view, of which the call gets the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FLIPPED = {"row": "col", "col": "row"}


def inputs_first(w: Tensor, layout: str) -> Tensor:
    """Return a weight as [inputs, outputs]; its own inverse."""
    return w if layout == "row" else w.t()


def as_stored(t: Tensor) -> tuple[Tensor, str]:
    """Return a matrix as it is stored, and its layout: a transposed view is its base and "col"."""
    columns, rows = (type(stride) is int and stride == 1 for stride in t.stride())
    return (t.t(), "col") if columns and not rows else (t, "row")


@dataclass(frozen=True)
class Products:
    """Who computes the products of a backward pass: kernels for an executor, PyTorch for None."""

    executor: str | None = None
    target: str = "trn2"

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Products:
        """Return the products of an op call's backward pass, computed as its forward pass was."""
        return cls(**{n: keywords[n] for n in ("executor", "target") if n in keywords})

    @property
    def by_kernels(self) -> bool:
        """Whether the products are op calls."""
        return self.executor is not None

    @property
    def _where(self) -> dict[str, Any]:
        return {"executor": self.executor, "target": self.target}

    def times(
        self, x: Tensor, w: Tensor, layout: str, bias: Tensor | None = None, out: str = "row"
    ) -> Tensor:
        """Return x w + bias; out: how a kernel stores it."""
        if not self.by_kernels:
            y = x @ inputs_first(w, layout)
            return y if bias is None else y + bias
        stored, x_layout = as_stored(x)
        y = torch.ops.nmm.matmul_as_stored(
            stored, w, bias, x_layout=x_layout, w_layout=layout, out_layout=out, **self._where
        )
        return y if out == "row" else y.t()

    def times_transposed(self, grad: Tensor, w: Tensor, layout: str, out: str = "row") -> Tensor:
        """Return grad w^T, the gradient of x for y = x w."""
        return self.times(grad, w, _FLIPPED[layout], None, out)

    def summed_over_tokens(self, left: Tensor, right: Tensor, layout: str) -> Tensor:
        """Return left^T right, the gradient of a weight between them, in the weight's layout."""
        if not self.by_kernels:
            return inputs_first(left.t() @ right, layout)
        stored, of_left = as_stored(left)
        other, of_right = as_stored(right)
        return torch.ops.nmm.matmul_as_stored(
            stored, other, x_layout=_FLIPPED[of_left], w_layout=of_right, out_layout=layout,
            token_axis="k", **self._where,
        )  # fmt: skip

    def chain(
        self, x: Tensor, factors: Sequence[Tensor], layouts: Sequence[str], bias: Tensor | None
    ) -> Tensor:
        """Return (x u) v + bias as one call, where nothing else needs x u."""
        if not self.by_kernels:
            y = x @ inputs_first(factors[0], layouts[0]) @ inputs_first(factors[1], layouts[1])
            return y if bias is None else y + bias
        stored, x_layout = as_stored(x)
        return torch.ops.nmm.lowrank_matmul(
            stored, *factors, bias, x_layout=x_layout, u_layout=layouts[0], v_layout=layouts[1],
            **self._where,
        )  # fmt: skip

    def chain_transposed(
        self,
        grad: Tensor,
        factors: Sequence[Tensor],
        layouts: Sequence[str],
        base: tuple[Tensor, str] | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Return scale (grad v^T) u^T + grad w^T as one call; base: w and its layout."""
        (u, v), (u_layout, v_layout) = factors, layouts
        if not self.by_kernels:
            total = grad if scale == 1.0 else grad * scale
            low = total @ inputs_first(v, v_layout).t() @ inputs_first(u, u_layout).t()
            return low if base is None else low + grad @ inputs_first(*base).t()
        stored, x_layout = as_stored(grad)
        w, w_layout = base or (None, "col")
        return torch.ops.nmm.lowrank_matmul(
            stored, v, u, None, w, scale=scale, x_layout=x_layout, u_layout=_FLIPPED[v_layout],
            v_layout=_FLIPPED[u_layout], w_layout=_FLIPPED[w_layout], **self._where,
        )  # fmt: skip


BY_TORCH = Products()
