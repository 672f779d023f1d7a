"""ScalarE instructions: activation, activation_reduce, activate2; VectorE's exponential."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import OperandError, UnsupportedInstructionError
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.isa.enums import reduce_cmd
from nmm_compiler.simulator.isa.instruction import Call, Steps, attributes, instruction
from nmm_compiler.simulator.isa.operands import ANY_DTYPE, require_present
from nmm_compiler.simulator.isa.operators import ACTIVATION, ALU, BY_NAME, Op, Takes
from nmm_compiler.simulator.isa.values import F32, apply_scalar, f32, put, scalar_value, write_sum
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, FLOATS, INTEGERS
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Instruction

_IDLE = reduce_cmd.idle
_COMMANDS = ("idle", "reset", "reduce", "reset_reduce")
_BIASES = (FLOATS | INTEGERS | {"bool"}) - {"tfloat32"}
_EXP_SUMS = frozenset({"float8_e4m3", "float8_e5m2", "float16", "bfloat16", "float32", "tfloat32"})
_EXP_RESULTS = _EXP_SUMS | {"int8", "int16", "int32", "uint8", "uint16"}
_EXP_INPUTS = (_EXP_RESULTS | {"uint32"}) - {"tfloat32"}


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


@instruction(
    engines=("scalar",),
    operands="data[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"bias": _BIASES, "scale": FLOAT32},
    streams=("data",),
    operators={"op": ACTIVATION, "reduce_op": Takes("reduce", ("add",), "add")},
    commands=_COMMANDS,
    indirect=(
        "dst",
        "data",
    ),
    cycles=cycles.reducing,
)
def activation(
    call: Call,
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = _IDLE,
    name: str | None = None,
) -> Steps:
    """dst = op(data * scale + bias) on ScalarE, with an optional sum over the free axes."""
    machine = call.machine
    if bias is not None:
        if op.name == "reciprocal":
            require_present(machine, "activation(nl.reciprocal) with bias")
        if bias.__class__ is not NkiTensor and not machine.target.scalar_number_bias:
            call.rule(
                OperandError,
                f"a scalar bias needs trn2 or newer, the target is {machine.target.name}; pass a "
                f"({data.shape[0]}, 1) tensor",
            )
    if op.activation is None:
        raise call.error(
            UnsupportedInstructionError, "nl.prelu needs relu_param; use nisa.activate2 (trn3)"
        )
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    yield attributes(function=op.name, reduces=reduces)
    result = _apply(machine, op, f32(data), scale, bias)
    put(dst, result)
    if reduces:
        write_sum(call, "scalar", reduce_cmd, reduce_op, result, reduce_res)


def _apply(machine: Machine, function: Op, values: np.ndarray, scale: Any, bias: Any) -> np.ndarray:
    if scale.__class__ is NkiTensor or scale != 1.0:
        values = values * scalar_value(scale, values.ndim)
    if bias is not None and (bias.__class__ is NkiTensor or bias != 0.0):
        values = values + scalar_value(bias, values.ndim)
    if function.valid is not None:
        _check_range(machine, function, values)
    assert function.activation is not None
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


@instruction(
    engines=("scalar",),
    operands="data[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"imm0": ANY_DTYPE, "imm1": ANY_DTYPE, "relu_param": ANY_DTYPE},
    streams=("data",),
    same_dtype=("imm0", "imm1"),
    operators={
        "op": ACTIVATION,
        "op0": ALU,
        "op1": ALU,
        "reduce_op": Takes("reduce", ("add", "maximum", "minimum", "max", "min"), "add"),
    },
    commands=_COMMANDS,
    indirect=(
        "dst",
        "data",
    ),
)
def activate2(
    call: Call,
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
) -> Steps:
    """dst = op((data <op0> imm0) <op1> imm1) on ScalarE of trn3."""
    pair = (op0.name, op1.name)
    if pair not in (
        ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
        ("subtract", "bypass"), ("bypass", "bypass"),
    ):  # fmt: skip
        raise call.error(
            UnsupportedInstructionError,
            f"operators {pair}; use (multiply, add), (multiply, subtract), "
            "(multiply, bypass), (add, bypass), (subtract, bypass) or (bypass, bypass)",
        )
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    yield attributes(function=op.name, reduces=reduces)
    values = apply_scalar(op1, apply_scalar(op0, f32(data), imm0, reverse0), imm1, reverse1)
    if op.name == "prelu":
        slope = scalar_value(relu_param, values.ndim)
        result = np.where(values >= 0, values, values * slope).astype(F32)
    else:
        result = _apply(call.machine, op, values, 1.0, None)
    put(dst, result)
    if reduces:
        write_sum(call, "scalar", reduce_cmd, reduce_op, result, reduce_res)


@instruction(
    engines=("vector",),
    operands="src[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"max_value": FLOAT32, "reduce_init": FLOAT32},
    streams=("src",),
    dtypes={"dst": _EXP_RESULTS, "src": _EXP_INPUTS, "reduce_res": _EXP_SUMS},
    ranks={"dst": 4, "src": 4},
    commands=("idle", "reset_reduce", "reduce", "load_reduce"),
    first_value="reduce_init",
    indirect=(
        "dst",
        "src",
    ),
)
def exponential(
    call: Call,
    dst: Any,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: Any = _IDLE,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> Steps:
    """dst = exp(src - max_value) on VectorE of trn3, with an optional running sum."""
    yield attributes(reduces=reduce_cmd is not _IDLE or reduce_res is not None)
    values = f32(src)
    result = np.exp(values - scalar_value(max_value, values.ndim))
    put(dst, result)
    write_sum(call, "vector", reduce_cmd, BY_NAME["add"], result, reduce_res, reduce_init)
