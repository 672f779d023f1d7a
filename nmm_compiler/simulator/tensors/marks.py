"""What is known of each element of a storage: whether it was ever written, or who wrote it last.

A view may have another dtype than its storage. So there is a mark for each `granule` bytes, and
the granule becomes smaller when a view has smaller elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.simulator.tensors.data import parts_of

NkiTensor = Any  # its file knows this one


class Marks:
    """The marks of one storage, all of one NumPy dtype."""

    __slots__ = ("granule", "values")

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
