"""Calls like an earlier one: without data they are recorded at once, without their checks.

A kernel calls an instruction thousands of times with operands of the same geometry. Whether such a
call is legal, on which engine it runs and what it costs depends on that geometry and on the other
arguments alone, so the first call answers for all, in later runs on that target too. Calls that
break a rule, even one that only warns, and calls with runtime addresses are never remembered.
"""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

import numpy as np

from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Instruction

_KINDS = itertools.count(1)
_KEPT = 100_000
_PLAIN = (int, float, np.number, str, Enum, type(None), type)
COMPUTED = frozenset({int, float, tuple, *(np.dtype(code).type for code in np.typecodes["All"])})
"""The classes of what a kernel computes anew for each call, and that is told by its value."""


def recall(written: list[str], read: list[str], parameters: list[str], defaults: set[str]) -> str:
    """Return the text that records a call like an earlier one, of an instruction's function.

    The key holds what each tensor is like, each number's value, the identity of each other argument
    (which the memory keeps alive), and where operands lie that share the storage of dst.
    """
    required = [*written, *read]
    dst, parts = written[0], ["OP"]
    optional = [p for p in parameters if p in defaults and p not in required and p != "name"]
    for p in parameters:
        if p in required:
            parts.append(f"({p}.like or like_of({p}))")
        elif p != "name" and p not in defaults:
            parts.append(f"{_key_part(p)}")
    if optional:
        given = "".join(f"0 if {p} is {p}_default else {_key_part(p)}, " for p in optional)
        parts.append(f"0 if {' and '.join(f'{p} is {p}_default' for p in optional)} else ({given})")
    parts += [
        f"({p}.offset, {dst}.offset) if {p}.storage is {dst}.storage else 0"
        for p in required
        if p != dst
    ]
    tensors = " and ".join(f"{p}.__class__ is NkiTensor" for p in required)
    reads, writes = (
        "(" + "".join(f"{p}._access, " for p in roles) + ")" for roles in (read, written)
    )
    values = "(" + "".join(f"{p}, " for p in parameters if p != "name") + ")"
    name = "name" if "name" in parameters else "None"
    return (
        "    key = None\n"
        f"    if machine.alike is not None and {tensors}:\n"
        f"        key = ({', '.join(parts)})\n"
        "        known = machine.alike.get(key)\n"
        "        if known is not None:\n"
        "            if known[2] is None:\n"
        "                return machine.record(\n"
        f"                    OP, known[0], {reads}, {writes}, known[1], {name}, known[4]\n"
        "                )\n"
        f"            values = {values}\n"
        "            reads = tuple([values[i]._access for i in known[2]])\n"
        "            writes = tuple([values[i]._access for i in known[3]])\n"
        "            return machine.record(\n"
        f"                OP, known[0], reads, writes, known[1], {name}, known[4]\n"
        "            )\n"
        f"        values, plain, warned = {values}, ({reads}, {writes}), machine.warned\n"
    )


def _key_part(p: str) -> str:
    return (
        f"({p}.form or form_of({p}) if {p}.__class__ is NkiTensor else "
        f"id({p}) if {p}.__class__ not in COMPUTED else key_of({p}))"
    )


def key_of(value: Any) -> Any:
    """Return a key that equal numbers of one class share, and tuples of them."""
    kind = value.__class__
    if kind not in COMPUTED:
        return id(value)
    if kind is tuple:
        return kind, *map(key_of, value)
    return kind, value if value == value else "nan"


REMEMBER = (
    "    if key is not None and warned == machine.warned:\n"
    "        remember(machine, key, values, plain, record)\n"
)


def remember(
    machine: Machine, key: tuple[Any, ...], values: tuple[Any, ...], plain: Any, record: Instruction
) -> None:
    """Keep what a call came to: engine, attributes, and which arguments it reads and writes."""
    memory = machine.alike
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        if value.__class__ is NkiTensor:
            if value.indirection is not None or _shared_hbm(values, value):
                return
            places[id(value._access)] = place
        elif not (
            isinstance(value, _PLAIN)
            or callable(value)
            or (value.__class__ is tuple and all(n.__class__ is int for n in value))
        ):
            return
    if memory is None or any(
        id(access) not in places for access in (*record.reads, *record.writes)
    ):
        return
    if len(memory) >= _KEPT:
        memory.clear()
    found = [tuple(places[id(a)] for a in accesses) for accesses in (record.reads, record.writes)]
    as_declared = (record.reads, record.writes) == plain
    # the other arguments are kept, so that no object to come gets the identity of one of them
    others = [value for value in values if value.__class__ is not NkiTensor]
    places_of = (None, None) if as_declared else found
    record.kind = next(_KINDS)
    memory[key] = record.engine, record.attributes, *places_of, record.kind, others


def _shared_hbm(values: tuple[Any, ...], one: NkiTensor) -> bool:
    """Tell whether `one` is in HBM and another argument in its storage."""
    return one.memory == "hbm" and any(
        value.__class__ is NkiTensor and value is not one and value.storage is one.storage
        for value in values
    )
