"""Index patterns and selection: iota, affine_select, range_select, select_reduce."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, KernelArgumentError, OperandError
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.isa.enums import reduce_cmd
from nmm_compiler.simulator.isa.instruction import (
    INT32,
    NO_ATTRIBUTES,
    Call,
    Steps,
    attributes,
    instruction,
)
from nmm_compiler.simulator.isa.operands import ANY_DTYPE, SBUF
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.values import F32, f32, put, raw, scalar_value, write_sum
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, FLOATS, INTEGERS
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_BOUNDS = Takes("", ("equal", "less", "less_equal", "greater", "greater_equal"))
_COMPARISON = Takes("", (*_BOUNDS.names, "not_equal"), "equal")
_MAXIMUM = Takes("reduce", ("maximum", "max"), "maximum")
_PREDICATES = frozenset({"int8", "uint8", "int16", "uint16", "bool"})
_SELECTED = (FLOATS | INTEGERS | {"bool"}) - {"tfloat32", "int32", "uint32"}
FP32_MIN = float(np.finfo(np.float32).min)


def affine_values(
    call: Call, dst: NkiTensor, pattern: Any, offset: int, multiplier: int
) -> np.ndarray:
    """Return int64 offset + partition * multiplier + sum(index * step), [P, elements]."""
    given = list(pattern) if isinstance(pattern, (list, tuple)) else [pattern]
    if any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in given):
        raise call.error(
            KernelArgumentError, f"pattern {pattern!r:.60}; pass a list of [step, num] pairs"
        )
    counts = range(1, 2**31)
    pairs = [(call.integer("step", s), call.integer("num", num, counts)) for s, num in given]
    if len(pairs) > 4 or math.prod(c for _, c in pairs) != dst.free_size:
        raise call.error(
            OperandError,
            f"pattern {given} has "
            f"{math.prod(c for _, c in pairs)} elements, dst {dst.shape} has {dst.free_size} per "
            "partition; at most 4 [step, num] pairs whose nums multiply to that",
        )
    values = np.zeros((), np.int64)
    for step, count in pairs:
        values = values[..., None] + np.arange(count) * step
    rows = offset + np.arange(dst.shape[0]) * multiplier
    return np.asarray(rows[:, None] + values.reshape(1, -1))


@instruction(
    engines=("gpsimd",),
    operands="-> dst",
    memory=SBUF,
    integers={"offset": INT32, "channel_multiplier": INT32},
    cycles=cycles.linear(fixed="gpsimd_fixed_cycles"),
)
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
    put(dst, wrapped.astype(F32) if dst.dtype.kind == "float" else wrapped)


@instruction(
    engines=("gpsimd",),
    operands="on_true_tile[P F] -> dst[P F]",
    memory=SBUF,
    streams=("on_true_tile",),
    operators={"cmp_op": _COMPARISON},
    integers={"offset": INT32, "channel_multiplier": INT32},
    cycles=cycles.linear(fixed="gpsimd_fixed_cycles"),
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
    values = affine_values(call, dst, pattern, offset, channel_multiplier)
    number = call.number("on_false_value", on_false_value)
    yield NO_ATTRIBUTES
    call.machine.kept = chosen = np.asarray(cmp_op.alu(values, 0)) != 0
    if dst.dtype == on_true_tile.dtype and dst.dtype.kind == "float":
        source = raw(on_true_tile).reshape(values.shape)
        fill = np.asarray(F32(number)).astype(dst.dtype.numpy)
        put(dst, np.where(chosen, source, fill))
    else:
        source = f32(on_true_tile).reshape(values.shape)
        put(dst, np.where(chosen, source, F32(number)))


@instruction(
    engines=("vector",),
    operands="on_true_tile[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"bound0": FLOAT32, "bound1": FLOAT32},
    streams=("on_true_tile",),
    dtypes={"on_true_tile": FLOATS},
    operators={"comp_op0": _BOUNDS, "comp_op1": _BOUNDS, "reduce_op": _MAXIMUM},
    integers={"range_start": INT32},
    commands=("idle", "reset", "reduce", "reset_reduce"),
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
    if len(call.tensors(("bound0", "bound1"))) < 2:
        raise call.error(OperandError, "bound0 and bound1 must be (P, 1) float32 tensors")
    last_index = range_start + on_true_tile.free_size - 1
    if not -(2**24) <= range_start <= last_index <= 2**24:
        raise call.error(
            HazardError,
            f"range_start={range_start} gives indices up to {last_index}, which float32 compares; "
            "stay within 2**24",
        )
    if on_false_value is not Ellipsis and (
        abs(call.number("on_false_value", on_false_value) - FP32_MIN) > 1e31
    ):
        call.rule(
            OperandError,
            f"on_false_value {on_false_value}; the hardware fills FP32_MIN ({FP32_MIN:g}) only",
        )
    yield attributes(reduces=reduce_res is not None)
    values = f32(on_true_tile).reshape(dst.shape[0], -1)
    index = (range_start + np.arange(values.shape[1])).astype(F32)[None, :]
    low, high = scalar_value(bound0, 2), scalar_value(bound1, 2)
    above, below = comp_op0.alu(index, low) != 0, comp_op1.alu(index, high) != 0
    call.machine.kept = chosen = np.asarray(above & below)
    fill = FP32_MIN if on_false_value is Ellipsis else on_false_value
    result = np.where(chosen, values, F32(fill))
    put(dst, result)
    write_sum(call, "vector", reduce_cmd, reduce_op, result, reduce_res)


@instruction(
    engines=("vector",),
    operands="predicate[P F], on_true[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"on_false": ANY_DTYPE},
    streams=("on_true", "predicate"),
    dtypes={"on_true": _SELECTED, "predicate": _PREDICATES, "reduce_res": FLOATS},
    pair=("on_true", "predicate"),
    operators={"reduce_op": _MAXIMUM},
    commands=("reset_reduce", "reduce", "idle"),
    cycles=cycles.two_inputs,
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
    partitions = dst.shape[0]
    yield attributes(reduces=reduce_res is not None)
    chosen = raw(predicate).reshape(partitions, -1) != 0
    if reverse_pred:
        chosen = ~chosen
    if on_false.__class__ is not NkiTensor:
        call.machine.kept = chosen
    values = f32(on_true).reshape(partitions, -1)
    result = np.where(chosen, values, scalar_value(on_false, 2))
    put(dst, result)
    write_sum(call, "vector", reduce_cmd, reduce_op, result, reduce_res)
