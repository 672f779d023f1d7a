"""Indirect views: rows, offsets or columns that a tensor in SBUF chooses at run time.

Gather and scatter by element positions in the flat storage. An index outside the tensor is an
error, or skips its row with `oob_mode.skip`. In timing mode there are no indices and only the
regions are recorded.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, OperandError, OutOfBoundsError
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.dtypes import cast
from nmm_compiler.simulator.tensors.marks import FILL, note_unwritten
from nmm_compiler.simulator.tensors.races import note_read, settled
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def _scalar_index(index: Any) -> int:
    if isinstance(index, VirtualRegister):
        return index.read()
    values = index.load("a runtime address").reshape(-1)
    if values.size != 1:
        raise current().error(
            OperandError, f"a scalar offset tensor has {values.size} elements; it must have 1"
        )
    return int(values[0])


def positions(view: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions [rows, elements], valid [rows]) of a view in its storage.

    Positions are elements of the view's dtype from the start of the storage. Rows that leave
    the storage are not valid and their positions are 0.
    """
    indirection = view.indirection
    rows = view.shape[0]
    # of one row (dimensions after the first), without the offset
    lines = (np.arange(n) * s for n, s in zip(view.shape[1:], view.strides[1:], strict=True))
    inner = functools.reduce(np.add.outer, lines, np.zeros((), np.int64)).reshape(-1)
    if indirection is None:
        starts = view.offset + np.arange(rows) * view.strides[0]
        return starts[:, None] + inner[None, :], np.ones(rows, np.bool_)
    storage = view.storage
    total = storage.raw.size // view.dtype.item_bytes
    if indirection.kind == "columns":
        return _column_positions(view), np.ones(rows, np.bool_)
    if indirection.kind == "scalar":
        shift = _scalar_index(indirection.index) * indirection.step
        starts = view.offset + shift + np.arange(rows) * view.strides[0]
    else:
        index = indirection.index.load("a row index")
        flat = index.reshape(-1) if index.shape[-1] == 1 else index.reshape(index.shape[0], -1).T
        flat = flat.reshape(-1)[:rows].astype(np.int64)
        if flat.size < rows:
            raise current().error(
                OperandError,
                f"vector_offset has {flat.size} indices, the view of {view.name!r} {view.shape} "
                f"needs {rows}",
            )
        starts = view.offset + flat * indirection.step
    low = starts + (inner.min() if inner.size else 0)
    high = starts + (inner.max() if inner.size else 0)
    valid = (low >= 0) & (high < total)
    if indirection.kind == "scalar" and storage.memory != "hbm":
        row = storage.bytes_per_partition // view.dtype.item_bytes
        valid &= (low // row) == (high // row)
    table = starts[:, None] + inner[None, :]
    table[~valid] = 0
    return table, valid


def _column_positions(view: NkiTensor) -> np.ndarray:
    """Return positions of tensor indirection: offset i is index[i % 16, i // 16] of each group.

    Groups of 16 partitions share their offsets.
    """
    indirection = view.indirection
    index = indirection.index.load("an index").astype(np.int64)
    index = index.reshape(index.shape[0], -1)
    group = 16
    count = view.shape[1]
    table = np.zeros((view.shape[0], count), np.int64)
    for start in range(0, view.shape[0], group):
        part = index[start : start + group]
        offsets = part.T.reshape(-1)[:count]
        if offsets.size and (offsets.min() < 0 or offsets.max() >= indirection.column_count):
            raise current().error(
                OutOfBoundsError,
                f"tensor indirection into {view.name!r}: offset {int(offsets.max())} of "
                f"{indirection.column_count} elements",
            )
        partitions = np.arange(start, min(start + group, view.shape[0]))
        table[partitions] = (
            view.offset + partitions[:, None] * view.strides[0] + offsets * indirection.step
        )
    return table


def _check_valid(view: NkiTensor, valid: np.ndarray, skip: bool) -> None:
    if skip or valid.all():
        return
    indirection = view.indirection
    row = int(np.argmin(valid))
    shown: Any = ""
    if isinstance(indirection.index, NkiTensor):
        values = indirection.index.array().reshape(-1)
        shown = f" {int(values[min(row, values.size - 1)])}"
    raise current().error(
        OutOfBoundsError,
        f"runtime index{shown} of row {row} leaves tensor {view.name!r} {view.storage.shape}; "
        "keep indices inside, or pass oob_mode=nisa.oob_mode.skip",
    )


def gather(view: NkiTensor, skip: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (values in the view's shape, valid rows) that a view reads; None: all are valid."""
    if view.indirection is None:
        return view.load(), None
    table, valid = positions(view)
    _check_valid(view, valid, skip)
    storage = view.storage
    if storage.shared:
        note_read(view, table[valid])
    values = storage.raw.view(view.dtype.numpy)[table].reshape(view.shape)
    if storage.unwritten is not None:
        marks = storage.unwritten
        chosen = marks.values[marks.places(view, table)].any(axis=-1)
        mask = np.asarray(chosen & valid[:, None]).reshape(view.shape)
        if mask.any():
            note_unwritten(view, mask)
            values[mask] = FILL.get(view.dtype.kind, FILL["int"])
    return values, None if valid.all() else valid


def _check_unique(view: NkiTensor, table: np.ndarray, stored: np.ndarray, adds: bool) -> None:
    """Refuse rows that write different values to one place: their order is not defined."""
    if view.indirection.kind != "vector" or len(table) < 2:
        return
    _, first, inverse = np.unique(table[:, 0], return_index=True, return_inverse=True)
    if len(first) == len(table):
        return
    twin = first[inverse.reshape(-1)]
    bits = np.ascontiguousarray(stored).view(np.uint8).reshape(len(table), -1)
    clash = twin != np.arange(len(table)) if adds else (bits != bits[twin]).any(axis=1)
    if clash.any():
        row = int(np.argmax(clash))
        current().rule(
            HazardError,
            f"a scatter into {view.name!r} {view.storage.shape} writes rows {int(twin[row])} and "
            f"{row} to the same place; which one stays is undefined, make the indices unique",
        )


def scatter(view: NkiTensor, values: np.ndarray, skip: bool = False, adds: bool = False) -> None:
    """Write values through an indirect view; rows out of bounds raise or are skipped.

    adds: the values are sums with what was there, so no two rows may be the same.
    """
    table, valid = positions(view)
    _check_valid(view, valid, skip)
    stored = cast(values.reshape(table.shape), view.dtype)
    _check_unique(view, table[valid], stored[valid], adds)
    store_at(view, table[valid], stored[valid])


def store_at(view: NkiTensor, places: np.ndarray, stored: np.ndarray) -> None:
    """Write stored values to some elements of the view's storage, which `places` numbers."""
    storage = view.storage
    if storage.shared:
        stored = settled(view, stored, places)
    storage.raw.view(view.dtype.numpy)[places] = stored
    marks = storage.unwritten
    if marks is not None:
        marks.values[marks.places(view, places)] = False
        storage.missing = int(np.count_nonzero(marks.values)) * marks.granule
        if not storage.missing:
            storage.unwritten = None
