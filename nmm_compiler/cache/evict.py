"""The size bound: entries used least recently go first; and what killed processes left behind.

The time of last use is the modification time of an entry's directory. A clock that went back leaves
times in the future, which would shield old entries for ever: such times count as a moment ago and
are written again, in the same order.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from nmm_compiler.cache.disk import Disk, delete_tree, host_name, leftovers

LEFTOVER_SECONDS = 3600.0
MOMENT_NS = 2_000_000_000  # above the steps in which filesystems keep time


@dataclass(frozen=True)
class Usage:
    """What one entry takes and when it was used last (nanoseconds since the epoch)."""

    digest: str
    size_bytes: int
    used_ns: int


def usage(disk: Disk) -> list[Usage]:
    """Return every entry's usage, least recently used first."""
    found = []
    for digest in disk.digests():
        path = disk.folder / digest
        try:
            used = os.lstat(path).st_mtime_ns
            size = sum(f.stat(follow_symlinks=False).st_size for f in os.scandir(path))
        except OSError:
            if not os.path.lexists(path):
                continue  # evicted by another process meanwhile
            used, size = 0, 0  # a file or a closed directory in an entry's place: goes first
        found.append(Usage(digest, size, used))
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
                os.utime(disk.folder / seen.digest, ns=(stamp, stamp))
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


def clear_leftovers(disk: Disk, everything: bool = False) -> int:
    """Delete stages and trash of processes that are gone (or of all); return how many.

    A live process whose stage is deleted stages again, so an error of judgement costs time only.
    """
    count = 0
    for path in leftovers(disk.folder) if disk.check() else ():
        if everything or _is_abandoned(path):
            delete_tree(path)
            count += 1
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
