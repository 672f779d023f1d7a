"""Loops on the device: dynamic_range, fori_loop, while_loop, and what their turns may not do.

The device's compiler traces the body of such a loop once. The simulator runs it turn by turn, as
Python, so a body that counts or that toggles its tiles in Python would compute something else
here. So every turn must issue what the first one did: the same instructions with the same
immediates, tiles, dtypes and access patterns. A register is the same whatever its value is. Tensors
and registers that a turn makes have numbers, from the turn's start on. A loop in a loop is
compared over all of its turns, in all turns of the outer one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, SimulationError
from nmm_compiler.simulator.machine import Machine, current, kernel_frame
from nmm_compiler.simulator.tensors.registers import (
    Indirection,
    VirtualRegister,
)
from nmm_compiler.simulator.tensors.tensor import NkiTensor


@dataclasses.dataclass
class _Body:
    """What the first turn of a loop issues: (name, arguments, line); and the loops in it."""

    issued: list[tuple[str, Any, int]] = dataclasses.field(default_factory=list)
    loops: dict[int, _Body] = dataclasses.field(default_factory=dict)
    known: bool = False


class _Loop:
    """A loop that runs, and the comparison of its running turn with the first one.

    step: of its variable. count: of its turns before this one. place: in the running turn.
    numbers: of the tensors and registers that the turn, and those around it, make: how many before.
    """

    def __init__(self, machine: Machine, name: str, *bounds: Any, step: Any = 1) -> None:
        machine.need(
            not isinstance(step, VirtualRegister) and int(step) > 0,
            f"{name}: step {step!r}; use a positive compile-time integer",
        )
        machine.need(
            not machine.no_reorder_depth,
            f"{name} inside nl.no_reorder() is not supported; move it out",
        )
        self.machine, self.name, self.count = machine, name, 0
        self.body, self.outer, self.place = _Body(), machine.turn, 0
        if self.outer is not None:
            self.body = self.outer.body.loops.setdefault(self.outer.place, self.body)
            machine.note(name, *bounds, step)

    def note(self, what: str, values: tuple[Any, ...]) -> None:
        """Compare an instruction and its arguments with the first turn's."""
        known, issued = self.body.issued, (what, self._same(values))
        place, self.place = self.place, self.place + 1
        if not self.body.known:
            known.append((*issued, kernel_frame()[1]))
        elif place >= len(known) or known[place][:2] != issued:
            name, _, line = known[min(place, len(known) - 1)]
            other = " with other arguments" if name == what else ""
            self.machine.rule(
                HazardError,
                f"a turn of a loop on the device issues {what} where the first turn issued {name} "
                f"of line {line}{other}; the "
                "device's compiler traces the body once, so nothing in it may change from turn to "
                "turn but what goes through registers: keep counts in a register or a tile, or "
                "write a Python for loop, which is unrolled",
            )

    def _symbol(self, symbol: Any) -> Any:
        if symbol.__class__ is tuple:
            return tuple(map(self._symbol, symbol))
        return self.numbers.get(symbol, symbol)

    def _same(self, value: Any) -> Any:
        """Return what is equal for arguments that a traced body may pass in all of its turns."""
        kind = value.__class__
        if kind is NkiTensor:
            base = value.offset * value.itemsize - sum(s * number for _, s, number in value.moved)
            moved = [(self._symbol(register), step) for register, step, _ in value.moved]
            return (
                self._symbol(value.storage.identity), value.shape, value.strides, value.dtype, base,
                moved, value.indirection and self._same(value.indirection),
            )  # fmt: skip
        if kind is tuple or kind is list:
            return tuple([self._same(v) for v in value])
        if kind is VirtualRegister:
            return self._symbol(value.symbol)
        if kind is Indirection:
            return value.kind, self._same(value.index), value.step, value.columns
        if isinstance(value, np.ndarray):
            return value.shape, str(value.dtype), value.tobytes()
        # equal numbers of two kinds are two immediates, and so are 0.0 and -0.0; NaN is one
        return repr(value) if isinstance(value, (int, float, np.generic)) else value

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold one turn: record its instructions, and compare them with the first turn's."""
        machine = self.machine
        most = machine.options.max_instructions
        machine.need(
            self.count <= most,
            f"{self.name} ran more than max_instructions={most:,} times; is its condition ever "
            "cleared? Otherwise raise max_instructions",
        )
        trace, first, made = machine.trace, len(machine.instructions), machine.storages
        machine.turn, self.place = self, 0
        outer: ChainMap[int, tuple[int]] = ChainMap() if self.outer is None else self.outer.numbers
        self.numbers = outer.new_child()
        yield
        self.note("nothing more", ())  # no turn may issue less than the first one
        self.body.known = True
        machine.turn = self.outer
        stop = len(machine.instructions)
        if stop > first:
            trace.turns.append((first, stop, range(made, machine.storages), self.count > 0))
        self.count += 1


def _turns(name: str, lower: Any, upper: Any, step: int, frozen: bool) -> Iterator[VirtualRegister]:
    """Yield the register of each turn of a loop between bounds."""
    machine = current()
    loop = _Loop(machine, name, lower, upper, step=step)
    first, given = _bound(lower), machine.options.turns
    if machine.data or given is None or not isinstance(upper, VirtualRegister):
        values = range(first, _bound(upper), step)
    else:
        values = range(first, first + given * step, step)
    for value in values:
        with loop.turn():
            try:
                yield VirtualRegister(value, frozen)
            except GeneratorExit:  # Python drops what is raised while it closes a generator
                machine.turn = loop.outer
                if machine.options.strict and machine.failure is None:
                    machine.failure = machine.error(
                        SimulationError,
                        f"Python leaves {name} in the middle of a turn; a loop on the device runs "
                        "to its bound, use nl.while_loop to end it by a register",
                    )
                raise


def _bound(value: Any) -> int:
    return value.read() if isinstance(value, VirtualRegister) else int(value)


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """Yield frozen registers of a loop on the device."""
    lower, upper = (0, start) if stop is None else (start, stop)
    return _turns("nl.dynamic_range", lower, upper, step, frozen=True)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[..., Any], step: int = 1) -> None:
    """Run body_fun(i) for i in lower..upper on the device."""
    for register in _turns("nl.fori_loop", lower, upper, step, frozen=False):
        returned = body_fun(register)
        current().need(returned is None, "the body of nl.fori_loop returned a value; it must not")


def while_loop(init: Any, body_fun: Callable[..., Any]) -> None:
    """Run r = body_fun(r) on the device while the register r is not zero."""
    machine = current()
    loop = _Loop(machine, "nl.while_loop", init)
    register = init
    while True:
        machine.need(
            isinstance(register, VirtualRegister),
            f"nl.while_loop: the condition is {type(register).__name__}; init and what the body "
            "returns must be registers",
        )
        if register.read() == 0:
            return
        with loop.turn():
            register = body_fun(VirtualRegister(register.read()))
            machine.note("the next condition", register)
