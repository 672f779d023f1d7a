"""Small frozen records, which one stage passes to the next.

A record is a frozen dataclass that prints on one line, turns into plain JSON and back, and has a
short digest of that JSON as its identity. Nested records, tuples, numbers, strings, booleans and
None are allowed as fields; nothing else, so that equal records always give equal bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from typing import Any, ClassVar, Self


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def json_kind(annotation: Any) -> Any:
    """Return what JSON makes of this type: list, dict, or Any where it changes nothing."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return list
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, Record)):
        return dict
    return Any


def _revive(annotation: Any, value: Any) -> Any:
    """Turn JSON data back into the type that a field is annotated with."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        kind = type(value) if isinstance(value, (list, dict)) else Any
        kinds = (one for one in typing.get_args(annotation) if json_kind(one) is kind)
        return _revive(next(kinds, Any), value)
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation.from_dict(value)
    if origin is tuple:
        inner = typing.get_args(annotation)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_revive(inner[0], item) for item in value)
        return tuple(_revive(kind, item) for kind, item in zip(inner, value, strict=True))
    if origin is dict:
        kind = typing.get_args(annotation)[1]
        return {key: _revive(kind, item) for key, item in value.items()}
    return value


@functools.lru_cache(maxsize=256)
def hints_of(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations of a class; reading them costs more than building a record."""
    return typing.get_type_hints(cls, include_extras=True)


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of the frozen records; subclasses are `@dataclass(frozen=True, kw_only=True)`.

    derived: properties that follow from the fields, and that `to_dict` says, too.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data, in declaration order.

        A field that takes no part in comparison and in `repr` holds no data, and is left out.
        """
        held = [f.name for f in dataclasses.fields(self) if f.repr or f.compare]
        return {name: _plain(getattr(self, name)) for name in (*held, *self.derived)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the record again from `to_dict`'s data; unknown keys raise TypeError."""
        hints = hints_of(typing.cast(Any, cls))
        held = {key: value for key, value in data.items() if key not in cls.derived}
        return cls(**{key: _revive(hints.get(key, Any), value) for key, value in held.items()})

    def to_json(self, indent: int | None = None) -> str:
        """Return canonical JSON: equal records give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build the record from the text of `to_json`."""
        return cls.from_dict(json.loads(text))

    def digest(self, length: int = 12) -> str:
        """Return the first `length` hex digits of the sha256 of class name and canonical JSON."""
        text = f"{type(self).__name__}:{self.to_json()}"
        return hashlib.sha256(text.encode()).hexdigest()[:length]

    def __str__(self) -> str:
        shown = (
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.repr and getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"
