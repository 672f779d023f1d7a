"""The region record, the NumPy view and the written elements of a tensor, for instructions.

In: a storage with shape, strides and offset. Out: `Access` for the trace, an array over the
storage's bytes, and the check that no element is read before it is written.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from nmm_compiler.errors import UninitializedReadError
from nmm_compiler.simulator.machine import Machine, current, kernel_frame
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.races import note_read
from nmm_compiler.simulator.tensors.reshaping import Reshaping
from nmm_compiler.simulator.trace import Access

_PATTERNS: dict[tuple[Any, ...], tuple[tuple[tuple[int, int], ...], int]] = {}
_OUT_OF_REACH: set[tuple[Any, ...]] = set()
MAX_FREE_DIMS, MAX_SIZE, MIN_STRIDE, MAX_STRIDE = 4, 0xFFFF, -0x8000, 0x7FFF
"""Limits of an engine's access pattern: dimensions, uint16 sizes, int16 strides in elements."""


def out_of_reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Return which of these free dimensions no engine's access pattern can express, or ""."""
    walked = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    if len(walked) > MAX_FREE_DIMS:
        return f"{len(walked)} free dimensions {shape}, at most {MAX_FREE_DIMS}; merge some"
    for size, stride in walked:
        if size > MAX_SIZE:
            return f"a free dimension of {size:,} elements, at most {MAX_SIZE:,}; split it"
        if not MIN_STRIDE <= stride <= MAX_STRIDE:
            return (
                f"a stride of {stride:,} elements, {MIN_STRIDE:,}..{MAX_STRIDE:,}; use one "
                "instruction for each of its steps, or a wider dtype"
            )
    return ""


def walk_pattern(
    shape: tuple[int, ...], strides: tuple[int, ...], item: int
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return (((step_bytes, count), ...) outermost first, extent in bytes) of some dimensions.

    Dimensions of size 1 are dropped and those that continue each other merged.
    """
    key = (shape, strides, item)
    known = _PATTERNS.get(key)
    if known is not None:
        return known
    merged: list[list[int]] = []
    extent = item
    for size, stride in zip(shape, strides, strict=True):
        extent += (size - 1) * stride * item
        if size == 1:
            continue
        if merged and merged[-1][0] == stride * item * size:
            merged[-1] = [stride * item, merged[-1][1] * size]
        else:
            merged.append([stride * item, size])
    pattern = tuple((step, count) for step, count in merged) or ((item, 1),)
    if len(_PATTERNS) > 100_000:
        _PATTERNS.clear()
        _OUT_OF_REACH.clear()
    _PATTERNS[key] = pattern, extent
    if out_of_reach(shape, strides):
        _OUT_OF_REACH.add(key)
    return pattern, extent


class DynamicSlice:
    """`nl.ds(start, size)`: `size` elements from `start`, which may be a register."""

    __slots__ = ("size", "start")

    def __init__(self, start: Any, size: int) -> None:
        self.start, self.size = start, size


class Indirection:
    """The runtime index of an indirect view.

    kind: "vector" (one index per row of dim 0), "scalar" (resolved already, and kept for the checks
        of views), or "columns" (tensor indirection of trn3).
    """

    __slots__ = ("column_count", "dim", "index", "kind", "step")

    def __init__(self, kind: str, dim: int, index: Any, step: int = 0, count: int = 0) -> None:
        self.kind, self.dim, self.index, self.step = kind, dim, index, step
        self.column_count = count


class TensorData(Reshaping):
    """The part of `NkiTensor` that reaches its storage."""

    __slots__ = ("_access", "_array", "dtype", "offset", "special", "storage")

    storage: Storage
    offset: int
    dtype: DType
    _access: Access | None
    _array: np.ndarray | None
    special: bool
    """Whether `operand` must check the view in detail; known after `access()`."""

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.storage.name

    @property
    def buffer(self) -> Any:
        """The memory region: nl.sbuf, nl.psum, nl.private_hbm or nl.shared_hbm."""
        return self.storage.region

    @property
    def memory(self) -> str:
        """Either "sbuf", "psum" or "hbm"."""
        return self.storage.memory

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.item_bytes

    @property
    def partition_start(self) -> int:
        """First partition the view touches, within its memory when placed by hand."""
        storage = self.storage
        row_bytes = storage.bytes_per_partition
        base = storage.address[0] if storage.address else 0
        return base + (self.offset * self.dtype.item_bytes) // row_bytes if row_bytes else base

    @property
    def free_size(self) -> int:
        """Elements per partition."""
        return math.prod(self.shape[1:])

    def get_pattern(self) -> list[list[int]]:
        """Return [[stride, count], ...] of all dimensions."""
        return [list(pair) for pair in zip(self.strides, self.shape, strict=True)]

    def leaves(self) -> str:
        """Say that some element of the view is outside its storage, or its partition, or ""."""
        storage, item = self.storage, self.dtype.item_bytes
        whole = storage.bytes_per_partition
        on_chip = storage.memory != "hbm"
        partition, start = divmod(self.offset * item, whole) if on_chip else (0, self.offset * item)
        dims = list(zip(self.shape, self.strides, strict=True))[on_chip:]
        spans = [(size - 1) * stride * item for size, stride in dims]
        low = start + sum(span for span in spans if span < 0)
        high = start + item + sum(span for span in spans if span > 0)
        beyond = on_chip and partition + self.shape[0] > storage.shape[0]
        if self.offset >= 0 and low >= 0 and high <= whole and not beyond:
            return ""
        return (
            f"pattern {self.get_pattern()} at offset {self.offset} leaves tensor {self.name!r} "
            f"{storage.shape} {storage.dtype} ({whole} B{' per partition' if on_chip else ''})"
        )

    def access(self) -> Access:
        """Return the record of the region for the trace."""
        access = self._access
        if access is None:
            if min(self.strides, default=0) < 0:
                access = self._access = self._ascending().access()
                return access
            storage = self.storage
            item = self.dtype.item_bytes
            if storage.memory == "hbm":
                whole = (self.shape, self.strides, item)
                pattern, extent = _PATTERNS.get(whole) or walk_pattern(*whole)
                start = self.offset * item
                if self.indirection is not None:
                    start, extent = 0, storage.bytes_per_partition
                access = Access(
                    storage.identity, "hbm", 0, 1, start, start + extent, pattern, self.dtype, item
                )
            else:
                inner = (self.shape[1:], self.strides[1:], item)
                pattern, extent = _PATTERNS.get(inner) or walk_pattern(*inner)
                partition, start = divmod(self.offset * item, storage.bytes_per_partition)
                address = storage.address
                if address is not None:
                    partition += address[0]
                if self.indirection is not None:
                    start, extent = 0, storage.bytes_per_partition
                access = Access(
                    storage.identity, storage.memory, partition, partition + self.shape[0],
                    start, start + extent, pattern, self.dtype, item,
                )  # fmt: skip
                if (
                    partition
                    or (_OUT_OF_REACH and inner in _OUT_OF_REACH)
                    or self.dtype.kind == "packed"
                ):
                    self.special = True
            self._access = access
        return access

    def _ascending(self) -> Self:
        """Return a view of the same elements that walks every dimension upwards."""
        shift = sum(
            (size - 1) * stride
            for size, stride in zip(self.shape, self.strides, strict=True)
            if stride < 0
        )
        return self._like(self.shape, tuple(abs(s) for s in self.strides), self.offset + shift)

    def array(self) -> np.ndarray:
        """Return the NumPy view of the elements (storage dtype)."""
        array = self._array
        if array is None:
            item = self.dtype.item_bytes
            array = self._array = np.ndarray(
                self.shape,
                self.dtype.numpy,
                self.storage.raw,
                self.offset * item,
                tuple([s * item for s in self.strides]),
            )
        return array

    def unwritten_view(self) -> np.ndarray | None:
        """Return the bool view of unwritten elements, or None when all are written."""
        storage = self.storage
        if storage.unwritten is None:
            return None
        item = self.dtype.item_bytes
        if item < storage.granule:
            storage.refine(item)
        factor = item // storage.granule
        shape, strides = self.shape, self.strides
        if factor > 1:
            return np.ndarray(
                (*shape, factor), np.bool_, storage.unwritten, self.offset * factor,
                (*(s * factor for s in strides), 1),
            )  # fmt: skip
        return np.ndarray(shape, np.bool_, storage.unwritten, self.offset, strides)

    def missing(self) -> np.ndarray | None:
        """Return a copy of the mask of unwritten elements, or None when there are none."""
        mask = self.unwritten_view()
        if mask is None or not mask.any():
            return None
        return np.asarray(mask.any(axis=-1)) if mask.ndim > len(self.shape) else mask.copy()

    def known(self, what: str) -> np.ndarray:
        """Return the stored elements; refuses unwritten ones, because `what` needs values."""
        if self.storage.shared:
            note_read(self)
        if self.storage.unwritten is not None:
            mask = self.missing()
            if mask is not None:
                origin = self.storage.origin or first_read(self, mask)
                refuse_poison(current(), what, origin, int(mask.sum()), mask.size)
                return poisoned_values(self, mask)
        return self.array()

    def mark_written(self) -> None:
        """Note that all elements of the view are written."""
        storage = self.storage
        if storage.unwritten is None:
            return
        strides = self.strides
        if self.shape == storage.shape and strides[-1] == 1 and self.dtype is storage.dtype:
            rows = self.shape[1] if len(strides) == 2 else -1
            if strides[0] == rows and not self.offset:  # all of it: no need to count
                storage.unwritten, storage.missing = None, 0
                return
        mask = self.unwritten_view()
        assert mask is not None
        new = int(np.count_nonzero(mask))
        if new:
            mask[...] = False
            storage.missing -= new
            if storage.missing <= 0:
                storage.unwritten = None

    def load(self) -> np.ndarray:
        """Return the stored elements; unwritten ones are NaN (4 in integers), and are noted."""
        if self.storage.shared:
            note_read(self)
        if self.storage.unwritten is not None:
            mask = self.missing()
            if mask is not None:
                note_unwritten(self, mask)
                return poisoned_values(self, mask)
        return self.array()


FILL = {"float": np.nan, "int": 4}
"""The value of unwritten elements, by the kind of the dtype; no accepted result shows it."""
_WAY_OUT = "write them first (memset, dma_copy)"


def first_read(view: TensorData, mask: np.ndarray) -> str:
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


def note_unwritten(view: TensorData, mask: np.ndarray) -> None:
    """Note that an instruction reads unwritten elements; refuse it where none may be read."""
    machine = current()
    origin = view.storage.origin or first_read(view, mask)
    if not machine.poison_spreads:
        machine.rule(UninitializedReadError, f"{origin}; {_WAY_OUT}")
    machine.poisoned.append((view, mask, origin))


def poisoned_values(view: TensorData, mask: np.ndarray) -> np.ndarray:
    """Return a copy of the stored elements with NaN, or 4 in integers, where none was written."""
    values = view.array().copy()
    values[mask] = FILL.get(view.dtype.kind, FILL["int"])
    return values


def refuse_poison(machine: Machine, what: str, origin: str, count: int, size: int) -> None:
    """Refuse a use that needs known values, naming the read that they come from."""
    machine.rule(
        UninitializedReadError,
        f"{count} of {size} elements of {what} depend on memory that nothing has written: "
        f"{origin}; {_WAY_OUT}",
    )
