"""Family `matmul`: y = activation(x w + bias) in any layout: the baseline, and what the graph's
single products become once their transposes are layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from nmm_compiler.kernels.base import OUTPUTS, Array
from nmm_compiler.kernels.error_bounds import Estimate, activated
from nmm_compiler.kernels.product_spec import ProductSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSpec(ProductSpec):
    """y[m, n] = activation(x w + bias) with x [m, k], w [k, n], bias [n].

    A "col" layout means that the operand is passed, or the result comes back, transposed: x as
    [k, m], w as [n, k], y as [n, m]. With dtype float8_e4m3 the product is x_scale w_scale (x w):
    scales "tensor" gives w_scale [1], "channel" [n]; y and bias are bfloat16 or `out_dtype`.
    """

    n: int
    dtype: str = "bfloat16"
    x_layout: str = "row"
    out_layout: str = "row"
    w_layout: str = "row"
    bias: bool = False
    activation: str = "identity"
    scales: str | None = None
    out_dtype: str | None = None

    family: ClassVar[str] = "matmul"

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return w."""
        return {"w": (self.k, self.n)}

    def weight_splits(self) -> tuple[str, ...]:
        """Return that w can be halved along an even number of outputs."""
        return () if self.n % self.lnc else (OUTPUTS,)

    def half_of(self, split: str) -> dict[str, Any]:
        """Return the sizes of a core's share of the weights."""
        return {"n": self.n // 2}

    def _estimates(self, operands: dict[str, Array], typical: bool) -> Sequence[Estimate]:
        total = self._times(self._x(operands, typical), "w", operands, typical)
        return (activated(self._biased(total, "bias", operands, typical), self.activation),)

    def short(self) -> str:
        """Return family, sizes and dtype."""
        return f"matmul m{self.m} k{self.k} n{self.n} {self.formats()}"


def products_of(
    spec: Any, sizes: tuple[int, ...], layouts: tuple[str, ...], **ends: Any
) -> tuple[MatmulSpec, ...]:
    """Return the products of a chain x w1 w2 ..., what is between them transposed.

    sizes: features of x, then those that each weight gives. layouts: of the weights. ends:
    x_layout, and out_layout, bias and activation of the last product. The rest is as in `spec`.
    """
    made = []
    last = len(layouts) - 1
    x_layout = ends.pop("x_layout", "col")
    for place, layout in enumerate(layouts):
        end = ends if place == last else {"out_layout": "col"}
        made.append(
            MatmulSpec(
                m=spec.m, k=sizes[place], n=sizes[place + 1], dtype=spec.dtype,
                x_layout="col" if place else x_layout, w_layout=layout, lnc=spec.lnc,
                scales=getattr(spec, "scales", None), x_dtype=spec.x_dtype, **end,
            )
        )  # fmt: skip
    return tuple(made)
