"""`@instruction`: the checks and the record that all instructions of `nki.isa` share.

An instruction is one decorated generator. First, its declared tensors are checked: each is a
tensor, in a memory that the instruction reaches, at a legal partition, of a dtype and rank that it
takes, as large as dst where `like_dst` says so. Then the generator runs to its `yield`: it makes
its own checks and yields the attributes that its cost depends on. Then dst must not be a constant,
the engine is chosen, runtime addresses are checked, and no element may be overwritten before it is
read (`streams`). Then the instruction is recorded, so a refused one is never in the trace. With
data, the rest of the generator computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from operator import index as as_index
from typing import Any, Concatenate, ParamSpec

import numpy as np

from nmm_compiler.errors import (
    KernelArgumentError,
    OperandValueError,
    SimulationError,
    TensorDtypeError,
)
from nmm_compiler.simulator.isa import enums
from nmm_compiler.simulator.isa.alike import COMPUTED, REMEMBER, key_of, recall, remember
from nmm_compiler.simulator.isa.operands import (
    ON_CHIP,
    check_destination,
    check_hazard,
    check_pair,
    choose_engine,
    indirect_operand,
    member,
    no_psum_on_gpsimd,
    operand,
    refuse_dtype,
    refuse_rank,
    require_instruction,
    same_elements,
    scalar_operand,
)
from nmm_compiler.simulator.isa.poison import spread
from nmm_compiler.simulator.machine import CURRENT, Machine, current
from nmm_compiler.simulator.tensors.forms import form_of, like_of
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Access

Attributes = dict[str, Any]
Steps = Iterator[Attributes]
Memories = Mapping[str, tuple[str, ...]]
P = ParamSpec("P")

_ATTRIBUTES: dict[tuple[Any, ...], Attributes] = {}
NO_ATTRIBUTES: Attributes = {}
MEMBERS: dict[str, type[Enum]] = {
    "engine": enums.engine,
    "dge_mode": enums.dge_mode,
    "oob_mode": enums.oob_mode,
    "reduce_cmd": enums.reduce_cmd,
    "dma_engine": enums.dma_engine,
}
"""The enumeration of each parameter that takes a member of one."""
INSTRUCTIONS: dict[str, Callable[..., Any]] = {}
"""Every decorated instruction by its name."""


def attributes(**values: Any) -> Attributes:
    """Return a shared dictionary of attributes (readers must not change it)."""
    key = tuple(values.items())
    known = _ATTRIBUTES.get(key)
    if known is None:
        known = _ATTRIBUTES[key] = values
    return known


@dataclasses.dataclass(frozen=True)
class Kind:
    """An instruction's name and the engines that can run it, the default first."""

    op: str
    engines: tuple[str, ...]


class Call:
    """One call of an instruction, between its declared checks and its record.

    reads, writes: the regions so far; an instruction adds those of its optional operands.
    engine: the name of the engine, "" until it is chosen.
    """

    __slots__ = ("engine", "given", "kind", "machine", "reads", "writes")

    def __init__(
        self,
        machine: Machine,
        kind: Kind,
        given: Any,
        reads: list[Access],
        writes: list[Access],
    ) -> None:
        self.machine = machine
        self.kind = kind
        self.given = given
        self.reads = reads
        self.writes = writes
        self.engine = ""

    @property
    def op(self) -> str:
        """The instruction's name."""
        return self.kind.op

    def error(self, kind: type[SimulationError], message: str) -> SimulationError:
        """Return an error that names the instruction and the kernel's line."""
        return self.machine.error(kind, f"nisa.{self.op}: {message}")

    def read(self, role: str, view: Any, memories: tuple[str, ...] = ON_CHIP) -> Access:
        """Check an optional tensor that is read, and add it."""
        access = operand(self.machine, self.op, role, view, memories)
        self._indirect(role, view, memories)
        self.reads.append(access)
        return access

    def write(self, role: str, view: Any, memories: tuple[str, ...] = ON_CHIP) -> Access:
        """Check an optional tensor that is written, and add it."""
        access = operand(self.machine, self.op, role, view, memories)
        self._indirect(role, view, memories)
        check_destination(self.machine, self.op, view)
        self.writes.append(access)
        return access

    def _indirect(self, role: str, view: Any, memories: tuple[str, ...]) -> None:
        if view.indirection is not None:
            self.reads += indirect_operand(self.machine, self.op, role, view, "", ())

    def scalar(
        self, role: str, value: Any, partitions: int, allowed: frozenset[str] | None = None
    ) -> bool:
        """Check a number or a [P, 1] tensor; return whether it is a tensor, then added."""
        return scalar_operand(self.machine, self.op, role, value, partitions, self.reads, allowed)

    def integer(self, role: str, value: Any, low: int = -(2**31), high: int = 2**31 - 1) -> int:
        """Return a compile-time integer of the instruction's field, int32 unless said."""
        number = None
        if not isinstance(value, VirtualRegister):
            with contextlib.suppress(TypeError):
                number = as_index(value)
        if number is None:
            raise self.error(
                KernelArgumentError,
                f"{role} is {type(value).__name__} {value!r:.40}; pass a compile-time integer",
            )
        if not low <= number <= high:
            raise self.error(OperandValueError, f"{role}={number}; it must be in {low}..{high}")
        return number

    def number(self, role: str, value: Any) -> float:
        """Return a compile-time number of the instruction's float32 field."""
        if not isinstance(value, (int, float, np.number)):
            raise self.error(
                TensorDtypeError, f"{role} is {type(value).__name__}; pass a compile-time number"
            )
        return float(value)

    def choose(self, default: str = "") -> str:
        """Choose the engine now: the one that the kernel gave, or the default."""
        engines = self.kind.engines
        self.engine = choose_engine(
            self.machine, self.op, self.given, engines, default or engines[0]
        )
        return self.engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class instruction:  # noqa: N801 - a decorator, written as one
    """The decorator of an instruction; its fields are what the instruction declares.

    engines: those that can run it; of several, the parameter `engine` chooses and the first is
        the default. writes, reads: required tensors and the memories that each may be in.
    like_dst: operands with the partitions, and elements per partition, of dst.
    streams: operands that stream through the engine while dst, the first of `writes`, is written,
        so that dst may be such an operand. All others are read in an order of their own: no
        destination may share elements with one.
    dtypes, ranks: the dtypes that an operand may have, the most dimensions that it may have.
    pair: two operands that VectorE or GpSimd reads at once: not both in PSUM, in SBUF from the
        same partition on.
    indirect: operands that may be `.indirect()` views, each with the engines for that.
    waits: the part after the yield runs without data as well.
    alike: what comes before the yield depends on nothing but the operands' geometry and the other
        arguments, so that without data a call like an earlier one is recorded at once (`alike.py`).
    """

    engines: tuple[str, ...]
    writes: Memories = dataclasses.field(default_factory=dict)
    reads: Memories = dataclasses.field(default_factory=dict)
    like_dst: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    dtypes: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    ranks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pair: tuple[str, str] | None = None
    indirect: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    waits: bool = False
    alike: bool = False

    def __call__(self, body: Callable[Concatenate[Call, P], Steps]) -> Callable[P, Any]:
        """Return the instruction: its declared checks, the body, and its record."""
        op = body.__name__
        parameters = list(inspect.signature(body).parameters.values())[1:]
        names = [p.name for p in parameters]
        known: dict[str, Any] = {
            "BODY": body, "KIND": Kind(op, self.engines), "OP": op, "FIRST": self.engines[0],
            "Call": Call, "NkiTensor": NkiTensor, "current": current, "operand": operand,
            "require_instruction": require_instruction, "same_elements": same_elements,
            "check_destination": check_destination, "check_hazard": check_hazard,
            "no_psum_on_gpsimd": no_psum_on_gpsimd, "indirect_operand": indirect_operand,
            "refuse_dtype": refuse_dtype, "refuse_rank": refuse_rank, "check_pair": check_pair,
            "member": member, "spread": spread, "CURRENT": CURRENT, "form_of": form_of,
            "like_of": like_of, "remember": remember, "COMPUTED": COMPUTED, "key_of": key_of,
        }  # fmt: skip
        for p in parameters:
            if p.default is not p.empty:
                known[f"{p.name}_default"] = p.default
        for role, where in (*self.writes.items(), *self.reads.items()):
            known[f"{role}_memories"] = where
            known[f"{role}_engines"] = self.indirect.get(role, ())
        for role, allowed in self.dtypes.items():
            known[f"{role}_dtypes"] = allowed
        for name, members in MEMBERS.items():
            known[f"{name}_members"] = members
        defaults = {p.name for p in parameters if p.default is not p.empty}
        text = _signature(op, parameters)
        if self.alike:
            text += recall(list(self.writes), list(self.reads), names, defaults)
        text += _checks(self) + _body(self, parameters)
        several = len(self.engines) > 1
        text += _choice("engine" if several else "None", (*self.writes, *self.reads))
        text += _indirections((*self.reads, *self.writes)) + _hazards(self)
        text += _record(self, names)
        # a path in the simulator's folder: errors then name the kernel's line, not one of this text
        exec(compile(text, f"{__file__}:{op}", "exec", dont_inherit=True), known)  # noqa: S102
        made: Callable[P, Any] = known[op]
        made.__doc__, made.__module__ = body.__doc__, body.__module__
        INSTRUCTIONS[op] = made
        return made


# The text of an instruction's function is generated, as the standard library does for a dataclass:
# Python binds the arguments, and every check is inline. Loops over roles, `*args` and `**kwargs`
# would make an instruction twice as slow.


def _signature(op: str, parameters: list[inspect.Parameter]) -> str:
    """Return the text of the function's head, and the checks of target and enumerations."""
    shown = ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.name}_default" for p in parameters
    )
    given = "".join(f"{p.name}, " for p in parameters if p.name != "name")
    lines = [
        f"def {op}({shown}):",
        "    machine = CURRENT.machine or current()",
        "    if machine.turn is not None:",
        f"        machine.turn.note(OP, ({given}))",
        "    if OP in machine.absent:",
        "        require_instruction(machine, OP)",
    ]
    for name in (p.name for p in parameters if p.name in MEMBERS):
        lines += [
            f"    if {name}.__class__ is not {name}_members:",
            f"        {name} = member(machine, OP, {name!r}, {name}, {name}_members)",
        ]
    return "\n".join(lines) + "\n"


def _checks(declared: instruction) -> str:
    """Return the text of the declared checks."""
    lines = []
    written = list(declared.writes)
    for role in (*written, *declared.reads):
        lines += [
            f"    if {role}.__class__ is not NkiTensor:",
            f"        operand(machine, OP, {role!r}, {role}, {role}_memories)",
            f"    at_{role} = {role}._access or {role}.access()",
            f"    if at_{role}.memory not in {role}_memories or {role}.special:",
            f"        operand(machine, OP, {role!r}, {role}, {role}_memories)",
        ]
    for role in declared.like_dst:
        lines += [
            f"    if {role}.shape != {written[0]}.shape:",
            f"        same_elements(machine, OP, {written[0]}, {role})",
        ]
    if declared.pair is not None:
        a, b = declared.pair
        lines += [
            f'    if at_{a}.partition_start != at_{b}.partition_start or at_{a}.memory == "psum":',
            f"        check_pair(machine, OP, {declared.pair!r}, {a}, {b})",
        ]
    for role in declared.dtypes:
        lines += [
            f"    if {role}.dtype not in {role}_dtypes:",
            f"        refuse_dtype(machine, OP, {role!r}, {role}, {role}_dtypes)",
        ]
    for role, most in declared.ranks.items():
        lines += [
            f"    if len({role}.shape) > {most}:",
            f"        refuse_rank(machine, OP, {role!r}, {role}, {most})",
        ]
    return "".join(line + "\n" for line in lines)


def _body(declared: instruction, parameters: list[inspect.Parameter]) -> str:
    """Return the text that runs the body to its yield, and the checks that follow it."""
    written = list(declared.writes)
    regions = [", ".join(f"at_{role}" for role in roles) for roles in (declared.reads, written)]
    given = "engine" if "engine" in {p.name for p in parameters} else "None"
    lines = [
        f"    call = Call(machine, KIND, {given}, [{regions[0]}], [{regions[1]}])",
        f"    steps = BODY(call, {', '.join(p.name for p in parameters)})",
        "    attributes = next(steps)",
    ]
    for role in written:
        lines += [
            f"    if {role}.storage.constant:",
            f"        check_destination(machine, OP, {role})",
        ]
    return "\n".join(lines) + "\n"


def _indirections(roles: tuple[str, ...]) -> str:
    """Return the text that checks views with runtime addresses and adds what they read."""
    return "".join(
        f"    if {role}.indirection is not None:\n"
        f"        call.reads += indirect_operand(\n"
        f"            machine, OP, {role!r}, {role}, chosen, {role}_engines\n"
        "        )\n"
        for role in roles
    )


def _hazards(declared: instruction) -> str:
    """Return the text that compares what is read with what is written."""
    written = list(declared.writes)
    return "".join(
        f"    if {role}.storage is {dst}.storage:\n"
        f"        check_hazard(\n"
        f"            call, {dst}, {role}, {dst == written[0] and role in declared.streams}\n"
        "        )\n"
        for dst, role in itertools.product(written, declared.reads)
    )


def _choice(given: str, views: tuple[str, ...]) -> str:
    """Return the text that chooses the engine, unless the body has."""
    if given == "None":
        return "    chosen = call.engine or FIRST\n"
    return (
        "    chosen = call.engine\n"
        "    if not chosen:\n"
        "        chosen = call.choose()\n"
        f"        no_psum_on_gpsimd(machine, OP, chosen, {', '.join(views)})\n"
    )


def _record(declared: instruction, parameters: list[str]) -> str:
    """Return the text that records the instruction, and computes when there is data."""
    name = "name" if "name" in parameters else "None"
    with_data = "" if declared.waits else "    if machine.data:\n    "
    shown = ", ".join(f"{p!r}: {p}" for p in parameters)
    return (
        "    record = machine.record(\n"
        f"        OP, chosen, tuple(call.reads), tuple(call.writes), attributes, {name}\n"
        f"    )\n{REMEMBER if declared.alike else ''}{with_data}    next(steps, None)\n"
        "    if machine.poisoned:\n"
        f"        spread(machine, OP, {{{shown}}}, {tuple(declared.writes)!r})\n"
        + ("" if name == "None" else "    return record\n")
    )
