"""Two programs of a grid that use one place, one of them to write, with no wait between: a warning.

A storage in shared HBM remembers for each element which program read it since both programs were
last at a `core_barrier`, or exchanged tiles by `sendrecv`, and which one wrote it, with the number
of that write. The programs run one after the other here, and side by side on hardware. So the write
with the higher number stays, as if both ran in step. Equal values are no race, whoever writes last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.simulator.machine import Machine, current

NkiTensor = Any  # its file knows this one


class Uses:
    """Who used each element of a storage since the programs met: a row for each program.

    written: the number of the last write, 0 for none. read: whether it was read before that.
    """

    def __init__(self, programs: int, elements: int) -> None:
        self.written = np.zeros((programs, elements), np.int32)
        self.read = np.zeros((programs, elements), np.bool_)


def _part(rows: np.ndarray, view: NkiTensor, places: np.ndarray | None) -> np.ndarray:
    """Return the rows' part that an access covers: one that changes `rows` if places is None."""
    if places is not None:
        return rows[:, places]
    item = rows.itemsize
    return np.ndarray(
        (len(rows), *view.shape), rows.dtype, rows, view.offset * item,
        (rows.strides[0], *(step * item for step in view.strides)),
    )  # fmt: skip


def _uses(
    machine: Machine, view: NkiTensor, places: np.ndarray | None
) -> tuple[Uses, np.ndarray | None]:
    """Return the record of a view's storage, and which of its elements an access covers.

    None are those of the view itself. A view of another dtype covers every element it touches.
    """
    storage, item = view.storage, view.dtype.item_bytes
    unit = storage.dtype.item_bytes
    assert machine.programs is not None
    if storage.uses is None:
        storage.uses = Uses(machine.grid, storage.raw.size // unit)
    machine.programs.used(machine, storage)
    if item == unit:
        return storage.uses, places
    if places is None:
        every = np.arange(storage.raw.size // item)
        places = np.ndarray(
            view.shape, every.dtype, every, 8 * view.offset, [8 * s for s in view.strides]
        )
    return storage.uses, places[..., None] * item // unit + np.arange(max(item // unit, 1))


def _of_elements(marks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return the largest mark of each element of a view of another dtype, else the marks."""
    return marks if marks.shape == shape else np.asarray(marks.max(axis=-1))


def note_read(view: NkiTensor, places: np.ndarray | None = None) -> None:
    """Remember a read of shared HBM; warn if another program has written there.

    places: the elements of the storage, in the view's dtype; by default those of the view.
    """
    machine = current()
    if machine.programs is None:
        return
    me = machine.program_id
    uses, covered = _uses(machine, view, places)
    written, read = _part(uses.written, view, covered), _part(uses.read, view, covered)
    first = written[me] == 0  # after a write of its own, only other values would be a race
    read[me] |= first
    if covered is not None:
        uses.read[me, covered] = read[me]
    theirs = first & (np.delete(written, me, axis=0).max(axis=0) > 0)
    _warn_of(theirs, machine, view, "use", "reads from", "were written by another program")


def _warn_of(
    clash: np.ndarray, machine: Machine, view: NkiTensor, use: str, does: str, what: str
) -> None:
    if clash.any():
        machine.warn(
            f"two programs {use} one place: {np.count_nonzero(clash)} of {clash.size} elements "
            f"that program {machine.program_id} {does} {view.name!r} {view.storage.shape} {what} "
            "since the last core_barrier or sendrecv; on hardware either may come first, put a "
            "core_barrier between them"
        )


def settled(dst: NkiTensor, values: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    """Return what stays of a write to shared HBM that is about to happen; warn if it is of a race.

    values: what is written, in the dtype of dst. places: the elements of the storage that an
    indirect write chooses, in the shape of values; by default those of dst.
    """
    machine, storage = current(), dst.storage
    if machine.programs is None:
        return values
    me, number = machine.program_id, machine.programs.next_write(machine)
    uses, covered = _uses(machine, dst, places)
    old = dst.array() if places is None else storage.raw.view(dst.dtype.numpy)[places]
    written, read = (_part(rows, dst, covered) for rows in (uses.written, uses.read))
    theirs, seen = (
        _of_elements(np.delete(rows, me, axis=0).max(axis=0), old.shape) for rows in (written, read)
    )
    if theirs.any() or seen.any():
        values = np.broadcast_to(values, old.shape).astype(old.dtype)
        bits = np.dtype(f"u{old.dtype.itemsize}")
        other = np.ascontiguousarray(old).view(bits) != values.view(bits)
        stays = theirs > _of_elements(written[me], old.shape)
        _warn_of(stays & other, machine, dst, "write to", "writes to", "have other values")
        _warn_of(seen & other, machine, dst, "use", "writes to", "were read by another program")
        values = np.where(theirs > number, old, values)
    written[me] = number
    if covered is not None:
        uses.written[me, covered] = number
    return values
