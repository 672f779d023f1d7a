"""Access patterns that engines can walk, runtime indices, and reads of unwritten elements."""

from __future__ import annotations

import functools
from operator import index as as_index
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError
from nmm_compiler.simulator.machine import Machine, current, kernel_frame

NkiTensor = Any  # its file knows this one

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


@functools.lru_cache(100_000)
def walk_pattern(
    shape: tuple[int, ...], strides: tuple[int, ...], item: int
) -> tuple[tuple[tuple[int, int], ...], int, bool]:
    """Return (((step_bytes, count), ...) outermost first, extent in bytes, no engine reaches it).

    Dimensions of size 1 are dropped and those that continue each other merged.
    """
    merged: list[tuple[int, int]] = []
    extent = item
    for size, stride in zip(shape, strides, strict=True):
        step = stride * item
        extent += (size - 1) * step
        if size == 1:
            continue
        if merged and merged[-1][0] == step * size:
            size *= merged.pop()[1]
        merged.append((step, size))
    return tuple(merged) or ((item, 1),), extent, bool(out_of_reach(shape, strides))


def parts_of(places: np.ndarray, item: int, unit: int) -> np.ndarray:
    """Return which units of `unit` bytes elements of `item` bytes cover: a last axis of them."""
    return places[..., None] * item // unit + np.arange(max(item // unit, 1))


def whole(value: Any) -> int | None:
    """Return an integer that is one, also a NumPy one, else None."""
    try:
        return as_index(value)
    except TypeError:
        return int(value) if isinstance(value, float) and value.is_integer() else None


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
