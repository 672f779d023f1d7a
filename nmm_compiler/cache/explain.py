"""Answers about a cache: why a key missed, what is stored, and whether it is still what would be
built."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nmm_compiler.cache.entry import Entry
from nmm_compiler.cache.key import Change, Key
from nmm_compiler.report.text import counted

MAX_DIFF_LINES = 12


@dataclass(frozen=True)
class Info:
    """One line of `list`: `state` is "ok" or what is wrong; key and meta are None when damaged."""

    digest: str
    state: str
    size_bytes: int
    used: float
    key: Key | None = None
    meta: Mapping[str, Any] | None = None
    created: Mapping[str, Any] | None = None
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        label = self.key.label() if self.key else self.state
        return f"{self.digest[:12]}  {self.size_bytes} B  {label}"


@dataclass(frozen=True)
class Explanation:
    """Why a key hits or misses. `where` is "memory", "disk", "remote" or "" for a miss.

    nearest: the entry that differs in the fewest names; changes: the fields that differ from it.
    entries: how many there are. damage: what is wrong with the key's own entry, if it is there.
    """

    key: Key
    where: str
    nearest: Info | None
    changes: tuple[Change, ...]
    entries: int
    damage: str = ""

    def verdict(self) -> str:
        """Return whether the key hits or misses, and why, in one line."""
        if self.where:
            return f"hit ({self.where})"
        if self.damage:
            return f"miss, because its entry is {self.damage}"
        if self.nearest is None or self.nearest.key is None:
            return "miss; the cache has no whole entry to compare with"
        names = ", ".join(self.key.diff(self.nearest.key))
        among = counted(self.entries, "entry", "entries")
        return f"miss among {among}, because of: {names}"

    def __str__(self) -> str:
        said = f"{self.key}: {self.verdict()}"
        if self.where or self.damage or self.nearest is None or self.nearest.key is None:
            return said
        lines = [
            said,
            f"nearest entry {self.nearest.digest[:12]} differs in",
            *(f"  {change}" for change in self.changes),
        ]
        return "\n".join(lines)


def nearest(key: Key, infos: Iterable[Info]) -> tuple[Info | None, tuple[Change, ...]]:
    """Return the whole entry that differs from `key` in the fewest names, then fields, then age."""
    best: tuple[tuple[int, int, float], Info, tuple[Change, ...]] | None = None
    for info in infos:
        if info.key is None or info.key == key:
            continue
        changes = key.changes(info.key)
        rank = (len(key.diff(info.key)), len(changes), -info.used)
        if best is None or rank < best[0]:
            best = rank, info, changes
    return (best[1], best[2]) if best else (None, ())


@dataclass(frozen=True)
class Verified:
    """One entry of `verify`: state is same, differs, damaged, failed or skipped."""

    digest: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.digest[:12]}  {self.state}" + (f"  {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class VerifyReport:
    """What `verify` found, entry by entry; `ok` when nothing differs, is damaged or failed."""

    rows: tuple[Verified, ...]

    @property
    def ok(self) -> bool:
        """Whether every entry that could be compared is what would be built now."""
        return all(row.state in ("same", "skipped") for row in self.rows)

    def count(self, state: str) -> int:
        """Return how many entries are in this state."""
        return sum(row.state == state for row in self.rows)

    def __str__(self) -> str:
        states = ("same", "skipped", "differs", "damaged", "failed")
        counts = ", ".join(f"{self.count(s)} {s}" for s in states if self.count(s))
        bad = [str(row) for row in self.rows if row.state not in ("same", "skipped")]
        many = counted(len(self.rows), "entry", "entries")
        return "\n".join([f"{many}: {counts or 'nothing to verify'}", *bad])


def compare(entry: Entry, rebuilt: Mapping[str, str] | None) -> Verified:
    """Compare an entry with what was built again; None: this version could not build it."""
    digest = entry.key.digest
    if rebuilt is None:
        return Verified(digest, "skipped", f"made by {entry.created.get('by', 'another version')}")
    odd = sorted(set(rebuilt) ^ set(entry.files))
    if odd:
        return Verified(digest, "differs", f"files: {', '.join(odd)}")
    for name, text in entry.files.items():
        if rebuilt[name] != text:
            diff = difflib.unified_diff(
                text.splitlines(), rebuilt[name].splitlines(), "cached", "rebuilt", "", "", 0, ""
            )
            shown = "\n".join(list(diff)[:MAX_DIFF_LINES]) or "only line ends differ"
            return Verified(digest, "differs", f"{name}:\n{shown}")
    return Verified(digest, "same")
