"""ScalarE instructions: activation, activation_reduce, activate2; VectorE's exponential."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import (
    TargetRuleError,
    TensorDtypeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa.accumulators import check_command, reduce_result, write_sum
from nmm_compiler.simulator.isa.enums import (
    reduce_cmd,
)
from nmm_compiler.simulator.isa.instruction import (
    Call,
    Steps,
    attributes,
    instruction,
)
from nmm_compiler.simulator.isa.operands import (
    ON_CHIP,
    require_form,
)
from nmm_compiler.simulator.isa.operators import BY_NAME, Op, activation_function, alu, reduction
from nmm_compiler.simulator.isa.values import (
    F32,
    apply_scalar,
    f32,
    scalar_value,
    write,
)
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
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP},
    like_dst=("data",),
    streams=("data",),
    indirect={"dst": ("scalar",), "data": ("scalar",)},
    alike=True,
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
    function = activation_function(machine, op, "activation")
    partitions = data.shape[0]
    if bias is not None:
        is_tensor = call.scalar("bias", bias, partitions, _BIASES)
        if function.name == "reciprocal":
            require_form(machine, "activation(nl.reciprocal) with bias")
        if not is_tensor and not machine.target.scalar_number_bias:
            machine.rule(
                TargetRuleError,
                f"nisa.activation: a scalar bias needs trn2 or newer, the target is "
                f"{machine.target.name}; pass a ({partitions}, 1) tensor",
            )
    call.scalar("scale", scale, partitions, FLOAT32)
    if function.activation is None:
        raise call.error(
            UnsupportedInstructionError, "nl.prelu needs relu_param; use nisa.activate2 (trn3)"
        )
    check_command(call, reduce_cmd, _COMMANDS)
    if reduce_op is not None and reduction(machine, reduce_op, "activation").name != "add":
        raise call.error(UnsupportedInstructionError, "reduce_op must be nl.add")
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    reduce_result(call, reduce_res, partitions)
    yield attributes(function=function.name, reduces=reduces)
    result = _apply(machine, function, f32(data), scale, bias)
    write(dst, result)
    if reduces:
        write_sum(call, "scalar", reduce_cmd, BY_NAME["add"], result, reduce_res)


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
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP},
    like_dst=("data",),
    streams=("data",),
    indirect={"dst": ("scalar",), "data": ("scalar",)},
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
    machine = call.machine
    function = activation_function(machine, op, "activate2")
    first = alu(machine, op0, "activate2")
    second = alu(machine, op1, "activate2")
    pair = (first.name, second.name)
    if pair not in (
        ("multiply", "add"), ("multiply", "subtract"), ("multiply", "bypass"), ("add", "bypass"),
        ("subtract", "bypass"), ("bypass", "bypass"),
    ):  # fmt: skip
        raise call.error(
            UnsupportedInstructionError,
            f"operators {pair}; use (multiply, add), (multiply, subtract), "
            "(multiply, bypass), (add, bypass), (subtract, bypass) or (bypass, bypass)",
        )
    partitions = data.shape[0]
    for role, value in (("imm0", imm0), ("imm1", imm1), ("relu_param", relu_param)):
        call.scalar(role, value, partitions)
    if imm0.__class__ is NkiTensor and imm1.__class__ is NkiTensor and imm0.dtype != imm1.dtype:
        raise call.error(
            TensorDtypeError, f"imm0 is {imm0.dtype}, imm1 {imm1.dtype}; they must be the same"
        )
    check_command(call, reduce_cmd, _COMMANDS)
    reducer = BY_NAME["add"] if reduce_op is None else reduction(machine, reduce_op, "activate2")
    if reducer.name not in ("add", "maximum", "minimum", "max", "min"):
        raise call.error(
            UnsupportedInstructionError,
            f"reduce_op nl.{reducer.name}; use nl.add, nl.maximum or nl.minimum",
        )
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    reduce_result(call, reduce_res, partitions)
    yield attributes(function=function.name, reduces=reduces)
    values = apply_scalar(machine, first, f32(data), imm0, reverse0)
    values = apply_scalar(machine, second, values, imm1, reverse1)
    if function.name == "prelu":
        slope = scalar_value(relu_param, values.ndim)
        result = np.where(values >= 0, values, values * slope).astype(F32)
    else:
        result = _apply(machine, function, values, 1.0, None)
    write(dst, result)
    if reduces:
        write_sum(call, "scalar", reduce_cmd, reducer, result, reduce_res)


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"src": ON_CHIP},
    like_dst=("src",),
    streams=("src",),
    dtypes={"dst": _EXP_RESULTS, "src": _EXP_INPUTS},
    ranks={"dst": 4, "src": 4},
    indirect={"dst": ("vector",), "src": ("vector",)},
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
    partitions = src.shape[0]
    call.scalar("max_value", max_value, partitions, FLOAT32)
    call.scalar("reduce_init", reduce_init, partitions, FLOAT32)
    given = reduce_init.__class__ is NkiTensor or reduce_init != 0
    loads = getattr(reduce_cmd, "name", "") == "load_reduce"
    check_command(
        call,
        reduce_cmd,
        ("idle", "reset_reduce", "reduce", "load_reduce"),
        reduce_init if given or loads else None,
        "reduce_init",
    )
    reduce_result(call, reduce_res, partitions, _EXP_SUMS)
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    yield attributes(reduces=reduces)
    values = f32(src)
    result = np.exp(values - scalar_value(max_value, values.ndim))
    write(dst, result)
    write_sum(call, "vector", reduce_cmd, BY_NAME["add"], result, reduce_res, reduce_init)
