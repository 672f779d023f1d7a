"""Two programs of a grid that write to one place, with no wait between: who stays, and a warning.

A storage in shared HBM remembers which program wrote each element since both programs were last at
a `core_barrier`, or exchanged tiles by `sendrecv`, and the number of that write. The programs run
one after the other here, and side by side on hardware. So the write with the higher number stays,
as if both ran in step. Equal values are no race, whoever writes last.
"""

from __future__ import annotations

import numpy as np

from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.tensor import NkiTensor


def settled(dst: NkiTensor, values: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    """Return what stays of a write to shared HBM that is about to happen; warn if it is of a race.

    values: what is written, in the dtype of dst. places: the elements of the storage that an
    indirect write chooses, in the shape of values; by default those of dst.
    """
    storage, machine = dst.storage, current()
    if machine.programs is None or dst.dtype.item_bytes != storage.dtype.item_bytes:
        return values
    assert storage.raw is not None
    number = machine.programs.next_write(machine, storage)
    mine = 1 + number * machine.grid + machine.program_id
    if storage.writers is None:
        storage.writers = np.zeros(storage.raw.size // storage.dtype.item_bytes, np.int32)
    if places is None:
        strides = [4 * step for step in dst.strides]
        before = np.ndarray(dst.shape, np.int32, storage.writers, 4 * dst.offset, strides)
        old = dst.array()
    else:
        before = storage.writers[places]
        old = storage.raw.view(dst.dtype.numpy)[places]
    after = np.full(before.shape, mine, np.int32)
    theirs = (before != 0) & ((before - 1) % machine.grid != machine.program_id)
    if theirs.any():
        values = np.broadcast_to(values, old.shape).astype(old.dtype)
        clash = theirs & _differ(old, values)
        if clash.any():
            machine.warn(
                f"two programs write to one place: {np.count_nonzero(clash)} of {theirs.size} "
                f"elements that program {machine.program_id} writes to {dst.name!r} "
                f"{storage.shape} have other values since the last core_barrier or sendrecv; on "
                "hardware either may stay, put a core_barrier between them"
            )
        later = theirs & ((before - 1) // machine.grid > number)
        values, after = np.where(later, old, values), np.where(later, before, after)
    if places is None:
        before[...] = after
    else:
        storage.writers[places] = after
    return values


def _differ(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return where the bits of two arrays of one dtype differ."""
    bits = np.dtype(f"u{old.dtype.itemsize}")
    return np.asarray(np.ascontiguousarray(old).view(bits) != new.view(bits))
