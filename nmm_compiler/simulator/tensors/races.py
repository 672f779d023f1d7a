"""Warns where two programs of a grid write different values to one place, with no wait between.

A storage in shared HBM remembers which program wrote each element since both programs were last at
a `core_barrier`, or exchanged tiles by `sendrecv`. Equal values are no race, whoever writes last.
"""

from __future__ import annotations

import numpy as np

from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def note_shared_write(dst: NkiTensor, values: np.ndarray, places: np.ndarray | None = None) -> None:
    """Note a write to shared HBM that is about to happen, and warn if it is one of a race.

    values: what is written, in the dtype of dst. places: the elements of the storage that an
    indirect write chooses, in the shape of values; by default those of dst.
    """
    storage, machine = dst.storage, current()
    if machine.programs is None or dst.dtype.item_bytes != storage.dtype.item_bytes:
        return
    me = machine.program_id + 1
    if storage.writers is None:
        assert storage.raw is not None
        storage.writers = np.zeros(storage.raw.size // storage.dtype.item_bytes, np.uint8)
        machine.programs.written_by_one(machine, storage)
    if places is None:
        before = np.ndarray(dst.shape, np.uint8, storage.writers, dst.offset, dst.strides)
    else:
        before = storage.writers[places]
    theirs = (before != 0) & (before != me)
    if theirs.any():
        assert storage.raw is not None
        old = dst.array() if places is None else storage.raw.view(dst.dtype.numpy)[places]
        clash = int(np.count_nonzero(theirs & _differ(old, values)))
        if clash:
            machine.warn(
                f"two programs write to one place: {clash} of {theirs.size} elements that program "
                f"{machine.program_id} writes to {dst.name!r} {storage.shape} have other values "
                "since the last core_barrier or sendrecv; on hardware either may stay, put a "
                "core_barrier between them"
            )
    if places is None:
        before[...] = me
    else:
        storage.writers[places] = me


def _differ(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return where the bits of two arrays of one dtype differ."""
    bits = np.dtype(f"u{old.dtype.itemsize}")
    new = np.broadcast_to(new, old.shape).astype(old.dtype)
    return np.asarray(np.ascontiguousarray(old).view(bits) != new.view(bits))
