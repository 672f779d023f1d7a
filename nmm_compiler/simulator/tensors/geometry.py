"""The geometry of views: what an engine can walk; interned, so that it is worked out once.

A kernel allocates thousands of tensors of one shape and takes the same parts of each. Views of one
geometry differ only in their storage and in where they begin in HBM or SBUF. No check of an
instruction tells them apart, but for operands that share a storage. A part of another view of that
geometry takes its geometry from the first one.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable
from typing import Any

from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.memory import Storage

KEPT = 100_000
Dims = tuple[tuple[int, int], ...]
"""(size, stride in elements) of each dimension."""
Pattern = tuple[tuple[int, int], ...]
"""(step, count) of each dimension of a region, as an `Access` has them."""


class Geometry:
    """What views have in common that differ only in their storage and in where they begin.

    first, stop: partitions. base: bytes from where the region begins to where the view does.
    extent: bytes from the first element to the last; dense: they are all of the region.
    far: why no engine can walk it, or "". parts: (geometry, step in elements) by key.
    """

    def __init__(
        self, memory: str, dims: Dims, dtype: DType, row: tuple[Any, ...], *apart: Any
    ) -> None:
        self.memory, self.dims, self.dtype = memory, dims, dtype
        self.shape = tuple([size for size, _ in dims])
        self.strides = tuple([stride for _, stride in dims])
        self.first, self.stop, self.far = 0, 1, ""
        # from there on the same elements are walked upwards
        shift = sum((size - 1) * stride for size, stride in dims if stride < 0)
        self.base = shift * dtype.item_bytes
        if row:
            partition, whole, address, _ = row
            self.base -= partition * whole
            self.first = partition + (address[0] if address else 0)
            self.stop = self.first + self.shape[0]
            self.far = out_of_reach(self.shape[1:], self.strides[1:])
        self.pattern, self.extent = walk_pattern(dims[bool(row) :], dtype.item_bytes)
        self.dense = contiguous_run(self.pattern, dtype.item_bytes) >= self.extent
        self.parts: dict[tuple[Any, ...], tuple[Geometry, int]] = {}


_interned = functools.lru_cache(KEPT)(Geometry)


def geometry_of(storage: Storage, dims: Dims, offset: int, dtype: DType) -> Geometry:
    """Return the geometry of a view; `apart` are its differences that checks of operands see."""
    memory, whole = storage.memory, storage.bytes_per_partition
    if memory == "hbm":
        return _interned(memory, dims, dtype, (), storage.constant)
    row = offset * dtype.item_bytes // whole, whole, storage.address, storage.shape[0]
    bank = offset if memory == "psum" else 0  # its banks tell where a product may lie
    return _interned(memory, dims, dtype, row, storage.constant, bank)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return element strides of a dense tensor."""
    return tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1]


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


def walk_pattern(dims: Dims, item: int) -> tuple[Pattern, int]:
    """Return (((step_bytes, count), ...) outermost first, bytes from the first element to the
    last) of dimensions in elements, walked upwards."""
    upwards = merged((size, abs(stride)) for size, stride in dims)
    pattern = tuple((stride * item, size) for size, stride in upwards) or ((item, 1),)
    return pattern, item + sum((count - 1) * step for step, count in pattern)
