"""Family `matmul`: y = activation(x w + bias) in any layout: the baseline, and what the graph's
single products become once their transposes are layouts.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    LAYOUTS,
    Array,
    TensorSpec,
    check_arrays,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.error_bounds import (
    FP32_ROUNDOFF,
    activation_error,
    activation_value,
    combine,
    product_error,
    rounding_error,
)
from nmm_compiler.kernels.number_formats import Estimate, FormattedSpec
from nmm_compiler.kernels.tiling import lay


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSpec(FormattedSpec):
    """y[m, n] = activation(x w + bias) with x [m, k], w [k, n], bias [n].

    A "col" layout means that the operand is passed, or the result comes back, transposed: x as
    [k, m], w as [n, k], y as [n, m]. With dtype float8_e4m3 the product is x_scale w_scale (x w):
    scales "tensor" gives w_scale [1], "channel" [n]; y and bias are bfloat16 or `out_dtype`.
    """

    m: int
    k: int
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

    def __post_init__(self) -> None:
        check_sizes("matmul", {name: getattr(self, name) for name in ("m", "k", "n")})
        self._settle_formats()
        check_name("activation", self.activation, ACTIVATIONS)
        for name in ("x_layout", "out_layout", "w_layout"):
            check_name(name, getattr(self, name), LAYOUTS)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, w, then bias, then the scales of fp8 operands."""
        made = [
            TensorSpec(name="x", shape=lay((self.m, self.k), self.x_layout), dtype=self.dtype),
            TensorSpec(name="w", shape=lay((self.k, self.n), self.w_layout), dtype=self.dtype),
        ]
        if self.bias:
            made.append(TensorSpec(name="bias", shape=(self.n,), dtype=self.result_dtype))
        return (*made, *self._scale_tensors({"w": self.n}))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return y."""
        shape = lay((self.m, self.n), self.out_layout)
        return (TensorSpec(name="y", shape=shape, dtype=self.result_dtype),)

    def flops(self) -> int:
        """Return 2 m k n."""
        return 2 * self.m * self.k * self.n

    def reference(self, *arrays: Array) -> Array:
        """Return y in float64, laid out as `out_layout` says."""
        y = activation_value(self._before_activation(arrays)[0], self.activation)
        return y if self.out_layout == "row" else np.ascontiguousarray(y.T)

    def error_bound(self, *arrays: Array) -> Array:
        """Return the elementwise bound: one fp32 accumulation of length k, one rounding."""
        return self._error(arrays)

    def typical_error(self, *arrays: Array) -> Array:
        """Return the error per element if roundings are independent."""
        return self._error(arrays, typical=True)

    def _error(self, arrays: tuple[Array, ...], typical: bool = False) -> Array:
        total, error = self._before_activation(arrays, typical)
        error = activation_error(total, error, self.activation)
        magnitude = np.abs(activation_value(total, self.activation)) + error
        error = combine(error, rounding_error(magnitude, self.result_dtype), typical)
        return error if self.out_layout == "row" else np.ascontiguousarray(error.T)

    def _before_activation(self, arrays: tuple[Array, ...], typical: bool = False) -> Estimate:
        check_arrays(self, arrays)
        x, w, *rest = (np.asarray(a, dtype=np.float64) for a in arrays)
        x = x if self.x_layout == "row" else x.T
        w = w if self.w_layout == "row" else w.T
        total = x @ w
        error = product_error(np.abs(x), np.abs(w), 0.0, self.k, typical)
        if self.fp8:
            total, error = self._scaled(total, error, *rest[-2:], typical=typical)
        if self.bias:
            total = total + rest[0]
            error = combine(error, FP32_ROUNDOFF * (np.abs(total) + error), typical)
        return total, error

    def short(self) -> str:
        """Return family, sizes and dtype."""
        return f"matmul m{self.m} k{self.k} n{self.n} {self.formats()}"
