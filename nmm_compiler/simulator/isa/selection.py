"""Index patterns and selection: iota, affine_select, range_select, select_reduce."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    KernelArgumentError,
    OperandValueError,
    TensorDtypeError,
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa.accumulators import check_command, reduce_result, write_sum
from nmm_compiler.simulator.isa.enums import (
    reduce_cmd,
)
from nmm_compiler.simulator.isa.instruction import (
    NO_ATTRIBUTES,
    Call,
    Steps,
    attributes,
    instruction,
)
from nmm_compiler.simulator.isa.operands import (
    ON_CHIP,
    SBUF,
)
from nmm_compiler.simulator.isa.operators import BY_NAME, Op, find_op, reduction
from nmm_compiler.simulator.isa.values import (
    F32,
    f32,
    raw,
    scalar_value,
    write,
)
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, FLOATS, INTEGERS
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
_PREDICATES = frozenset({"int8", "uint8", "int16", "uint16", "bool"})
_SELECTED = (FLOATS | INTEGERS | {"bool"}) - {"tfloat32", "int32", "uint32"}
FP32_MIN = float(np.finfo(np.float32).min)


def affine_values(
    call: Call, dst: NkiTensor, pattern: Any, offset: Any, multiplier: Any
) -> np.ndarray:
    """Return int64 offset + partition * multiplier + sum(index * step), [P, elements]."""
    given = list(pattern) if isinstance(pattern, (list, tuple)) else [pattern]
    if any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in given):
        raise call.error(
            KernelArgumentError, f"pattern {pattern!r:.60}; pass a list of [step, num] pairs"
        )
    pairs = [(call.integer("step", step), call.integer("num", num, 1)) for step, num in given]
    offset = call.integer("offset", offset)
    multiplier = call.integer("channel_multiplier", multiplier)
    if len(pairs) > 4 or math.prod(c for _, c in pairs) != dst.free_size:
        raise call.error(
            TensorShapeError,
            f"pattern {given} has "
            f"{math.prod(c for _, c in pairs)} elements, dst {dst.shape} has {dst.free_size} per "
            "partition; at most 4 [step, num] pairs whose nums multiply to that",
        )
    values = np.zeros((), np.int64)
    for step, count in pairs:
        values = values[..., None] + np.arange(count) * step
    rows = offset + np.arange(dst.shape[0]) * multiplier
    return np.asarray(rows[:, None] + values.reshape(1, -1))


def _maximum(call: Call, reduce_op: Any) -> Op:
    """Return the reduction of a selection, which is the maximum."""
    if reduce_op is None:
        return BY_NAME["maximum"]
    reducer = reduction(call.machine, reduce_op, call.op)
    if reducer.name not in ("maximum", "max"):
        raise call.error(UnsupportedInstructionError, "reduce_op must be nl.maximum")
    return reducer


@instruction(engines=("gpsimd",), writes={"dst": SBUF})
def iota(
    call: Call,
    dst: Any,
    pattern: Any,
    offset: Any = 0,
    channel_multiplier: Any = 0,
    name: str | None = None,
) -> Steps:
    """dst[p, ...] = offset + p * channel_multiplier + pattern, on GpSimd."""
    values = affine_values(call, dst, pattern, offset, channel_multiplier)
    yield NO_ATTRIBUTES
    wrapped = (values & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    write(dst, wrapped.astype(F32) if dst.dtype.kind == "float" else wrapped)


def _comparison(machine: Machine, op: str, function: Any) -> Any:
    found = find_op(machine, function, op)
    if found.name not in _COMPARISONS:
        raise machine.error(
            UnsupportedInstructionError,
            f"nisa.{op}: comparison nl.{found.name}; use one of {', '.join(_COMPARISONS)}",
        )
    return found


@instruction(
    engines=("gpsimd",),
    writes={"dst": SBUF},
    reads={"on_true_tile": SBUF},
    like_dst=("on_true_tile",),
    streams=("on_true_tile",),
)
def affine_select(
    call: Call,
    dst: Any,
    pattern: Any,
    channel_multiplier: Any,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = None,
    offset: Any = 0,
    name: str | None = None,
) -> Steps:
    """dst = on_true_tile where cmp_op(affine value, 0), else on_false_value, on GpSimd."""
    machine = call.machine
    op = "affine_select"
    compare = BY_NAME["equal"] if cmp_op is None else _comparison(machine, op, cmp_op)
    values = affine_values(call, dst, pattern, offset, channel_multiplier)
    number = call.number("on_false_value", on_false_value)
    yield NO_ATTRIBUTES
    assert compare.alu is not None
    machine.kept = chosen = np.asarray(compare.alu(values, 0)) != 0
    if dst.dtype == on_true_tile.dtype and dst.dtype.kind == "float":
        source = raw(on_true_tile).reshape(values.shape)
        fill = np.asarray(F32(number)).astype(dst.dtype.numpy)
        write(dst, np.where(chosen, source, fill))
    else:
        source = f32(on_true_tile).reshape(values.shape)
        write(dst, np.where(chosen, source, F32(number)))


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"on_true_tile": ON_CHIP},
    like_dst=("on_true_tile",),
    streams=("on_true_tile",),
    dtypes={"on_true_tile": FLOATS},
)
def range_select(
    call: Call,
    dst: Any,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = None,
    range_start: int = 0,
    on_false_value: Any = ...,
    name: str | None = None,
) -> Steps:
    """dst = on_true_tile where both comparisons of the free index hold, else FP32_MIN."""
    machine = call.machine
    op = "range_select"
    first, second = _comparison(machine, op, comp_op0), _comparison(machine, op, comp_op1)
    if "not_equal" in (first.name, second.name):
        raise call.error(
            UnsupportedInstructionError,
            "nl.not_equal compares no bounds; use equal, less, less_equal, greater, greater_equal",
        )
    reducer = _maximum(call, reduce_op)
    check_command(call, reduce_cmd, ("idle", "reset", "reduce", "reset_reduce"))
    partitions = dst.shape[0]
    for role, bound in (("bound0", bound0), ("bound1", bound1)):
        if not call.scalar(role, bound, partitions, FLOAT32):
            raise call.error(TensorDtypeError, f"{role} must be a ({partitions}, 1) float32 tensor")
    first_index = call.integer("range_start", range_start)
    last_index = first_index + on_true_tile.free_size - 1
    if not -(2**24) <= first_index <= last_index <= 2**24:
        raise call.error(
            OperandValueError,
            f"range_start={first_index} gives indices up to {last_index}, which float32 compares; "
            "stay within 2**24",
        )
    if on_false_value is not Ellipsis and (
        abs(call.number("on_false_value", on_false_value) - FP32_MIN) > 1e31
    ):
        machine.rule(
            TensorDtypeError,
            f"nisa.{op}: on_false_value {on_false_value}; the hardware fills FP32_MIN "
            f"({FP32_MIN:g}) only",
        )
    reduce_result(call, reduce_res, partitions)
    yield attributes(reduces=reduce_res is not None)
    values = f32(on_true_tile).reshape(partitions, -1)
    index = (first_index + np.arange(values.shape[1])).astype(F32)[None, :]
    low, high = scalar_value(bound0, 2), scalar_value(bound1, 2)
    assert first.alu is not None
    assert second.alu is not None
    chosen = (np.asarray(first.alu(index, low)) != 0) & (np.asarray(second.alu(index, high))
                                                         != 0)  # fmt: skip
    machine.kept = chosen
    fill = FP32_MIN if on_false_value is Ellipsis else on_false_value
    result = np.where(chosen, values, F32(fill))
    write(dst, result)
    write_sum(call, "vector", reduce_cmd, reducer, result, reduce_res)


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"predicate": ON_CHIP, "on_true": ON_CHIP},
    like_dst=("on_true", "predicate"),
    streams=("on_true", "predicate"),
    dtypes={"on_true": _SELECTED, "predicate": _PREDICATES},
    pair=("on_true", "predicate"),
)
def select_reduce(
    call: Call,
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_op: Any = None,
    reverse_pred: bool = False,
    name: str | None = None,
) -> Steps:
    """dst = on_true where predicate, else on_false (number or [P, 1]), with an optional max."""
    reducer = _maximum(call, reduce_op)
    check_command(call, reduce_cmd, ("reset_reduce", "reduce", "idle"))
    partitions = dst.shape[0]
    call.scalar("on_false", on_false, partitions)
    reduce_result(call, reduce_res, partitions, FLOATS)
    yield attributes(reduces=reduce_res is not None)
    chosen = raw(predicate).reshape(partitions, -1) != 0
    if reverse_pred:
        chosen = ~chosen
    if on_false.__class__ is not NkiTensor:
        call.machine.kept = chosen
    values = f32(on_true).reshape(partitions, -1)
    result = np.where(chosen, values, scalar_value(on_false, 2))
    write(dst, result)
    write_sum(call, "vector", reduce_cmd, reducer, result, reduce_res)
