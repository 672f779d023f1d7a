"""Family `lowrank`: y = activation(x w + scale (x u) v + bias), x w being optional.

The spec, its float64 reference and its error bound.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    LAYOUTS,
    Array,
    Products,
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
from nmm_compiler.kernels.matmul.spec import MatmulSpec
from nmm_compiler.kernels.number_formats import Estimate, FormattedSpec
from nmm_compiler.kernels.tiling import lay


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSpec(FormattedSpec):
    """y[m, n] = activation(x w + scale (x u) v + bias) with x [m, k], u [k, r], v [r, n].

    A "col" layout means that the operand is passed, or the result comes back, transposed: x as
    [k, m], u as [r, k], v as [n, r], w as [n, k], y as [n, m]. base adds the dense product x w.

    intermediate: what x u is rounded to, once: "operand", "float32", or with fp8 operands
    "float8_e4m3" by p_scale. With dtype float8_e4m3 the sums are
    p = scale x_scale u_scale (x u) and v_scale (p v): scales "tensor" gives u_scale, v_scale
    [1], "channel" [r] and [n]; y and bias are bfloat16 or `out_dtype`.
    """

    m: int
    k: int
    r: int
    n: int
    dtype: str = "bfloat16"
    x_layout: str = "row"
    out_layout: str = "row"
    u_layout: str = "row"
    v_layout: str = "row"
    bias: bool = False
    activation: str = "identity"
    base: bool = False
    scale: float = 1.0
    w_layout: str = "row"
    intermediate: str = "operand"
    scales: str | None = None
    out_dtype: str | None = None

    family: ClassVar[str] = "lowrank"

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("m", "k", "r", "n")}
        check_sizes("lowrank", sizes)
        self._settle_formats()
        check_name("activation", self.activation, ACTIVATIONS)
        for name in ("x_layout", "out_layout", "u_layout", "v_layout", "w_layout"):
            check_name(name, getattr(self, name), LAYOUTS)
        if not np.isfinite(self.scale):
            raise SpecError(f"lowrank: scale is {self.scale!r}; pass a finite number")
        if self.fp8 and self.base:
            raise SpecError(
                "lowrank: base adds x w to the sums of p v, and fp8 sums of different scales do "
                "not add; make x w a kernel of family matmul, or use dtype bfloat16"
            )
        object.__setattr__(self, "scale", float(self.scale))  # equal specs have equal JSON

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, u, v, then w with a base product, then bias, then scales of fp8 operands."""
        tensors = [
            ("x", (self.m, self.k), self.x_layout),
            ("u", (self.k, self.r), self.u_layout),
            ("v", (self.r, self.n), self.v_layout),
        ]
        if self.base:
            tensors.append(("w", (self.k, self.n), self.w_layout))
        made = [
            TensorSpec(name=name, shape=lay(shape, layout), dtype=self.dtype)
            for name, shape, layout in tensors
        ]
        if self.bias:
            made.append(TensorSpec(name="bias", shape=(self.n,), dtype=self.result_dtype))
        return (*made, *self._scale_tensors({"u": self.r, "v": self.n}, ("p",)))

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return y."""
        shape = lay((self.m, self.n), self.out_layout)
        return (TensorSpec(name="y", shape=shape, dtype=self.result_dtype),)

    def flops(self) -> int:
        """Return 2 m r (k + n), and 2 m k n for the base product."""
        dense = 2 * self.m * self.k * self.n if self.base else 0
        return 2 * self.m * self.r * (self.k + self.n) + dense

    def flops_by_dtype(self) -> dict[str, int]:
        """Return the flops of x u (and x w), and of p v at the rate of the intermediate."""
        second = 2 * self.m * self.r * self.n
        if self.intermediate_dtype == self.dtype:
            return {self.dtype: self.flops()}
        return {self.dtype: self.flops() - second, self.intermediate_dtype: second}

    def notes(self) -> tuple[str, ...]:
        """Say when the dense product would be cheaper, and what an fp32 intermediate costs."""
        return (*self._format_notes("the product with v"), *self._shape_notes())

    def _shape_notes(self) -> tuple[str, ...]:
        if self.base or self.r * (self.k + self.n) < self.k * self.n:
            return ()
        what = "r >= min(k, n)" if self.r >= min(self.k, self.n) else "r (k + n) >= k n"
        return (
            f"{what}: the dense product x (u v) needs {self.k * self.n:,} weights, the factors "
            f"have {self.r * (self.k + self.n):,}; multiply them once and use family matmul",
        )

    def as_products(self) -> Products:
        """Return (two products and the base product, one dense product) of a low-rank chain."""
        first = MatmulSpec(
            m=self.m, k=self.k, n=self.r, dtype=self.dtype,
            x_layout=self.x_layout, w_layout=self.u_layout, out_layout="col",
        )  # fmt: skip
        second = MatmulSpec(
            m=self.m, k=self.r, n=self.n, dtype=self.dtype, x_layout="col", w_layout=self.v_layout,
            out_layout=self.out_layout, bias=self.bias, activation=self.activation,
        )  # fmt: skip
        dense = MatmulSpec(
            m=self.m, k=self.k, n=self.n, dtype=self.dtype, x_layout=self.x_layout,
            w_layout="col" if self.u_layout == "col" else "row", out_layout=self.out_layout,
            bias=self.bias, activation=self.activation,
        )  # fmt: skip
        base = (dense,) if self.base else ()
        return (first, second, *base), (dense,)

    def reference(self, *arrays: Array) -> Array:
        """Return y in float64, laid out as `out_layout` says."""
        y = activation_value(self._before_activation(arrays)[0], self.activation)
        return y if self.out_layout == "row" else np.ascontiguousarray(y.T)

    def error_bound(self, *arrays: Array) -> Array:
        """Return the elementwise bound: two fp32 accumulations, p rounded once, y rounded once."""
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
        """Return the value before the activation and its error, both [m, n]."""
        check_arrays(self, arrays)
        given = zip(self.inputs(), arrays, strict=True)
        operands = {t.name: np.asarray(a, dtype=np.float64) for t, a in given}
        x, u, v = (self._laid(operands, name) for name in "xuv")
        p = x @ u
        p_error = product_error(np.abs(x), np.abs(u), 0.0, self.k, typical)
        if self.fp8:
            scales = operands["x_scale"], operands["u_scale"]
            p, p_error = self._scaled(p, p_error, *scales, typical=typical)
        p, p_error = self.scale * p, abs(self.scale) * p_error
        if self.scale != 1.0:
            p_error = combine(p_error, 2 * FP32_ROUNDOFF * (np.abs(p) + p_error), typical)
        p, p_error = self._kept(p, p_error, operands.get("p_scale"), typical)
        total = p @ v
        terms = self.r + (self.k if self.base else 0)
        error = product_error(np.abs(p), np.abs(v), p_error, terms, typical)
        if self.base:
            w = self._laid(operands, "w")
            total = total + x @ w
            base_error = product_error(np.abs(x), np.abs(w), 0.0, terms, typical)
            error = combine(error, base_error, typical)
        if self.fp8:
            total, error = self._scaled(total, error, operands["v_scale"], typical=typical)
        if self.bias:
            total = total + operands["bias"]
            error = combine(error, FP32_ROUNDOFF * (np.abs(total) + error), typical)
        return total, error

    def _laid(self, operands: dict[str, Array], name: str) -> Array:
        """Return an operand as it multiplies."""
        value = operands[name]
        return value if getattr(self, f"{name}_layout") == "row" else value.T

    def short(self) -> str:
        """Return family, sizes and dtype."""
        base = " base" if self.base else ""
        return f"lowrank m{self.m} k{self.k} r{self.r} n{self.n} {self.formats()}{base}"
