"""Family `lowrank`: y = activation(x w + scale (x u) v + bias), x w being optional.

The spec, its float64 reference and its error bound. How it is scheduled is in lowrank_schedule.py,
the kernel itself in kernels/nki/lowrank.py.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import (
    ACTIVATIONS,
    DTYPES,
    LAYOUTS,
    Array,
    KernelSpec,
    TensorSpec,
    check_arrays,
    check_name,
    check_sizes,
)
from nmm_compiler.kernels.numerics import (
    FP32_ROUNDOFF,
    activation_error,
    activation_value,
    product_error,
    rounding_error,
)
from nmm_compiler.kernels.tiling import (
    lay,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSpec(KernelSpec):
    """y[m, n] = activation(x w + scale (x u) v + bias) with x [m, k], u [k, r], v [r, n].

    A "col" layout means that the operand is passed, or the result comes back, transposed: x as
    [k, m], u as [r, k], v as [n, r], w as [n, k], y as [n, m]. base adds the dense product x w.
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

    family: ClassVar[str] = "lowrank"

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("m", "k", "r", "n")}
        check_sizes("lowrank", sizes)
        check_name("dtype", self.dtype, DTYPES[:3])
        check_name("activation", self.activation, ACTIVATIONS)
        for name in ("x_layout", "out_layout", "u_layout", "v_layout", "w_layout"):
            check_name(name, getattr(self, name), LAYOUTS)
        if not np.isfinite(self.scale):
            raise SpecError(f"lowrank: scale is {self.scale!r}; pass a finite number")
        object.__setattr__(self, "scale", float(self.scale))  # equal specs have equal JSON

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return x, u, v, then w with a base product, then bias."""
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
            made.append(TensorSpec(name="bias", shape=(self.n,), dtype=self.dtype))
        return tuple(made)

    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return y."""
        shape = lay((self.m, self.n), self.out_layout)
        return (TensorSpec(name="y", shape=shape, dtype=self.dtype),)

    def flops(self) -> int:
        """Return 2 m r (k + n), and 2 m k n for the base product."""
        dense = 2 * self.m * self.k * self.n if self.base else 0
        return 2 * self.m * self.r * (self.k + self.n) + dense

    def notes(self) -> tuple[str, ...]:
        """Say when the dense product would be cheaper."""
        if self.base or self.r * (self.k + self.n) < self.k * self.n:
            return ()
        what = "r >= min(k, n)" if self.r >= min(self.k, self.n) else "r (k + n) >= k n"
        return (
            f"{what}: the dense product x (u v) needs {self.k * self.n:,} weights, the factors "
            f"have {self.r * (self.k + self.n):,}; multiply them once and use family matmul",
        )

    def reference(self, *arrays: Array) -> Array:
        """Return y in float64, laid out as `out_layout` says."""
        y = activation_value(self._before_activation(arrays)[0], self.activation)
        return y if self.out_layout == "row" else np.ascontiguousarray(y.T)

    def error_bound(self, *arrays: Array) -> Array:
        """Return the elementwise bound: two fp32 accumulations, p rounded once, y rounded once."""
        total, error = self._before_activation(arrays)
        error = activation_error(total, error, self.activation)
        magnitude = np.abs(activation_value(total, self.activation)) + error
        bound = error + rounding_error(magnitude, self.dtype)
        return bound if self.out_layout == "row" else np.ascontiguousarray(bound.T)

    def _before_activation(self, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return the value before the activation and the bound of its error, both [m, n]."""
        check_arrays(self, arrays)
        x, u, v, *rest = (np.asarray(a, dtype=np.float64) for a in arrays)
        x = x if self.x_layout == "row" else x.T
        u = u if self.u_layout == "row" else u.T
        v = v if self.v_layout == "row" else v.T
        p = x @ u
        p_error = product_error(np.abs(x), np.abs(u), 0.0, self.k)
        p, p_error = self.scale * p, abs(self.scale) * p_error
        p_magnitude = np.abs(p) + p_error
        if self.scale != 1.0:
            p_error = p_error + 2 * FP32_ROUNDOFF * p_magnitude
        p_error = p_error + rounding_error(p_magnitude, self.dtype)
        total = p @ v
        terms = self.r + (self.k if self.base else 0)
        error = product_error(np.abs(p), np.abs(v), p_error, terms)
        if self.base:
            w = rest.pop(0)
            w = w if self.w_layout == "row" else w.T
            total = total + x @ w
            error = error + product_error(np.abs(x), np.abs(w), 0.0, terms)
        if self.bias:
            total = total + rest.pop(0)
            error = error + FP32_ROUNDOFF * (np.abs(total) + error)
        return total, error

    def short(self) -> str:
        """Return family, sizes and dtype."""
        base = " base" if self.base else ""
        return f"lowrank m{self.m} k{self.k} r{self.r} n{self.n} {self.dtype}{base}"
