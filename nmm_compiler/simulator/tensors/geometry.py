"""The geometry of views, interned, so that it is worked out once and not for every tensor.

A kernel allocates thousands of tensors of one shape and takes the same parts of each. Views of one
geometry differ only in their storage and in where they begin in HBM or SBUF. No check of an
instruction tells them apart, but for operands that share a storage. A part of another view of that
geometry takes its shape, strides and region from the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nmm_compiler.simulator.tensors.data import DynamicSlice
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.trace import Access

NkiTensor = Any  # its file knows this one

_FIXED = frozenset({int, type(None), type, bool})
"""The classes of what a key may consist of, if its part is to be kept."""
_KEPT = 100_000
_KNOWN: dict[tuple[Any, ...], Geometry] = {}
_WHOLE: dict[tuple[Any, ...], Part] = {}


class Geometry:
    """What views have in common that differ only in their storage and in where they begin.

    parts: how to make the part that a key selects.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: dict[tuple[Any, ...], Part] = {}


class Part:
    """How to make a view: of a whole storage, or by a key into a view of some geometry.

    offset, start: from where that view begins, in elements and in bytes.
    """

    __slots__ = (
        "dtype", "extent", "first", "geometry", "item", "memory", "offset", "pattern", "rows",
        "shape", "special", "start", "strides",
    )  # fmt: skip

    def __init__(self, view: NkiTensor, offset: int, start: int) -> None:
        access = view.access()
        self.shape, self.strides, self.dtype = view.shape, view.strides, view.dtype
        self.memory, self.pattern, self.item = access.memory, access.pattern, access.item_bytes
        self.first, self.rows = access.partition_start, access.partitions
        self.offset, self.start = view.offset - offset, access.byte_start - start
        self.extent = access.byte_stop - access.byte_start
        self.special, self.geometry = view.special, geometry_of(view)

    def of(
        self, kind: Callable[..., NkiTensor], storage: Storage, offset: int, start: int
    ) -> NkiTensor:
        """Return the view of `storage` by a key into a view that begins at `offset` and `start`."""
        view = kind(storage, self.shape, self.strides, self.offset + offset, self.dtype)
        start += self.start
        first = self.first
        view._access = Access(
            storage.identity, self.memory, first, first + self.rows, start, start + self.extent,
            self.pattern, self.dtype, self.item,
        )  # fmt: skip
        view.special, view.geometry = self.special, self.geometry
        return view


def geometry_of(view: NkiTensor) -> Geometry:
    """Return the geometry of a view, which must not have runtime addresses."""
    access = view._access or view.access()
    storage, memory = view.storage, access.memory
    key: tuple[Any, ...] = (memory, view.shape, view.strides, view.dtype, storage.constant)
    if memory != "hbm":
        key += (access.partition_start, storage.bytes_per_partition, storage.address,
                storage.shape[0])  # fmt: skip
    if memory == "psum":
        key += (view.offset,)  # its banks tell where a product may lie
    known = _KNOWN.get(key)
    if known is None:
        if len(_KNOWN) >= _KEPT:
            _KNOWN.clear()
        known = _KNOWN[key] = Geometry()
    view.geometry = known
    return known


def numbers_of(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a key consists of, slices taken apart."""
    numbers: list[Any] = []
    for k in key:
        kind = k.__class__
        if kind is slice:
            numbers += k.start, k.stop, k.step
        elif kind is DynamicSlice:
            numbers += DynamicSlice, k.start, k.size
        else:
            numbers += kind, k
    return tuple(numbers)


def part_of(view: NkiTensor, at: tuple[Any, ...]) -> NkiTensor | None:
    """Return the part of a view without runtime addresses, if one of its geometry is known.

    at: the key as a flat tuple of numbers.
    """
    known = (view.geometry or geometry_of(view)).parts.get(at)
    if known is None:
        return None
    return known.of(view.__class__, view.storage, view.offset, view._access.byte_start)


def remember_part(view: NkiTensor, at: tuple[Any, ...], part: NkiTensor) -> None:
    """Keep how a part was made, for the views of this geometry.

    A part by a register, say, is not kept: the value may change.
    """
    parts = view.geometry.parts
    if _FIXED.issuperset(map(type, at)):
        if len(parts) >= _KEPT:
            parts.clear()
        parts[at] = Part(part, view.offset, view._access.byte_start)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return element strides of a dense tensor."""
    if len(shape) == 2:
        return (shape[1], 1)
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def whole_of(kind: Callable[..., NkiTensor], storage: Storage) -> NkiTensor:
    """Return the view of a whole storage."""
    if storage.address is not None:
        return kind(storage, storage.shape, row_major(storage.shape), 0, storage.dtype)
    key = (storage.memory, storage.shape, storage.dtype, storage.constant)
    known = _WHOLE.get(key)
    if known is None:
        view = kind(storage, storage.shape, row_major(storage.shape), 0, storage.dtype)
        if len(_WHOLE) >= _KEPT:
            _WHOLE.clear()
        known = _WHOLE[key] = Part(view, 0, 0)
    return known.of(kind, storage, 0, 0)
