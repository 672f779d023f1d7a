"""The API of NKI Beta 1 (`neuronxcc.nki`) by full name, read from `beta1_table.py`.

Names are those of the current dialect ("nki.isa.nc_matmul"), so that one set of lint rules and one
simulator serve both. `returns` has what the table says of the tile that a call returns; in the
current dialect no call returns one.
"""

from __future__ import annotations

import dataclasses
import functools
import re

from nmm_compiler.nki_api import beta1_table as table
from nmm_compiler.nki_api.api import Api, Function, Parameter, parameters_of

_ENTRY = re.compile(
    r"\s*([\w,\s]+?)\(((?:[^()]|\([^()]*\))*)\)\s*(?:->\s*([\w\s]+?))?\s*(?=\n[a-z]|\Z)", re.DOTALL
)
_MASKED = ", mask=None"


@dataclasses.dataclass(frozen=True)
class Beta1(Api):
    """The API with, by full name, what the table says of the tile that a function returns."""

    returns: dict[str, str]


@functools.cache
def beta_1() -> Beta1:
    """Return the API of NKI Beta 1."""
    functions: dict[str, Function] = {}
    returns: dict[str, str] = {}
    for module, text, more in (
        ("nki.isa", table.ISA, _MASKED + ", dtype=None"),
        ("nki.isa", table.ISA_WITHOUT_DTYPE, _MASKED),
        ("nki.isa", table.ISA_UNMASKED, ""),
        ("nki.language", table.LANGUAGE, _MASKED),
        ("nki.language", table.LANGUAGE_UNMASKED, ""),
    ):
        for match in _ENTRY.finditer(text):
            arguments = " ".join(match.group(2).split())
            known = {p.name for p in parameters_of(arguments)}
            extra = ", ".join(m for m in more.split(", ") if m and m.split("=")[0] not in known)
            parameters: tuple[Parameter, ...] = parameters_of(
                ", ".join(part for part in (arguments, extra) if part)
            )
            for short in match.group(1).split(","):
                name = f"{module}.{short.strip()}"
                functions[name] = Function(name, parameters)
                if match.group(3):
                    returns[name] = " ".join(match.group(3).split())
    members = {f"nki.isa.{name}": tuple(text.split()) for name, text in table.ISA_ENUMS.items()}
    members |= {
        f"nki.language.{name}": tuple(text.split()) for name, text in table.LANGUAGE_RECORDS.items()
    }
    values = {f"nki.isa.{n}" for n in table.ISA_VALUES.split()} | set(members)
    values |= {f"nki.language.{n}" for n in table.LANGUAGE_VALUES.split()}
    values |= {f"nki.{n}" for n in table.TOP_VALUES.split()}
    return Beta1(table.BETA_1, functions, frozenset(values), members, returns)
