"""The geometry of views: what an engine can walk; interned, so that it is worked out once.

A kernel allocates thousands of tensors of one shape and takes the same parts of each. Views of one
geometry differ only in their storage and in where they begin in HBM or SBUF. No check of an
instruction tells them apart, but for operands that share a storage. A part of another view of that
geometry takes its shape, strides and region from the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.registers import DynamicSlice
from nmm_compiler.simulator.trace import Access

NkiTensor = Any  # its file knows this one

FIXED = frozenset({int, type(None), type, bool})
"""The classes of what a key may consist of, if its part is to be kept."""
KEPT = 100_000
Pattern = tuple[tuple[int, int], ...]
"""(step, count) of each dimension of a region, as an `Access` has them."""
Make = Callable[[Storage, int, int], NkiTensor]
"""Makes a view of a storage that begins so many elements, and bytes, behind where it did."""


class Geometry:
    """What views have in common that differ only in their storage and in where they begin.

    parts: how to make the part that a key selects.
    """

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.parts: dict[tuple[Any, ...], Make] = {}


_interned = functools.lru_cache(KEPT)(Geometry)


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
    known = view.geometry = _interned(key)
    return known


def keep(makers: dict[tuple[Any, ...], Make], key: Any, view: NkiTensor, *begin: int) -> Make:
    """Keep how to make a view like this one under a key.

    begin: the offset in elements and in bytes from where it begins.
    """
    if len(makers) >= KEPT:
        makers.clear()
    access, kind, special, geometry = view.access(), view.__class__, view.special, geometry_of(view)
    shape, strides, dtype = view.shape, view.strides, view.dtype
    memory, pattern, item = access.memory, access.pattern, access.item_bytes
    first, stop = access.partition_start, access.partition_stop
    offset, start = view.offset - begin[0], access.byte_start - begin[1]
    extent, dense = access.byte_stop - access.byte_start, access.dense

    def make(storage: Storage, elements: int, byte: int) -> NkiTensor:
        made = kind(storage, shape, strides, offset + elements, dtype)
        byte += start
        made._access = Access(
            storage.identity, memory, first, stop, byte, byte + extent, pattern, dtype, item, dense
        )
        made.special, made.geometry = special, geometry
        return made

    makers[key] = make
    return make


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


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return element strides of a dense tensor."""
    if len(shape) == 2:
        return (shape[1], 1)
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


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


def merged(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (size, stride) of dimensions: without those of size 1, one for any that are dense."""
    found: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if found and found[-1][1] == stride * size:
            size *= found.pop()[0]
        found.append((size, stride))
    return found


def contiguous_run(pattern: Pattern, item_bytes: int) -> int:
    """Return the length in bytes of the contiguous runs that `pattern` walks.

    Dimensions that continue each other are one in the pattern of an access.
    """
    step, count = pattern[-1]
    return count * item_bytes if step == item_bytes else item_bytes


@functools.lru_cache(100_000)
def walk_pattern(
    shape: tuple[int, ...], strides: tuple[int, ...], item: int
) -> tuple[Pattern, int, int, bool]:
    """Return (((step_bytes, count), ...) outermost first, bytes of a run, and from the first
    element to the last, whether it is out of all reach)."""
    pattern = tuple(
        (stride * item, size) for size, stride in merged(zip(shape, strides, strict=True))
    ) or ((item, 1),)
    extent = item + sum((count - 1) * step for step, count in pattern)
    run = contiguous_run(pattern, item)
    return pattern, run, extent, bool(out_of_reach(shape, strides))
