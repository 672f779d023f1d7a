"""Finds the earlier accesses that a region overlaps: exact overlap of strided regions.

An access is a set of bytes: a partition range, a byte range and a strided pattern inside it.
Bounding ranges are compared first; only when they intersect and one side has holes are the
patterns themselves compared. A kernel that tiles one HBM tensor writes thousands of interleaved
regions. So the records of a storage are kept in a grid of its rows and columns, and the comparison
of two patterns at one distance is cached.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from nmm_compiler.simulator.trace import Access

Pattern = tuple[tuple[int, int], ...]

_LIST_LIMIT = 12
_WIDE_CELLS = 16
_SMALLEST_CELL_BITS = 4
_RUNS_LIMIT = 1 << 20


@functools.lru_cache(maxsize=65536)
def contiguous_run(pattern: Pattern, item_bytes: int) -> int:
    """Return the length in bytes of the contiguous runs that `pattern` walks."""
    run = item_bytes
    for step, count in reversed(pattern):
        if count == 1:
            continue
        if step != run:
            break
        run *= count
    return run


@functools.lru_cache(maxsize=65536)
def is_dense(pattern: Pattern, item_bytes: int, extent: int) -> bool:
    """Return whether `pattern` touches every byte of its bounding range of `extent` bytes."""
    return contiguous_run(pattern, item_bytes) >= extent


@functools.lru_cache(maxsize=4096)
def _run_starts(pattern: Pattern, item_bytes: int) -> tuple[np.ndarray, int]:
    """Return the sorted starts (relative to byte_start) and the length of the contiguous runs."""
    run = contiguous_run(pattern, item_bytes)
    covered, outer = item_bytes, list(pattern)
    while outer and covered < run:
        covered *= outer.pop()[1]
    starts = np.zeros(1, dtype=np.int64)
    for step, count in outer:
        if count > 1 and step:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    starts = np.unique(starts)
    return starts - starts[0], run


@functools.lru_cache(maxsize=65536)
def _patterns_meet(first: Pattern, item: int, second: Pattern, other: int, delta: int) -> bool:
    """Return whether `first` and `second`, whose start lies `delta` bytes later, share a byte."""
    if _runs(first) > _RUNS_LIMIT or _runs(second) > _RUNS_LIMIT:
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


def _runs(pattern: Pattern) -> int:
    count = 1
    for _, extent in pattern:
        count *= extent
    return count


class Record:
    """One remembered access: its region, when it ends (microseconds) and which engine made it."""

    __slots__ = ("access", "end", "engine")

    def __init__(self, access: Access, end: float, engine: int) -> None:
        self.access, self.end, self.engine = access, end, engine


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
    if is_dense(first.pattern, first.item_bytes, first.byte_stop - first.byte_start) and is_dense(
        second.pattern, second.item_bytes, second.byte_stop - second.byte_start
    ):
        return True
    return _patterns_meet(
        first.pattern,
        first.item_bytes,
        second.pattern,
        second.item_bytes,
        second.byte_start - first.byte_start,
    )


def _covers(new: Access, new_dense: bool, old: Access) -> bool:
    """Return whether `new` surely touches every byte that `old` touches."""
    if new.partition_start > old.partition_start or new.partition_stop < old.partition_stop:
        return False
    if new_dense:
        return new.byte_start <= old.byte_start and new.byte_stop >= old.byte_stop
    return new.byte_start == old.byte_start and new.pattern == old.pattern


class Tiling:
    """Equal regions on a regular grid: two of them share a byte only if they start at the same.

    like: any of them. pitch: the step of their outer dimension, 0 for one dense run; rows, width:
    the steps of that dimension in a region, and the bytes of each.
    """

    __slots__ = ("like", "pitch", "rows", "width")

    def __init__(self, like: Access, pitch: int, rows: int, width: int) -> None:
        self.like, self.pitch, self.rows, self.width = like, pitch, rows, width

    @classmethod
    def of(cls, access: Access) -> Tiling | None:
        """Return the tiling that `access` belongs to; None if it is on no such grid."""
        pattern, item = access.pattern, access.item_bytes
        step, width = pattern[-1][0], pattern[-1][1] * item
        if len(pattern) > 2 or step != item:
            return None
        pitch, rows = pattern[0] if len(pattern) == 2 else (0, 1)
        if len(pattern) == 2 and (pitch < width or rows < 1):
            return None
        found = cls(access, pitch, rows, width)
        return found if found.aligned(access.byte_start) else None

    def same(self, access: Access) -> bool:
        """Return whether `access` has the shape of the regions, at any place."""
        like = self.like
        return (
            access.partition_stop == like.partition_stop
            and access.partition_start == like.partition_start
            and access.item_bytes == like.item_bytes
            and (access.pattern is like.pattern or access.pattern == like.pattern)
        )

    def aligned(self, start: int) -> bool:
        """Return whether a region that starts at this byte is on the grid."""
        if not self.pitch:
            return start % self.width == 0
        row, column = divmod(start, self.pitch)
        return (
            row % self.rows == 0 and column % self.width == 0 and column + self.width <= self.pitch
        )


def distinct_bytes(accesses: Sequence[Access]) -> int:
    """Return how many bytes accesses to one HBM tensor touch; a shared byte counts once."""
    tiling = Tiling.of(accesses[0])
    if tiling and all(tiling.same(a) and tiling.aligned(a.byte_start) for a in accesses):
        return len(accesses) * tiling.rows * tiling.width
    starts, lengths = [], []
    for access in accesses:
        steps = [(abs(step), count) for step, count in access.pattern if step and count > 1]
        offsets, run = _run_starts(tuple(sorted(steps, reverse=True)), access.item_bytes)
        starts.append(offsets + access.byte_start)
        lengths.append(np.full(len(offsets), run))
    start, length = np.concatenate(starts), np.concatenate(lengths)
    order = np.argsort(start)
    start, stop = start[order], start[order] + length[order]
    seen = np.maximum.accumulate(stop)
    seen = np.concatenate(([start[0]], seen[:-1]))
    return int(np.maximum(stop - np.maximum(start, seen), 0).sum())


class Records:
    """The accesses of one storage that a later access may depend on.

    Regions of one tiling are found by where they start. Others are in a short list at first; then
    in a grid. Rows are multiples of the storage's pitch (the step that most of the accesses take in
    their outermost dimension), columns the bytes within a row, both in steps of the median access;
    so tiles of a matrix meet only their neighbours. Accesses that would cover many cells are kept
    aside, and the grid is laid anew when they become many.
    """

    __slots__ = (
        "cells",
        "column_shift",
        "items",
        "pitch",
        "row_shift",
        "tiles",
        "tiling",
        "used",
        "wide",
        "wide_limit",
    )

    def __init__(self) -> None:
        self.used = False
        self.tiling: Tiling | None = None
        self.tiles: dict[int, list[Record]] = {}
        self.items: list[Record] = []
        self.cells: dict[tuple[int, int], list[Record]] | None = None
        self.wide: list[Record] = []
        self.wide_limit = _LIST_LIMIT
        self.pitch = self.row_shift = self.column_shift = 0

    def near(self, access: Access) -> Iterable[Record]:
        """Return the records that may overlap `access` (a superset; some may come twice).

        The last ones first, where that costs nothing: who waits for the latest compares fewer.
        """
        tiling = self.tiling
        if tiling is not None:
            if tiling.same(access):
                start = access.byte_start
                found = self.tiles.get(start)
                if found is not None:
                    return found
                if tiling.aligned(start):
                    return ()
            starts = self._starts(tiling, access)
            if starts is not None:
                tiles = self.tiles
                return [record for start in starts for record in tiles.get(start, ())]
            self._leave_tiling()
        if self.cells is None:
            return self.items[::-1]
        return self._in_cells(access)

    def _starts(self, tiling: Tiling, access: Access) -> Iterable[int] | None:
        """Return where the tiles start that `access` may touch; None if a grid finds them sooner.

        Of dense tiles, those between its first and its last byte.
        """
        if not tiling.pitch:
            width = tiling.width
            first = access.byte_start // width * width
            if (access.byte_stop - first) // width < len(self.tiles):
                return reversed(range(first, access.byte_stop, width))
            return reversed(list(self.tiles))
        return reversed(list(self.tiles)) if len(self.tiles) <= _LIST_LIMIT else None

    def _leave_tiling(self) -> None:
        """Keep the records in the list, or in the grid, from now on."""
        records = [record for tile in self.tiles.values() for record in tile]
        self.tiling, self.tiles = None, {}
        if len(records) > _LIST_LIMIT:
            self._lay_grid(records)
        else:
            self.items = records

    def _in_cells(self, access: Access) -> Iterator[Record]:
        assert self.cells is not None
        yield from self.wide
        rows, columns = self._span(access)
        if len(rows) * len(columns) > len(self.cells):
            for cell in self.cells.values():
                yield from cell
            return
        for row in rows:
            for column in columns:
                yield from self.cells.get((row, column), ())

    def replace_covered(self, access: Access) -> None:
        """Forget the records that a new write of `access` covers whole."""
        tiling = self.tiling
        if tiling is not None and tiling.same(access):
            self.tiles.pop(access.byte_start, None)  # equal regions cover only one another
            return
        dense = is_dense(access.pattern, access.item_bytes, access.byte_stop - access.byte_start)
        if tiling is not None:
            starts = self._starts(tiling, access)
            if starts is not None:
                self._drop_covered(starts, access, dense)
                return
            self._leave_tiling()
        if self.cells is None:
            if self.items:
                self.items = [r for r in self.items if not _covers(access, dense, r.access)]
            return
        if self.wide:
            self.wide = [r for r in self.wide if not _covers(access, dense, r.access)]
        rows, columns = self._span(access)
        if len(rows) * len(columns) > len(self.cells):
            keys = list(self.cells)
        else:
            keys = [(row, column) for row in rows for column in columns]
        for key in keys:
            cell = self.cells.get(key)
            if cell:
                self.cells[key] = [r for r in cell if not _covers(access, dense, r.access)]

    def write(self, record: Record) -> None:
        """Remember a write, and forget the accesses that it covers whole."""
        access, tiling = record.access, self.tiling
        if tiling is not None and tiling.same(access):
            start, tiles = access.byte_start, self.tiles
            if start in tiles or tiling.aligned(start):
                tiles[start] = [record]  # equal regions cover only one another
                return
        if self.used:
            self.replace_covered(access)
        self.add(record)

    def _drop_covered(self, starts: Iterable[int], access: Access, dense: bool) -> None:
        """Forget the tiles that `access` covers; all records of a tile have its region."""
        for start in starts:
            tile = self.tiles.get(start)
            if tile and _covers(access, dense, tile[0].access):
                del self.tiles[start]

    def add(self, record: Record) -> None:
        """Remember one access."""
        access = record.access
        if not self.used:
            self.used = True
            self.tiling = Tiling.of(access)
        tiling = self.tiling
        if tiling is not None:
            if tiling.same(access):
                found = self.tiles.get(access.byte_start)
                if found is not None:
                    found.append(record)
                    return
                if tiling.aligned(access.byte_start):
                    self.tiles[access.byte_start] = [record]
                    return
            self._leave_tiling()
        if self.cells is not None:
            self._place(record)
            if len(self.wide) > self.wide_limit:
                self._lay_grid([*self.wide, *(r for c in self.cells.values() for r in c)])
                self.wide_limit = max(self.wide_limit, 2 * len(self.wide))
            return
        self.items.append(record)
        if len(self.items) > _LIST_LIMIT:
            self._lay_grid(self.items)
            self.items = []

    def _lay_grid(self, records: list[Record]) -> None:
        """Choose the pitch and the size of a cell from `records`, and place them."""
        unique = list({id(record): record for record in records}.values())
        steps = [
            r.access.pattern[0][0]
            for r in unique
            if len(r.access.pattern) > 1 and r.access.pattern[0][1] > 1
        ]
        self.pitch = max(statistics.mode(steps), 0) if steps else 0
        self.row_shift = self.column_shift = 0
        rows, columns = zip(*(self._span(r.access) for r in unique), strict=True)
        self.row_shift = _shift(rows)
        self.column_shift = max(_SMALLEST_CELL_BITS, _shift(columns))
        self.cells, self.wide = {}, []
        for record in unique:
            self._place(record)

    def _span(self, access: Access) -> tuple[range, range]:
        """Return the rows and columns of cells that `access` touches."""
        start, stop, pitch = access.byte_start, access.byte_stop, self.pitch
        if not pitch:
            rows, low, high = range(1), start, stop
        else:
            first, low = divmod(start, pitch)
            outer = access.pattern[0]
            count = outer[1] if outer[0] == pitch else 1
            high = low + stop - start - (count - 1) * pitch
            rows = range(first, first + count)
            if high > pitch:  # not a tile of this matrix: whole rows
                rows, low, high = range(first, (stop - 1) // pitch + 1), 0, pitch
        bits, shift = self.row_shift, self.column_shift
        return (
            range(rows.start >> bits, ((rows.stop - 1) >> bits) + 1),
            range(low >> shift, ((high - 1) >> shift) + 1),
        )

    def _place(self, record: Record) -> None:
        assert self.cells is not None
        rows, columns = self._span(record.access)
        if len(rows) * len(columns) > _WIDE_CELLS:
            self.wide.append(record)
            return
        for row in rows:
            for column in columns:
                self.cells.setdefault((row, column), []).append(record)


def _shift(spans: Iterable[range]) -> int:
    """Return the bits of a cell that the median span fills."""
    return max(0, int(statistics.median_low([len(span) for span in spans]) - 1).bit_length())
