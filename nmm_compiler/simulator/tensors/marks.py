"""What is known of each element of a storage: whether it was ever written, or who wrote it last.

A view may have another dtype than its storage. So there is a mark for each `granule` bytes, and
the granule becomes smaller when a view has smaller elements. A read of unwritten elements is noted,
or refused where values are needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError
from nmm_compiler.simulator.machine import Machine, current, kernel_frame

NkiTensor = Any  # its file knows this one


def parts_of(places: np.ndarray, item: int, unit: int) -> np.ndarray:
    """Return which units of `unit` bytes elements of `item` bytes cover: a last axis of them."""
    return places[..., None] * item // unit + np.arange(max(item // unit, 1))


class Marks:
    """The marks of one storage, all of one NumPy dtype."""

    def __init__(self, size_bytes: int, granule: int, value: Any) -> None:
        self.granule = granule
        self.values = np.full(size_bytes // granule, value)

    def _refine(self, item: int) -> None:
        if item < self.granule:
            self.values = np.repeat(self.values, self.granule // item)
            self.granule = item

    def of(self, view: NkiTensor) -> np.ndarray:
        """Return the marks of a view to read or write; the last axis has those of one element."""
        item = view.dtype.item_bytes
        self._refine(item)
        each, size = item // self.granule, self.values.itemsize
        strides = (*[stride * each * size for stride in view.strides], size)
        return np.ndarray(
            (*view.shape, each), self.values.dtype, self.values, view.offset * each * size, strides
        )

    def places(self, view: NkiTensor, elements: np.ndarray) -> np.ndarray:
        """Return the places in `values` of elements of the storage, numbered in a view's dtype."""
        item = view.dtype.item_bytes
        self._refine(item)
        return parts_of(elements, item, self.granule)


FILL = {"float": np.nan, "int": 4}
"""The value of unwritten elements, by the kind of the dtype; no accepted result shows it."""
_WAY_OUT = "write them first (memset, dma_copy)"


def first_read(view: NkiTensor, mask: np.ndarray) -> str:
    """Return the text that names unwritten elements and the kernel's line that reads them first."""
    storage = view.storage
    where = [int(i) for i in np.unravel_index(int(mask.argmax()), mask.shape)]
    _, line = kernel_frame()
    return (
        f"{int(mask.sum())} of {mask.size} elements of tensor {storage.name!r} {storage.shape} "
        f"{storage.dtype} ({storage.memory}, allocated on line {storage.allocation.line}) are "
        f"read on line {line} but were never written, the first at {where} of the view "
        f"{view.shape}"
    )


def note_unwritten(view: NkiTensor, mask: np.ndarray, what: str = "") -> None:
    """Note that an instruction reads unwritten elements; refuse it where none may be read.

    what: needs known values.
    """
    machine = current()
    origin = view.storage.origin or first_read(view, mask)
    if what:
        refuse_poison(machine, what, origin, int(mask.sum()), mask.size)
    else:
        machine.poisoned.append((view, mask, origin))


def poisoned_values(view: NkiTensor, mask: np.ndarray) -> np.ndarray:
    """Return a copy of the stored elements with NaN, or 4 in integers, where none was written."""
    values = view.array().copy()
    values[mask] = FILL.get(view.dtype.kind, FILL["int"])
    return values


def refuse_poison(machine: Machine, what: str, origin: str, count: int, size: int) -> None:
    """Refuse a use that needs known values, naming the read that they come from."""
    machine.rule(
        HazardError,
        f"{count} of {size} elements of {what} depend on memory that nothing has written: "
        f"{origin}; {_WAY_OUT}",
    )
