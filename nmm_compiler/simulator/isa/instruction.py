"""`@instruction`: what an instruction declares, and the one call behind all of `nki.isa`.

An instruction is its row and a function. The row says which operands it takes, in which memories,
of which dtypes and shapes, and what may be written over what is read; a call is held to
it. The function computes. It is a generator if it has rules or a cost of its own: up to its `yield`
it checks, and it yields the attributes that the cost depends on. The instruction is recorded when
all rules hold, so a refused one is never in the trace. With data, the function then computes.

What a call came to (engine, attributes, which operands it reads and writes) depends on the geometry
of its operands and on its other arguments alone. So the first such call answers for all, in later
runs on that target too: a later one is not checked again. Calls that break a rule, even one that
only warns, and calls with runtime addresses are never remembered.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Concatenate, ParamSpec

import numpy as np

from nmm_compiler.errors import (
    HazardError,
    KernelArgumentError,
    KernelFailedError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.isa import enums
from nmm_compiler.simulator.isa.cycles import Cycles, one_pass
from nmm_compiler.simulator.isa.operands import (
    ON_CHIP,
    Issue,
    check_dtype,
    check_hazard,
    collide,
    indirect_operand,
    member,
)
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.poison import Flow, spread
from nmm_compiler.simulator.machine import CURRENT, Machine, current
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.trace import Instruction

Arguments = dict[str, Any]
Steps = Iterator[Arguments]
P = ParamSpec("P")

_NUMBERS = int, float, np.number, VirtualRegister
_OPERAND = re.compile(r"(\w+)(?:\[([^]]*)])?")
_TERM = re.compile(r"(?=\S)(?:(\d+)\*)?([A-Z]?)\+?(\d*)")
_SEQUENCES = tuple, list
_KINDS = itertools.count(1)
_KEPT = 100_000
MEMBERS: dict[str, type[Enum]] = {kind.__name__: kind for kind in enums.Member.__subclasses__()}
"""The enumerations by their names, which parameters that take a member of one have, too."""
MEMBERS_OF: dict[str, type[Enum]] = {**MEMBERS, "perf_mode": enums.matmul_perf_mode}
_TEXTS = (
    "engines", "streams", "same_dtype", "pair", "commands", "indirect", "indirect_engines", "lists",
)  # fmt: skip
"""The fields that are given as one text of several words."""


@dataclass(kw_only=True, eq=False, repr=False)
class Row:
    """An instruction: its row, and its function `body`; to call it is to issue it.

    A parameter with the name of an enumeration takes a member of it, one that is annotated as a
    `VirtualRegister` a register.

    Names of engines, operands and commands are given as one text, and are split into a tuple.
    module, op: where it is, and its name, that of the function unless given.
    engines: those that can run it; of several, the parameter `engine` chooses and the first is
        the default.
    operands: the tensors that are read and, after `->`, written: `stationary[K M], moving[K N] ->
        dst[M N]` gives partitions and elements per partition. A size is a letter, a number, or
        both: `4*F`, `F+1`. One letter alone is a tensor's number of elements. Those whose default
        is None are optional. memory, memories: where they may be, all and some.
    numbers: operands that are a number or a [P, 1] tensor, and the dtypes of such a tensor.
    constants: operands that are a tensor or a compile-time number.
    limits: the sizes that a letter may have.
    streams: operands that stream through the engine while the first destination is written,
        so that it may be such an operand. All others are read in an order of their own: no
        destination may share elements with one.
    dtypes, ranks: the dtypes that an operand may have, the most dimensions that it may have.
    same_dtype: operands that have one dtype.
    pair: two operands that VectorE or GpSimd reads at once: not both in PSUM, in SBUF from the
        same partition on.
    operators: which operators a parameter takes; the function gets an `Operator`.
    integers: compile-time integers and their ranges.
    commands: members of reduce_cmd; first_value: the parameter that load_reduce starts from.
    indirect: operands that may be `.indirect()` views. indirect_engines: the engines for that, all
        unless said.
    lists: operands that are lists of tensors. exchanges: what it writes comes from other programs,
        after all of them have read.
    packed: it takes x4-packed operands, which it only moves, or is made for.
    flows: for an operand, where unwritten elements of it go; for a result, which of its elements
        depend on those of any other operand: those of the same place if both have the same sizes,
        else those of the same partition, unless said.
    waits: the part after the yield runs without data as well; no call answers for another.
    named: it also takes `name=None`, and returns its record.
    cycles: how long it holds its engine.
    """

    body: Callable[..., Any] = field(kw_only=False)
    engines: Sequence[str]
    module: str = "nisa"
    op: str = ""
    operands: str = "->"
    memory: tuple[str, ...] = ON_CHIP
    memories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    limits: Mapping[str, range] = field(default_factory=dict)
    streams: Sequence[str] = ""
    dtypes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    same_dtype: Sequence[str] = ""
    pair: Sequence[str] = ""
    operators: Mapping[str, Takes] = field(default_factory=dict)
    integers: Mapping[str, range] = field(default_factory=dict)
    commands: Sequence[str] = ""
    first_value: str = ""
    indirect: Sequence[str] = ""
    indirect_engines: Sequence[str] = ""
    lists: Sequence[str] = ""
    exchanges: bool = False
    packed: bool = False
    flows: Mapping[str, Flow] = field(default_factory=dict)
    waits: bool = False
    named: bool = True
    cycles: Cycles = one_pass

    def __post_init__(self) -> None:
        body = self.body
        self.op = self.__name__ = self.op or body.__name__
        self.__doc__, self.__module__ = body.__doc__, body.__module__
        self.checks = inspect.isgeneratorfunction(body)
        parameters = list(inspect.signature(body).parameters.values())[1:]
        self.defaults = {p.name: p.default for p in parameters}
        if self.named:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter("name", kind, default=None))
        self.__signature__ = inspect.Signature(parameters)
        for name in _TEXTS:
            setattr(self, name, tuple(getattr(self, name).split()))
        self.registers = [p.name for p in parameters if p.annotation == "VirtualRegister"]
        self.members = [(name, MEMBERS_OF[name]) for name in self.defaults if name in MEMBERS_OF]
        read, written = (dict(_OPERAND.findall(side)) for side in self.operands.split("->"))
        sizes = {**read, **written, **dict.fromkeys(self.numbers, "P 1")}
        # (times, letter, plus) of each size
        self.terms = {
            role: [(int(t or 1), letter, int(plus or 0)) for t, letter, plus in _TERM.findall(text)]
            for role, text in sizes.items()
            if text
        }
        self.shapes = ", ".join(
            [f"{role} [{text.replace(' ', ', ')}]" for role, text in sizes.items() if text]
            + [
                f"{letter} in {some[0]}..{some[-1]}" + f" in steps of {some.step}" * (some.step > 1)
                for letter, some in self.limits.items()
            ]
        )
        where = {
            **dict.fromkeys(sizes, self.memory),
            **dict.fromkeys(self.numbers, ON_CHIP),
            **self.memories,
        }
        self.writes = {role: where[role] for role in written}
        self.first = next(iter(self.writes), "")
        self.constants = (*self.constants, *self.numbers)
        self.dtypes = {**self.numbers, **self.dtypes}
        self.reads = {role: where[role] for role in self.defaults if role in where.keys() - written}
        self.roles = {**self.writes, **self.reads}
        named = {role: role.replace("op", "operand") for role in self.operators}
        self.number_of = {role: n for role, n in named.items() if n in self.numbers}
        # an operator that may be unary may have none
        unset = {role for role in self.roles if self.defaults[role] is None}
        self.optional = unset | {*self.number_of.values()}

    def __repr__(self) -> str:
        return f"{self.module}.{self.op}"

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Check, record and, with data, compute one call."""
        machine = CURRENT.machine or current()
        values, lost = named, False
        if given:
            values = {**dict(zip(self.__signature__.parameters, given, strict=False)), **named}
            lost = len(values) < len(given) + len(named)  # too many, or one of them twice
        name = values.pop("name", None) if self.named else None
        key = None if self.waits or self.lists or lost else self.key_of(values)
        try:
            known = machine.outcomes.get(key)
        except TypeError:  # an argument that cannot be hashed, such as a register
            key = known = None
        if known is None:
            try:
                # a misspelled name, before what it leaves out
                self.__signature__.bind_partial(**named)
                self.__signature__.bind(*given, **named)
            except TypeError as error:
                raise machine.error(KernelFailedError, f"{self!r}: {error}") from None
        if machine.turn is not None:
            machine.turn.note(self.op, tuple({**self.defaults, **values}.values()))
        if known is None or machine.data:
            return self._run(machine, {**self.defaults, **values}, name, key, known)
        engine, attributes, kind = known
        reads, writes = map(values.get, self.reads), map(values.get, self.writes)
        return machine.record(
            self.op, engine,
            tuple([v._access or v.access() for v in reads if v.__class__ is NkiTensor]),
            tuple([v._access or v.access() for v in writes if v.__class__ is NkiTensor]),
            attributes, name, kind,
        )  # fmt: skip

    def key_of(self, values: Arguments) -> tuple[Any, ...] | None:
        """Return a key that calls share of which one answers for the others; None if none does.

        It holds the geometry of each tensor, where tensors of one storage lie to each other, and
        the class and value of each other argument that is given, of a tuple or a list its text.
        """
        key: list[Any] = [self.op, *values]
        views: list[NkiTensor] = []
        for value in values.values():
            kind = value.__class__
            if kind is NkiTensor:
                if value.indirection is not None:
                    return None
                views.append(value)
                key += [value.geometry]
            else:
                key += kind, repr(value) if kind in _SEQUENCES else value
        storages = [view.storage for view in views]
        if len(set(storages)) < len(storages):
            for storage, view in zip(storages, views, strict=True):
                first = storages.index(storage)
                begin = view.access().byte_start - views[first].access().byte_start
                key += first, begin
        return tuple(key)

    def _run(
        self,
        machine: Machine,
        arguments: Arguments,
        name: Any,
        key: Any,
        known: tuple[str, Arguments, int] | None,
    ) -> Instruction | None:
        """Check a call as far as no earlier one answers for it, record it and compute.

        known: what the earlier one came to: its engine, its attributes, and its kind as of
            `Instruction`.
        """
        call, warned = Issue(machine, self, arguments), machine.warned
        self._resolve(call)
        if known is None:
            self._check(call)
        call.reads, call.writes = (
            [view.access() for _, view in call.tensors(part)] for part in (self.reads, self.writes)
        )
        steps = self.body(call, **call.arguments) if self.checks else None
        attributes = {} if steps is None else next(steps)
        if known is None:
            self._finish(call)
            known = call.engine, attributes, 0
            if key is not None and warned == machine.warned:
                if len(machine.outcomes) >= _KEPT:
                    machine.outcomes.clear()
                known = machine.outcomes[key] = call.engine, attributes, next(_KINDS)
        engine, _, kind = known
        record = machine.record(
            self.op, engine, tuple(call.reads), tuple(call.writes), attributes, name, kind
        )
        if steps is not None and (machine.data or self.waits):
            next(steps, None)
        elif machine.data:
            self.body(call, **call.arguments)
        if machine.poisoned:
            spread(call)
        return record if self.named else None

    def _resolve(self, call: Issue) -> None:
        """Replace arguments by what they mean: members, operators, integers."""
        arguments = call.arguments
        for role, members in self.members:
            if arguments[role].__class__ is not members:
                arguments[role] = member(call, role, arguments[role], members)
        for role, takes in self.operators.items():
            arguments[role] = takes.resolve(call, role, arguments[role], self.defaults[role])
        for role, allowed in self.integers.items():
            arguments[role] = call.integer(role, arguments[role], allowed)
        if arguments.get("priority") is not None:  # the class of service of a DMA
            call.integer("priority", arguments["priority"], range(4))
            call.machine.require("dma priority")
        for role in self.registers:
            given = arguments[role]
            says = f"{role} is {type(given).__name__}; pass a register"
            call.need(isinstance(given, VirtualRegister), says)
        for role in self.lists:
            fits = isinstance(arguments[role], _SEQUENCES) and len(arguments[role]) > 0
            call.need(fits, f"{role} must be a list of tensors", KernelArgumentError)

    def _check(self, call: Issue) -> None:
        """Check the operands against the row."""
        call.machine.require(self.op)
        for role in self.roles:
            for view in call.each(role):
                if not (view is None and role in self.optional):
                    self._check_operand(call, role, view)
        self._check_sizes(call)
        call.need(
            len({view.dtype for _, view in call.tensors(self.same_dtype)}) < 2,
            f"the dtypes of {' and '.join(self.same_dtype)} must be the same",
        )
        places, names = [v.access() for _, v in call.tensors(self.pair)], " and ".join(self.pair)
        memories = {place.memory for place in places}
        both = f"{names} are both in PSUM; copy one to SBUF first"
        call.need(len(places) < 2 or memories != {"psum"}, both)
        starts = {place.partition_start for place in places}
        # the hardware's rule: nki-library's rope.py copies half of a tile for it
        call.should(
            memories != {"sbuf"} or len(starts) == 1,
            f"{names} start at partitions {sorted(starts)}; two SBUF inputs start at the same "
            "partition, copy one with nisa.tensor_copy",
        )
        if self.commands:
            self._check_command(call, call.arguments["reduce_cmd"])

    def _check_operand(self, call: Issue, role: str, view: Any) -> None:
        """Check one operand, a tensor or a number, against the row."""
        if role in self.constants and not isinstance(view, NkiTensor):
            call.need(isinstance(view, _NUMBERS), f"{role} must be a number or a tensor")
            return
        call.need(view.__class__ is NkiTensor, f"{role} must be a tensor")
        access, memories = view.access(), self.roles[role]
        places = " or ".join(m.upper() for m in memories)
        says = f"{role} is in {access.memory.upper()}, it must be in {places}; copy it there first"
        call.need(access.memory in memories, says)
        call.need(
            view.dtype.kind != "packed" or self.packed,
            f"engines move {view.dtype} but do not compute with it; multiply it with "
            f"nisa.nc_matmul_mx, or pass .view(nl.uint8) as {role}",
        )
        if "hbm" not in memories:
            start, count = access.partition_start, access.partitions
            if role.endswith("_scale") and start % 32 in (4, 8, 12):
                # scales of MX blocks may be at an offset in each quadrant (mxfp-matmul: packing
                # scales)
                start -= start % 32
            call.should(
                start % 32 == 0 and count <= (128, 32, 64, 32)[start // 32 % 4],
                f"{role} starts at partition {start} with {count} partitions; up to 32 partitions "
                "may start at 0, 32, 64, 96, up to 64 at 0, 64, more at 0",
            )
            call.should(not view.geometry.far, f"{role} has {view.geometry.far}")
        if self.dtypes.get(role):
            check_dtype(call, role, view, self.dtypes[role])
        most = self.ranks.get(role, len(view.shape))
        says = f"{role} has at most {most} dimensions; flatten some"
        call.should(len(view.shape) <= most, says)

    def _check_sizes(self, call: Issue) -> None:
        """Refuse operands whose sizes do not fit together."""
        sizes: dict[str, int] = {}
        fit = True
        for role, view in call.tensors(self.roles):
            terms = self.terms.get(role, ())
            have = (view.size,) if len(terms) == 1 else (view.shape[0], view.free_size)
            for (times, letter, plus), size in zip(terms, have, strict=False):
                known = sizes.setdefault(letter, (size - plus) // times) if letter else 0
                fit = fit and known >= 0 and known * times + plus == size
        fit = fit and all(sizes.get(x, known.start) in known for x, known in self.limits.items())
        call.need(fit, f"shapes, as partitions and elements per partition, must be {self.shapes}")

    def _check_command(self, call: Issue, command: Any) -> None:
        """Check reduce_cmd, and that a first value comes with load_reduce and only with it."""
        name, first = command.name, self.first_value
        call.need(
            name in self.commands,
            f"reduce_cmd must be {' or '.join(self.commands)}",
            UnsupportedInstructionError,
        )
        given = call.arguments.get(first)
        says, fits = f"load_reduce needs {first}, the first value", given is not None
        if name != "load_reduce":
            says = f"only load_reduce reads {first}; leave it unset"
            fits = not isinstance(given, NkiTensor) and given == self.defaults.get(first)
        call.need(fits, says, KernelArgumentError)

    def _check_operators(self, call: Issue) -> None:
        """Check that binary operators have their number and others none, and bits of integers."""
        ops, kind = {r: call.arguments[r] for r in self.operators}, UnsupportedInstructionError
        for role, number in self.number_of.items():
            op, given = ops[role], call.arguments[number]
            if op is None:
                call.need(given is None, f"{number} without {role}", kind)
            elif "unary" in op.kind:
                none = f"{op} takes no operand; {number} must be None or 0"
                call.need(given in (None, 0), none, kind)
            elif op.kind != "bypass":
                call.need(given is not None, f"{op} needs {number}, which is None", kind)
        if any(op is not None and "bitvec" in op.kind for op in ops.values()):
            here = call.engine == "vector" or self.engines == ("gpsimd",)
            call.need(here, f"bit operators run on the vector engine, not {call.engine}")
            of_tensors = all(v.dtype.kind in ("int", "bool") for _, v in call.tensors(self.roles))
            numbers = [call.arguments[role] for role in self.numbers]
            floats = [n for n in numbers if isinstance(n, (float, np.floating))]
            call.need(
                of_tensors and all(float(n).is_integer() for n in floats),
                "bit operators need integers; use .view(dtype) for a tensor's bits",
            )

    def _finish(self, call: Issue) -> None:
        """Check what the engine decides, and that nothing is overwritten before it is read."""
        if not call.engine:
            call.engine = call.choose() if len(self.engines) > 1 else self.engines[0]
        call.machine.require(f"{self.op}(engine={call.engine})")
        self._check_operators(call)
        written, read = call.tensors(self.writes), call.tensors(self.reads)
        for _, dst in written:  # a broadcast dst is legal: the last one of several elements stays
            says = f"{dst.name!r} is a shared constant; copy it first"
            call.need(not dst.storage.constant, says, HazardError)
        for role, view in (*read, *written):
            if view.indirection is not None:
                engines = self.indirect_engines or self.engines if role in self.indirect else ()
                indirect_operand(call, role, view, engines)
        if self.exchanges:
            return
        for (to, dst), (of, src) in itertools.product(written, read):
            streams = of in self.numbers or (of in self.streams and to == self.first)
            check_hazard(call, dst, src, streams)
        for (of, one), (also, other) in itertools.combinations(written, 2):
            both = f"{of} and {also} to the same elements of {one.name!r}"
            says = (
                f"it writes {both}, and no order decides which stays; write one to another tensor"
            )
            call.should(not collide(call.machine, one, other, False), says, HazardError)


def instruction(
    **row: Any,
) -> Callable[[Callable[Concatenate[Issue, P], Any]], Callable[P, Any]]:
    """Return the decorator that makes the instruction of a function, with these fields of a row."""
    return functools.partial(Row, **row)
