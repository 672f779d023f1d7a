"""Documented functions as data: their names and parameters, from a table's text or a function."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

_ENTRY = re.compile(
    r"\s*([\w,\s]+?)\(((?:[^()]|\([^()]*\))*)\)\s*(?:->\s*(\w+))?\s*(?=\n[a-z]|\Z)", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Function:
    """A documented function: its full name and its parameters in positional order.

    parameters: name -> its default as text, None when required. result: what a table says of the
    result after an arrow.
    """

    name: str
    parameters: dict[str, str | None]
    result: str = ""

    def __str__(self) -> str:
        given = self.parameters.items()
        shown = (name if text is None else f"{name}={text}" for name, text in given)
        return f"{self.name.rpartition('.')[2]}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True)
class Api:
    """What NKI of `version` documents, by full name.

    functions: callables with a known signature; values: every other name (dtypes, memories,
    classes, modules); members: enumeration or record -> its attribute names.
    """

    version: str
    functions: dict[str, Function]
    values: frozenset[str]
    members: dict[str, tuple[str, ...]]

    def names(self, owner: str) -> tuple[str, ...]:
        """Return the attribute names of a module, an enumeration or a record, in table order."""
        if owner in self.members:
            return self.members[owner]
        prefix = owner + "."
        known = (*self.functions, *self.values)
        return tuple(n[len(prefix) :] for n in known if n.startswith(prefix))


def entries(module: str, text: str, more: str = "") -> Iterator[Function]:
    """Yield the functions of a table: `name, name(parameters) -> result` are its entries.

    more: parameters that all of them also have.
    """
    for found in _ENTRY.finditer(text):
        own = _parameters(found.group(2))
        given = {**own, **_parameters(more), **own}
        for name in found.group(1).split(","):
            yield Function(f"{module}.{name.strip()}", given, found.group(3) or "")


def _parameters(text: str) -> dict[str, str | None]:
    arguments = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + [
        ast.unparse(d) for d in arguments.defaults
    ]
    return {a.arg: d for a, d in zip(arguments.args, defaults, strict=True)}


def described(name: str, function: Callable[..., Any]) -> Function:
    """Return a function as data, with its defaults as kernels write them."""
    parameters = inspect.signature(function).parameters.values()
    return Function(name, {p.name: _spelled(p.default) for p in parameters})


def _spelled(default: Any) -> str | None:
    """Return a default as a kernel writes it: enum.member, memory, dtype, or a literal."""
    if default is inspect.Parameter.empty:
        return None
    text = repr(default) if type(default) is str else str(default)
    return "..." if default is ... else text.removeprefix("MemoryRegion.")
