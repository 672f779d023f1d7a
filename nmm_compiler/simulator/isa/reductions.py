"""Reductions and scans: tensor_reduce, *_reduce, cumulative, scan, bn_stats, max8 and kin."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from nmm_compiler.errors import UnsupportedInstructionError
from nmm_compiler.simulator.isa import cycles, poison
from nmm_compiler.simulator.isa.enums import reduce_cmd
from nmm_compiler.simulator.isa.instruction import Steps, instruction
from nmm_compiler.simulator.isa.operands import ANY_DTYPE, SBUF, Issue
from nmm_compiler.simulator.isa.operators import ARITHMETIC, BINARY, REDUCTION, Operator, Takes
from nmm_compiler.simulator.isa.values import (
    F32,
    apply_scalar,
    begin,
    f32,
    keep,
    put,
    put_with_sum,
    rows_of,
    scalar_value,
)
from nmm_compiler.simulator.tensors.dtypes import FLOAT8, FLOAT32

INDICES = frozenset({"uint16", "uint32"})
_EIGHT_OF = range(8, 16385)
_CUMULATIVE = frozenset(
    {"bfloat16", "float16", "float32", *FLOAT8, "uint8", "uint16", "int8", "int16"}
)


def last_axes(shape: tuple[int, ...], given: Iterable[int]) -> tuple[int, ...]:
    """Return axes from 0 on, in order, if they are the last free ones without a gap; else none."""
    axes = tuple(sorted(a + len(shape) if a < 0 else a for a in given))
    last = axes and axes[0] > 0 and axes == tuple(range(axes[0], len(shape)))
    return axes if last else ()


def _reduce(function: Operator, values: np.ndarray) -> np.ndarray:
    """Reduce the last axis of [P, kept, reduced]."""
    if function.name == "average":
        return np.asarray(values.mean(axis=-1, dtype=F32))
    return np.asarray(function.reduce.reduce(values, axis=-1), dtype=values.dtype)


@instruction(
    engines="vector",
    operands="data -> dst",
    streams="data",
    operators={"op": REDUCTION},
    indirect="dst data",
    cycles=cycles.reduce,
)
def tensor_reduce(
    call: Issue,
    dst: Any,
    op: Any,
    data: Any,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
) -> Steps:
    """Reduce the last contiguous free axes of data on VectorE, in float32."""
    call.need(
        op.name != "average",
        "nl.average is no reduction of VectorE; use nl.add and multiply by 1 / count",
        UnsupportedInstructionError,
    )
    given = axis if isinstance(axis, (tuple, list)) else (axis,)
    axes = last_axes(data.shape, [call.integer("axis", a) for a in given])
    call.need(
        axes,
        "axis must be the last contiguous free axes, e.g. the last one (partitions: "
        "nisa.tensor_partition_reduce or a transpose)",
    )
    kept = math.prod(data.shape[1 : axes[0]])
    call.need(
        (dst.shape[0], dst.free_size) == (data.shape[0], kept),
        f"dst must have {data.shape[0]} partitions with {kept} elements",
    )
    bitvec = op.kind == "bitvec"
    call.need(
        not (bitvec and negate), "negate goes with arithmetic operators only",
        UnsupportedInstructionError,
    )  # fmt: skip
    yield {"function": op.name}
    values = (data.load() if bitvec else f32(data)).reshape(data.shape[0], kept, -1)
    result = _reduce(op, values)
    put(dst, -result if negate else result)


@instruction(
    engines="gpsimd",
    operands="data[P F] -> dst[1 F]",
    memory=SBUF,
    operators={
        "op": Takes("reduce", ("add", "average", "maximum", "max", "bitwise_or", "bitwise_and"))
    },
    flows={"dst": poison.to_columns},
    # GpSimd walks its 16 partitions one after another, then combines 8 cores
    cycles=cycles.linear(16.0, fixed="gpsimd_fixed_cycles"),
)
def tensor_partition_reduce(call: Issue, dst: Any, op: Any, data: Any) -> None:
    """Reduce across partitions on GpSimd; dst has one partition."""
    values = data.load() if op.kind == "bitvec" else f32(data)
    flat = values.reshape(data.shape[0], -1).T
    put(dst, _reduce(op, flat[None]).reshape(dst.shape))


@instruction(
    engines="vector",
    operands="data[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"operand0": FLOAT32, "reduce_init": FLOAT32},
    streams="data",
    operators={
        "op0": ARITHMETIC,
        "reduce_op": Takes("reduce", ("add", "multiply", "maximum", "minimum", "max", "min")),
    },
    commands="reset_reduce reduce load_reduce",
    first_value="reduce_init",
    indirect="dst data",
    cycles=cycles.linear(fixed="engine_min_cycles"),  # to read the accumulators out
)
def tensor_scalar_reduce(
    call: Issue,
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any = None,
    reverse0: bool = False,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
) -> Steps:
    """dst = data <op0> operand0, and its reduction over the free axes, on VectorE."""
    call.need(
        not reverse0, "reverse0 is not supported yet; swap the operands with another operator",
        UnsupportedInstructionError,
    )  # fmt: skip
    yield {}
    put_with_sum(call, apply_scalar(op0, f32(data), operand0, reverse0))


@instruction(
    engines="vector",
    operands="src[P F] -> dst[P F]",
    streams="src",
    numbers={"imm0": FLOAT32, "imm1": FLOAT32},
    dtypes={"dst": _CUMULATIVE, "src": _CUMULATIVE},
    operators={
        "op0": ARITHMETIC,
        "op1": Takes("reduce", ("add", "subtract", "multiply", "maximum", "minimum", "max", "min")),
    },
    commands="reset_reduce load_reduce reduce",
    first_value="imm1",
    indirect="dst src",
    flows={"dst": poison.onwards},
)
def tensor_scalar_cumulative(
    call: Issue,
    dst: Any,
    src: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
) -> None:
    """dst[i] = op1(op0(src[i], imm0), dst[i - 1]) along the free dimension, on VectorE."""
    values = apply_scalar(op0, f32(src), imm0, False).reshape(src.shape[0], -1)
    register, result = begin(call, op1, len(values)), np.empty_like(values)
    for i, column in enumerate(values.T):
        result[:, i] = register = np.asarray(op1.alu(column, register), F32)
    keep(call, register)
    put(dst, result)


@instruction(
    engines="vector",
    operands="data0[P F], data1[P F] -> dst[P F]",
    streams="data0 data1",
    numbers={"initial": ANY_DTYPE},
    pair="data0 data1",
    operators={"op0": BINARY, "op1": BINARY},
    flows={"dst": poison.onwards},
    cycles=cycles.linear(2.0),
)
def tensor_tensor_scan(
    call: Issue,
    dst: Any,
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """dst[i] = op1(op0(data0[i], dst[i - 1]), data1[i]) along the free dimension, on VectorE."""
    x, y = rows_of(data0), rows_of(data1)
    state = np.broadcast_to(np.asarray(scalar_value(initial, 1), F32).reshape(-1), (len(x),))
    result, f, g = np.empty_like(x), op0.alu, op1.alu
    for i in range(x.shape[1]):
        inner = f(state, x[:, i]) if reverse0 else f(x[:, i], state)
        result[:, i] = state = g(y[:, i], inner) if reverse1 else g(inner, y[:, i])
    put(dst, result)


@instruction(
    engines="vector",
    operands="data[P F] -> dst[P 6]",
    limits={"F": range(1, 513)},
)
def bn_stats(call: Issue, dst: Any, data: Any) -> None:
    """dst = (count, mean, variance * count) of the even, then of the odd elements."""
    values = rows_of(data)
    result = np.zeros((data.shape[0], 2, 3), F32)
    for start in range(min(values.shape[1], 2)):  # one element alone is even
        part = values[:, start::2].astype(np.float64)
        average = part.mean(axis=1)
        spread = ((part - average[:, None]) ** 2).sum(axis=1)
        result[:, start] = np.stack([np.full(len(part), part.shape[1]), average, spread], axis=1)
    put(dst, result)


@instruction(
    engines="vector",
    operands="data[P 3*T] -> dst[P 2]",
    cycles=cycles.linear(13.0, over=3.0),  # for each triple of statistics
)
def bn_aggr(call: Issue, dst: Any, data: Any) -> None:
    """dst = (mean, variance) from (count, mean, variance * count) triples."""
    triples = f32(data).reshape(data.shape[0], -1, 3).astype(np.float64)
    count, average, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    total = count.sum(axis=1)
    mean = (count * average).sum(axis=1) / total
    apart = spread.sum(axis=1) + (count * (average - mean[:, None]) ** 2).sum(axis=1)
    put(dst, np.stack([mean, apart / total], axis=1).astype(F32))


@instruction(
    engines="vector",
    operands="src[P F] -> dst[P 8]",
    limits={"F": _EIGHT_OF},
    ranks={"dst": 2, "src": 3},
)
def max8(call: Issue, dst: Any, src: Any) -> None:
    """dst = the 8 largest values of each partition, descending."""
    values = rows_of(src)
    top = np.sort(values, axis=1)[:, ::-1][:, :8]
    put(dst, np.ascontiguousarray(top))


def find_eight(
    data: np.ndarray, wanted: np.ndarray, backwards: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions [P, 8], found [P, 8]); repeated values get successive occurrences.

    Occurrences are given to equal values from the first to the last slot, or backwards.
    """
    places, found = (np.zeros(wanted.shape, kind) for kind in (np.int64, np.bool_))
    used, rows = np.zeros(data.shape, np.bool_), np.arange(len(data))
    for slot in range(7, -1, -1) if backwards else range(8):
        match = (data == wanted[:, slot : slot + 1]) & ~used
        hit, place = match.any(axis=1), match.argmax(axis=1)
        places[:, slot], found[:, slot] = place, hit
        used[rows[hit], place[hit]] = True
    return places, found


@instruction(
    engines="vector",
    operands="data[P F], vals[P 8] -> dst[P 8]",
    limits={"F": _EIGHT_OF},
    dtypes={"dst": INDICES},
    ranks={"dst": 2, "data": 3, "vals": 3},
    flows={"dst": poison.by_partition},
)
def nc_find_index8(call: Issue, dst: Any, data: Any, vals: Any) -> None:
    """dst = positions of 8 values in each partition of data; all ones where absent."""
    places, found = find_eight(rows_of(data), rows_of(vals), False)
    put(dst, np.where(found, places, dst.dtype.high))


@instruction(
    engines="vector",
    operands="data[P F], vals[P 8] -> dst[P F], dst_idx[P 8]",
    limits={"F": _EIGHT_OF},
    streams="data",
    dtypes={"dst_idx": INDICES},
    flows={"dst": poison.by_partition},
)
def nc_match_replace8(
    call: Issue,
    dst: Any,
    data: Any,
    vals: Any,
    imm: float,
    dst_idx: Any = None,
) -> Steps:
    """dst = data with the first occurrence of each of 8 values replaced by imm."""
    call.number("imm", imm)
    yield {}
    values = rows_of(data)
    places, found = find_eight(values, rows_of(vals), True)
    result = values.copy()
    result[np.nonzero(found)[0], places[found]] = imm
    put(dst, result)
    if dst_idx is not None:
        put(dst_idx, np.where(found, places, dst_idx.dtype.high))
