"""The cache key: a list of named entries, so that a miss can name the entry that differs.

In: a mapping of names to plain data (numbers, text, booleans, None, lists, dicts, Records).
Out: a frozen Key with a sha256 digest of its canonical JSON. Two keys can be compared name by name
and field by field. Values that are not the same in every process and on every machine (sets, paths,
objects, NaN) are refused. Each entry that is not needed is a miss for somebody.

A change of the canonical JSON takes a new KEY_FORMAT.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nmm_compiler.errors import CacheError
from nmm_compiler.records import Record

KEY_FORMAT = 1
_HASH = re.compile(r"[0-9a-f]{16,}")


def plain(value: Any, where: str) -> Any:
    """Return `value` as JSON data of exact built-in types; `where` names it in errors.

    Raises CacheError for anything that JSON cannot carry there and back unchanged.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CacheError(f"{where} is {value!r}; pass a finite number or a string")
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
                raise CacheError(f"{where} has the key {name!r}; pass strings as names")
        return {str.__str__(n): plain(item, f"{where}.{n}") for n, item in value.items()}
    raise CacheError(
        f"{where} is a {type(value).__name__} ({value!r:.80}), which has no canonical JSON; pass "
        "numbers, strings, booleans, None, lists, dicts with string names, or a Record"
    )


def canonical(value: Any) -> str:
    """Return the one JSON text of plain data: sorted names, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclasses.dataclass(frozen=True)
class Key:
    """What can change an emitted kernel, by name. Keys are equal when their digests are.

    entries: (name, plain data) in the order of printing, which does not change the digest. digest:
    the sha256 of the canonical JSON, in hex: the entry's name on disk.
    """

    entries: tuple[tuple[str, Any], ...] = dataclasses.field(compare=False)
    digest: str

    @classmethod
    def make(cls, entries: Mapping[str, Any]) -> Key:
        """Return the key of `entries`; raise CacheError for none, or data it cannot hold."""
        if not isinstance(entries, Mapping) or not entries:
            raise CacheError(f"a cache key needs named entries, got {entries!r:.80}")
        parts = plain(entries, "key")
        document = canonical({"format": KEY_FORMAT, "entries": parts})
        return cls(tuple(parts.items()), hashlib.sha256(document.encode()).hexdigest())

    def to_dict(self) -> dict[str, Any]:
        """Return the entries as a dict of plain data, in order."""
        return dict(self.entries)

    def changes(self, other: Key) -> tuple[tuple[str, str, str], ...]:
        """Return (dotted name, our value, their value) of every differing field, as text."""
        mine, theirs = self.fields(), other.fields()
        both = [(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}]
        return tuple((name, short(a), short(b)) for name, a, b in both if a != b)

    def diff(self, other: Key) -> tuple[str, ...]:
        """Return the names of the entries that differ."""
        names = (name.partition(".")[0] for name, _, _ in self.changes(other))
        return tuple(dict.fromkeys(names))

    def fields(self) -> dict[str, str]:
        """Return every field as dotted name -> JSON: {"family": '"lowrank"', "spec.m": "512"}."""
        return {name: text for top, value in self.entries for name, text in _leaves(top, value)}

    def __str__(self) -> str:
        shown = " ".join(f"{name}={short(canonical(value))}" for name, value in self.entries)
        return f"Key({self.digest[:12]}: {shown})"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    else:
        yield path, canonical(value)


def short(text: str | None, limit: int = 60) -> str:
    """Return JSON as text of a readable length; None: there is none."""
    if text is None:
        return "(absent)"
    text = text.strip('"')
    if _HASH.fullmatch(text):
        return text[:8]
    return text if len(text) <= limit else text[: limit - 3] + "..."
