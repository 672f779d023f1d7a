"""The elements of a view: where they lie, what is known of each, and how they are read and written.

Elements are numbered from the start of their storage. The numbers of a view are strided, or an
index chooses them at run time: rows, an offset, or columns. An index outside the tensor is an
error, or skips its row with `oob_mode.skip`. In timing mode there are no indices.

A mark for each byte of a storage says whether it was ever written, or who wrote it last, since a
view may have another dtype than its storage. A read of unwritten elements is noted, or refused
where values are needed.

A storage in shared HBM also remembers for each element which of two programs read it since both
were last at a `core_barrier`, or exchanged tiles by `sendrecv`, and which one wrote it, with the
number of that write. The programs run one after the other here, and side by side on hardware. So
the write with the higher number stays, as if both ran in step, and what two programs use, one of
them to write, with no wait between, is warned of. Equal values are no race, whoever writes last.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, OutOfBoundsError
from nmm_compiler.simulator.machine import current, kernel_frame
from nmm_compiler.simulator.tensors.dtypes import cast
from nmm_compiler.simulator.tensors.registers import VirtualRegister

NkiTensor = Any  # its file knows this one

# Where they lie


def positions(view: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return (positions [rows, elements], valid [rows]) of a view in its storage.

    Positions are elements of the view's dtype from the start of the storage. Rows that leave
    the storage are not valid and their positions are 0.
    """
    rows, index = view.shape[0], view.indirection
    # of one row (dimensions after the first), without the offset
    lines = (np.arange(n) * s for n, s in zip(view.shape[1:], view.strides[1:], strict=True))
    inner = functools.reduce(np.add.outer, lines, np.zeros((), np.int64)).reshape(-1)
    starts, valid = view.offset + np.arange(rows) * view.strides[0], np.ones(rows, np.bool_)
    if index is None:
        return starts[:, None] + inner, valid
    if index.kind == "columns":
        return _column_positions(view, starts), valid
    if index.kind == "scalar":
        starts += _numbers(view) * index.step
    else:
        starts = view.offset + _numbers(view) * index.step
    low, high = starts + inner.min(), starts + inner.max()
    storage, item = view.storage, view.dtype.item_bytes
    valid = (low >= 0) & (high < storage.raw.size // item)
    if index.kind == "scalar" and storage.memory != "hbm":
        row = storage.bytes_per_partition // item
        valid &= (low // row) == (high // row)
    table = starts[:, None] + inner
    table[~valid] = 0
    return table, valid


def _numbers(view: NkiTensor) -> np.ndarray:
    """Return the index of the view, or that of each row, column by column of the index tensor."""
    index, rows, what = view.indirection.index, 1, "a runtime address"
    if isinstance(index, VirtualRegister):
        return np.asarray([index.read()])
    if view.indirection.kind == "vector":
        rows, what = view.shape[0], "a row index"
    values = index.load(what)
    flat = values.reshape(len(values), -1).T.reshape(-1)
    view.need(flat.size >= rows, f"{what}: {flat.size} indices for {rows} rows")
    return np.asarray(flat[:rows].astype(np.int64))


def _column_positions(view: NkiTensor, starts: np.ndarray) -> np.ndarray:
    """Return positions of tensor indirection: offset i is index[i % 16, i // 16] of each group.

    Groups of 16 partitions share their offsets.
    """
    chosen, count = view.indirection, view.shape[1]
    index = chosen.index.load("an index").astype(np.int64)
    index = index.reshape(index.shape[0], -1)
    offsets = np.zeros((view.shape[0], count), np.int64)
    for start in range(0, view.shape[0], 16):
        offsets[start : start + 16] = index[start : start + 16].T.reshape(-1)[:count]
    inside = offsets.min() >= 0 and offsets.max() < chosen.columns
    leaves = f"tensor indirection: offset {offsets.max()} of {chosen.columns} elements"
    view.need(inside, leaves, OutOfBoundsError)
    return starts[:, None] + offsets * chosen.step


def _check_valid(view: NkiTensor, valid: np.ndarray, skip: bool) -> None:
    if skip or valid.all():
        return
    row, numbers = int(np.argmin(valid)), _numbers(view)
    number = numbers[min(row, len(numbers) - 1)]
    raise current().error(
        OutOfBoundsError,
        f"runtime index {number} of row {row} leaves tensor {view.name!r} {view.storage.shape}; "
        "keep indices inside, or pass oob_mode=nisa.oob_mode.skip",
    )


# What is known of each

NOBODY, TENSOR, OTHER = (np.uint8(who) for who in range(3))
"""Who wrote an element of PSUM."""


def marks_of(view: NkiTensor, marks: np.ndarray) -> np.ndarray:
    """Return the marks of a view; the last axis has those of the bytes of one element.

    marks: of all bytes of its storage. Those of a view without a runtime index may be written.
    """
    item = view.itemsize
    if view.indirection is not None:
        return marks.reshape(-1, item)[positions(view)[0]].reshape(*view.shape, item)
    strides = *[stride * item for stride in view.strides], 1
    return np.ndarray((*view.shape, item), marks.dtype, marks, view.offset * item, strides)


def put_marks(view: NkiTensor, marks: np.ndarray, value: Any, where: Any = ...) -> None:
    """Set the marks of a view, or of those elements of it that a mask says."""
    if view.indirection is None:
        marks_of(view, marks)[where] = value
        return
    table, valid = positions(view)
    chosen = np.broadcast_to(valid[:, None], table.shape)
    if where is not ...:
        chosen = chosen & where.reshape(table.shape)
    marks.reshape(-1, view.itemsize)[table[chosen]] = value


def mark(view: NkiTensor, unwritten: bool, where: Any = ..., origin: str = "") -> None:
    """Mark elements of a view as written, or as dependent on unwritten memory.

    origin: the first read of that memory.
    """
    storage = view.storage
    if storage.unwritten is None:
        if not unwritten:
            return
        storage.unwritten, storage.left = np.zeros(storage.raw.size, np.bool_), 0
    marks = storage.unwritten
    changed = marks if view.indirection is not None else marks_of(view, marks)
    storage.left -= np.count_nonzero(changed)
    put_marks(view, marks, unwritten, where)
    if unwritten or changed is marks or where is not ...:  # else none of them is left
        storage.left += np.count_nonzero(changed)
    storage.origin = storage.origin or origin
    if not storage.left:
        storage.unwritten, storage.origin = None, ""


FILL = {"float": np.nan, "int": 4}
"""The value of unwritten elements, by the kind of the dtype; no accepted result shows it."""


def note_unwritten(view: NkiTensor, mask: np.ndarray, what: str = "") -> None:
    """Note that an instruction reads unwritten elements; refuse it where none may be read.

    what: needs known values.
    """
    machine, storage = current(), view.storage
    if not mask.any():
        return
    first = [int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)]
    origin = storage.origin or (
        f"{int(mask.sum())} of {mask.size} elements of tensor {storage.name!r} {storage.shape} "
        f"{storage.dtype} ({storage.memory}, allocated on line {storage.allocation.line}) are "
        f"read on line {kernel_frame()[1]} but were never written, the first at {first} of the "
        f"view {view.shape}"
    )
    if what:
        machine.rule(
            HazardError,
            f"{int(mask.sum())} of {mask.size} elements of {what} depend on memory that nothing "
            f"has written: {origin}; write them first (memset, dma_copy)",
        )
    else:
        machine.poisoned.append((view, mask, origin))


def poisoned_values(view: NkiTensor, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return a copy of a view's values with NaN, or 4 in integers, where none was written."""
    fill = FILL.get(view.dtype.kind, FILL["int"])
    return np.where(mask, np.asarray(fill, values.dtype), values)


_USES = np.dtype([("written", np.int32, 2), ("read", np.bool_, 2)])
"""Who used an element since the two programs met, by program: the number of its last write, 0 for
none, and whether it read the element before that."""


def _uses(view: NkiTensor, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return who used the elements of a view's storage, and which of them some places cover.

    places: elements in the view's dtype.
    """
    storage, machine = view.storage, current()
    item, own = view.itemsize, storage.dtype.item_bytes
    known, _ = machine.programs.uses[machine.rank]
    if storage.identity not in known:
        known[storage.identity] = np.zeros(storage.raw.size // own, _USES)
    return known[storage.identity], (places * item // own)[..., None] + np.arange(-(-item // own))


def _note_read(view: NkiTensor, places: np.ndarray) -> None:
    """Remember a read of shared HBM; warn if another program has written there."""
    me, (uses, at) = current().program_id, _uses(view, places)
    written = uses["written"][at]
    first = written[..., me] == 0  # after its own write, only other values would race
    uses["read"][at, me] |= first
    theirs = first & (written[..., 1 - me] > 0)
    _warn_of(theirs.any(axis=-1), view, "reads from", "were written by another program")


def _warn_of(clash: np.ndarray, view: NkiTensor, does: str, what: str, use: str = "use") -> None:
    if clash.any():
        machine = current()
        machine.warn(
            f"two programs {use} one place: {np.count_nonzero(clash)} of {clash.size} elements "
            f"that program {machine.program_id} {does} {view.name!r} {view.storage.shape} {what} "
            "since the last core_barrier or sendrecv; on hardware either may come first, put a "
            "core_barrier between them"
        )


def _settled(dst: NkiTensor, stored: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return what stays of a write to shared HBM that is about to happen; warn if it is of a race.

    places: the elements of the storage that get the stored values.
    """
    machine = current()
    me, (_, begun) = machine.program_id, machine.programs.uses[machine.rank]
    begun[me] += 1
    uses, at = _uses(dst, places)
    theirs, mine = (uses["written"][at, p].max(axis=-1) for p in (1 - me, me))
    seen = uses["read"][at, 1 - me].any(axis=-1)
    if theirs.any() or seen.any():
        old = dst.storage.raw.view(dst.dtype.numpy)[places]
        other = _bits(old) != _bits(stored)
        _warn_of((theirs > mine) & other, dst, "writes to", "have other values", "write to")
        _warn_of(seen & other, dst, "writes to", "were read by another program")
        stored = np.where(theirs > begun[me], old, stored)
    uses["written"][at, me] = begun[me]
    return stored


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


# How they are read and written


def read(
    view: NkiTensor, what: str = "", skip: bool = False, where: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return (values in the view's shape, valid rows) that a view reads; None: all are valid.

    Unwritten elements are NaN (4 in integers), and are noted. what: needs values, so that they are
    refused. skip: rows out of bounds are no error. where: the elements that count.
    """
    storage, valid, mask = view.storage, None, view.missing()
    if view.indirection is None:
        values = view.array()
        if storage.shared:
            _note_read(view, positions(view)[0])
    else:
        table, valid = positions(view)
        _check_valid(view, valid, skip)
        values = storage.raw.view(view.dtype.numpy)[table].reshape(view.shape)
        if storage.shared:
            _note_read(view, table[valid])
        where = valid.reshape(-1, *[1] * (len(view.shape) - 1)) if where is None else where
    if mask is not None:
        mask = mask if where is None else mask & where
        note_unwritten(view, mask, what)
        values = poisoned_values(view, values, mask)
    return values, None if valid is None or valid.all() else valid


def put(
    view: NkiTensor,
    values: np.ndarray,
    *,
    exact: bool = False,
    product: bool = False,
    where: np.ndarray | None = None,
    skip: bool = False,
    adds: bool = False,
) -> None:
    """Write values to a view: the one place where an instruction does.

    exact: they are stored elements of the view's dtype; else they are cast to it.
    product: TensorE writes them, so a later product may add to them.
    where: the elements that are written. skip: rows out of bounds are not, and are no error.
    adds: the values are sums with what was there, so no two rows may be the same.
    """
    storage, dtype = view.storage, view.dtype
    whole = view.indirection is None and not storage.shared and where is None
    rounds = values.dtype == np.float32 and dtype.kind == "float" and dtype != "tfloat32"
    if not (exact or (whole and rounds)):  # else the assignment rounds as it writes
        values = cast(values, dtype)
    if whole:
        view.array()[...] = values.reshape(view.shape)
        mark(view, False)
    else:
        table, valid = positions(view)
        _check_valid(view, valid, skip)
        stored = values.reshape(table.shape)
        if view.is_indirect() and view.indirection.kind == "vector":
            _check_unique(view, table[valid], stored[valid], adds)
        chosen = np.repeat(valid[:, None], table.shape[1], axis=1)
        if where is not None:
            chosen &= where.reshape(table.shape)
        places, stored = table[chosen], stored[chosen]
        if storage.shared:
            stored = _settled(view, stored, places)
        storage.raw.view(dtype.numpy)[places] = stored
        mark(view, False, chosen.reshape(view.shape))
    if storage.memory == "psum":
        put_marks(view, storage.writers, TENSOR if product else OTHER)


def _check_unique(view: NkiTensor, table: np.ndarray, stored: np.ndarray, adds: bool) -> None:
    """Refuse rows that write different values to one place: their order is not defined."""
    _, first, inverse = np.unique(table[:, 0], return_index=True, return_inverse=True)
    twin = first[inverse.reshape(-1)]
    bits = _bits(stored)
    clash = twin != np.arange(len(table)) if adds else (bits != bits[twin]).any(axis=1)
    if clash.any():
        row = int(np.argmax(clash))
        current().rule(
            HazardError,
            f"a scatter into {view.name!r} {view.storage.shape} writes rows {int(twin[row])} and "
            f"{row} to the same place; which one stays is undefined, make the indices unique",
        )
