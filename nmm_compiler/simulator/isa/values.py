"""How instructions read and compute values: in float32, with a cast on the write.

PSUM remembers which engine wrote each element, because a matmul adds to what a matmul wrote.
ScalarE and VectorE have accumulator registers, which reductions of other instructions use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, SimulationError
from nmm_compiler.simulator.isa.operands import Issue
from nmm_compiler.simulator.isa.operators import BY_NAME, Operator
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import round_tfloat32
from nmm_compiler.simulator.tensors.elements import NOBODY, OTHER, TENSOR, marks_of, put, read
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor

F32 = np.float32


def f32(view: NkiTensor) -> np.ndarray:
    """Return the view's values as float32 (what engines compute with).

    A tfloat32 view may lie over float32 data: an engine reads ten bits of its mantissas.
    """
    values = view.load()
    return round_tfloat32(values) if view.dtype == "tfloat32" else values.astype(F32, copy=False)


def rows_of(view: NkiTensor) -> np.ndarray:
    """Return the view's values as float32 [partitions, elements]."""
    return f32(view).reshape(view.shape[0], -1)


def scalar_value(value: Any, rank: int, kind: Any = F32) -> Any:
    """Return a scalar of a NumPy dtype, or [P, 1, ...] to broadcast over the free dimensions."""
    if value.__class__ is NkiTensor:
        values = f32(value) if kind == F32 else value.load()
        return values.astype(kind, copy=False).reshape((value.shape[0],) + (1,) * (rank - 1))
    if isinstance(value, VirtualRegister):
        value = value.read()
    return F32(value) if kind == F32 else np.asarray(int(value)).astype(kind)


def apply_scalar(function: Operator, data: np.ndarray, value: Any, reverse: bool) -> np.ndarray:
    """Return data <op> value (or reversed) in data's dtype: float32, or integers for bits.

    Unary operators and bypass ignore the value.
    """
    operands = [data]
    if "unary" not in function.kind and function.kind != "bypass":
        operands.append(scalar_value(value, data.ndim, data.dtype))
    return np.asarray(function.alu(*operands[:: -1 if reverse else 1]), dtype=data.dtype)


# Products in PSUM


def accumulate_product(
    machine: Machine, dst: NkiTensor, product: np.ndarray, accumulate: Any
) -> None:
    """Write a product to dst, or add it to earlier products there; None: PSUM's state decides."""
    if product.shape != dst.shape:
        product = product.reshape(dst.shape)
    writers = marks_of(dst, dst.storage.writers)
    adds = accumulate is not False and bool(accumulate or writers.any())
    if accumulate is None:  # a compiler of a loop on the device decides it once
        machine.note(f"nc_matmul(accumulate=None) that {'adds' if adds else 'overwrites'}")
    sums = dst.indirection is None and dst.dtype == "float32"
    if adds and sums and (writers == TENSOR).all():
        target = dst.array()
        target += product
        return
    if adds:
        writers = writers[..., 0]
        if accumulate and not writers.all():
            machine.rule(
                SimulationError,
                f"nisa.nc_matmul(accumulate=True) into {dst.name!r}, where no matmul has written "
                "yet: undefined on hardware; start with accumulate=False (or leave it unset)",
            )
        elif writers.max() == OTHER and not machine.target.matmul_adds_to_written_psum:
            text = (
                f"nisa.nc_matmul(accumulate={accumulate}) adds to {dst.name!r}, which memset or "
                "another engine wrote: undefined before trn3; pass accumulate=False for the first "
                "matmul"
            )
            other = writers == OTHER
            if accumulate is None and (read(dst, where=other)[0][other] == 0).all():
                machine.warn(text)  # overwriting and adding to zeros are the same
            else:
                machine.rule(SimulationError, text)
        written = writers != NOBODY  # what nobody has written is zero
        product = np.where(written, read(dst, where=written)[0].astype(F32), F32(0)) + product
    put(dst, product, product=True)


# Accumulator registers


def begin(call: Issue, op: Operator, partitions: int) -> np.ndarray:
    """Return float32 [P]: what the accumulators hold before an instruction adds to them.

    Each partition has its own, so `reduce` and `idle` find what an instruction of the same
    partitions has left there, and nothing else.
    """
    machine, name = call.machine, call.arguments["reduce_cmd"].name
    register = call.row.engines[0]
    if name in ("reset", "reset_reduce"):
        return np.full(partitions, op.identity, F32)
    if name == "load_reduce":
        start = scalar_value(call.arguments[call.row.first_value], 1).reshape(-1)
        return np.broadcast_to(start, (partitions,)).copy()
    first = call.reads[0].partition_start
    held, state, spoilt = machine.accumulators.get(register, (None, None, []))
    machine.poisoned += [(None, *each) for each in spoilt]
    if held != (first, partitions):
        machine.rule(
            HazardError,
            f"nisa.{call.op}: reduce_cmd.{name} reads the {register} engine's accumulators of "
            f"partitions {first}..{first + partitions - 1}, "
            + ("which no instruction has set" if held is None else
               f"the last instruction has set {held[0]}..{held[0] + held[1] - 1}")
            + "; start with reset_reduce",
        )  # fmt: skip
        return np.full(partitions, op.identity if name == "reduce" else np.nan, F32)
    return np.asarray(state)


def keep(call: Issue, state: np.ndarray) -> None:
    """Leave `state` in the accumulators, with the elements that depend on unwritten memory."""
    machine, partitions = call.machine, len(state)
    spoilt = [
        (mask.reshape(partitions, -1).any(axis=1, keepdims=True), origin)
        for _, mask, origin in machine.poisoned
        if len(mask) == partitions
    ]
    place = call.reads[0].partition_start, partitions
    machine.accumulators[call.row.engines[0]] = place, state, spoilt


def put_with_sum(call: Issue, values: np.ndarray) -> None:
    """Write values to dst, and update the accumulators by reduce_cmd; read them out into
    `reduce_res` if it is a tile.

    VectorE's idle may still modify them, so their value is unknown afterwards.
    """
    put(call.arguments["dst"], values)
    given, op = call.arguments, call.arguments.get("reduce_op", BY_NAME["add"])
    command, result = given["reduce_cmd"].name, given["reduce_res"]
    if command == "idle" and result is None:
        if call.row.engines == ("vector",):
            call.machine.accumulators.pop("vector", None)
        return
    total = begin(call, op, len(values))
    if command not in ("idle", "reset"):
        part = op.reduce.reduce(np.asarray(values, F32).reshape(len(values), -1), axis=1)
        total = op.reduce(total, part).astype(F32)
    keep(call, total)
    if result is not None:
        negated = given.get("reduce_res_negate", False)
        put(result, (-total if negated else total).reshape(result.shape))
