"""Answers about a cache: why a key missed, what is stored, and whether it is still what would be
built."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.key import Key
from nmm_compiler.report.text import counted


@dataclass(frozen=True)
class Info:
    """One entry on disk. state: "ok", what is wrong, or "" where it was not read.

    used: seconds since the epoch. entry: a whole one that was read.
    """

    digest: str
    state: str
    size_bytes: int
    used: float
    entry: Entry | None = None


def explain(key: Key, infos: Iterable[Info]) -> tuple[str, Key]:
    """Return why a key hits or misses, in one line, and the nearest other key, itself if none.

    The nearest is that of the fewest changes; of equally near ones, the one that was used last.
    """
    used: dict[Key, float] = {}
    state = ""
    for info in infos:
        if info.digest == key.digest:
            state = info.state
        elif info.entry is not None:
            used[info.entry.key] = info.used
    nearest = min(used, key=lambda k: (len(key.changes(k)), -used[k]), default=key)
    names = ", ".join(key.diff(nearest)) or "the cache has no whole entry to compare with"
    said = f"miss among {counted(len(used), 'entry', 'entries')}, because of: {names}"
    if state:
        said = "hit" if state == "ok" else f"miss, because its entry is {state}"
    return said, nearest


def compare(entry: Entry, rebuilt: Mapping[str, str] | None) -> str:
    """Return "same", "skipped: why" or "differs: where", of an entry and what was built again.

    rebuilt: None where this version could not build it.
    """
    if rebuilt is None:
        return f"skipped: made by {entry.created.get('by', 'another version')}"
    if dict(rebuilt) == entry.files:
        return "same"
    cached, built = (
        [f"{name}: {line}" for name in sorted(files) for line in files[name].splitlines(True)]
        for files in (entry.files, rebuilt)
    )
    lines = difflib.unified_diff(cached, built, "cached", "rebuilt", n=0)
    return "differs:\n" + "".join(islice(lines, 12))
