"""Two programs of a grid that use one place, one of them to write, with no wait between: a warning.

A storage in shared HBM remembers for each element which program read it since both programs were
last at a `core_barrier`, or exchanged tiles by `sendrecv`, and which one wrote it, with the number
of that write. The programs run one after the other here, and side by side on hardware. So the write
with the higher number stays, as if both ran in step. Equal values are no race, whoever writes last.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.marks import parts_of

NkiTensor = Any  # its file knows this one


Uses = tuple[np.ndarray, np.ndarray]
"""Who used each element of a storage since the two programs met, a row for each program: the number
of its last write, 0 for none, and whether it read the element before that."""


def _uses(view: NkiTensor, places: np.ndarray | None) -> tuple[Uses, np.ndarray]:
    """Return the record of a view's storage, and which of its elements an access covers.

    places: the elements of the storage, in the view's dtype; None for those of the view. An element
    of a wider dtype covers several along the last axis.
    """
    storage, item, machine = view.storage, view.dtype.item_bytes, current()
    unit = storage.dtype.item_bytes
    known = machine.programs.uses[machine.rank]
    if storage.identity not in known:
        shape = 2, storage.raw.size // unit
        known[storage.identity] = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    if places is None:
        lines = (np.arange(n) * step for n, step in zip(view.shape, view.strides, strict=True))
        places = functools.reduce(np.add.outer, lines, np.asarray(view.offset))
    return known[storage.identity], parts_of(places, item, unit)


def note_read(view: NkiTensor, places: np.ndarray | None = None) -> None:
    """Remember a read of shared HBM; warn if another program has written there.

    places: the elements of the storage, in the view's dtype; by default those of the view.
    """
    me, ((written, read), covered) = current().program_id, _uses(view, places)
    first = written[me, covered] == 0  # after its own write, only other values would race
    read[me, covered] |= first
    theirs = first & (written[1 - me, covered] > 0)
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


def settled(dst: NkiTensor, values: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    """Return what stays of a write to shared HBM that is about to happen; warn if it is of a race.

    values: what is written, in the dtype of dst. places: the elements of the storage that an
    indirect write chooses, in the shape of values; by default those of dst.
    """
    machine, storage = current(), dst.storage
    me, begun = machine.program_id, machine.programs.writes[machine.rank]
    begun[me] += 1
    (written, read), covered = _uses(dst, places)
    theirs, mine = (written[p, covered].max(axis=-1) for p in (1 - me, me))
    seen = read[1 - me, covered].any(axis=-1)
    if theirs.any() or seen.any():
        old = dst.array() if places is None else storage.raw.view(dst.dtype.numpy)[places]
        values = np.broadcast_to(values, old.shape).astype(old.dtype)
        bits = np.dtype(f"u{old.dtype.itemsize}")
        other = np.ascontiguousarray(old).view(bits) != values.view(bits)
        _warn_of((theirs > mine) & other, dst, "writes to", "have other values", "write to")
        _warn_of(seen & other, dst, "writes to", "were read by another program")
        values = np.where(theirs > begun[me], old, values)
    written[me, covered] = begun[me]
    return values
