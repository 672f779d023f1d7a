"""Finds the earlier accesses that a region overlaps: exact overlap of strided regions.

An access is a set of bytes: a partition range, a byte range and a strided pattern inside it.
Bounding ranges are compared first; only when they intersect and one side has holes are the
patterns themselves compared, and the comparison of two patterns at one distance is cached. Kernels
touch the same regions again and again, so each region of a storage knows those that overlap it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from nmm_compiler.simulator.tensors.geometry import Pattern, contiguous_run, merged
from nmm_compiler.simulator.trace import Access

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
