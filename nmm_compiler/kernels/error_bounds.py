"""Derived error bounds: the allowed difference of a right kernel to the float64 reference.

Sums are accumulated in fp32 in any order (Higham, Accuracy and Stability of Numerical Algorithms,
chapter 3: gamma_n), each stored value is rounded once to its dtype, activations are
evaluated in fp32.

Errors combine in two ways. Worst case: they add, and a sum of n terms is off by gamma_n; no right
kernel exceeds this, but over a chain of long products it grows to the size of the result. Typical:
roundings are independent, so squares add, and a sum is off by sqrt(n) roundings (Higham and Mary, A
new approach to probabilistic rounding error analysis, 2019); a right kernel stays near it in norm,
which is what finds a wrong tile or a result of zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Rounding: u is half the distance from 1 to the next number.
_UNIT_ROUNDOFF = {
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3": 2.0**-4,
}
# The smallest positive number, half of which is lost where a value underflows.
_SMALLEST = {
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float8_e4m3": 2.0**-9,
}
FP32_ROUNDOFF = _UNIT_ROUNDOFF["float32"]


def sum_error(length: int, typical: bool) -> float:
    """Return the error of a sum of n products in fp32, over the sum of their magnitudes.

    The bound is Higham's gamma_n.
    """
    most = length * FP32_ROUNDOFF
    return math.sqrt(length) * FP32_ROUNDOFF if typical else most / (1.0 - most)


def rounding_error(magnitude: Array, dtype: str) -> Array:
    """Return the bound of rounding values of this magnitude to `dtype`, underflow included."""
    return magnitude * _UNIT_ROUNDOFF[dtype] + _SMALLEST[dtype] / 2


def combine(first: Array | float, second: Array | float, typical: bool = False) -> Array:
    """Return the error of two errors together: their sum, or the root of the sum of squares."""
    return np.hypot(first, second) if typical else np.add(first, second)


# ScalarE evaluates in fp32; a few roundings of the function's own evaluation.
_ACTIVATION_ROUNDINGS = 16


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu_tanh(values: Array) -> Array:
    inner = math.sqrt(2.0 / math.pi) * (values + 0.044715 * values**3)
    return 0.5 * values * (1.0 + np.tanh(inner))


_ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "identity": (lambda values: values, 1.0),
    "relu": (lambda values: np.maximum(values, 0.0), 1.0),
    "silu": (lambda values: 0.5 * values * (1.0 + np.tanh(0.5 * values)), 1.1),
    "gelu": (lambda values: 0.5 * values * (1.0 + _erf(values / math.sqrt(2.0))), 1.13),
    "gelu_tanh": (_gelu_tanh, 1.13),
}
"""Each activation as PyTorch defines it, and its largest slope: how much it can enlarge an error of
its argument."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value in float64, and the allowed error of a kernel's value, element by element.

    typical: errors are those of independent roundings, else bounds.
    """

    value: Array
    error: Array | float = 0.0
    typical: bool = False

    @property
    def most(self) -> Array:
        """The largest magnitude that a kernel's value may have."""
        return np.abs(self.value) + self.error

    def off_by(self, error: Array | float) -> Estimate:
        """Return the estimate with a further error."""
        return dataclasses.replace(self, error=combine(self.error, error, self.typical))

    def in_fp32(self, value: Array, error: Array | float, roundings: int = 1) -> Estimate:
        """Return another value of this kind, computed with so many fp32 roundings of its own."""
        made = Estimate(value, error, self.typical)
        return made.off_by(roundings * FP32_ROUNDOFF * made.most)

    def with_sum(self, other: Estimate) -> Estimate:
        """Return the sum with what goes into the same fp32 sums."""
        error = combine(self.error, other.error, self.typical)
        return Estimate(self.value + other.value, error, self.typical)

    def times(self, weight: Array, terms: int | None = None) -> Estimate:
        """Return the estimate of an fp32-accumulated product.

        terms: of its sums, where further products are added to them. Bound, for an error E of this
        value a: E|b| + gamma_(terms + 2) (|a| + E)|b|; typical: the root of E^2 |b|^2 and of the
        square of sqrt(terms + 2) fp32 roundings of |a||b|.
        """
        length, right = 2 + (terms or len(weight)), np.abs(weight)
        off = np.broadcast_to(np.asarray(self.error, dtype=np.float64), self.value.shape)
        carried: Array | float = 0.0
        if np.any(off):
            squares = np.square(off) @ np.square(right) if self.typical else None
            carried = off @ right if squares is None else np.sqrt(squares)
        own = sum_error(length, self.typical) * ((np.abs(self.value) + off) @ right)
        return Estimate(self.value @ weight, carried, self.typical).off_by(own)

    def plus(self, bias: Array) -> Estimate:
        """Return the estimate after an fp32 addition."""
        return self.in_fp32(self.value + bias, self.error)

    def scaled(self, factor: Array, error: Array | float = 0.0) -> Estimate:
        """Return the estimate of a product with a factor, element by element, in fp32.

        error: of the factor.
        """
        own = self.error * (np.abs(factor) + error)
        carried = combine(own, np.abs(self.value) * error, self.typical)
        return self.in_fp32(self.value * factor, carried)

    def activated(self, name: str) -> Estimate:
        """Return the estimate after the activation, which ScalarE evaluates in fp32."""
        if name == "identity":
            return self
        function, slope = _ACTIVATIONS[name]
        own = _ACTIVATION_ROUNDINGS * FP32_ROUNDOFF * (np.abs(self.value) + 1.0)
        error = slope * self.error + (own if name != "relu" else 0.0)
        return Estimate(function(self.value), error, self.typical)

    def rounded(self, dtype: str) -> Estimate:
        """Return the estimate of a value once it is stored in a dtype."""
        return self.off_by(rounding_error(self.most, dtype))

    def inverse_roots(self, eps: float) -> Estimate:
        """Return the estimate of 1 / sqrt(mean(p * p) + eps) over the last axis, in fp32.

        An error e of p moves the norm to between |p| - |e| and |p| + |e|; independent errors move
        the sum of squares by twice the sum of p e. The sum has gamma_(r + 4), and the inverse root
        is evaluated with a few roundings.
        """
        value, r = self.value, self.value.shape[-1]
        off = np.broadcast_to(np.asarray(self.error, dtype=np.float64), value.shape)
        norm = np.linalg.norm(value, axis=-1, keepdims=True)
        inverse = 1.0 / np.sqrt(norm**2 / r + eps)
        if self.typical:
            moved = inverse**3 * np.linalg.norm(value * off, axis=-1, keepdims=True) / r
        else:
            size = np.linalg.norm(off, axis=-1, keepdims=True)
            least = np.maximum(norm - size, 0.0) ** 2 / r + max(eps, _SMALLEST["float32"])
            lowest = 1.0 / np.sqrt((norm + size) ** 2 / r + eps)
            moved = np.maximum(1.0 / np.sqrt(least) - inverse, inverse - lowest)
        own = sum_error(r + 4, self.typical) / 2 + _ACTIVATION_ROUNDINGS * FP32_ROUNDOFF
        return Estimate(inverse, moved, self.typical).off_by(own * (inverse + moved))
