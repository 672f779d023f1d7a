"""`nki.language` functions over the last free axes: sums, means, softmax, rms_norm."""

from __future__ import annotations

import math
from typing import Any

from nmm_compiler.errors import TensorShapeError
from nmm_compiler.simulator.isa import activation, elementwise
from nmm_compiler.simulator.isa.reductions import tensor_reduce
from nmm_compiler.simulator.language.base import dtype_of
from nmm_compiler.simulator.language.exports import exported
from nmm_compiler.simulator.language.math import (
    FUNCTIONS,
    combine,
    named,
    need_tile,
    new_tile,
    reciprocal,
)
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.dtypes import float32
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def _axes(name: str, x: NkiTensor, axis: Any) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a + len(x.shape) if a < 0 else a for a in axes))
    rank = len(x.shape)
    if not axes or axes[0] < 1 or axes != tuple(range(axes[0], rank)):
        raise current().error(
            TensorShapeError,
            f"nl.{name}: axis {axis} of {x.shape}; reduce the last contiguous free axes",
        )
    return axes


def _reduced(x: NkiTensor, axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if d in axes else s for d, s in enumerate(x.shape))
    kept = tuple(s for d, s in enumerate(x.shape) if d not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _reduce(
    name: str, op: str, x: NkiTensor, axis: Any, dtype: Any = None, keepdims: bool = False
) -> NkiTensor:
    axes = _axes(name, need_tile(name, x), axis)
    result = new_tile(x, dtype, _reduced(x, axes, keepdims))
    tensor_reduce(result, FUNCTIONS[op], x, axes)
    return result


def _reduction(name: str, op: str) -> None:
    def function(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
        return _reduce(name, op, x, axis, dtype, keepdims)

    function.__doc__ = f"Return the {name} over the last free axes; also a reduction operator."
    named(name, function)


_reduction("sum", "add")
_reduction("max", "maximum")
_reduction("min", "minimum")
_reduction("prod", "multiply")


@exported
def mean(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the mean over the last free axes."""
    count = math.prod(x.shape[a] for a in _axes("mean", x, axis))
    total = FUNCTIONS["sum"](x, axis, float32, keepdims)
    result = new_tile(x, dtype, total.shape)
    elementwise.tensor_scalar(result, total, FUNCTIONS["multiply"], 1.0 / count)
    return result


@exported
def var(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the population variance over the last free axes."""
    apart = combine("var", "subtract", x, mean(x, axis, float32, True), float32)
    elementwise.tensor_tensor(apart, apart, apart, FUNCTIONS["multiply"])
    return mean(apart, axis, dtype or x.dtype, keepdims)


def all_(x: Any, axis: Any, dtype: Any = None) -> NkiTensor:
    """Return 1 where all elements along the axes are nonzero."""
    truth = FUNCTIONS["not_equal"](x, 0.0, dtype=float32)
    return _reduce("all", "minimum", truth, axis, x.dtype if dtype is None else dtype)


@exported
def softmax(x: Any, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Return softmax over the last free axes."""
    top = FUNCTIONS["max"](x, axis, float32, True)
    powers = FUNCTIONS["exp"](combine("softmax", "subtract", x, top, float32))
    inverse = reciprocal(FUNCTIONS["sum"](powers, axis, float32, True))
    return combine("softmax", "multiply", powers, inverse, x.dtype if dtype is None else dtype)


@exported
def rms_norm(
    x: Any,
    w: Any,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """Return x / sqrt(sum(x^2) / n + epsilon) * w."""
    kind = float32 if compute_dtype is None else dtype_of(current(), compute_dtype)
    total = FUNCTIONS["sum"](FUNCTIONS["square"](x, dtype=kind), axis, float32, True)
    scaled = new_tile(total)
    elementwise.tensor_scalar(
        scaled, total, FUNCTIONS["multiply"], 1.0 / n, op1=FUNCTIONS["add"], operand1=epsilon
    )
    activation.activation(scaled, FUNCTIONS["rsqrt"], scaled)
    normal = combine("rms_norm", "multiply", x, scaled, kind)
    return combine("rms_norm", "multiply", normal, w, x.dtype if dtype is None else dtype)
