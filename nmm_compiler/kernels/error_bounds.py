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

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Estimate = tuple[Array, Array | float]
"""A value, and the allowed error of a kernel's value, element by element."""

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


def unit_roundoff(dtype: str) -> float:
    """Return the largest relative error of rounding to `dtype`, to nearest."""
    return _UNIT_ROUNDOFF[dtype]


def gamma(length: int) -> float:
    """Return Higham's gamma_n for fp32: the relative error bound of a sum of n products."""
    return length * FP32_ROUNDOFF / (1.0 - length * FP32_ROUNDOFF)


def rounding_error(magnitude: Array, dtype: str) -> Array:
    """Return the bound of rounding values of this magnitude to `dtype`, underflow included."""
    bound: Array = magnitude * unit_roundoff(dtype) + _SMALLEST[dtype] / 2
    return bound


def combine(first: Array | float, second: Array | float, typical: bool = False) -> Array:
    """Return the error of two errors together: their sum, or the root of the sum of squares."""
    together: Array = np.hypot(first, second) if typical else np.add(first, second)
    return together


def product_error(
    left: Array, right: Array, left_error: Array | float, length: int, typical: bool = False
) -> Array:
    """Return the error of an fp32-accumulated product whose left factor has an error.

    left, right: magnitudes |a| [i, j] and |b| [j, l]; left_error: bound on a's own error;
    length: terms in the accumulation. Bound: E|b| + gamma_(length + 2) (|a| + E)|b|; typical:
    the root of E^2 |b|^2 and of the square of sqrt(length + 2) fp32 roundings of |a||b|.
    """
    off = np.broadcast_to(np.asarray(left_error, dtype=np.float64), left.shape)
    carried: Array | float = 0.0
    if np.any(off):
        carried = np.sqrt(np.square(off) @ np.square(right)) if typical else off @ right
    own = math.sqrt(length + 2) * FP32_ROUNDOFF if typical else gamma(length + 2)
    return combine(carried, own * ((left + off) @ right), typical)


# ScalarE evaluates in fp32; a few roundings of the function's own evaluation.
_ACTIVATION_ROUNDINGS = 16


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu_tanh(values: Array) -> Array:
    inner = math.sqrt(2.0 / math.pi) * (values + 0.044715 * values**3)
    value: Array = 0.5 * values * (1.0 + np.tanh(inner))
    return value


_ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], float]] = {
    "identity": (lambda values: values, 1.0),
    "relu": (lambda values: np.maximum(values, 0.0), 1.0),
    "silu": (lambda values: 0.5 * values * (1.0 + np.tanh(0.5 * values)), 1.1),
    "gelu": (lambda values: 0.5 * values * (1.0 + _erf(values / math.sqrt(2.0))), 1.13),
    "gelu_tanh": (_gelu_tanh, 1.13),
}
"""Each activation as PyTorch defines it, and its largest slope: how much it can enlarge an error of
its argument."""


def activation_error(values: Array, error: Array | float, name: str) -> Array | float:
    """Return the bound after the activation of `values` that are off by `error`."""
    if name == "identity":
        return error
    own = _ACTIVATION_ROUNDINGS * FP32_ROUNDOFF * (np.abs(values) + 1.0) if name != "relu" else 0.0
    return _ACTIVATIONS[name][1] * error + own


def times_weight(
    left: Estimate, weight: Array, typical: bool, terms: int | None = None
) -> Estimate:
    """Return the estimate of a product; terms: of its sums, where further products are added to
    them."""
    value, error = left
    length = terms or len(weight)
    off = product_error(np.abs(value), np.abs(weight), error, length, typical)
    return value @ weight, off


def plus_bias(left: Estimate, bias: Array, typical: bool) -> Estimate:
    """Return the estimate after an fp32 addition."""
    value = left[0] + bias
    return value, combine(left[1], FP32_ROUNDOFF * (np.abs(value) + left[1]), typical)


def activated(left: Estimate, name: str) -> Estimate:
    """Return the estimate after the activation."""
    return _ACTIVATIONS[name][0](left[0]), activation_error(*left, name)


def inverse_roots(left: Estimate, eps: float, typical: bool) -> Estimate:
    """Return the estimate of 1 / sqrt(mean(p * p) + eps) over the last axis, in fp32.

    An error e of p moves the norm to between |p| - |e| and |p| + |e|; independent errors move the
    sum of squares by twice the sum of p e. The sum has gamma_(r + 4), and the inverse root is
    evaluated with a few roundings.
    """
    value, error = left
    off = np.broadcast_to(np.asarray(error, dtype=np.float64), value.shape)
    r = value.shape[-1]
    norm = np.linalg.norm(value, axis=-1, keepdims=True)
    inverse = 1.0 / np.sqrt(norm**2 / r + eps)
    if typical:
        moved = inverse**3 * np.linalg.norm(value * off, axis=-1, keepdims=True) / r
        own = (math.sqrt(r + 4) / 2 + _ACTIVATION_ROUNDINGS) * FP32_ROUNDOFF
    else:
        size = np.linalg.norm(off, axis=-1, keepdims=True)
        most = 1.0 / np.sqrt(np.maximum(norm - size, 0.0) ** 2 / r + max(eps, _SMALLEST["float32"]))
        moved = np.maximum(most - inverse, inverse - 1.0 / np.sqrt((norm + size) ** 2 / r + eps))
        own = gamma(r + 4) / 2 + _ACTIVATION_ROUNDINGS * FP32_ROUNDOFF
    return inverse, combine(moved, own * (inverse + moved), typical)


def scaled(left: Estimate, factor: Estimate, typical: bool) -> Estimate:
    """Return the estimate of a product of two values, element by element, in fp32."""
    value = left[0] * factor[0]
    error = combine(left[1] * (np.abs(factor[0]) + factor[1]), np.abs(left[0]) * factor[1], typical)
    return value, combine(error, FP32_ROUNDOFF * (np.abs(value) + error), typical)


def rounded(left: Estimate, dtype: str, typical: bool) -> Estimate:
    """Return the estimate of a value once it is stored in a dtype."""
    value, error = left
    return value, combine(error, rounding_error(np.abs(value) + error, dtype), typical)
