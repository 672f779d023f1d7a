"""`simulate`: runs one NKI kernel on NumPy arrays, checks it strictly, records a trace.

Start here: arguments become HBM tensors, the kernel runs as Python under the stand-in modules,
the capacity of SBUF and PSUM is checked over the recorded live ranges, and the timing pass
turns the trace into a profile. `loading/` executes the kernel file, `language/` and `isa/` have one
function per documented name, `tensors/` the view arithmetic and the bytes, `programs.py` the grid,
`timing/` the timing model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from nmm_compiler.errors import (
    HazardError,
    InternalFaultError,
    KernelArgumentError,
    KernelFailedError,
    NmmError,
    SimulationError,
    one_line,
)
from nmm_compiler.report.parts import Grid, Line, Part
from nmm_compiler.report.shown import Shown
from nmm_compiler.simulator.arguments import ArraySpec as ArraySpec, Binder, bind, each
from nmm_compiler.simulator.language.base import shared_hbm
from nmm_compiler.simulator.language.functions import assign
from nmm_compiler.simulator.loading.loader import resolve
from nmm_compiler.simulator.loading.standins import RUNNERS
from nmm_compiler.simulator.machine import (
    CURRENT,
    MAX_RANKS,
    Machine,
    RunOptions,
    defined_at,
    is_own,
)
from nmm_compiler.simulator.programs import Programs, Stopped
from nmm_compiler.simulator.tensors.elements import poisoned_values
from nmm_compiler.simulator.tensors.memory import check_capacity
from nmm_compiler.simulator.tensors.tensor import NkiTensor
from nmm_compiler.simulator.timing.profile import Profile, profile_traces
from nmm_compiler.simulator.timing.schedule import check_dependencies, collector_held_off
from nmm_compiler.simulator.trace import Trace
from nmm_compiler.targets import Target, get as get_target

_SHOWN = ("output", "shape", "dtype", "least", "most", "mean")  # of each output


@dataclasses.dataclass(frozen=True, repr=False)
class Simulation(Shown):
    """The result of a run.

    outputs: tuple of NumPy arrays; None in timing mode. single: the kernel returned one tensor.
    profile: predicted timing, of the slower program; None in functional mode.
    trace: of program 0; traces: of all.
    output_specs: shape and dtype of each output, in every mode.
    """

    outputs: tuple[np.ndarray, ...] | None
    profile: Profile | None
    trace: Trace
    warnings: tuple[str, ...]
    traces: tuple[Trace, ...] = ()
    output_specs: tuple[ArraySpec, ...] = ()
    single: bool = True

    @property
    def output(self) -> np.ndarray:
        """The only output."""
        if self.outputs is None:
            raise SimulationError('timing mode computes no outputs; use mode="full"')
        if len(self.outputs) != 1:
            raise SimulationError(f"the kernel has {len(self.outputs)} outputs; use .outputs")
        return self.outputs[0]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: shapes and ranges of the outputs, profile, warnings."""
        return {
            "outputs": [dict(zip(_SHOWN, row, strict=True)) for row in self._rows()],
            "warnings": list(self.warnings),
            "profile": None if self.profile is None else self.profile.to_dict(),
        }

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    def _rows(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for i, spec in enumerate(self.output_specs):
            figures: tuple[float | None, ...] = (None, None, None)
            if self.outputs is not None:
                values = self.outputs[i].astype(np.float64)
                figures = (float(values.min()), float(values.max()), float(values.mean()))
            rows.append((i, list(spec.shape), str(spec.dtype), *figures))
        return rows

    def _said(self) -> list[Part]:
        rows = [
            (i, tuple(shape), dtype, *("-" if f is None else f"{f:.4g}" for f in at))
            for i, shape, dtype, *at in self._rows()
        ]
        said: list[Part] = [Grid.of(_SHOWN, rows, right=_SHOWN[3:])] if rows else []
        return said + [Line(f"warning: {warning}", "warning") for warning in self.warnings]

    def overview(self) -> list[Part]:
        """Return outputs, warnings, the profile's line and why engines wait."""
        return [*self._said(), *(() if self.profile is None else self.profile.overview())]

    def parts(self) -> list[Part]:
        """Return outputs, warnings and the profile."""
        return [*self._said(), *(() if self.profile is None else self.profile.parts())]

    def page_parts(self) -> list[Part]:
        """Return `parts` with the source lines and their time."""
        return [*self._said(), *(() if self.profile is None else self.profile.page_parts())]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{list(s.shape)} {s.dtype}" for s in self.output_specs)
        timed = "" if self.profile is None else f", {self.profile.latency_us:.2f} us simulated"
        warned = f", {len(self.warnings)} warnings" if self.warnings else ""
        return f"<Simulation: outputs {shapes or 'none'}{timed}{warned}>"


def simulate(
    kernel: Any,
    *arrays: Any,
    target: str | Target = "trn2",
    grid: int | tuple[Any, ...] = 1,
    mode: Literal["full", "functional", "timing"] | str = "full",
    strict: bool = True,
    max_instructions: int = 10_000_000,
    reorder: bool = True,
    named: Mapping[str, Any] | None = None,
    one_of_ranks: int = 1,
    turns: int | None = None,
    **kwargs: Any,
) -> Simulation:
    """Run an NKI kernel on the CPU.

    Args:
        kernel: "file.py", "file.py:name", a Path, a function, or an object with .path and .name.
        arrays: the kernel's arguments. NumPy arrays (ml_dtypes too) and torch CPU tensors become
            HBM tensors, and are updated in place when the kernel writes them, as in AWS's
            simulator; everything else passes through. `ArraySpec` stands for an array in timing
            mode.
        target: hardware, by name or as a record.
        grid: programs; 2 is LNC=2. A kernel of NKI Beta 1 takes any launch grid, such as (4, 2).
        mode: "full", "functional" (no timing), or "timing" (no data).
        strict: False turns broken rules into warnings where a result exists.
        max_instructions: ends an endless loop.
        reorder: whether the compiler's scheduler may move independent instructions and DMAs
            across each other, as AWS documents outside of nl.no_reorder, or keeps program order.
        named: more arguments of the kernel by name, for names that are parameters of this
            function.
        one_of_ranks: in timing mode, run the kernel as one of so many ranks that exchange data by
            nki.collectives and all arrive at once; data needs all of them, see `simulate_ranks`.
        turns: in timing mode, of loops on the device whose bound is a register; a loaded one has
            no value there.
        kwargs: the kernel's arguments by name.

    Returns:
        The outputs, the profile, the trace and the warnings.

    Raises:
        SimulationError: a rule is broken, or the kernel fails; with the kernel's own file and
            line.
    """
    options = RunOptions(target, grid, mode, strict, max_instructions, reorder, one_of_ranks, turns)
    return _launch(kernel, [(arrays, {**kwargs, **(named or {})})], options)[0]


def simulate_ranks(
    kernel: Any,
    inputs: Sequence[Mapping[str, Any] | Sequence[Any]],
    *,
    target: str | Target = "trn2",
    grid: int | tuple[Any, ...] = 1,
    mode: Literal["full", "functional", "timing"] | str = "full",
    strict: bool = True,
    max_instructions: int = 10_000_000,
    reorder: bool = True,
) -> tuple[Simulation, ...]:
    """Run a kernel on several ranks that exchange data by `nki.collectives`.

    Args:
        kernel: as for `simulate`.
        inputs: for each rank, 2 to 64 of them, its arguments in order or by name.
        target: as for `simulate`.
        grid: programs of each rank.
        mode: as for `simulate`.
        strict: as for `simulate`.
        max_instructions: as for `simulate`.
        reorder: as for `simulate`.

    Returns:
        One Simulation for each rank.

    Raises:
        SimulationError: as for `simulate`.
    """
    if not 1 <= len(inputs) <= MAX_RANKS:
        raise KernelArgumentError(f"{len(inputs)} ranks; the simulator runs 1 to {MAX_RANKS}")
    options = RunOptions(target, grid, mode, strict, max_instructions, reorder)
    given = [((), dict(i)) if isinstance(i, Mapping) else (tuple(i), {}) for i in inputs]
    return _launch(kernel, given, options)


def _launch(
    kernel: Any, inputs: list[tuple[tuple[Any, ...], dict[str, Any]]], options: RunOptions
) -> tuple[Simulation, ...]:
    """Run the programs of all ranks; return one Simulation for each rank."""
    if CURRENT.machine is not None:
        raise SimulationError("simulate() inside a kernel; call the other kernel as a function")
    hardware = get_target(options.target)
    launched = _load(kernel).launched(options.grid)
    grid, function = launched.grid, launched.function
    if grid not in (1, 2):
        raise KernelArgumentError(f"grid {grid}; NKI has 1 or 2 programs (LNC)")
    data, count = options.data, len(inputs) * grid
    programs = Programs(count)
    ranks: list[tuple[list[Machine], Binder]] = []
    bodies: list[Callable[[], None]] = []
    for rank, (arrays, named) in enumerate(inputs):
        machines = [
            Machine(
                hardware, options, assign, program_id=p, grid=grid, rank=rank,
                ranks=max(len(inputs), options.ranks), programs=programs,
            )
            for p in range(grid)
        ]  # fmt: skip
        binder = Binder(machines[0], grid)
        bound = bind(function, arrays, named)
        bound.arguments = {n: each(binder.convert, n, v) for n, v in bound.arguments.items()}
        for other in machines[1:]:
            other.trace.allocations.update(
                {k: dataclasses.replace(a) for k, a in machines[0].trace.allocations.items()}
            )
        ranks.append((machines, binder))
        bodies += [functools.partial(_run, m, launched.run, bound) for m in machines]
    with contextlib.nullcontext() if data else collector_held_off():
        if count == 1:
            bodies[0]()
        else:
            programs.run(bodies)
        return tuple(_result(machines, binder, function, options) for machines, binder in ranks)


def _result(
    machines: list[Machine], binder: Binder, function: Any, options: RunOptions
) -> Simulation:
    """Check what a rank's programs did and return its outputs and profile."""
    for machine in machines:
        check_capacity(machine)
        check_dependencies(machine.trace)
    tensors, single = _outputs(machines[0], machines[0].outputs, function)
    for machine in machines:
        _check_turns(machine, tensors)
    outputs = None
    if machines[0].data:
        outputs = tuple(_export(machines[0], t) for t in tensors)
        binder.write_back(machines)
    specs = tuple(ArraySpec(t.shape, t.dtype) for t in tensors)
    profile = None
    if options.mode != "functional":
        traces = [m.trace for m in machines]
        profiles = profile_traces(traces, machines[0].target, reorder=options.reorder)
        profile = max(profiles, key=lambda p: p.latency_us)
    warnings = tuple(dict.fromkeys(w for m in machines for w in m.warnings.values()))
    return Simulation(
        outputs, profile, machines[0].trace, warnings, tuple(m.trace for m in machines), specs,
        single,
    )  # fmt: skip


RUNNERS.append(simulate)


def _load(kernel: Any) -> Any:
    try:
        return resolve(kernel)
    except (NmmError, KeyboardInterrupt):
        raise
    except SyntaxError as error:
        raise KernelFailedError(
            f"the kernel file has a syntax error: {error.msg}",
            str(error.filename),
            error.lineno or 0,
        ) from error
    except BaseException as error:  # the kernel file's own top level: SystemExit too
        raise failed(error, "the kernel file could not be loaded") from error


def _check_turns(machine: Machine, outputs: list[NkiTensor]) -> None:
    """Refuse a tensor that is used after the turn of a loop on the device that makes it."""
    trace = machine.trace
    shared = {tensor.storage.identity for tensor in machine.identities.values()}
    used = dict.fromkeys((tensor.storage.identity for tensor in outputs), len(trace.instructions))
    for _, end, made, _ in trace.turns:
        for identity in sorted({*made} & trace.allocations.keys() - shared):
            found = trace.allocations[identity]
            if used.get(identity, found.last_index) < end:
                continue
            last = machine.instructions[found.last_index]
            message = (
                f"tensor {found.name!r} {found.shape} of line {found.line} is made in a turn of a "
                f"loop on the device and used after it (nisa.{last.op}, or as an output); on the "
                "device all turns have one such tensor, allocate it before the loop"
            )
            machine.rule(HazardError, message, (last.file, last.line))
            return


def _run(machine: Machine, function: Any, bound: Any) -> None:
    CURRENT.machine = machine
    try:
        with np.errstate(all="ignore"):
            machine.outputs = function(*bound.args, **bound.kwargs)
        if machine.failure is not None:
            raise machine.failure
    except (NmmError, KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # the kernel's own code may raise anything: SystemExit too
        raise failed(error, "the kernel raised") from error
    finally:
        CURRENT.machine = None


def _outputs(machine: Machine, returned: Any, function: Any) -> tuple[list[NkiTensor], bool]:
    """Return (tensors, whether it was a single one) of what the kernel returned."""
    place, flat = defined_at(function), list(_flat(returned))
    for item in flat:
        if not isinstance(item, NkiTensor):
            raise SimulationError(
                f"the kernel returned {type(item).__name__}; return a tensor or a tuple of them",
                *place,
            )
        if item.memory != "hbm":
            raise SimulationError(
                f"the kernel returned {item.name!r}, which is in {item.memory.upper()}; copy "
                "it to an nl.shared_hbm tensor and return that",
                *place,
            )
        if item.buffer is not shared_hbm and not item.storage.is_input:
            private = f"output {item.name!r} is in private HBM; allocate outputs in nl.shared_hbm"
            machine.warn(private, place)
    return flat, isinstance(returned, NkiTensor)


def _flat(returned: Any) -> Iterator[Any]:
    """Yield what a kernel returned in tuples, lists and dictionaries; nothing for None."""
    if isinstance(returned, (list, tuple, dict)):
        for value in returned.values() if isinstance(returned, dict) else returned:
            yield from _flat(value)
    elif returned is not None:
        yield returned


def _export(machine: Machine, tensor: NkiTensor) -> np.ndarray:
    """Return a copy of an output's values; refuses elements that were never written.

    In Beta 1 some of them may be undefined.
    """
    values, mask = tensor.array().copy(), tensor.missing()
    if mask is not None:
        origin = tensor.storage.origin
        message = (
            f"{int(mask.sum())} of {mask.size} elements of output {tensor.name!r} {tensor.shape} "
            + (f"depend on memory that nothing has written: {origin}" if origin
               else "were never written")
        )  # fmt: skip
        file = machine.instructions[-1].file if machine.instructions else ""
        place = file, tensor.storage.allocation.line
        if machine.dialect is not None and not mask.all():
            machine.warn(message, place)
        else:
            machine.rule(HazardError, message, place)
        values = poisoned_values(tensor, values, mask)
    return values.astype(np.bool_) if tensor.dtype == "bool" else values


# Whose code raised: the kernel's own, or the simulator's inside an NKI call

_LONGEST_MESSAGE = 1000
_ELSEWHERE = frozenset({"numpy", "ml_dtypes", *sys.stdlib_module_names})


def failed(error: BaseException, what: str) -> InternalFaultError | SimulationError:
    """Return the catalogue error for an exception of the kernel's own code, or of ours.

    The innermost frame that is neither NumPy's nor the standard library's says whose code it was;
    the first of the simulator's after the kernel's last is the NKI function that was called.
    """
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _ELSEWHERE
    ]
    file, line, called = "", 0, None
    for frame, at in frames:
        if not is_own(frame.f_code.co_filename):
            file, line, called = frame.f_code.co_filename, at, None
        elif called is None:
            called = frame
    if not file or called is None or isinstance(error, ImportError):
        said = f"{type(error).__name__}: {one_line(error, _LONGEST_MESSAGE)}"
        return KernelFailedError(f"{what}: {said}", file, line)
    code = called.f_code
    names = code.co_varnames[: code.co_argcount]
    shown = ", ".join(f"{n}={called.f_locals[n]!r:.90}" for n in names if n in called.f_locals)
    return InternalFaultError(
        f"a fault of the simulator in {code.co_name}({shown}): {type(error).__name__}: "
        f"{one_line(error)}; please report it with this line, and pass other arguments meanwhile "
        f"[{file}:{line}]"
    )
