"""Elementwise instructions: copies, memset, arithmetic, reciprocal, select, activation functions.

VectorE and GpSimd compute with ALU operators, ScalarE with activation functions (activation,
activation_reduce, activate2); trn3's VectorE has an exponential of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import UnsupportedInstructionError
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.isa.enums import engine, reduce_cmd
from nmm_compiler.simulator.isa.instruction import Steps, instruction
from nmm_compiler.simulator.isa.operands import (
    ANY_DTYPE,
    Issue,
    check_conversion,
    check_dtype,
)
from nmm_compiler.simulator.isa.operators import (
    ACTIVATION,
    ALU,
    ARITHMETIC,
    BINARY,
    TWO_OPERANDS,
    Operator,
    Takes,
)
from nmm_compiler.simulator.isa.values import (
    F32,
    apply_scalar,
    f32,
    put,
    put_with_sum,
    scalar_value,
)
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, FLOATS, INTEGERS, VECTOR_FLOATS
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_UNKNOWN = engine.unknown
_INT32 = ("int32", "uint32")
_ARITHMETIC = frozenset({"float32", "tfloat32", *_INT32})
SCALAR_PAIRS = frozenset({("multiply", "add"), ("multiply", None), ("add", None)})
"""The operators of tensor_scalar that ScalarE has on every target."""
_PAIRS = {"multiply": ("add", "subtract", "bypass"), "add": ("bypass",), "subtract": ("bypass",),
          "bypass": ("bypass",)}  # fmt: skip


@instruction(
    engines="vector scalar gpsimd",
    operands="src[P F] -> dst[P F]",
    streams="src",
    indirect="dst src",
    indirect_engines="vector scalar",
    packed=True,
    cycles=cycles.copy,
)
def tensor_copy(
    call: Issue,
    dst: Any,
    src: Any,
    engine: Any = _UNKNOWN,
) -> Steps:
    """dst = src on chip; bit-accurate for equal dtypes, else through float32."""
    chosen = call.choose()
    check_conversion(call, dst, src)
    if chosen == "scalar":
        remedy = "use nisa.activation(op=nl.copy)"
        call.machine.require("tensor_copy on ScalarE", remedy, "scalar_tensor_copy")
    yield {"unset": engine is _UNKNOWN}  # then the compiler may choose another engine
    same = dst.dtype == src.dtype
    put(dst, src.load() if same else f32(src), exact=same)


def _check_constant(call: Issue, role: str, value: Any, dst: NkiTensor) -> None:
    """Raise OperandError unless dst's type holds the compile-time number."""
    kind = dst.dtype.kind
    call.number(role, value)
    call.need(kind != "packed" or value == 0, f"{dst.dtype} takes only {role}=0")
    if kind == "int":
        low, high = dst.dtype.low, dst.dtype.high
        call.need(
            low <= value <= high and value == int(value),
            f"{role} must be an integer that {dst.dtype} holds ({low}..{high})",
        )


@instruction(
    engines="vector gpsimd",
    operands="-> dst",
    packed=True,
    cycles=cycles.memset,
)
def memset(call: Issue, dst: Any, value: Any, engine: Any = _UNKNOWN) -> Steps:
    """Fill dst with a compile-time constant."""
    _check_constant(call, "value", value, dst)
    yield {"nonzero": value != 0}
    put(dst, _filled(dst, value))


def _filled(dst: NkiTensor, value: Any) -> np.ndarray:
    """Return values of a constant that `_check_constant` has passed."""
    return np.full(dst.shape, value, F32 if dst.dtype.kind == "float" else dst.dtype.numpy)


def _exact(function: Any, a: Any, b: Any, dtype: Any) -> np.ndarray:
    """Return native 32-bit integer arithmetic (GpSimd), wrapping as the hardware's registers."""
    wide = function(a.astype(np.int64), b.astype(np.int64))
    if wide.dtype.kind == "f":
        return np.asarray(wide)
    bits = np.asarray(wide).astype(np.int64) & 0xFFFFFFFF
    return bits.astype(np.uint32).view(dtype.numpy)


@instruction(
    engines="vector gpsimd",
    operands="data1[P F], data2[P F] -> dst[P F]",
    streams="data1 data2",
    pair="data1 data2",
    operators={"op": TWO_OPERANDS},
    indirect="dst data1",
    cycles=cycles.two_inputs,
)
def tensor_tensor(
    call: Issue,
    dst: Any,
    data1: Any,
    data2: Any,
    op: Any,
    engine: Any = _UNKNOWN,
) -> Steps:
    """dst = data1 <op> data2, elementwise, in float32 (int32 exactly on GpSimd)."""
    views = dst, data1, data2
    bitvec, power = op.kind == "bitvec", op.name == "power"
    integers = not bitvec and all(view.dtype in _INT32 for view in views)
    in_psum = any(view.memory == "psum" for view in views)
    chosen = call.choose("gpsimd" if power or (integers and not in_psum) else "vector")
    call.need(not power or chosen == "gpsimd", "nl.power runs on GpSimd; leave engine unset")
    yield {}
    exact = integers and chosen == "gpsimd"
    load = NkiTensor.load if bitvec or exact else f32
    a, b = load(data1).reshape(dst.shape), load(data2).reshape(dst.shape)
    if exact:
        put(dst, _exact(op.alu, a, b, dst.dtype))
    else:
        put(dst, np.asarray(op.alu(a, b.astype(a.dtype) if bitvec else b)))


@instruction(
    engines="vector scalar gpsimd",
    operands="data[P F] -> dst[P F]",
    streams="data",
    numbers={"operand0": ANY_DTYPE, "operand1": ANY_DTYPE},
    operators={"op0": ALU, "op1": ALU},
    indirect="dst data",
    cycles=cycles.copy,
)
def tensor_scalar(
    call: Issue,
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = _UNKNOWN,
) -> Steps:
    """dst = (data <op0> operand0) <op1> operand1; operands are numbers or [P, 1] tensors."""
    target = call.machine.target
    bitvec = "bitvec" in op0.kind
    call.need(
        op1 is None or op1.kind == "bypass" or bitvec == ("bitvec" in op1.kind),
        "op0 and op1 must both be arithmetic or both bit operators",
        UnsupportedInstructionError,
    )
    others = INTEGERS if bitvec else _ARITHMETIC if data.dtype in _INT32 else FLOAT32
    for role, value in call.tensors(("operand0", "operand1")):
        check_dtype(call, role, value, others)
    in_psum = any(view.memory == "psum" for _, view in call.tensors(call.row.roles))
    chosen = call.choose("gpsimd" if op0.name in ("rsqrt", "power") and not in_psum else "vector")
    if chosen == "scalar":
        pair = (op0.name, op1.name if op1 else None)
        call.should(
            target.scalar_all_operators or pair in SCALAR_PAIRS,
            f"ScalarE of {target.name} takes (multiply, add), multiply or add",
        )
    elif chosen == "gpsimd" and engine is not _UNKNOWN:
        call.should(op0.name == "rsqrt", "GpSimd takes nl.rsqrt only; leave engine unset")
    yield {"function": op0.name, "function1": op1.name if op1 else "", "unset": engine is _UNKNOWN}
    values = data.load() if bitvec else f32(data)
    result = apply_scalar(op0, values, operand0, reverse0)
    if op1 is not None:
        result = apply_scalar(op1, result, operand1, reverse1)
    put(dst, result)


@instruction(
    engines="vector",
    operands="data[P F], operand1[P F] -> dst[P F]",
    streams="data operand1",
    pair="data operand1",
    numbers={"operand0": ANY_DTYPE},
    operators={"op0": ARITHMETIC, "op1": BINARY},
    cycles=cycles.two_inputs,
)
def scalar_tensor_tensor(
    call: Issue,
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """dst = (data <op0> operand0) <op1> operand1, where operand1 is a tensor like data."""
    left = apply_scalar(op0, f32(data), operand0, reverse0).reshape(dst.shape)
    right = f32(operand1).reshape(dst.shape)
    put(dst, np.asarray(op1.alu(right, left) if reverse1 else op1.alu(left, right), dtype=F32))


@instruction(
    engines="vector",
    operands="data[P F] -> dst[P F]",
    streams="data",
    cycles=cycles.linear("vector_reciprocal_cycles"),
)
def reciprocal(call: Issue, dst: Any, data: Any) -> None:
    """dst = 1 / data on VectorE."""
    put(dst, F32(1.0) / f32(data))


@instruction(
    engines="vector",
    operands="src[P F], predicate[P F] -> dst[P F]",
    constants=("src",),
    streams="src predicate",
    dtypes={"predicate": frozenset({"uint8", "uint16", "uint32", "bool"})},
    same_dtype="dst src",
    pair="src predicate",
    indirect="dst predicate",
    packed=True,
    cycles=cycles.two_inputs,
)
def tensor_copy_predicated(
    call: Issue,
    dst: Any,
    src: Any,
    predicate: Any,
    reverse_pred: bool = False,
) -> Steps:
    """dst = src where predicate is nonzero; elsewhere dst stays."""
    if src.__class__ is not NkiTensor:
        _check_constant(call, "src", src, dst)
    yield {}
    given = predicate.load(f"predicate of {call.name}").reshape(dst.shape)
    call.kept = (given == 0) if reverse_pred else (given != 0)
    put(dst, src.load() if src.__class__ is NkiTensor else _filled(dst, src), where=call.kept)


_IDLE = reduce_cmd.idle
_COMMANDS = "idle reset reduce reset_reduce"
_EXP_RESULTS = VECTOR_FLOATS | {"int8", "int16", "int32", "uint8", "uint16"}


@instruction(
    engines="scalar",
    operands="data[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"bias": (FLOATS | INTEGERS | {"bool"}) - {"tfloat32"}, "scale": FLOAT32},
    streams="data",
    operators={"op": ACTIVATION, "reduce_op": Takes("reduce", ("add",), "add")},
    commands=_COMMANDS,
    indirect="dst data",
    cycles=cycles.reducing,
)
def activation(
    call: Issue,
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = _IDLE,
) -> Steps:
    """dst = op(data * scale + bias) on ScalarE, with an optional sum over the free axes."""
    if bias is not None:
        if op.name == "reciprocal":
            call.machine.require("activation(nl.reciprocal) with bias")
        if bias.__class__ is not NkiTensor:
            remedy = f"pass a ({data.shape[0]}, 1) tensor"
            call.machine.require("activation with a number as bias", remedy)
    call.need(
        op.activation is not None,
        "nl.prelu needs relu_param; use nisa.activate2 (trn3)",
        UnsupportedInstructionError,
    )
    reduces = reduce_cmd is not _IDLE or reduce_res is not None
    yield {"function": op.name, "reduces": reduces}
    put_with_sum(call, _apply(call.machine, op, f32(data), scale, bias))


def _apply(
    machine: Machine, function: Operator, values: np.ndarray, scale: Any, bias: Any
) -> np.ndarray:
    if scale.__class__ is NkiTensor or scale != 1.0:
        values = values * scalar_value(scale, values.ndim)
    if bias is not None and (bias.__class__ is NkiTensor or bias != 0.0):
        values = values + scalar_value(bias, values.ndim)
    if function.valid is not None:
        low, high = function.valid
        checked = np.abs(values) if function.name == "reciprocal" else values
        outside = values[(checked < low) | (checked > high)]
        if outside.size:
            machine.warn(
                f"nisa.activation(nl.{function.name}): input {outside[0]:g} is outside the "
                f"documented range [{low:g}, {high:g}], where ScalarE's result is invalid"
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
) -> Any:
    """Do nisa.activation with reduce_cmd=reset_reduce."""
    issue: Any = activation
    return issue(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd.reset_reduce, name)


@instruction(
    engines="scalar",
    operands="data[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"imm0": ANY_DTYPE, "imm1": ANY_DTYPE, "relu_param": ANY_DTYPE},
    streams="data",
    same_dtype="imm0 imm1",
    operators={
        "op": ACTIVATION,
        "op0": ALU,
        "op1": ALU,
        "reduce_op": Takes("reduce", ("add", "maximum", "minimum", "max", "min"), "add"),
    },
    commands=_COMMANDS,
    indirect="dst data",
)
def activate2(
    call: Issue,
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
) -> Steps:
    """dst = op((data <op0> imm0) <op1> imm1) on ScalarE of trn3."""
    call.need(
        op1.name in _PAIRS.get(op0.name, ()),
        "op0 and op1 are nl.multiply with nl.add, nl.subtract or nl.bypass, or nl.add, nl.subtract "
        "or nl.bypass with nl.bypass",
        UnsupportedInstructionError,
    )
    yield {"function": op.name}
    values = apply_scalar(op1, apply_scalar(op0, f32(data), imm0, reverse0), imm1, reverse1)
    if op.name == "prelu":
        slope = scalar_value(relu_param, values.ndim)
        result = np.where(values >= 0, values, values * slope).astype(F32)
    else:
        result = _apply(call.machine, op, values, 1.0, None)
    put_with_sum(call, result)


@instruction(
    engines="vector",
    operands="src[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"max_value": FLOAT32, "reduce_init": FLOAT32},
    streams="src",
    dtypes={
        "dst": _EXP_RESULTS,
        "src": (_EXP_RESULTS | {"uint32"}) - {"tfloat32"},
        "reduce_res": VECTOR_FLOATS,
    },
    ranks={"dst": 4, "src": 4},
    commands="idle reset_reduce reduce load_reduce",
    first_value="reduce_init",
    indirect="dst src",
)
def exponential(
    call: Issue,
    dst: Any,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: Any = _IDLE,
    reduce_init: Any = 0.0,
) -> None:
    """dst = exp(src - max_value) on VectorE of trn3, with an optional running sum."""
    values = f32(src)
    put_with_sum(call, np.exp(values - scalar_value(max_value, values.ndim)))
