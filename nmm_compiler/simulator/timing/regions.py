"""Finds the earlier accesses that a region overlaps: exact overlap of strided regions.

An access is a set of bytes: a partition range, a byte range and a strided pattern inside it.
Bounding ranges are compared first; only when they intersect and one side has holes are the
patterns themselves compared. A kernel that tiles one HBM tensor writes thousands of interleaved
regions. So the records of a storage, once they are more than a few, are kept in a grid of its rows
and columns, whose cell is a region that was met, and the comparison of two patterns at one distance
is cached.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from nmm_compiler.simulator.tensors.geometry import Pattern, contiguous_run, merged
from nmm_compiler.simulator.trace import Access

_FEW = 6
_WIDE_CELLS = 16
_WIDE_RECORDS = 12
_RUNS_LIMIT = 1 << 20


@functools.lru_cache(maxsize=4096)
def _run_starts(pattern: Pattern, item_bytes: int) -> tuple[np.ndarray, int]:
    """Return the sorted starts (relative to byte_start) and the length of the contiguous runs."""
    run = contiguous_run(pattern, item_bytes)
    starts = np.zeros(1, dtype=np.int64)
    for step, count in pattern[:-1] if run > item_bytes else pattern:
        if count > 1 and step:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    starts = np.unique(starts)
    return starts - starts[0], run


@functools.lru_cache(maxsize=65536)
def _patterns_meet(first: Pattern, item: int, second: Pattern, other: int, delta: int) -> bool:
    """Return whether `first` and `second`, whose start lies `delta` bytes later, share a byte."""
    if any(math.prod([n for _, n in pattern]) > _RUNS_LIMIT for pattern in (first, second)):
        return True  # too many runs to enumerate: assume the dependence
    left, left_run = _run_starts(first, item)
    right, right_run = _run_starts(second, other)
    right = right + delta
    if len(left) > len(right):
        left, left_run, right, right_run = right, right_run, left, left_run
    # a run of the longer list meets the run starting at s if it starts in (s - its length, s + run)
    low = np.searchsorted(right, left - right_run, side="right")
    high = np.searchsorted(right, left + left_run, side="left")
    return bool((high > low).any())


class Record:
    """One remembered access: its region, when it ends (microseconds), and which engine and
    instruction made it."""

    __slots__ = ("access", "end", "engine", "index")

    def __init__(self, access: Access, end: float, engine: int, index: int) -> None:
        self.access, self.end, self.engine, self.index = access, end, engine, index


def overlaps(first: Access, second: Access) -> bool:
    """Return whether two accesses to the same storage share a byte, exactly."""
    if (
        first.byte_start >= second.byte_stop
        or second.byte_start >= first.byte_stop
        or first.partition_start >= second.partition_stop
        or second.partition_start >= first.partition_stop
    ):
        return False
    if first.byte_start == second.byte_start and first.pattern == second.pattern:
        return True
    if first.dense and second.dense:
        return True
    return _patterns_meet(
        first.pattern,
        first.item_bytes,
        second.pattern,
        second.item_bytes,
        second.byte_start - first.byte_start,
    )


def covers(new: Access, old: Access) -> bool:
    """Return whether `new` surely touches every byte that `old` touches."""
    if new.partition_start > old.partition_start or new.partition_stop < old.partition_stop:
        return False
    if new.dense:
        return new.byte_start <= old.byte_start and new.byte_stop >= old.byte_stop
    return new.byte_start == old.byte_start and new.pattern == old.pattern


def distinct_bytes(accesses: Sequence[Access]) -> int:
    """Return how many bytes accesses to one HBM tensor touch; a shared byte counts once."""
    found: dict[tuple[Pattern, int], list[int]] = {}
    for access in accesses:
        found.setdefault((access.pattern, access.item_bytes), []).append(access.byte_start)
    starts, stops = [], []
    for (pattern, item), firsts in found.items():
        steps = sorted([(abs(step), count) for step, count in pattern if step], reverse=True)
        dims = merged((count, step) for step, count in steps)
        walked = tuple((step, count) for count, step in dims) or ((item, 1),)
        offsets, run = _run_starts(walked, item)
        starts.append((np.unique(firsts)[:, None] + offsets).ravel())
        stops.append(starts[-1] + run)
    start, stop = np.concatenate(starts), np.concatenate(stops)
    order = np.argsort(start)
    start, stop = start[order], stop[order]
    seen = np.concatenate(([start[0]], np.maximum.accumulate(stop)[:-1]))
    return int(np.maximum(stop - np.maximum(start, seen), 0).sum())


class Records:
    """The accesses of one storage that a later access may depend on: a few, or a grid of cells.

    The grid is laid by one access: its pitch is the step of that one's outermost dimension (0 for
    one row), a cell has as many rows and as many bytes of each. So equal tiles have a cell each.
    Accesses of many cells are kept aside; when they become many, one of them lays the grid anew.
    """

    __slots__ = ("across", "cells", "pitch", "rows", "wide", "wide_limit", "width")

    def __init__(self) -> None:
        self.cells: dict[int, list[Record]] = {}
        self.wide: list[Record] = []  # all of them, while there is no grid
        self.wide_limit = _FEW
        self.pitch, self.rows, self.width, self.across = 0, 1, 0, 1

    def near(self, access: Access) -> Iterable[Record]:
        """Return the records that may overlap `access` (a superset; some may come twice)."""
        if not self.width:
            return self.wide
        cells, keys = self.cells, self._cells_of(access)
        if not self.wide and len(keys) == 1:
            return cells.get(keys[0], ())
        if len(keys) > len(cells):
            keys = list(cells)
        return itertools.chain(self.wide, *[cells[key] for key in keys if key in cells])

    def replace_covered(self, access: Access) -> None:
        """Forget the records that a new write of `access` covers whole."""
        self.wide = [r for r in self.wide if not covers(access, r.access)]
        cells, keys = self.cells, self._cells_of(access) if self.width else ()
        for key in keys if len(keys) <= len(cells) else list(cells):
            cell = cells.get(key)
            if cell:
                cells[key] = [r for r in cell if not covers(access, r.access)]

    def add(self, record: Record) -> None:
        """Remember one access."""
        keys = self._cells_of(record.access) if self.width else ()
        if keys and len(keys) <= _WIDE_CELLS:
            for key in keys:
                self.cells.setdefault(key, []).append(record)
            return
        self.wide.append(record)
        if len(self.wide) > self.wide_limit:
            inside = (record for cell in self.cells.values() for record in cell)
            known = {id(one): one for one in (*inside, *self.wide)}
            self.cells, self.wide = {}, []
            self.wide_limit = max(2 * len(known), _WIDE_RECORDS)
            self._lay(record.access)
            for one in known.values():
                self.add(one)

    def _lay(self, access: Access) -> None:
        """Take the pitch and the cell from an access."""
        step, count = access.pattern[0]
        self.pitch = step if count > 1 and step > access.item_bytes else 0
        self.rows = count if self.pitch else 1
        extent = access.byte_stop - access.byte_start - (self.rows - 1) * self.pitch
        self.width = max(extent, access.item_bytes)
        self.across = -(-self.pitch // self.width) or 1

    def _cells_of(self, access: Access) -> Sequence[int]:
        """Return the cells that `access` touches, by their numbers."""
        start, stop, pitch, width = access.byte_start, access.byte_stop, self.pitch, self.width
        if not pitch:
            return range(start // width, (stop - 1) // width + 1)
        first, low = divmod(start, pitch)
        step, count = access.pattern[0]
        last = first + count - 1 if step == pitch else first
        high = low + stop - start - (last - first) * pitch
        if high > pitch:  # not a tile of this matrix: whole rows
            last, low, high = (stop - 1) // pitch, 0, pitch
        first, last = first // self.rows * self.across, last // self.rows * self.across
        left, right = low // width, (high - 1) // width
        if first == last:
            return range(first + left, first + right + 1)
        return [
            row + column
            for row in range(first, last + 1, self.across)
            for column in range(left, right + 1)
        ]
