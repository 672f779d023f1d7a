"""ScalarE instructions: activation, activation_reduce, activate2; VectorE's exponential."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import (
    TargetRuleError,
    TensorDtypeError,
    TensorShapeError,
    UninitializedReadError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa.elementwise import apply_scalar, attributes, extra_reads, write
from nmm_compiler.simulator.isa.operands import (
    F32,
    ON_CHIP,
    check_destination,
    check_hazard,
    f32,
    operand,
    reduce_cmd,
    require_instruction,
    same_elements,
    scalar_operand,
    scalar_value,
)
from nmm_compiler.simulator.isa.operators import Op, activation_function, alu, reduction
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Access, Instruction

_IDLE = reduce_cmd.idle


def accumulate(
    machine: Machine,
    register: str,
    command: Any,
    op: Op,
    values: np.ndarray | None,
    initial: Any = None,
) -> np.ndarray:
    """Update the accumulator registers of an engine; return float32 [P].

    register: "scalar" or "vector". values: what is reduced along the free axes, [P, ...].
    """
    name = getattr(command, "name", "idle")
    state = machine.accumulators.get(register)
    partitions = 0 if values is None else values.shape[0]
    if name in ("reset", "reset_reduce"):
        state = np.full(partitions, op.identity, F32)
    elif name == "load_reduce":
        start = scalar_value(initial, 1)
        state = np.broadcast_to(np.asarray(start, F32).reshape(-1), (partitions,)).copy()
    elif name == "reduce" and (state is None or state.shape[0] != partitions):
        machine.rule(
            TensorShapeError,
            f"reduce_cmd.reduce continues the {register} engine's accumulators, which hold "
            f"{0 if state is None else state.shape[0]} partitions, not {partitions}; start with "
            "reset_reduce",
        )
        state = np.full(partitions, op.identity, F32)
    if name in ("reduce", "reset_reduce", "load_reduce") and values is not None:
        assert state is not None
        flat = np.asarray(values, F32).reshape(partitions, -1)
        part = op.reduce.reduce(flat, axis=1)
        state = op.reduce(state, part).astype(F32)
    if state is None or state.shape[0] != partitions:
        machine.rule(
            UninitializedReadError,
            f"reduce_res reads the {register} engine's accumulators, which no instruction has set "
            f"for {partitions} partitions; pass reduce_cmd=nisa.reduce_cmd.reset_reduce",
        )
        return np.full(partitions, np.nan, F32)
    machine.accumulators[register] = state
    return state


def reduce_result(
    machine: Machine, op: str, result: Any, partitions: int, writes: list[Access]
) -> None:
    """Check the tile that accumulators are read into."""
    if result is None:
        return
    access = operand(machine, op, "reduce_res", result, ON_CHIP)
    if result.shape[0] != partitions or result.free_size != 1:
        raise machine.error(
            TensorShapeError,
            f"nisa.{op}: reduce_res {result.shape}; it must be ({partitions}, 1)",
        )
    check_destination(machine, op, result)
    writes.append(access)


def _check_range(machine: Machine, function: Op, values: np.ndarray) -> None:
    """Record a warning when an input leaves the documented range of an approximation."""
    if function.valid is None:
        return
    low, high = function.valid
    checked = np.abs(values) if function.name == "reciprocal" else values
    with np.errstate(invalid="ignore"):
        outside = (checked < low) | (checked > high)
    if outside.any():
        worst = float(values[outside][0])
        machine.warn(
            f"nisa.activation(nl.{function.name}): input {worst:g} is outside the documented "
            f"range [{low:g}, {high:g}], where ScalarE's result is invalid"
        )


def activation(
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = _IDLE,
    name: str | None = None,
) -> Instruction:
    """dst = op(data * scale + bias) on ScalarE, with an optional sum over the free axes."""
    machine = current()
    function = activation_function(machine, op, "activation")
    writes = [operand(machine, "activation", "dst", dst, ON_CHIP)]
    reads = [operand(machine, "activation", "data", data, ON_CHIP)]
    if dst.shape != data.shape:
        same_elements(machine, "activation", dst, data)
    partitions = data.shape[0]
    if bias is not None:
        is_tensor = scalar_operand(machine, "activation", "bias", bias, partitions, reads)
        if not is_tensor and not machine.target.scalar_number_bias:
            machine.rule(
                TargetRuleError,
                f"nisa.activation: a scalar bias needs trn2 or newer, the target is "
                f"{machine.target.name}; pass a ({partitions}, 1) tensor",
            )
    if scale.__class__ is NkiTensor:
        scalar_operand(machine, "activation", "scale", scale, partitions, reads)
        if scale.dtype != "float32":
            raise machine.error(
                TensorDtypeError,
                f"nisa.activation: scale {scale.name!r} is {scale.dtype}; it must be float32",
            )
    else:
        scalar_operand(machine, "activation", "scale", scale, partitions, reads)
    check_destination(machine, "activation", dst)
    if dst.storage is data.storage:
        check_hazard(machine, "activation", dst, data)
    if reduce_op is not None and reduction(machine, reduce_op, "activation").name != "add":
        raise machine.error(
            UnsupportedInstructionError, "nisa.activation: reduce_op must be nl.add"
        )
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    reduce_result(machine, "activation", reduce_res, partitions, writes)
    if data.indirection is not None or dst.indirection is not None:
        reads += extra_reads(data, dst)
    instruction = machine.record(
        "activation", "scalar", tuple(reads), tuple(writes),
        attributes(function=function.name, reduces=reduces, reads_out=reduce_res is not None),
        name,
    )  # fmt: skip
    if machine.data:
        result = _apply(machine, function, f32(data), scale, bias)
        write(machine, dst, result)
        if reduces:
            total = accumulate(
                machine, "scalar", reduce_cmd, reduction(machine, _add_op(), ""), result
            )
            if reduce_res is not None:
                write(machine, reduce_res, total.reshape(reduce_res.shape))
    return instruction


class _Named:
    """An operator by name, for calls inside the simulator."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


def _add_op() -> Any:
    return _Named("add")


def _apply(machine: Machine, function: Op, values: np.ndarray, scale: Any, bias: Any) -> np.ndarray:
    if scale.__class__ is NkiTensor or scale != 1.0:
        values = values * scalar_value(scale, values.ndim)
    if bias is not None and (bias.__class__ is NkiTensor or bias != 0.0):
        values = values + scalar_value(bias, values.ndim)
    if function.valid is not None:
        _check_range(machine, function, values)
    if function.activation is None:
        raise machine.error(
            UnsupportedInstructionError,
            "nisa.activation(nl.prelu) needs relu_param; use nisa.activate2 (trn3)",
        )
    result = function.activation(values)
    return result if result.dtype == F32 else result.astype(F32)


def activation_reduce(
    dst: Any,
    op: Any,
    data: Any,
    reduce_op: Any,
    reduce_res: Any,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> Instruction:
    """Do nisa.activation with reduce_cmd=reset_reduce."""
    return activation(
        dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce, name
    )


def activate2(
    dst: Any,
    op: Any,
    data: Any,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = _IDLE,
    name: str | None = None,
) -> Instruction:
    """dst = op((data <op0> imm0) <op1> imm1) on ScalarE of trn3."""
    machine = current()
    require_instruction(machine, "activate2")
    function = activation_function(machine, op, "activate2")
    first = alu(machine, op0, "activate2")
    second = alu(machine, op1, "activate2")
    pair = (first.name, second.name)
    if pair not in (
        ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
        ("subtract", "bypass"), ("bypass", "bypass"),
    ):  # fmt: skip
        raise machine.error(
            UnsupportedInstructionError,
            f"nisa.activate2: operators {pair}; use (multiply, add), (multiply, subtract), "
            "(multiply, bypass), (add, bypass), (subtract, bypass) or (bypass, bypass)",
        )
    writes = [operand(machine, "activate2", "dst", dst, ON_CHIP)]
    reads = [operand(machine, "activate2", "data", data, ON_CHIP)]
    same_elements(machine, "activate2", dst, data)
    partitions = data.shape[0]
    for role, value in (("imm0", imm0), ("imm1", imm1), ("relu_param", relu_param)):
        scalar_operand(machine, "activate2", role, value, partitions, reads)
    check_destination(machine, "activate2", dst)
    check_hazard(machine, "activate2", dst, data)
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    reduce_result(machine, "activate2", reduce_res, partitions, writes)
    instruction = machine.record(
        "activate2", "scalar", tuple(reads), tuple(writes),
        attributes(function=function.name, reduces=reduces, reads_out=reduce_res is not None),
        name,
    )  # fmt: skip
    if machine.data:
        values = apply_scalar(machine, first, f32(data), imm0, reverse0)
        values = apply_scalar(machine, second, values, imm1, reverse1)
        if function.name == "prelu":
            slope = scalar_value(relu_param, values.ndim)
            result = np.where(values >= 0, values, values * slope).astype(F32)
        else:
            result = _apply(machine, function, values, 1.0, None)
        write(machine, dst, result)
        if reduces:
            total = accumulate(
                machine, "scalar", reduce_cmd,
                reduction(machine, reduce_op or _add_op(), "activate2"), result,
            )  # fmt: skip
            if reduce_res is not None:
                write(machine, reduce_res, total.reshape(reduce_res.shape))
    return instruction


def exponential(
    dst: Any,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: Any = _IDLE,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> Instruction:
    """dst = exp(src - max_value) on VectorE of trn3, with an optional running sum."""
    machine = current()
    require_instruction(machine, "exponential")
    op = "exponential"
    writes = [operand(machine, op, "dst", dst, ON_CHIP)]
    reads = [operand(machine, op, "src", src, ON_CHIP)]
    same_elements(machine, op, dst, src)
    partitions = src.shape[0]
    scalar_operand(machine, op, "max_value", max_value, partitions, reads)
    scalar_operand(machine, op, "reduce_init", reduce_init, partitions, reads)
    check_destination(machine, op, dst)
    check_hazard(machine, op, dst, src)
    reduce_result(machine, op, reduce_res, partitions, writes)
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    instruction = machine.record(
        op, "vector", tuple(reads), tuple(writes), attributes(reduces=reduces), name
    )
    if machine.data:
        values = f32(src)
        result = np.exp(values - scalar_value(max_value, values.ndim))
        write(machine, dst, result)
        if reduces:
            total = accumulate(
                machine, "vector", reduce_cmd, reduction(machine, _add_op(), op), result,
                reduce_init,
            )  # fmt: skip
            if reduce_res is not None:
                write(machine, reduce_res, total.reshape(reduce_res.shape))
    return instruction
