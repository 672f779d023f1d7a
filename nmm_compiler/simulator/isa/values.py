"""How instructions read, compute and write values: in float32, with a cast on the write.

PSUM also remembers which engine wrote each element, because a matmul adds to what a matmul wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.simulator.isa.operators import Op
from nmm_compiler.simulator.tensors.dtypes import cast, round_tfloat32
from nmm_compiler.simulator.tensors.indirect import gather, positions, scatter
from nmm_compiler.simulator.tensors.races import settled
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


def put(dst: NkiTensor, values: np.ndarray, *, exact: bool = False, product: bool = False) -> None:
    """Write values to dst: the one place where an instruction does.

    exact: they are stored elements of dst's dtype; else they are cast to it.
    product: TensorE writes them, so a later product may add to them.
    """
    dtype, storage = dst.dtype, dst.storage
    if dst.indirection is not None:
        scatter(dst, values)
    else:
        if values.shape != dst.shape:
            values = values.reshape(dst.shape)
        rounds = values.dtype == F32 and dtype.kind == "float" and dtype != "tfloat32"
        if not exact and (storage.shared or not rounds):
            values = cast(values, dtype)
        if storage.shared:
            values = settled(dst, values)
        dst.array()[...] = values
        if storage.unwritten is not None:
            dst.mark_written()
    if storage.memory == "psum":
        note_writer(dst, TENSOR if product else OTHER)


TENSOR, OTHER = 1, 2
"""Who wrote an element of PSUM; 0 is nobody."""


def writers_of(dst: NkiTensor) -> np.ndarray:
    """Return who wrote each element of a view of PSUM."""
    state, step = _writers(dst)
    if dst.indirection is not None:
        return np.asarray(state[positions(dst)[0] * step]).reshape(dst.shape)
    steps = tuple([s * step for s in dst.strides])
    return np.ndarray(dst.shape, np.uint8, state, dst.offset * step, steps)


def note_writer(dst: NkiTensor, who: int) -> None:
    """Note who wrote a view of PSUM."""
    dst.storage.products = None
    if dst.indirection is None:
        writers_of(dst)[...] = who
        return
    state, step = _writers(dst)
    state[positions(dst)[0] * step] = who


def _writers(dst: NkiTensor) -> tuple[np.ndarray, int]:
    """Return who wrote each granule of a storage, and how many granules an element of dst has."""
    storage, item = dst.storage, dst.dtype.item_bytes
    if storage.matmul is None:
        size = storage.shape[0] * storage.bytes_per_partition
        storage.matmul_granule = min(item, storage.dtype.item_bytes)
        storage.matmul = np.zeros(size // storage.matmul_granule, np.uint8)
    elif item < storage.matmul_granule:
        storage.matmul = np.repeat(storage.matmul, storage.matmul_granule // item)
        storage.matmul_granule = item
    return storage.matmul, item // storage.matmul_granule


def scalar_value(value: Any, rank: int) -> Any:
    """Return a float32 scalar, or float32 [P, 1, ...] to broadcast over the free dimensions."""
    if value.__class__ is NkiTensor:
        return f32(value).reshape((value.shape[0],) + (1,) * (rank - 1))
    if isinstance(value, VirtualRegister):
        value = value.read()
    return F32(value)


def apply_scalar(function: Op, data: np.ndarray, value: Any, reverse: bool) -> np.ndarray:
    """Return data <op> value (or reversed) in float32; unary and bypass ignore the value."""
    assert function.alu is not None
    if function.kind in ("unary", "bypass"):
        return np.asarray(function.alu(data), dtype=F32)
    operand_value = scalar_value(value, data.ndim)
    result = function.alu(operand_value, data) if reverse else function.alu(data, operand_value)
    return np.asarray(result, dtype=F32)
