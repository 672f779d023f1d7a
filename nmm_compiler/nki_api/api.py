"""The NKI API of one version: its names, and the parameters of each function.

`api("0.6")` reads `table.py` once. By full name ("nki.isa.nc_matmul") it has a function's
parameters, the version that added or removed a name, and the replacement of a deprecated one. The
lint uses it, and so can any other reader or writer of NKI source.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator

from nmm_compiler.errors import UnknownNameError
from nmm_compiler.nki_api import table

API_VERSION = table.API_VERSION
VERSIONS = table.VERSIONS
MODULES = ("nki", "nki.isa", "nki.language", "nki.collectives")
_ENTRY = re.compile(r"\s*([\w,\s]+?)\((.*?)\)\s*(?=\n[a-z]|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of a function: its name and its default as text (None when required)."""

    name: str
    default: str | None


@dataclasses.dataclass(frozen=True)
class Function:
    """A documented function: its full name and its parameters in positional order."""

    name: str
    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        shown = (p.name if p.default is None else f"{p.name}={p.default}" for p in self.parameters)
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


def known_version(version: str) -> str:
    """Return `version` ("0.6" or "0.6.0") as a member of VERSIONS, or raise UnknownNameError."""
    short = ".".join(str(version).split(".")[:2])
    if short not in VERSIONS:
        raise UnknownNameError("NKI version", version, VERSIONS)
    return short


def before(version: str, other: str) -> bool:
    """Return whether NKI `version` is older than `other`."""
    return _ordinal(version) < _ordinal(other)


def _ordinal(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _entries(text: str) -> Iterator[tuple[str, str]]:
    for match in _ENTRY.finditer(text):
        for name in match.group(1).split(","):
            yield name.strip(), " ".join(match.group(2).split())


def parameters_of(text: str) -> tuple[Parameter, ...]:
    """Return the parameters of the text between the parentheses of a signature."""
    arguments = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + [
        ast.unparse(d) for d in arguments.defaults
    ]
    return tuple(Parameter(a.arg, d) for a, d in zip(arguments.args, defaults, strict=True))


def _adjusted(name: str, parameters: tuple[Parameter, ...], version: str) -> Function:
    """Undo the changes that are younger than `version`."""
    kept = []
    for parameter in parameters:
        since = table.PARAMETER_ADDED.get((name, parameter.name), "0.3")
        if name.startswith("nki.collectives.") and parameter.name == "name":
            since = table.COLLECTIVE_NAME_ADDED
        if before(version, since):
            continue
        optional = table.PARAMETER_OPTIONAL.get((name, parameter.name), "0.3")
        kept.append(Parameter(parameter.name, None) if before(version, optional) else parameter)
    return Function(name, tuple(kept))


@functools.cache
def api(version: str = API_VERSION) -> Api:
    """Return the API of an NKI version; "0.7" is 0.6 with the announced removals.

    Raises UnknownNameError for a version outside VERSIONS.
    """
    version = known_version(version)
    sources = [
        ("nki.isa", table.ISA_NAMED, ", name=None"),
        ("nki.isa", table.ISA_PLAIN, ""),
        ("nki.language", table.LANGUAGE, ""),
        ("nki.collectives", table.COLLECTIVES, ""),
    ]
    functions = {}
    for module, text, more in sources:
        for short, arguments in _entries(text):
            name = f"{module}.{short}"
            if _exists(name, version):
                functions[name] = _adjusted(name, parameters_of(arguments + more), version)
    members = {f"nki.isa.{name}": tuple(text.split()) for name, text in table.ISA_ENUMS.items()}
    for record, text in table.LANGUAGE_RECORDS.items():
        owner = f"nki.language.{record}"
        members[owner] = tuple(n for n in text.split() if _exists(f"{owner}.{n}", version))
    values = {f"nki.isa.{n}" for n in table.ISA_VALUES.split()} | set(members)
    values |= {f"nki.language.{n}" for n in table.LANGUAGE_VALUES.split()}
    values |= {f"nki.{n}" for n in table.TOP_VALUES.split()} | {"nki.collectives.ReplicaGroup"}
    values = {name for name in values if _exists(name, version)}
    return Api(version, functions, frozenset(values), members)


def _exists(name: str, version: str) -> bool:
    if before(version, table.ADDED.get(name, "0.3")):
        return False
    gone = table.REMOVED.get(name)
    return gone is None or before(version, gone[0])
