"""`nki.language` functions over the last free axes: sums, means, softmax, rms_norm."""

from __future__ import annotations

import math
from typing import Any

from nmm_compiler.errors import TensorShapeError
from nmm_compiler.simulator.isa import activation, elementwise
from nmm_compiler.simulator.isa.reductions import tensor_reduce
from nmm_compiler.simulator.language.base import (
    dtype_of,
    ndarray,
    sbuf,
)
from nmm_compiler.simulator.language.math import (
    FUNCTIONS,
    named,
    need_tile,
    new_tile,
    reciprocal,
    stretch,
)
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.tensors.dtypes import float32
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def _axes(machine: Machine, name: str, x: NkiTensor, axis: Any) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a + len(x.shape) if a < 0 else a for a in axes))
    rank = len(x.shape)
    if not axes or axes[0] < 1 or axes != tuple(range(axes[0], rank)):
        raise machine.error(
            TensorShapeError,
            f"nl.{name}: axis {axis} of {x.shape}; reduce the last contiguous free axes",
        )
    return axes


def _reduced(x: NkiTensor, axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if d in axes else s for d, s in enumerate(x.shape))
    kept = tuple(s for d, s in enumerate(x.shape) if d not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _reduction(name: str, op: str) -> None:
    def function(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
        machine = current()
        tile = need_tile(machine, name, x)
        axes = _axes(machine, name, tile, axis)
        result = new_tile(machine, tile, _reduced(tile, axes, keepdims), dtype)
        tensor_reduce(result, FUNCTIONS[op], tile, axes)
        return result

    function.__doc__ = f"Return the {name} over the last free axes; also a reduction operator."
    named(name, function)


_reduction("sum", "add")
_reduction("max", "maximum")
_reduction("min", "minimum")
_reduction("prod", "multiply")


def mean(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the mean over the last free axes."""
    machine = current()
    axes = _axes(machine, "mean", x, axis)
    count = math.prod(x.shape[a] for a in axes)
    total = FUNCTIONS["sum"](x, axis, float32, keepdims)
    result = new_tile(machine, x, total.shape, dtype)
    elementwise.tensor_scalar(result, total, FUNCTIONS["multiply"], 1.0 / count)
    return result


def var(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the population variance over the last free axes."""
    machine = current()
    axes = _axes(machine, "var", x, axis)
    centre = mean(x, axis, float32, True)
    wide = stretch(machine, "var", centre, x.shape)
    apart = ndarray(x.shape, float32, sbuf, "")
    elementwise.tensor_tensor(apart, x, wide, FUNCTIONS["subtract"])
    elementwise.tensor_tensor(apart, apart, apart, FUNCTIONS["multiply"])
    return mean(apart, axes, dtype or x.dtype, keepdims)


def all_(x: Any, axis: Any, dtype: Any = None) -> NkiTensor:
    """Return 1 where all elements along the axes are nonzero."""
    machine = current()
    truth = FUNCTIONS["not_equal"](x, 0.0, dtype=float32)
    axes = _axes(machine, "all", x, axis)
    result = new_tile(machine, x, _reduced(x, axes, False), dtype)
    tensor_reduce(result, FUNCTIONS["minimum"], truth, axes)
    return result


def softmax(x: Any, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Return softmax over the last free axes."""
    machine = current()
    top = FUNCTIONS["max"](x, axis, float32, True)
    apart = ndarray(x.shape, float32, sbuf, "")
    elementwise.tensor_tensor(
        apart, x, stretch(machine, "softmax", top, x.shape), FUNCTIONS["subtract"]
    )
    powers = FUNCTIONS["exp"](apart)
    total = FUNCTIONS["sum"](powers, axis, float32, True)
    inverse = reciprocal(total)
    result = new_tile(machine, x, x.shape, dtype)
    elementwise.tensor_tensor(
        result, powers, stretch(machine, "softmax", inverse, x.shape), FUNCTIONS["multiply"]
    )
    return result


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
    machine = current()
    kind = float32 if compute_dtype is None else dtype_of(machine, compute_dtype)
    squares = FUNCTIONS["square"](x, dtype=kind)
    total = FUNCTIONS["sum"](squares, axis, float32, True)
    scaled = ndarray(total.shape, float32, sbuf, "")
    elementwise.tensor_scalar(
        scaled, total, FUNCTIONS["multiply"], 1.0 / n, op1=FUNCTIONS["add"], operand1=epsilon
    )
    activation.activation(scaled, FUNCTIONS["rsqrt"], scaled)
    normal = ndarray(x.shape, kind, sbuf, "")
    elementwise.tensor_tensor(
        normal, x, stretch(machine, "rms_norm", scaled, x.shape), FUNCTIONS["multiply"]
    )
    result = new_tile(machine, x, x.shape, dtype)
    weight = stretch(machine, "rms_norm", w, x.shape)
    elementwise.tensor_tensor(result, normal, weight, FUNCTIONS["multiply"])
    return result
