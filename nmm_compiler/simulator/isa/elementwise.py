"""Elementwise instructions: copies, memset, tensor/scalar arithmetic, reciprocal, select."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import (
    EngineRuleError,
    TargetRuleError,
    TensorDtypeError,
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa.operands import (
    F32,
    ON_CHIP,
    SBUF,
    check_destination,
    check_hazard,
    choose_engine,
    engine,
    f32,
    no_psum_on_gpsimd,
    operand,
    put,
    raw,
    same_elements,
    scalar_operand,
    scalar_value,
)
from nmm_compiler.simulator.isa.operators import Op, alu
from nmm_compiler.simulator.isa.tensor_engine import note_psum_write
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.tensors.dtypes import cast
from nmm_compiler.simulator.tensors.indirect import index_access
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Access, Instruction

_UNKNOWN = engine.unknown
_ATTRIBUTES: dict[tuple[Any, ...], dict[str, Any]] = {}
_INT32 = ("int32", "uint32")


def attributes(**values: Any) -> dict[str, Any]:
    """Return a shared dictionary of attributes (readers must not change it)."""
    key = tuple(values.items())
    known = _ATTRIBUTES.get(key)
    if known is None:
        known = _ATTRIBUTES[key] = values
    return known


NO_ATTRIBUTES: dict[str, Any] = {}


def write(machine: Machine, dst: NkiTensor, values: np.ndarray) -> None:
    """Write results of a compute engine other than TensorE."""
    put(dst, values)
    if dst.storage.memory == "psum":
        note_psum_write(dst)


def extra_reads(*views: NkiTensor) -> tuple[Access, ...]:
    """Return the Access of the index tensors of indirect views."""
    found: tuple[Access, ...] = ()
    for view in views:
        if view.indirection is not None:
            found += index_access(view)
    return found


def tensor_copy(
    dst: Any, src: Any, engine: Any = _UNKNOWN, name: str | None = None, dtype: Any = None
) -> Instruction:
    """dst = src on chip; bit-accurate for equal dtypes, else through float32.

    dtype: of NKI 0.2, without effect.
    """
    machine = current()
    if dtype is not None:
        machine.warn("nisa.tensor_copy(dtype=...) is of NKI 0.2: the dtype of dst decides")
    writes = operand(machine, "tensor_copy", "dst", dst, ON_CHIP)
    reads = operand(machine, "tensor_copy", "src", src, ON_CHIP)
    if dst.shape != src.shape:
        same_elements(machine, "tensor_copy", dst, src)
    check_destination(machine, "tensor_copy", dst)
    if dst.storage is src.storage:
        check_hazard(machine, "tensor_copy", dst, src)
    chosen = choose_engine(machine, "tensor_copy", engine, ("vector", "scalar", "gpsimd"), "vector")
    if chosen == "gpsimd":
        no_psum_on_gpsimd(machine, "tensor_copy", chosen, dst, src)
    elif chosen == "scalar" and not machine.target.scalar_tensor_copy:
        machine.rule(
            TargetRuleError,
            f"nisa.tensor_copy on ScalarE needs trn2 or newer, the target is "
            f"{machine.target.name}; use nisa.activation(op=nl.copy)",
        )
    both = (reads,)
    if dst.indirection is not None or src.indirection is not None:
        both = (reads, *extra_reads(src, dst))  # type: ignore[assignment]
    instruction = machine.record("tensor_copy", chosen, both, (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        if dst.dtype == src.dtype:
            values = raw(src)
            if dst.indirection is None:
                dst.array()[...] = values if values.shape == dst.shape \
                    else values.reshape(dst.shape)  # fmt: skip
                if dst.storage.unwritten is not None:
                    dst.mark_written()
                if writes.memory == "psum":
                    note_psum_write(dst)
                return instruction
        else:
            values = f32(src)
        write(machine, dst, values)
    return instruction


def _check_constant(machine: Machine, op: str, role: str, value: Any, dst: NkiTensor) -> None:
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
    raise machine.error(TensorDtypeError, f"nisa.{op}: {problem}")


def memset(dst: Any, value: Any, engine: Any = _UNKNOWN, name: str | None = None) -> Instruction:
    """Fill dst with a compile-time constant."""
    machine = current()
    writes = operand(machine, "memset", "dst", dst, ON_CHIP)
    check_destination(machine, "memset", dst)
    chosen = choose_engine(machine, "memset", engine, ("vector", "gpsimd"), "vector")
    no_psum_on_gpsimd(machine, "memset", chosen, dst)
    _check_constant(machine, "memset", "value", value, dst)
    dtype = dst.dtype
    instruction = machine.record("memset", chosen, (), (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        target = dst.array()
        target[...] = cast(np.asarray(F32(value)), dtype) if dtype.kind == "float" else int(value)
        if dst.storage.unwritten is not None:
            dst.mark_written()
        if writes.memory == "psum":
            note_psum_write(dst)
    return instruction


def _check_bitvec(machine: Machine, op: str, *views: Any) -> None:
    for view in views:
        if view.__class__ is NkiTensor and view.dtype.kind == "float":
            raise machine.error(
                TensorDtypeError,
                f"nisa.{op}: bit operators need integer tensors, {view.name!r} is {view.dtype}; "
                "use .view(dtype) for its bits",
            )


def _exact(machine: Machine, function: Any, a: Any, b: Any, dtype: Any) -> np.ndarray:
    """Return native 32-bit integer arithmetic (GpSimd), wrapping as the hardware's registers."""
    wide = function(a.astype(np.int64), b.astype(np.int64))
    if wide.dtype.kind == "f":
        return np.asarray(wide)
    bits = np.asarray(wide).astype(np.int64) & 0xFFFFFFFF
    return bits.astype(np.uint32).view(dtype.numpy)


def tensor_tensor(
    dst: Any,
    data1: Any,
    data2: Any,
    op: Any,
    engine: Any = _UNKNOWN,
    name: str | None = None,
) -> Instruction:
    """dst = data1 <op> data2, elementwise, in float32 (int32 exactly on GpSimd)."""
    machine = current()
    function = alu(machine, op, "tensor_tensor")
    writes = operand(machine, "tensor_tensor", "dst", dst, ON_CHIP)
    first = operand(machine, "tensor_tensor", "data1", data1, ON_CHIP)
    second = operand(machine, "tensor_tensor", "data2", data2, ON_CHIP)
    if data1.shape != dst.shape:
        same_elements(machine, "tensor_tensor", dst, data1)
    if data2.shape != dst.shape:
        same_elements(machine, "tensor_tensor", dst, data2)
    if "unary" in function.kind:
        raise machine.error(
            UnsupportedInstructionError,
            f"nisa.tensor_tensor: nl.{function.name} takes one operand; use nisa.tensor_scalar",
        )
    if first.memory == "psum" and second.memory == "psum":
        raise machine.error(
            EngineRuleError,
            f"nisa.tensor_tensor: data1 {data1.name!r} and data2 {data2.name!r} are both in PSUM; "
            "copy one to SBUF first",
        )
    check_destination(machine, "tensor_tensor", dst)
    if dst.storage is data1.storage:
        check_hazard(machine, "tensor_tensor", dst, data1)
    if dst.storage is data2.storage:
        check_hazard(machine, "tensor_tensor", dst, data2)
    in_psum = "psum" in (first.memory, second.memory, writes.memory)
    bitvec = function.kind == "bitvec"
    integers = (
        not bitvec and dst.dtype in _INT32 and data1.dtype in _INT32 and data2.dtype in _INT32
    )
    power = function.name == "power"
    default = "gpsimd" if power or (integers and not in_psum) else "vector"
    chosen = choose_engine(machine, "tensor_tensor", engine, ("vector", "gpsimd"), default)
    if power:
        chosen = "gpsimd"
    if chosen == "gpsimd":
        no_psum_on_gpsimd(machine, "tensor_tensor", chosen, dst, data1, data2)
    if bitvec:
        _check_bitvec(machine, "tensor_tensor", dst, data1, data2)
    instruction = machine.record(
        "tensor_tensor", chosen, (first, second, *extra_reads(data1, dst)), (writes,),
        attributes(function=function.name), name,
    )  # fmt: skip
    if machine.data:
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
        write(machine, dst, result)
    return instruction


def apply_scalar(
    machine: Machine, function: Op, data: np.ndarray, value: Any, reverse: bool
) -> np.ndarray:
    """Return data <op> value (or reversed) in float32; unary and bypass ignore the value."""
    assert function.alu is not None
    if function.kind in ("unary", "bypass"):
        return np.asarray(function.alu(data), dtype=F32)
    if value is None:
        raise machine.error(
            TensorShapeError, f"nl.{function.name} needs an operand and none was given"
        )
    operand_value = scalar_value(value, data.ndim)
    result = function.alu(operand_value, data) if reverse else function.alu(data, operand_value)
    return np.asarray(result, dtype=F32)


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


def tensor_scalar(
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
) -> Instruction:
    """dst = (data <op0> operand0) <op1> operand1; operands are numbers or [P, 1] tensors."""
    machine = current()
    first = alu(machine, op0, "tensor_scalar")
    second = None if op1 is None else alu(machine, op1, "tensor_scalar")
    writes = operand(machine, "tensor_scalar", "dst", dst, ON_CHIP)
    reads = [operand(machine, "tensor_scalar", "data", data, ON_CHIP)]
    if dst.shape != data.shape:
        same_elements(machine, "tensor_scalar", dst, data)
    check_destination(machine, "tensor_scalar", dst)
    if dst.storage is data.storage:
        check_hazard(machine, "tensor_scalar", dst, data)
    bitvec = "bitvec" in first.kind
    if second is not None and bitvec != ("bitvec" in second.kind) and second.kind != "bypass":
        raise machine.error(
            UnsupportedInstructionError,
            f"nisa.tensor_scalar: op0 nl.{first.name} and op1 nl.{second.name}; both must be "
            "arithmetic or both bit operators",
        )
    partitions = data.shape[0]
    for role, value in (("operand0", operand0), ("operand1", operand1)):
        if value is None:
            continue
        is_tensor = scalar_operand(machine, "tensor_scalar", role, value, partitions, reads)
        if is_tensor and not bitvec and value.dtype not in ("float32", "tfloat32", *_INT32):
            machine.rule(
                TensorDtypeError,
                f"nisa.tensor_scalar: {role} {value.name!r} is {value.dtype}; arithmetic "
                "operands must be float32",
            )
    default = "gpsimd" if first.name == "rsqrt" or first.name == "power" else "vector"
    chosen = choose_engine(
        machine, "tensor_scalar", engine, ("vector", "scalar", "gpsimd"), default
    )
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
        no_psum_on_gpsimd(machine, "tensor_scalar", chosen, dst, data)
    elif chosen == "gpsimd" and (writes.memory == "psum" or reads[0].memory == "psum"):
        chosen = "vector"
    if bitvec:
        if chosen != "vector":
            raise machine.error(
                EngineRuleError, "nisa.tensor_scalar: bit operators run on the vector engine"
            )
        _check_bitvec(machine, "tensor_scalar", dst, data, operand0, operand1)
    if data.indirection is not None or dst.indirection is not None:
        reads += extra_reads(data, dst)
    instruction = machine.record(
        "tensor_scalar", chosen, tuple(reads), (writes,),
        attributes(function=first.name, function1=second.name if second else ""), name,
    )  # fmt: skip
    if machine.data:
        if bitvec:
            result = _apply_bits(first, raw(data), operand0, reverse0)
            if second is not None and second.kind != "bypass":
                result = _apply_bits(second, result, operand1, reverse1)
        else:
            result = apply_scalar(machine, first, f32(data), operand0, reverse0)
            if second is not None:
                result = apply_scalar(machine, second, result, operand1, reverse1)
        write(machine, dst, result)
    return instruction


def scalar_tensor_tensor(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> Instruction:
    """dst = (data <op0> operand0) <op1> operand1, where operand1 is a tensor like data."""
    machine = current()
    op = "scalar_tensor_tensor"
    first, second = alu(machine, op0, op), alu(machine, op1, op)
    writes = operand(machine, op, "dst", dst, ON_CHIP)
    reads = [operand(machine, op, "data", data, ON_CHIP)]
    other = operand(machine, op, "operand1", operand1, ON_CHIP)
    same_elements(machine, op, dst, data)
    same_elements(machine, op, dst, operand1)
    scalar_operand(machine, op, "operand0", operand0, data.shape[0], reads)
    reads.append(other)
    if "bitvec" in first.kind or "bitvec" in second.kind:
        raise machine.error(
            UnsupportedInstructionError, f"nisa.{op}: bit operators are not supported"
        )
    if reads[0].memory == "psum" and other.memory == "psum":
        raise machine.error(
            EngineRuleError,
            f"nisa.{op}: data {data.name!r} and operand1 {operand1.name!r} are both in PSUM; "
            "copy one to SBUF first",
        )
    check_destination(machine, op, dst)
    check_hazard(machine, op, dst, data)
    check_hazard(machine, op, dst, operand1)
    instruction = machine.record(
        op, "vector", tuple(reads), (writes,),
        attributes(function=first.name, function1=second.name), name,
    )  # fmt: skip
    if machine.data:
        left = apply_scalar(machine, first, f32(data), operand0, reverse0).reshape(dst.shape)
        right = f32(operand1).reshape(dst.shape)
        assert second.alu is not None
        result = second.alu(right, left) if reverse1 else second.alu(left, right)
        write(machine, dst, np.asarray(result, dtype=F32))
    return instruction


def reciprocal(dst: Any, data: Any, name: str | None = None) -> Instruction:
    """dst = 1 / data on VectorE."""
    machine = current()
    writes = operand(machine, "reciprocal", "dst", dst, ON_CHIP)
    reads = operand(machine, "reciprocal", "data", data, ON_CHIP)
    same_elements(machine, "reciprocal", dst, data)
    check_destination(machine, "reciprocal", dst)
    check_hazard(machine, "reciprocal", dst, data)
    instruction = machine.record("reciprocal", "vector", (reads,), (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        write(machine, dst, F32(1.0) / f32(data))
    return instruction


def tensor_copy_predicated(
    dst: Any, src: Any, predicate: Any, reverse_pred: bool = False, name: str | None = None
) -> Instruction:
    """dst = src where predicate is nonzero; elsewhere dst stays."""
    machine = current()
    op = "tensor_copy_predicated"
    writes = operand(machine, op, "dst", dst, ON_CHIP)
    reads = [operand(machine, op, "predicate", predicate, ON_CHIP)]
    same_elements(machine, op, dst, predicate)
    if src.__class__ is NkiTensor:
        reads.append(operand(machine, op, "src", src, ON_CHIP))
        same_elements(machine, op, dst, src)
        if src.dtype != dst.dtype:
            raise machine.error(
                TensorDtypeError,
                f"nisa.{op}: src is {src.dtype}, dst {dst.dtype}; they must be the same",
            )
        if reads[0].memory == "psum" and reads[1].memory == "psum":
            raise machine.error(
                EngineRuleError, f"nisa.{op}: src and predicate are both in PSUM; copy one first"
            )
        check_hazard(machine, op, dst, src)
    else:
        _check_constant(machine, op, "src", src, dst)
    if predicate.dtype not in ("uint8", "uint16", "uint32", "bool"):
        raise machine.error(
            TensorDtypeError,
            f"nisa.{op}: predicate is {predicate.dtype}; use uint8, uint16 or uint32",
        )
    check_destination(machine, op, dst)
    instruction = machine.record(op, "vector", tuple(reads), (writes,), NO_ATTRIBUTES, name)
    if machine.data:
        chosen = raw(predicate).reshape(dst.shape) != 0
        if reverse_pred:
            chosen = ~chosen
        target = dst.array()
        if src.__class__ is NkiTensor:
            target[chosen] = raw(src).reshape(dst.shape)[chosen]
        else:
            target[chosen] = F32(src) if dst.dtype.kind == "float" else int(src)
        mask = dst.unwritten_view()
        if mask is not None:
            mask[chosen] = False
            storage = dst.storage
            assert storage.unwritten is not None
            storage.missing = int(np.count_nonzero(storage.unwritten))
            if storage.missing == 0:
                storage.unwritten = None
        if writes.memory == "psum":
            note_psum_write(dst)
    return instruction


def require_sbuf(machine: Machine, op: str, **views: Any) -> dict[str, Access]:
    """Check that every given tensor is in SBUF (GpSimd reaches nothing else)."""
    return {role: operand(machine, op, role, view, SBUF) for role, view in views.items()}
