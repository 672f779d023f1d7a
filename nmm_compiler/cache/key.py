"""The cache key: a list of named entries, so that a miss can name the entry that differs.

In: a mapping of names to plain data (numbers, text, booleans, None, lists, dicts, Records).
Out: a frozen Key with a sha256 digest of its canonical JSON. Two keys can be compared name by name
and field by field. Values that are not the same in every process and on every machine (sets, paths,
objects, NaN) are refused. Each entry that is not needed is a miss for somebody.

A change of the canonical JSON takes a new KEY_FORMAT.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nmm_compiler.errors import CacheKeyError
from nmm_compiler.records import Record

KEY_FORMAT = 1
_HASH = re.compile(r"[0-9a-f]{16,}")


def plain(value: Any, where: str) -> Any:
    """Return `value` as JSON data of exact built-in types; `where` names it in errors.

    Raises CacheKeyError for anything that JSON cannot carry there and back unchanged.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CacheKeyError(f"{where} is {value!r}; pass a finite number or a string")
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Record):
        return plain(value.to_dict(), where)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise CacheKeyError(f"{where} has the key {name!r}; pass strings as names")
        return {str.__str__(n): plain(item, f"{where}.{n}") for n, item in value.items()}
    raise CacheKeyError(
        f"{where} is a {type(value).__name__} ({value!r:.80}), which has no canonical JSON; pass "
        "numbers, strings, booleans, None, lists, dicts with string names, or a Record"
    )


def canonical(value: Any) -> str:
    """Return the one JSON text of plain data: sorted names, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two keys: the dotted name and both values, as text."""

    name: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.name}: {self.ours} (nearest entry has {self.theirs})"


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """What can change an emitted kernel, by name. Keys are equal when their digests are.

    entries: (name, plain data) in the order of printing, which does not change the digest.
    """

    entries: tuple[tuple[str, Any], ...]

    @classmethod
    def make(cls, entries: Mapping[str, Any]) -> Key:
        """Return the key of `entries`; raise CacheKeyError for none, or data it cannot hold."""
        if not isinstance(entries, Mapping) or not entries:
            raise CacheKeyError(f"a cache key needs named entries, got {entries!r:.80}")
        try:
            made = plain(entries, "key")
        except RecursionError:
            raise CacheKeyError("a cache key's data is nested without end") from None
        return cls(tuple(made.items()))

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 of the canonical JSON, in hex: the entry's name on disk."""
        document = canonical({"format": KEY_FORMAT, "entries": dict(self.entries)})
        return hashlib.sha256(document.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the entries as a dict of plain data, in order."""
        return dict(self.entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def diff(self, other: Key) -> tuple[str, ...]:
        """Return the names of the entries that differ or that only one of the keys has."""
        mine, theirs = dict(self.entries), dict(other.entries)
        names = [*mine, *(name for name in theirs if name not in mine)]
        return tuple(
            name
            for name in names
            if name not in mine or name not in theirs or not _same(mine[name], theirs[name])
        )

    def changes(self, other: Key) -> tuple[Change, ...]:
        """Return every differing field as a dotted name with both values: `spec.m: 512, 1024`."""
        mine, theirs = dict(self.entries), dict(other.entries)
        return tuple(
            Change(path, ours, other_value)
            for name in self.diff(other)
            for path, ours, other_value in _walk(
                name, mine.get(name, _MISSING), theirs.get(name, _MISSING)
            )
        )

    def leaves(self) -> dict[str, str]:
        """Return every field as dotted name -> text: {"family": "lowrank", "spec.m": "512"}."""
        found: dict[str, str] = {}

        def walk(path: str, value: Any) -> None:
            if isinstance(value, dict) and value:
                for name, inner in value.items():
                    walk(f"{path}.{name}", inner)
            else:
                found[path] = _short(value)

        for name, value in self.entries:
            walk(name, value)
        return found

    def __str__(self) -> str:
        return f"Key({self.digest[:12]}: {self.label()})"

    def label(self) -> str:
        """Return the entries on one line, each cut to a readable length."""
        return " ".join(f"{name}={_short(value)}" for name, value in self.entries)


_MISSING = object()


def _same(a: Any, b: Any) -> bool:
    return canonical(a) == canonical(b)


def _short(value: Any, limit: int = 60) -> str:
    if isinstance(value, dict):
        text = "{" + ",".join(f"{k}={_short(v, 20)}" for k, v in value.items()) + "}"
    else:
        text = value if isinstance(value, str) else canonical(value)
        if isinstance(value, str) and _HASH.fullmatch(text):
            return text[:8]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _walk(path: str, a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted name, our value, their value) of each leaf that differs."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(n for n in b if n not in a)]:
            ours, theirs = a.get(name, _MISSING), b.get(name, _MISSING)
            if ours is _MISSING or theirs is _MISSING or not _same(ours, theirs):
                yield from _walk(f"{path}.{name}", ours, theirs)
        return
    yield path, _leaf(a), _leaf(b)


def _leaf(value: Any) -> str:
    return "(absent)" if value is _MISSING else _short(value)
