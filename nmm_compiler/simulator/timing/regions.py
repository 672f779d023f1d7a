"""Finds the earlier accesses that a region overlaps: exact overlap of strided regions.

An access is a set of bytes: a partition range, a byte range and a strided pattern inside it.
Bounding ranges are compared first; only when they intersect and one side has holes are the
patterns themselves compared, and the comparison of two patterns at one distance is cached. Kernels
touch the same regions again and again, so each region of a storage knows those that overlap it,
and what used its bytes last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nmm_compiler.simulator.tensors.geometry import Pattern, contiguous_run, merged
from nmm_compiler.simulator.timing.resources import Pool
from nmm_compiler.simulator.timing.timeline import Booking
from nmm_compiler.simulator.trace import Access

_RUNS_LIMIT = 1 << 20


@functools.lru_cache(maxsize=4096)
def _runs(pattern: Pattern, item_bytes: int) -> tuple[np.ndarray, int]:
    """Return the starts of the contiguous runs, from the first byte on, and their length."""
    steps = sorted([(abs(step), count) for step, count in pattern if step], reverse=True)
    dims = merged((count, step) for step, count in steps)
    walked = tuple((step, count) for count, step in dims) or ((item_bytes, 1),)
    run = contiguous_run(walked, item_bytes)
    starts = np.zeros(1, dtype=np.int64)
    for step, count in walked[:-1] if run > item_bytes else walked:
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    return starts, run


def _bytes_of(several: Sequence[tuple[np.ndarray, int]]) -> int:
    """Return how many bytes runs of several lengths touch; a shared byte counts once."""
    start = np.concatenate([starts for starts, _ in several])
    stop = np.concatenate([starts + run for starts, run in several])
    order = np.argsort(start)
    start, stop = start[order], stop[order]
    seen = np.concatenate(([start[0]], np.maximum.accumulate(stop)[:-1]))
    return int(np.maximum(stop - np.maximum(start, seen), 0).sum())


@functools.lru_cache(maxsize=65536)
def _patterns_meet(first: Pattern, item: int, second: Pattern, other: int, delta: int) -> bool:
    """Return whether `first` and `second`, whose start lies `delta` bytes later, share a byte."""
    if any(math.prod([n for _, n in pattern]) > _RUNS_LIMIT for pattern in (first, second)):
        return True  # too many runs to enumerate: assume the dependence
    left, (starts, run) = _runs(first, item), _runs(second, other)
    return _bytes_of([left, (starts + delta, run)]) < _bytes_of([left]) + _bytes_of([(starts, run)])


def overlaps(first: Access, second: Access) -> bool:
    """Return whether two accesses to the same storage share a byte, exactly."""
    if (
        first.byte_start >= second.byte_stop
        or second.byte_start >= first.byte_stop
        or first.partition_start >= second.partition_stop
        or second.partition_start >= first.partition_stop
    ):
        return False
    delta = second.byte_start - first.byte_start
    if (first.dense and second.dense) or (delta == 0 and first.pattern == second.pattern):
        return True
    return _patterns_meet(first.pattern, first.item_bytes, second.pattern, second.item_bytes, delta)


def covers(new: Access, old: Access) -> bool:
    """Return whether `new` surely touches every byte that `old` touches."""
    if new.partition_start > old.partition_start or new.partition_stop < old.partition_stop:
        return False
    if new.dense:
        return new.byte_start <= old.byte_start and new.byte_stop >= old.byte_stop
    return new.byte_start == old.byte_start and new.pattern == old.pattern


def distinct_bytes(accesses: Iterable[Access]) -> int:
    """Return how many bytes accesses to one HBM tensor touch; a shared byte counts once."""
    walked = [(a.byte_start, *_runs(a.pattern, a.item_bytes)) for a in accesses]
    return _bytes_of([(first + starts, run) for first, starts, run in walked])


Use = tuple[float, int, Booking]
"""A write or a read: when it ends (microseconds), by which engine, and what held the engine."""


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """Bytes of a storage that instructions touch.

    made: the last write of exactly these bytes, if any; reads: the last one since then of each
    engine; later writes hide both. near: the regions that share a byte with it, of the first `seen`
    that were used.
    """

    storage: Tracked
    access: Access
    near: list[Region] = dataclasses.field(default_factory=list)
    seen: int = 0
    used: bool = False
    made: tuple[Use, ...] = ()
    reads: dict[int, Use] = dataclasses.field(default_factory=dict)

    def look(self) -> None:
        """Find the regions near it among those that were used since it looked last."""
        used, access = self.storage.used, self.access
        start, stop = access.byte_start, access.byte_stop
        for first, behind, other in used[self.seen :]:
            if first < stop and start < behind and overlaps(other.access, access):
                self.near.append(other)
        self.seen = len(used)

    def note(self, use: Use, writing: bool) -> None:
        """Remember a write, and forget what it covers, or the last read of an engine."""
        storage, (ended, engine, _) = self.storage, use
        if not self.used:
            self.used = True
            storage.used.append((self.access.byte_start, self.access.byte_stop, self))
        if not writing:
            if engine not in self.reads or ended > self.reads[engine][0]:
                self.reads[engine] = use
            return
        if self.seen < len(storage.used):
            self.look()
        for other in self.near:
            if covers(self.access, other.access):
                other.made, other.reads = (), {}
        self.made = (use,)


class Tracked:
    """What the timing pass knows of one allocation.

    used: the regions that have had a use, with their bytes.
    end: end of the last access so far, by `user`.
    floor: when its memory is free; `freed_by` frees it.
    pool: where its memory is from, until it gives it back; None of one at an address or in HBM.
    put_off: (region, whether it writes, store) of each store that was put off and touches it.
    """

    def __init__(self, last_write: int, last_use: int, size: int) -> None:
        self.last_write, self.last_use, self.size = last_write, last_use, size
        self.used: list[tuple[int, int, Region]] = []
        self.user: Booking | None = None
        self.freed_by: Booking | None = None
        self.end = self.floor = 0.0
        self.pool: Pool | None = None
        self.put_off: list[tuple[Region, bool, Any]] = []
