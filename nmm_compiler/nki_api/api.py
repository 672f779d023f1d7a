"""The NKI API of one version: its names, and the parameters of each function.

`api("0.6")` takes functions and enumerations from the simulator's `nki.isa`, `nki.language` and
`nki.collectives`, whose signatures are the documented ones, and what changed when from `table.py`.
By full name ("nki.isa.nc_matmul") it has a function's parameters, the version that added or removed
a name, and the replacement of a deprecated one. The lint uses it, and so can any other reader or
writer of NKI source.
"""

from __future__ import annotations

import functools
import inspect

from nmm_compiler.errors import UnknownNameError
from nmm_compiler.nki_api import table
from nmm_compiler.nki_api.table import API_VERSION as API_VERSION, VERSIONS as VERSIONS
from nmm_compiler.simulator.collectives import NAMES as COLLECTIVES
from nmm_compiler.simulator.isa.instruction import Row
from nmm_compiler.simulator.isa.names import CONSTANTS as ENUMS, NAMES as ISA
from nmm_compiler.simulator.language.base import TILE_SIZES, MemoryRegion
from nmm_compiler.simulator.language.functions import NAMES as LANGUAGE
from nmm_compiler.simulator.signatures import Api, Function, described, entries

MODULES = ("nki", "nki.isa", "nki.language", "nki.collectives")


@functools.cache
def before(version: str, other: str) -> bool:
    """Return whether NKI `version` is older than `other`."""
    mine, theirs = (tuple(map(int, name.split("."))) for name in (version, other))
    return mine < theirs


def of_parameter(said: dict[tuple[str, str], str], function: Function, name: str) -> str | None:
    """Return what a table says of a parameter of a function, or of all functions of its module."""
    return said.get((function.name, name), said.get((function.name.rpartition(".")[0], name)))


def _adjusted(function: Function, version: str) -> Function:
    """Undo the changes that are younger than `version`."""
    kept: dict[str, str | None] = {}
    for name, default in function.parameters.items():
        if not before(version, of_parameter(table.PARAMETER_ADDED, function, name) or "0.3"):
            optional = table.PARAMETER_OPTIONAL.get((function.name, name), "0.3")
            kept[name] = None if before(version, optional) else default
    return Function(function.name, kept)


@functools.cache
def api(version: str = API_VERSION) -> Api:
    """Return the API of an NKI version, "0.6" or "0.6.0"; 0.7 is 0.6 with what its pages change.

    Raises UnknownNameError for a version outside VERSIONS.
    """
    version, given = ".".join(str(version).split(".")[:2]), version
    if version not in VERSIONS:
        raise UnknownNameError("NKI version", given, VERSIONS)
    functions = [f for module, text in table.FUNCTIONS.items() for f in entries(module, text)]
    values = {f"nki.{n}" for n in table.TOP_VALUES.split()} | set(table.CLASSES.split())
    own = {"nki.isa": ISA, "nki.language": LANGUAGE, "nki.collectives": COLLECTIVES}
    for module, names in own.items():
        for short, value in names.items():
            if inspect.isfunction(value) or isinstance(value, Row):
                functions.append(described(f"{module}.{short}", value))
            else:
                values.add(f"{module}.{short}")
    values |= {"nki.isa.NkiValidationError", "nki.isa.constants"}
    members = {f"nki.isa.{name}": tuple(enum.__members__) for name, enum in ENUMS.items()}
    members["nki.language.MemoryRegion"] = tuple(MemoryRegion.__members__)
    sizes = (n for n in TILE_SIZES if _exists(f"nki.language.tile_size.{n}", version))
    members["nki.language.tile_size"] = tuple(sizes)
    return Api(
        version,
        {f.name: _adjusted(f, version) for f in functions if _exists(f.name, version)},
        frozenset(name for name in values if _exists(name, version)),
        members,
    )


def _exists(name: str, version: str) -> bool:
    since, gone = table.ADDED.get(name, "0.3"), table.REMOVED.get(name)
    return not before(version, since) and (gone is None or before(version, gone[0]))
