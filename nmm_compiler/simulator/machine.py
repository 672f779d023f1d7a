"""The state of one running program: its trace, its limits, and how to say where an error is.

One `Machine` per program of the grid; the stand-in `nki` functions find it through `current()`.
It knows whether data is computed (not in timing mode) and whether rules are strict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    KernelArgumentError,
    OperandError,
    SimulationError,
    UnknownNameError,
)
from nmm_compiler.simulator.trace import Access, Instruction, Trace
from nmm_compiler.targets import Target, oldest_with

Programs = Any  # its file knows this one
MODES = ("full", "functional", "timing")
MAX_RANKS = 64
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@functools.cache
def is_own(filename: str) -> bool:
    """Return whether a file is of this package, or of Python's own frozen modules."""
    return filename.startswith((_PACKAGE, "<frozen"))


class _Current(threading.local):
    machine: Machine | None = None
    place: tuple[str, int] | None = None


CURRENT = _Current()
"""Of this thread: the machine that runs, to which NKI calls go, None outside of a simulation; and
the place that stands for the kernel's line."""


def current() -> Machine:
    """Return the machine of the running kernel; error outside a simulation."""
    machine = CURRENT.machine
    if machine is None:
        raise SimulationError(
            "an NKI call outside a simulation; run the kernel with nmm_compiler.simulate(...)"
        )
    return machine


def kernel_frame() -> tuple[str, int]:
    """Return (file, line) of the innermost frame that is not the simulator's."""
    if CURRENT.place is not None:
        return CURRENT.place
    frame: Any = sys._getframe(2)  # who calls this is the simulator
    while is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def defined_at(function: Any) -> tuple[str, int]:
    """Return (file, line) of a kernel's own function; ("", 0) of what is no function of Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)


@contextlib.contextmanager
def place_instructions(place: tuple[str, int]) -> Iterator[None]:
    """Give the instructions and errors inside the kernel's (file, line) `place`."""
    before = CURRENT.place
    CURRENT.place = place
    try:
        yield
    finally:
        CURRENT.place = before


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run: `simulate` says what each means.

    ranks: if several, the others do not run; they are taken to arrive at the same time.
    """

    target: str | Target
    grid: Any
    mode: str
    strict: bool
    max_instructions: int
    reorder: bool = True
    ranks: int = 1
    turns: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS or (self.ranks > 1 and self.mode != "timing"):
            raise KernelArgumentError(
                f"one_of_ranks={self.ranks!r} in mode {self.mode!r}; one of 1 to {MAX_RANKS} ranks "
                "runs in mode 'timing', and simulate_ranks runs all of them on data"
            )
        if self.mode not in MODES:
            raise UnknownNameError("mode", self.mode, MODES)

    @property
    def data(self) -> bool:
        """Whether values are computed."""
        return self.mode != "timing"


@functools.lru_cache(16)
def _outcomes_on(target: Target) -> dict[tuple[Any, ...] | None, Any]:
    """Return what calls of instructions came to on a target so far: the same each time."""
    return {}


class Machine:
    """One program on one core.

    assign: the function (tensor, key, value) behind `tensor[key] = value`. dialect: the state of
    NKI Beta 1 for this program, None in a kernel of the current dialect.
    program_id: of the programs of a rank, which are `grid`. program: its place in `launch`, the
        grid that the kernel sees. rank: of `ranks` cores that exchange
        data by nki.collectives.
    programs: the exchange with the other programs.
    poisoned: (view, mask, first read) of what the running instruction has read of them.
    storages: the identity of the next storage or register. names: of the variables that places
        assign to.
    outcomes: what calls of instructions came to (`isa/instruction.py`), in all runs on this target.
    random_state: the generator of random numbers, seeded with 0 until a kernel seeds it.
    failure: what a place that cannot raise has refused; raised at the program's end.
    turn: the turn of a loop on the device that runs, None outside of those loops.
    warned: how often a rule was broken that only warns.
    """

    def __init__(
        self,
        target: Target,
        options: RunOptions,
        assign: Callable[[Any, Any, Any], None],
        *,
        program_id: int,
        grid: int,
        rank: int,
        ranks: int,
        programs: Programs,
    ) -> None:
        self.target = target
        self.assign = assign
        self.data = options.data
        self.outcomes = _outcomes_on(target)
        self.warned = 0
        self.program_id, self.grid, self.programs = program_id, grid, programs
        self.program: tuple[int, ...] = (program_id,)
        self.launch: tuple[int, ...] = (grid,) if grid > 1 else ()
        self.rank, self.ranks, self.options = rank, ranks, options
        self.trace = Trace()
        self.instructions = self.trace.instructions
        self.storages = self.place << 40
        self.names: dict[tuple[str, int], str] = {}
        self.warnings: dict[tuple[str, str, int], str] = {}
        self.poisoned: list[tuple[Any, Any, str]] = []
        self.accumulators: dict[str, Any] = {}
        self.identities: dict[Any, Any] = {}
        self.random_state = np.random.default_rng(0)
        self.turn: Any = None
        self.failure: SimulationError | None = None
        self.no_reorder_depth = 0
        self.outputs: Any = None
        self.dialect: Any = None

    def new_identity(self) -> int:
        """Return a number that no other storage and no other register of the program has."""
        identity, self.storages = self.storages, self.storages + 1
        if self.turn is not None:
            self.turn.numbers[identity] = (len(self.turn.numbers),)
        return identity

    def note(self, what: str, *values: Any) -> None:
        """Tell the running turn of a loop on the device, if any, what else it issues."""
        if self.turn is not None:
            self.turn.note(what, values)

    @property
    def place(self) -> int:
        """The number of this program among those of all ranks."""
        return self.rank * self.grid + self.program_id

    def error(self, kind: type[SimulationError], message: str) -> SimulationError:
        """Return an error of `kind` that carries the kernel's current file and line."""
        return kind(message, *kernel_frame())

    def need(
        self, holds: object, message: str, kind: type[SimulationError] = SimulationError
    ) -> None:
        """Refuse what does not hold, at the kernel's current line."""
        if not holds:
            raise self.error(kind, message)

    def rule(
        self, kind: type[SimulationError], message: str, place: tuple[str, int] | None = None
    ) -> None:
        """Raise in strict mode; otherwise record a warning, once per place.

        place: the (file, line) that is to blame, by default the kernel's current one.
        """
        if self.options.strict:
            raise kind(message, *(place or kernel_frame()))
        self.warn(message, place)

    def require(self, what: str, remedy: str = "", flag: str = "") -> None:
        """Refuse an instruction, or a form of one, that the target lacks.

        what: as `absent_instructions` or `absent_forms` name it, unless a `flag` says it.
        remedy: what to do on this target, a newer one unless said.
        """

        def has(t: Target) -> Any:
            return getattr(t, flag) if flag else what not in t.absent_instructions + t.absent_forms

        if not has(self.target):
            needed = oldest_with(has)
            self.rule(
                OperandError,
                f"{what} needs {needed} or newer, the target is {self.target.name}; "
                + (remedy or f'pass target="{needed}"'),
            )

    def warn(self, message: str, place: tuple[str, int] | None = None) -> None:
        """Record a warning once per kernel line."""
        self.warned += 1
        file, line = place or kernel_frame()
        key = message.split(":")[0], file, line
        self.warnings.setdefault(key, f"{message} [{file}:{line}]")

    def record(
        self,
        op: str,
        engine: str,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
        attributes: dict[str, Any],
        name: str | None = None,
        kind: int = 0,
    ) -> Instruction:
        """Append one instruction to the trace; ends a run that is too long."""
        file, line = kernel_frame()
        instructions = self.instructions
        index = len(instructions)
        if index >= self.options.max_instructions:
            raise SimulationError(
                f"more than max_instructions={self.options.max_instructions:,} instructions; is "
                "a loop endless? Otherwise raise max_instructions",
                file,
                line,
            )
        instruction = Instruction(
            op, engine, reads, writes, attributes, file, line, name or "", (), kind, index
        )
        instructions.append(instruction)
        allocations = self.trace.allocations
        for access in reads + writes:
            allocation = allocations[access.storage]
            allocation.last_index = index
            if allocation.first_index < 0:
                allocation.first_index = index
        for access in writes:
            allocations[access.storage].last_write = index
        return instruction
