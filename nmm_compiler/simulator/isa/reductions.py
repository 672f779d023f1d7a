"""Reductions and scans: tensor_reduce, *_reduce, cumulative, scan, bn_stats, max8 and kin."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    TensorDtypeError,
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa.accumulators import (
    begin,
    check_command,
    keep,
    reduce_result,
    write_sum,
)
from nmm_compiler.simulator.isa.elementwise import check_operators, check_unary
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
    refuse_dtype,
)
from nmm_compiler.simulator.isa.operators import Op, alu, reduction
from nmm_compiler.simulator.isa.values import (
    F32,
    apply_scalar,
    f32,
    raw,
    scalar_value,
    write,
)
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import FLOAT8, FLOAT32, INTEGERS
from nmm_compiler.simulator.tensors.tensor import NkiTensor

INDICES = frozenset({"uint16", "uint32"})
_ACROSS_PARTITIONS = ("add", "average", "maximum", "max", "bitwise_or", "bitwise_and")
_CUMULATIVE = frozenset(
    {"bfloat16", "float16", "float32", *FLOAT8, "uint8", "uint16", "int8", "int16"}
)


def _arithmetic(call: Call, role: str, function: Op) -> None:
    """Check that an operator is arithmetic."""
    if "bitvec" in function.kind:
        raise call.error(
            UnsupportedInstructionError, f"{role} nl.{function.name}; it must be arithmetic"
        )


def _reduce(function: Op, values: np.ndarray) -> np.ndarray:
    """Reduce the last axis of [P, kept, reduced]."""
    if function.name.startswith("logical"):
        return np.asarray(function.reduce.reduce(values != 0, axis=-1)).astype(F32)
    if function.name == "subtract":
        first, rest = values[..., 0], values[..., 1:]
        return np.asarray(first - rest.sum(axis=-1, dtype=F32))
    if function.name == "average":
        return np.asarray(values.mean(axis=-1, dtype=F32))
    return np.asarray(function.reduce.reduce(values, axis=-1))


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP},
    streams=("data",),
    indirect={"dst": ("vector",), "data": ("vector",)},
    alike=True,
)
def tensor_reduce(
    call: Call,
    dst: Any,
    op: Any,
    data: Any,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> Steps:
    """Reduce the last contiguous free axes of data on VectorE, in float32."""
    machine = call.machine
    function = reduction(machine, op, "tensor_reduce")
    if function.name == "average":
        raise call.error(
            UnsupportedInstructionError,
            "nl.average is no reduction of VectorE; use nl.add and multiply by 1 / count",
        )
    rank = len(data.shape)
    given = (
        tuple(call.integer("axis", a) for a in axis)
        if isinstance(axis, (tuple, list))
        else (call.integer("axis", axis),)
    )
    axes = tuple(sorted(a + rank if a < 0 else a for a in given))
    if not axes or axes[0] < 1 or axes != tuple(range(axes[0], rank)):
        raise call.error(
            TensorShapeError,
            f"axis {axis} of data {data.shape}; give the last contiguous free "
            "axes, e.g. the last one (partitions: nisa.tensor_partition_reduce or a transpose)",
        )
    kept = math.prod(data.shape[1 : axes[0]])
    if dst.shape[0] != data.shape[0] or dst.free_size != kept:
        raise call.error(
            TensorShapeError,
            f"dst {dst.shape}; reducing {axes} of {data.shape} leaves "
            f"{data.shape[0]} partitions with {kept} elements",
        )
    bitvec = function.kind == "bitvec"
    if bitvec and (dst.dtype not in INTEGERS or data.dtype not in INTEGERS):
        raise call.error(TensorDtypeError, "bit operators need integer tensors")
    if bitvec and negate:
        raise call.error(UnsupportedInstructionError, "negate goes with arithmetic operators only")
    yield attributes(function=function.name)
    values = (raw(data) if bitvec else f32(data)).reshape(data.shape[0], kept, -1)
    result = _reduce(function, values)
    write(dst, -result if negate and not bitvec else result)


@instruction(engines=("gpsimd",), writes={"dst": SBUF}, reads={"data": SBUF})
def tensor_partition_reduce(
    call: Call, dst: Any, op: Any, data: Any, name: str | None = None
) -> Steps:
    """Reduce across partitions on GpSimd; dst has one partition."""
    machine = call.machine
    function = reduction(machine, op, "tensor_partition_reduce")
    if function.name not in _ACROSS_PARTITIONS:
        raise call.error(
            UnsupportedInstructionError,
            f"nl.{function.name}; use nl.{', nl.'.join(_ACROSS_PARTITIONS)}",
        )
    if function.kind == "bitvec" and not {dst.dtype, data.dtype} <= INTEGERS:
        raise call.error(TensorDtypeError, "bit operators need integer tensors")
    if dst.shape[0] != 1 or dst.free_size != data.free_size:
        raise call.error(
            TensorShapeError,
            f"dst {dst.shape}, data {data.shape}; dst must be (1, {data.free_size})",
        )
    yield attributes(function=function.name)
    values = raw(data) if function.kind == "bitvec" else f32(data)
    flat = values.reshape(data.shape[0], -1).T
    write(dst, _reduce(function, flat[None]).reshape(dst.shape))


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP},
    like_dst=("data",),
    streams=("data",),
    indirect={"dst": ("vector",), "data": ("vector",)},
)
def tensor_scalar_reduce(
    call: Call,
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
    name: str | None = None,
) -> Steps:
    """dst = data <op0> operand0, and its reduction over the free axes, on VectorE."""
    machine = call.machine
    op = "tensor_scalar_reduce"
    first, reducer = alu(machine, op0, op), reduction(machine, reduce_op, op)
    partitions = data.shape[0]
    _arithmetic(call, "op0", first)
    if reverse0:
        raise call.error(
            UnsupportedInstructionError,
            "reverse0 is not supported yet; swap the operands with another operator",
        )
    check_command(
        call, reduce_cmd, ("reset_reduce", "reduce", "load_reduce"), reduce_init, "reduce_init"
    )
    if operand0 is not None:
        call.scalar("operand0", operand0, partitions, FLOAT32)
    check_unary(call, "operand0", first, operand0)
    check_operators(machine, op, first)
    if reduce_init is not None:
        call.scalar("reduce_init", reduce_init, partitions, FLOAT32)
    if reducer.name not in ("add", "multiply", "maximum", "minimum", "max", "min"):
        raise call.error(
            UnsupportedInstructionError,
            f"reduce_op nl.{reducer.name}; use nl.add, nl.multiply, nl.max or nl.min",
        )
    reduce_result(call, reduce_res, partitions)
    yield attributes(function=first.name, reduces=True)
    result = apply_scalar(machine, first, f32(data), operand0, reverse0)
    write(dst, result)
    write_sum(
        call, "vector", reduce_cmd, reducer, result, reduce_res, reduce_init, reduce_res_negate
    )


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"src": ON_CHIP},
    like_dst=("src",),
    streams=("src",),
    dtypes={"dst": _CUMULATIVE, "src": _CUMULATIVE},
    indirect={"dst": ("vector",), "src": ("vector",)},
)
def tensor_scalar_cumulative(
    call: Call,
    dst: Any,
    src: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    name: str | None = None,
) -> Steps:
    """dst[i] = op1(op0(src[i], imm0), dst[i - 1]) along the free dimension, on VectorE."""
    machine = call.machine
    op = "tensor_scalar_cumulative"
    first, second = alu(machine, op0, op), reduction(machine, op1, op)
    partitions = src.shape[0]
    _arithmetic(call, "op0", first)
    if second.name not in ("add", "subtract", "multiply", "maximum", "minimum", "max", "min"):
        raise call.error(
            UnsupportedInstructionError,
            f"op1 nl.{second.name}; use nl.add, nl.subtract, nl.multiply, nl.maximum or nl.minimum",
        )
    check_command(call, reduce_cmd, ("reset_reduce", "load_reduce", "reduce"), imm1, "imm1")
    call.scalar("imm0", imm0, partitions, FLOAT32)
    check_unary(call, "imm0", first, 0 if "unary" in first.kind else imm0)
    if imm1 is not None:
        call.scalar("imm1", imm1, partitions, FLOAT32)
    yield attributes(function=first.name, function1=second.name)
    values = apply_scalar(machine, first, f32(src), imm0, False).reshape(partitions, -1)
    register = begin(call, "vector", reduce_cmd, second, partitions, imm1)
    result = np.empty_like(values)
    assert second.alu is not None
    for i in range(values.shape[1]):
        register = np.asarray(second.alu(values[:, i], register), F32)
        result[:, i] = register
    keep(call, "vector", reduce_cmd, register)
    write(dst, result)


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"data0": ON_CHIP, "data1": ON_CHIP},
    like_dst=("data0", "data1"),
    streams=("data0", "data1"),
    pair=("data0", "data1"),
)
def tensor_tensor_scan(
    call: Call,
    dst: Any,
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Steps:
    """dst[i] = op1(op0(data0[i], dst[i - 1]), data1[i]) along the free dimension, on VectorE."""
    machine = call.machine
    op = "tensor_tensor_scan"
    first, second = alu(machine, op0, op), alu(machine, op1, op)
    call.scalar("initial", initial, data0.shape[0])
    if first.kind != "arith" or second.kind != "arith":
        raise call.error(UnsupportedInstructionError, "op0 and op1 must be binary and arithmetic")
    yield attributes(function=first.name, function1=second.name)
    partitions = data0.shape[0]
    x, y = f32(data0).reshape(partitions, -1), f32(data1).reshape(partitions, -1)
    state = np.broadcast_to(np.asarray(scalar_value(initial, 1), F32).reshape(-1), (partitions,))
    result = np.empty_like(x)
    f, g = first.alu, second.alu
    assert f is not None
    assert g is not None
    for i in range(x.shape[1]):
        inner = f(state, x[:, i]) if reverse0 else f(x[:, i], state)
        state = g(y[:, i], inner) if reverse1 else g(inner, y[:, i])
        result[:, i] = state
    write(dst, result)


@instruction(engines=("vector",), writes={"dst": ON_CHIP}, reads={"data": ON_CHIP})
def bn_stats(call: Call, dst: Any, data: Any, name: str | None = None) -> Steps:
    """dst = (count, mean, variance * count) of the even, then of the odd elements."""
    if data.free_size > 512 or dst.shape[0] != data.shape[0] or dst.free_size != 6:
        raise call.error(
            TensorShapeError,
            f"dst {dst.shape}, data {data.shape}; data has at most 512 elements "
            "per partition and dst 6",
        )
    yield NO_ATTRIBUTES
    values = f32(data).reshape(data.shape[0], -1)
    result = np.zeros((data.shape[0], 6), F32)
    for start in (0, 1):
        part = values[:, start::2].astype(np.float64)
        count = part.shape[1]
        if count:
            average = part.mean(axis=1)
            result[:, 3 * start] = count
            result[:, 3 * start + 1] = average
            result[:, 3 * start + 2] = ((part - average[:, None]) ** 2).sum(axis=1)
    write(dst, result)


@instruction(engines=("vector",), writes={"dst": ON_CHIP}, reads={"data": ON_CHIP})
def bn_aggr(call: Call, dst: Any, data: Any, name: str | None = None) -> Steps:
    """dst = (mean, variance) from (count, mean, variance * count) triples."""
    if data.free_size % 3 or dst.shape[0] != data.shape[0] or dst.free_size != 2:
        raise call.error(
            TensorShapeError,
            f"dst {dst.shape}, data {data.shape}; data has triples, dst 2 elements per partition",
        )
    yield NO_ATTRIBUTES
    triples = f32(data).reshape(data.shape[0], -1, 3).astype(np.float64)
    count, average, spread = triples[..., 0], triples[..., 1], triples[..., 2]
    total = count.sum(axis=1)
    mean = (count * average).sum(axis=1) / total
    apart = spread.sum(axis=1) + (count * (average - mean[:, None]) ** 2).sum(axis=1)
    write(dst, np.stack([mean, apart / total], axis=1).astype(F32))


def _eight(machine: Machine, op: str, data: NkiTensor, result: NkiTensor) -> None:
    count = data.free_size
    if not 8 <= count <= 16384 or data.shape[0] != result.shape[0] or result.free_size != 8:
        raise machine.error(
            TensorShapeError,
            f"nisa.{op}: data {data.shape}, {result.name!r} {result.shape}; data has 8 to 16,384 "
            "elements per partition, the other exactly 8",
        )


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"src": ON_CHIP},
    ranks={"dst": 2, "src": 3},
)
def max8(call: Call, dst: Any, src: Any, name: str | None = None) -> Steps:
    """dst = the 8 largest values of each partition, descending."""
    machine = call.machine
    _eight(machine, "max8", src, dst)
    yield NO_ATTRIBUTES
    values = f32(src).reshape(src.shape[0], -1)
    top = np.sort(values, axis=1)[:, ::-1][:, :8]
    write(dst, np.ascontiguousarray(top))


def find_eight(
    data: np.ndarray, wanted: np.ndarray, backwards: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions [P, 8], found [P, 8]); repeated values get successive occurrences.

    Occurrences are given to equal values from the first to the last slot, or backwards.
    """
    partitions = data.shape[0]
    places = np.zeros((partitions, 8), np.int64)
    found = np.zeros((partitions, 8), np.bool_)
    used = np.zeros(data.shape, np.bool_)
    rows = np.arange(partitions)
    for slot in range(7, -1, -1) if backwards else range(8):
        match = (data == wanted[:, slot : slot + 1]) & ~used
        hit = match.any(axis=1)
        place = match.argmax(axis=1)
        places[:, slot], found[:, slot] = place, hit
        used[rows[hit], place[hit]] = True
    return places, found


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP, "vals": ON_CHIP},
    dtypes={"dst": INDICES},
    ranks={"dst": 2, "data": 3, "vals": 3},
)
def nc_find_index8(call: Call, dst: Any, data: Any, vals: Any, name: str | None = None) -> Steps:
    """dst = positions of 8 values in each partition of data; all ones where absent."""
    machine = call.machine
    op = "nc_find_index8"
    _eight(machine, op, data, vals)
    _eight(machine, op, data, dst)
    yield NO_ATTRIBUTES
    places, found = find_eight(
        f32(data).reshape(data.shape[0], -1), f32(vals).reshape(vals.shape[0], 8), False
    )
    write(dst, np.where(found, places, dst.dtype.high))


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP, "vals": ON_CHIP},
    like_dst=("data",),
    streams=("data",),
)
def nc_match_replace8(
    call: Call,
    dst: Any,
    data: Any,
    vals: Any,
    imm: float,
    dst_idx: Any = None,
    name: str | None = None,
) -> Steps:
    """dst = data with the first occurrence of each of 8 values replaced by imm."""
    machine = call.machine
    op = "nc_match_replace8"
    _eight(machine, op, data, vals)
    call.number("imm", imm)
    if dst_idx is not None:
        call.write("dst_idx", dst_idx)
        if dst_idx.dtype not in INDICES:
            refuse_dtype(machine, op, "dst_idx", dst_idx, INDICES)
        _eight(machine, op, data, dst_idx)
    yield NO_ATTRIBUTES
    values = f32(data).reshape(data.shape[0], -1)
    places, found = find_eight(values, f32(vals).reshape(vals.shape[0], 8), True)
    result = values.copy()
    rows = np.broadcast_to(np.arange(values.shape[0])[:, None], places.shape)
    result[rows[found], places[found]] = imm
    write(dst, result)
    if dst_idx is not None:
        write(dst_idx, np.where(found, places, dst_idx.dtype.high))
