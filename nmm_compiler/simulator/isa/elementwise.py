"""Elementwise instructions: copies, memset, tensor/scalar arithmetic, reciprocal, select."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import (
    EngineRuleError,
    TargetRuleError,
    TensorDtypeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa.enums import (
    engine,
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
    check_conversion,
    check_hazard,
    check_pair,
    no_psum_on_gpsimd,
    require_form,
    same_elements,
)
from nmm_compiler.simulator.isa.operators import Op, alu
from nmm_compiler.simulator.isa.values import (
    F32,
    apply_scalar,
    f32,
    note_psum_write,
    raw,
    write,
)
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, INTEGERS, cast
from nmm_compiler.simulator.tensors.indirect import positions, store_at
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_UNKNOWN = engine.unknown
_UNSET = attributes(unset=True)  # the compiler may choose another engine
_NONZERO = attributes(nonzero=True)
_INT32 = ("int32", "uint32")
_ARITHMETIC = frozenset({"float32", "tfloat32", *_INT32})
_ALL_ENGINES = ("vector", "scalar", "gpsimd")


@instruction(
    engines=("vector", "scalar", "gpsimd"),
    writes={"dst": ON_CHIP},
    reads={"src": ON_CHIP},
    like_dst=("src",),
    streams=("src",),
    indirect={"dst": ("vector", "scalar"), "src": ("vector", "scalar")},
    alike=True,
)
def tensor_copy(
    call: Call,
    dst: Any,
    src: Any,
    engine: Any = _UNKNOWN,
    name: str | None = None,
) -> Steps:
    """dst = src on chip; bit-accurate for equal dtypes, else through float32."""
    machine = call.machine
    chosen = call.choose()
    if dst.dtype != src.dtype:
        check_conversion(machine, "tensor_copy", dst, src)
    if chosen == "gpsimd":
        no_psum_on_gpsimd(machine, "tensor_copy", chosen, dst, src)
    elif chosen == "scalar" and not machine.target.scalar_tensor_copy:
        machine.rule(
            TargetRuleError,
            f"nisa.tensor_copy on ScalarE needs trn2 or newer, the target is "
            f"{machine.target.name}; use nisa.activation(op=nl.copy)",
        )
    yield _UNSET if engine is _UNKNOWN else NO_ATTRIBUTES
    if dst.dtype == src.dtype:
        values = raw(src)
        if dst.indirection is None:
            dst.array()[...] = values if values.shape == dst.shape \
                else values.reshape(dst.shape)  # fmt: skip
            if dst.storage.unwritten is not None:
                dst.mark_written()
            if dst.memory == "psum":
                note_psum_write(dst)
            return
    else:
        values = f32(src)
    write(dst, values)


def _check_constant(call: Call, role: str, value: Any, dst: NkiTensor) -> None:
    """Raise TensorDtypeError unless dst's type holds the compile-time number."""
    dtype = dst.dtype
    if not isinstance(value, (int, float, np.number, np.bool_)):
        problem = f"{role} is {type(value).__name__}; pass a compile-time number"
    elif dtype.kind == "packed" and value != 0:
        problem = f"{dtype} takes only {role}=0, got {value!r}"
    elif dtype.kind == "int" and not dtype.low <= value <= dtype.high:
        problem = f"{role} {value!r} does not fit {dtype} ({dtype.low}..{dtype.high})"
    elif dtype.kind == "int" and value != int(value):
        problem = f"{role} {value!r} into {dtype} tensor {dst.name!r}; pass an integer"
    else:
        return
    raise call.error(TensorDtypeError, problem)


@instruction(engines=("vector", "gpsimd"), writes={"dst": ON_CHIP}, alike=True)
def memset(
    call: Call, dst: Any, value: Any, engine: Any = _UNKNOWN, name: str | None = None
) -> Steps:
    """Fill dst with a compile-time constant."""
    _check_constant(call, "value", value, dst)
    dtype = dst.dtype
    yield _NONZERO if value != 0 else NO_ATTRIBUTES
    target = dst.array()
    target[...] = cast(np.asarray(F32(value)), dtype) if dtype.kind == "float" else int(value)
    if dst.storage.unwritten is not None:
        dst.mark_written()
    if dst.memory == "psum":
        note_psum_write(dst)


def check_operators(machine: Machine, op: str, *functions: Op | None) -> None:
    """Check that the target's ALU has the operators."""
    for function in functions:
        if function is not None and function.name in ("abs_max", "abs_min", "square", "relu"):
            require_form(machine, "nl.abs_max, nl.abs_min, nl.square, nl.relu on the ALU")


def _check_bitvec(call: Call, chosen: str, *operands: Any) -> None:
    """Check the engine and the dtypes of a bit operator."""
    if chosen != "vector":
        raise call.error(EngineRuleError, f"bit operators run on the vector engine, not {chosen}")
    for value in operands:
        if value.__class__ is NkiTensor:
            integer, shown = value.dtype.kind in ("int", "bool"), f"{value.name!r} is {value.dtype}"
        else:
            integer = not isinstance(value, (float, np.floating)) or float(value).is_integer()
            shown = f"an operand is {value!r}"
        if not integer:
            raise call.error(
                TensorDtypeError,
                f"bit operators need integers, {shown}; use .view(dtype) for a tensor's bits",
            )


def check_unary(call: Call, role: str, function: Op, value: Any) -> None:
    """Check that a unary operator gets no operand and a binary one does."""
    if "unary" in function.kind or function.kind == "bypass":
        unused = value is None or (value.__class__ is not NkiTensor and value == 0)
        if not unused and function.kind != "bypass":
            raise call.error(
                UnsupportedInstructionError,
                f"nl.{function.name} takes no operand; {role} must be None or 0",
            )
    elif value is None:
        raise call.error(
            UnsupportedInstructionError, f"nl.{function.name} needs {role}, which is None"
        )


def _exact(machine: Machine, function: Any, a: Any, b: Any, dtype: Any) -> np.ndarray:
    """Return native 32-bit integer arithmetic (GpSimd), wrapping as the hardware's registers."""
    wide = function(a.astype(np.int64), b.astype(np.int64))
    if wide.dtype.kind == "f":
        return np.asarray(wide)
    bits = np.asarray(wide).astype(np.int64) & 0xFFFFFFFF
    return bits.astype(np.uint32).view(dtype.numpy)


@instruction(
    engines=("vector", "gpsimd"),
    writes={"dst": ON_CHIP},
    reads={"data1": ON_CHIP, "data2": ON_CHIP},
    like_dst=("data1", "data2"),
    streams=("data1", "data2"),
    pair=("data1", "data2"),
    indirect={"dst": ("vector", "gpsimd"), "data1": ("vector", "gpsimd")},
    alike=True,
)
def tensor_tensor(
    call: Call,
    dst: Any,
    data1: Any,
    data2: Any,
    op: Any,
    engine: Any = _UNKNOWN,
    name: str | None = None,
) -> Steps:
    """dst = data1 <op> data2, elementwise, in float32 (int32 exactly on GpSimd)."""
    machine = call.machine
    function = alu(machine, op, "tensor_tensor")
    if "unary" in function.kind:
        raise call.error(
            UnsupportedInstructionError,
            f"nl.{function.name} takes one operand; use nisa.tensor_scalar",
        )
    in_psum = [access.memory == "psum" for access in (*call.reads, *call.writes)]
    check_operators(machine, "tensor_tensor", function)
    bitvec = function.kind == "bitvec"
    integers = (
        not bitvec and dst.dtype in _INT32 and data1.dtype in _INT32 and data2.dtype in _INT32
    )
    power = function.name == "power"
    default = "gpsimd" if power or (integers and not any(in_psum)) else "vector"
    chosen = call.choose(default)
    if power and chosen != "gpsimd":
        raise call.error(EngineRuleError, "nl.power runs on GpSimd; leave engine unset")
    if chosen == "gpsimd":
        no_psum_on_gpsimd(machine, "tensor_tensor", chosen, dst, data1, data2)
    if bitvec:
        _check_bitvec(call, chosen, dst, data1, data2)
    yield attributes(function=function.name)
    shape = dst.shape
    assert function.alu is not None
    if bitvec or (integers and chosen == "gpsimd"):
        a, b = raw(data1), raw(data2)
        a = a if a.shape == shape else a.reshape(shape)
        b = b if b.shape == shape else b.reshape(shape)
        if bitvec:
            result = np.asarray(function.alu(a, b.astype(a.dtype)))
        else:
            result = _exact(machine, function.alu, a, b, dst.dtype)
    else:
        a, b = f32(data1), f32(data2)
        a = a if a.shape == shape else a.reshape(shape)
        b = b if b.shape == shape else b.reshape(shape)
        result = function.alu(a, b)
    write(dst, result)


def _apply_bits(function: Op, data: np.ndarray, value: Any, reverse: bool) -> np.ndarray:
    assert function.alu is not None
    if "unary" in function.kind:
        return np.asarray(function.alu(data))
    if value.__class__ is NkiTensor:
        other = raw(value).reshape((value.shape[0],) + (1,) * (data.ndim - 1))
    else:
        other = np.asarray(int(value) & ((1 << (8 * data.dtype.itemsize)) - 1), np.uint64)
    other = other.astype(f"u{data.dtype.itemsize}").view(data.dtype) if other.dtype.kind in "iu" \
        else other  # fmt: skip
    other = np.broadcast_to(other, data.shape)
    return np.asarray(function.alu(other, data) if reverse else function.alu(data, other))


@instruction(
    engines=("vector", "scalar", "gpsimd"),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP},
    like_dst=("data",),
    streams=("data",),
    indirect={"dst": _ALL_ENGINES, "data": _ALL_ENGINES},
    alike=True,
)
def tensor_scalar(
    call: Call,
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = _UNKNOWN,
    name: str | None = None,
) -> Steps:
    """dst = (data <op0> operand0) <op1> operand1; operands are numbers or [P, 1] tensors."""
    machine = call.machine
    first = alu(machine, op0, "tensor_scalar")
    second = None if op1 is None else alu(machine, op1, "tensor_scalar")
    bitvec = "bitvec" in first.kind
    if second is not None and bitvec != ("bitvec" in second.kind) and second.kind != "bypass":
        raise call.error(
            UnsupportedInstructionError,
            f"op0 nl.{first.name} and op1 nl.{second.name}; both must be "
            "arithmetic or both bit operators",
        )
    partitions = data.shape[0]
    vectors = INTEGERS if bitvec else \
        _ARITHMETIC if data.dtype in _INT32 else FLOAT32  # fmt: skip
    for role, function, value in (("operand0", first, operand0), ("operand1", second, operand1)):
        if value is not None:
            call.scalar(role, value, partitions, vectors)
        if function is not None:
            check_unary(call, role, function, value)
        elif value is not None:
            raise call.error(UnsupportedInstructionError, f"{role}={value!r} without op1")
    check_operators(machine, "tensor_scalar", first, second)
    default = "gpsimd" if first.name == "rsqrt" or first.name == "power" else "vector"
    chosen = call.choose(default)
    if chosen == "scalar":
        pair = (first.name, second.name if second else None)
        allowed = (("multiply", "add"), ("multiply", None), ("add", None))
        target = machine.target
        if not (target.scalar_tensor_scalar and (target.scalar_all_operators or pair in allowed)):
            machine.rule(
                EngineRuleError,
                f"nisa.tensor_scalar on ScalarE: operators {pair} on {machine.target.name}; it "
                "takes (multiply, add), multiply or add, on trn2 or newer",
            )
    elif chosen == "gpsimd" and engine is not _UNKNOWN:
        if first.name != "rsqrt":
            machine.rule(
                EngineRuleError,
                f"nisa.tensor_scalar: nl.{first.name} on GpSimd, which takes nl.rsqrt only; leave "
                "engine unset",
            )
        no_psum_on_gpsimd(machine, "tensor_scalar", chosen, dst, data)
    elif chosen == "gpsimd" and "psum" in (dst.memory, data.memory):
        chosen = call.engine = "vector"
    if bitvec:
        _check_bitvec(call, chosen, dst, data, *(v for v in (operand0, operand1) if v is not None))
    yield attributes(
        function=first.name, function1=second.name if second else "", unset=engine is _UNKNOWN
    )
    if bitvec:
        result = _apply_bits(first, raw(data), operand0, reverse0)
        if second is not None and second.kind != "bypass":
            result = _apply_bits(second, result, operand1, reverse1)
    else:
        result = apply_scalar(machine, first, f32(data), operand0, reverse0)
        if second is not None:
            result = apply_scalar(machine, second, result, operand1, reverse1)
    write(dst, result)


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP, "operand1": ON_CHIP},
    like_dst=("data", "operand1"),
    streams=("data", "operand1"),
    pair=("data", "operand1"),
    alike=True,
)
def scalar_tensor_tensor(
    call: Call,
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Steps:
    """dst = (data <op0> operand0) <op1> operand1, where operand1 is a tensor like data."""
    machine = call.machine
    op = "scalar_tensor_tensor"
    first, second = alu(machine, op0, op), alu(machine, op1, op)
    tensor = call.reads.pop()
    if operand0 is not None:
        call.scalar("operand0", operand0, data.shape[0])
    call.reads.append(tensor)
    if "bitvec" in first.kind or "bitvec" in second.kind:
        raise call.error(UnsupportedInstructionError, "bit operators are not supported")
    check_unary(call, "operand0", first, operand0)
    if second.kind != "arith":
        raise call.error(
            UnsupportedInstructionError, f"op1 nl.{second.name}; it must be binary, arithmetic"
        )
    check_operators(machine, op, first, second)
    yield attributes(function=first.name, function1=second.name)
    left = apply_scalar(machine, first, f32(data), operand0, reverse0).reshape(dst.shape)
    right = f32(operand1).reshape(dst.shape)
    assert second.alu is not None
    result = second.alu(right, left) if reverse1 else second.alu(left, right)
    write(dst, np.asarray(result, dtype=F32))


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP},
    like_dst=("data",),
    streams=("data",),
    alike=True,
)
def reciprocal(call: Call, dst: Any, data: Any, name: str | None = None) -> Steps:
    """dst = 1 / data on VectorE."""
    yield NO_ATTRIBUTES
    write(dst, F32(1.0) / f32(data))


@instruction(
    engines=("vector",),
    writes={"dst": ON_CHIP},
    reads={"predicate": ON_CHIP},
    like_dst=("predicate",),
    streams=("predicate",),
    dtypes={"predicate": frozenset({"uint8", "uint16", "uint32", "bool"})},
    indirect={"dst": ("vector",), "predicate": ("vector",)},
)
def tensor_copy_predicated(
    call: Call,
    dst: Any,
    src: Any,
    predicate: Any,
    reverse_pred: bool = False,
    name: str | None = None,
) -> Steps:
    """dst = src where predicate is nonzero; elsewhere dst stays."""
    machine = call.machine
    op = "tensor_copy_predicated"
    if src.__class__ is NkiTensor:
        call.read("src", src)
        same_elements(machine, op, dst, src)
        if src.dtype != dst.dtype:
            raise call.error(
                TensorDtypeError,
                f"src is {src.dtype}, dst {dst.dtype}; they must be the same",
            )
        check_pair(machine, op, ("src", "predicate"), src, predicate)
        check_hazard(call, dst, src, True)
    else:
        _check_constant(call, "src", src, dst)
    yield NO_ATTRIBUTES
    chosen = raw(predicate).reshape(dst.shape) != 0
    if reverse_pred:
        chosen = ~chosen
    machine.kept = chosen
    if src.__class__ is NkiTensor:
        values = raw(src).reshape(dst.shape)[chosen]
    else:
        values = F32(src) if dst.dtype.kind == "float" else int(src)
    store_at(dst, positions(dst)[0].reshape(dst.shape)[chosen], values)
    if dst.memory == "psum":
        note_psum_write(dst)
