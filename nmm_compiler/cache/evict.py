"""Keeps a cache within its size, and deletes what killed processes left behind.

The least recently used entries go first. The time of last use is the modification time of an
entry's directory. A clock that went back leaves
times in the future, which would shield old entries for ever: such times count as a moment ago and
are written again, in the same order.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from nmm_compiler.cache import locks
from nmm_compiler.cache.disk import SHARDS, Disk, delete_tree, host_name, leftovers

LEFTOVER_SECONDS = 3600.0
ENOUGH = 1000  # names, listed shard by shard
SAMPLE = 64
OLDEST = 2
SLACK = 1 / 64
SCAN_SHARE = 8  # the size bound may be passed by 1/8 of what was free, for a cheaper publication
MOMENT_NS = 2_000_000_000  # above the steps in which filesystems keep time


@dataclass(frozen=True)
class Usage:
    """What one entry takes and when it was used last (nanoseconds since the epoch)."""

    digest: str
    size_bytes: int
    used_ns: int


def usage(disk: Disk) -> list[Usage]:
    """Return every entry's usage, least recently used first."""
    found = [u for d in disk.digests() if (u := _usage(disk.place(d), d)) is not None]
    return sorted(_without_future(disk, found), key=lambda u: (u.used_ns, u.digest))


def _without_future(disk: Disk, found: list[Usage]) -> list[Usage]:
    now = time.time_ns()
    future = sorted((u for u in found if u.used_ns > now), key=lambda u: u.used_ns)
    mended = {}
    for rank, seen in enumerate(future):
        stamp = now - MOMENT_NS - (len(future) - rank) * 1000
        mended[seen.digest] = stamp
        if disk.writing:
            try:
                os.utime(disk.place(seen.digest), ns=(stamp, stamp))
            except OSError:
                continue  # evicted meanwhile
    return [Usage(u.digest, u.size_bytes, mended.get(u.digest, u.used_ns)) for u in found]


def evict(disk: Disk, max_bytes: int, keep: str | None = None) -> tuple[list[Usage], int]:
    """Delete entries until the rest fits into `max_bytes`; return those deleted and bytes left.

    `keep` is the digest of an entry that stays whatever its age. Raises OSError.
    """
    entries = usage(disk)
    total = sum(u.size_bytes for u in entries)
    deleted = []
    for seen in entries:
        if total <= max_bytes:
            break
        if seen.digest == keep:
            continue
        disk.remove(seen.digest)
        total -= seen.size_bytes
        deleted.append(seen)
    return deleted, total


class Bound:
    """Keeps a cache within `max_bytes`, without reading all of it at each publication.

    Up to SAMPLE entries all are looked at. In larger caches each look lists shards, in random
    order, until it has ENOUGH names. It takes the last use of SAMPLE random ones among them, and
    the sizes of those that it does not know yet. Digests are spread evenly, so what was listed is
    a fair part of the whole. The estimate of the total has a margin of three standard errors. The
    least recently used of the sample are deleted until the estimate leaves SLACK free: at most
    OLDEST of them, which leaves the rest to the next looks, unless the bound is surely exceeded.
    """

    def __init__(self, disk: Disk, max_bytes: int) -> None:
        self._disk, self._max_bytes = disk, max_bytes
        self._sizes: dict[str, int] = {}
        self._until_look: int | None = None
        self._random = random.Random()

    def published(self, digest: str, size_bytes: int) -> None:
        """Note a new entry and, when it is time, delete others; raises OSError."""
        if self._until_look is None:
            clear_leftovers(self._disk)
        self._sizes[digest] = size_bytes
        self._until_look = (self._until_look or 0) - size_bytes
        if self._until_look >= 0:
            return
        digests: list[str] = []
        shards = self._random.sample(SHARDS, len(SHARDS))
        while shards and len(digests) < ENOUGH:
            digests += self._disk.listing(shards.pop())
        if not shards and len(digests) <= SAMPLE:
            _, total = evict(self._disk, self._max_bytes, keep=digest)
        else:
            total = self._thin_out(digests, 1 - len(shards) / len(SHARDS), digest)
        self._until_look = max(0, self._max_bytes - total) // SCAN_SHARE

    def _thin_out(self, digests: list[str], share: float, keep: str) -> int:
        """Delete the oldest of a sample of entries; return the bytes that are left, estimated.

        digests: the entries of `share` of the cache.
        """
        sample = self._random.sample(digests, min(SAMPLE, len(digests)))
        seen = [u for u in map(self._usage, sample) if u is not None]
        known = [self._sizes[digest] for digest in digests if digest in self._sizes]
        if not known:
            return 0  # all of them were deleted meanwhile
        total, error = _estimate(known, len(digests), share)
        total += error
        if total > self._max_bytes:
            oldest = sorted(seen, key=lambda u: (u.used_ns, u.digest))
            for deleted, old in enumerate(u for u in oldest if u.digest != keep):
                surely_over = total - 2 * error > self._max_bytes
                enough = deleted >= OLDEST and not surely_over
                if enough or total <= self._max_bytes * (1 - SLACK):
                    break
                if self._disk.remove(old.digest):
                    total -= self._sizes.pop(old.digest, 0)
        return math.ceil(total)

    def _usage(self, digest: str) -> Usage | None:
        known = self._sizes.get(digest)
        found = _usage(self._disk.place(digest), digest, known)
        if found is not None:
            self._sizes[digest] = found.size_bytes
            if found.used_ns > time.time_ns():  # the clock went back: counts as a moment ago
                found = _without_future(self._disk, [found])[0]
        return found


def _usage(path: Path, digest: str, size_bytes: int | None = None) -> Usage | None:
    """Return the usage of one entry, or None when it is gone; a known size is not looked up."""
    try:
        used = os.lstat(path).st_mtime_ns
        if size_bytes is None:
            with os.scandir(path) as files:
                size_bytes = sum(f.stat(follow_symlinks=False).st_size for f in files)
    except OSError:
        if not os.path.lexists(path):
            return None  # evicted by another process meanwhile
        return Usage(digest, 0, 0)  # a file or a closed directory in an entry's place: goes first
    return Usage(digest, size_bytes, used)


def _estimate(known: list[int], count: int, share: float) -> tuple[float, float]:
    """Return the size of all entries in bytes, and three standard errors of it.

    known: the sizes of some of the `count` entries that were listed. share: the part of the cache
    that was listed.
    """
    mean, unknown = statistics.fmean(known), count - len(known)
    spread = statistics.pvariance(known, mean)
    listed = sum(known) + unknown * mean
    # The variance of a sum of `unknown` sizes, whose mean is known from the others only, and of
    # the number of entries that fall into the listed shards.
    variance = spread * (unknown**2 / len(known) + unknown)
    variance += count * (mean**2 + spread) * (1 - share)
    return listed / share, 3 * math.sqrt(variance) / share


def clear_leftovers(disk: Disk, everything: bool = False) -> int:
    """Delete stages and trash of processes that are gone (or of all), and locks that nobody holds;
    return how many stages and trash.

    A live process whose stage is deleted by mistake stages again: that costs time only.
    """
    count = 0
    for path in leftovers(disk.folder) if disk.check() else ():
        if everything or _is_abandoned(path):
            delete_tree(path)
            count += 1
    locks.clear(disk.folder)
    return count


def _is_abandoned(path: Path) -> bool:
    _, host, process, _ = (
        path.name.lstrip(".").split("-") if path.name.count("-") == 3 else [""] * 4
    )
    if host == host_name() and process.isdecimal():
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass  # alive and another user's, or no process id: its age decides
    try:
        return abs(time.time() - os.lstat(path).st_mtime) > LEFTOVER_SECONDS
    except OSError:
        return False
