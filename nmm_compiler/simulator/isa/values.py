"""How instructions read, compute and write values: in float32, with a cast on the write.

PSUM also remembers which engine wrote each element, because a matmul adds to what a matmul wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import TensorShapeError
from nmm_compiler.simulator.isa.operators import Op
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import DType, cast, round_tfloat32
from nmm_compiler.simulator.tensors.indirect import gather, scatter
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor

F32 = np.float32


def f32(view: NkiTensor) -> np.ndarray:
    """Return the view's values as float32 (what engines compute with).

    A tfloat32 view may lie over float32 data: an engine reads ten bits of its mantissas.
    """
    values = raw(view)
    if view.dtype == "tfloat32":
        return round_tfloat32(values)
    return values if values.dtype == F32 else values.astype(F32)


def raw(view: NkiTensor) -> np.ndarray:
    """Return the view's values in their storage dtype."""
    if view.indirection is not None:
        return gather(view)[0]
    return view.load()


def put(dst: NkiTensor, values: np.ndarray) -> None:
    """Write computed values: cast to the dtype of dst, note that they are written."""
    if dst.indirection is not None:
        scatter(dst, values)
        return
    shape = dst.shape
    if values.shape != shape:
        values = values.reshape(shape)
    target = dst.array()
    dtype: DType = dst.dtype
    if dtype.kind == "float" and dtype != "tfloat32" and values.dtype == F32:
        np.copyto(target, values, casting="unsafe")
    else:
        target[...] = cast(values, dtype)
    if dst.storage.unwritten is not None:
        dst.mark_written()


def matmul_state(dst: NkiTensor) -> np.ndarray:
    """Return the view of what wrote each PSUM element: 0 nothing, 1 TensorE, 2 another engine."""
    storage = dst.storage
    item = dst.dtype.item_bytes
    storage.products = None
    if storage.matmul is None:
        size = storage.shape[0] * storage.bytes_per_partition
        storage.matmul_granule = min(item, storage.dtype.item_bytes)
        storage.matmul = np.zeros(size // storage.matmul_granule, np.uint8)
    elif item < storage.matmul_granule:
        storage.matmul = np.repeat(storage.matmul, storage.matmul_granule // item)
        storage.matmul_granule = item
    step = item // storage.matmul_granule
    return np.ndarray(
        dst.shape,
        np.uint8,
        storage.matmul,
        dst.offset * step,
        tuple([s * step for s in dst.strides]),
    )


def note_psum_write(dst: NkiTensor) -> None:
    """Note that another engine than TensorE wrote a PSUM region."""
    matmul_state(dst)[...] = 2


def write(dst: NkiTensor, values: np.ndarray) -> None:
    """Write results of a compute engine other than TensorE."""
    put(dst, values)
    if dst.storage.memory == "psum":
        note_psum_write(dst)


def scalar_value(value: Any, rank: int) -> Any:
    """Return a float32 scalar, or float32 [P, 1, ...] to broadcast over the free dimensions."""
    if value.__class__ is NkiTensor:
        return f32(value).reshape((value.shape[0],) + (1,) * (rank - 1))
    if isinstance(value, VirtualRegister):
        value = value.read()
    return F32(value)


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
