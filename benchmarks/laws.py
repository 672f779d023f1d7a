"""Which laws of the timing model earn their keep: each is switched off alone, and errors compared.

A law is a constant that no data sheet has, or a rule of the model's code. Every published kernel
(timing_points.py, timing_texts.py) is simulated once; its trace is timed with the whole model and
once more without each law. The table has, for each law, the mean and the worst error of the kernels
whose publisher set no law, with it and without it, how many kernels it moves by more than half a
percent, of how many problems, and the statements of its code. Nothing here was measured by us.

    python benchmarks/laws.py [--only TEXT] [--law TEXT] [--record FILE]
        [--autocomp CLONE] [--accelopt CLONE] [--kda CLONE]

`--record` keeps what was timed, a kernel a line, and continues from it; without `--only` and clones
the table is of the kernels that the record has.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import statistics
import sys
import textwrap
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing_conflicts
import timing_points
import timing_texts
from row_file import RowFile

from nmm_compiler import targets
from nmm_compiler.errors import NmmError
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.timing import (
    dependence,
    dma,
    resources,
    timeline,
)
from nmm_compiler.simulator.timing.profile import profile_timeline
from nmm_compiler.simulator.timing.timeline import Timeline, time_trace
from nmm_compiler.simulator.trace import Trace
from nmm_compiler.targets import Target

MOVED = 0.005
EARNED = 0.003


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """A law: how it is switched off, and the code that it would spare.

    fields: of the target, with the values that say nothing. patches: (owner, name, replacement).
    code: functions and classes that only this law needs.
    """

    name: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    patches: tuple[tuple[Any, str, Any], ...] = ()
    code: tuple[Any, ...] = ()

    @property
    def statements(self) -> int:
        """The statements of its code."""
        return sum(_statements(one) for one in self.code)

    @contextlib.contextmanager
    def off(self, target: Target) -> Iterator[Target]:
        """Give the target without the law, and the model without its code meanwhile."""
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self.patches:
                stack.enter_context(unittest.mock.patch.object(owner, name, replacement))
            yield dataclasses.replace(target, **self.fields)


def _statements(one: Any) -> int:
    tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def _constant(name: str, value: Any) -> Law:
    return Law(name=name, fields={name: value})


class _NoSums(dict[Any, float]):
    """Sums that are always ready."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


_CLOCK = timeline.TensorClock.__init__
_TRANSFER = timeline._Pass._transfer
_ISSUE = dma.DmaCosts._issue
_TAKE = resources.Pool.take


def _clock_without_sums(self: Any, target: Target, slots: Any) -> None:
    _CLOCK(self, target, slots)
    self.sums = _NoSums()


def _clock_that_stays_warm(self: Any, target: Target, slots: Any) -> None:
    _CLOCK(self, target, slots)
    self.window = 1e30


def _no_store_put_off(self: Any, index: int, instruction: Any, ready: float, cost: Any) -> None:
    _TRANSFER(self, index, instruction, ready, dataclasses.replace(cost, stores=False))


def _take_without_stores(self: Any, size: int) -> float:
    while self.free < size and not self.dead and self.settle(float("inf")):
        pass
    settle, self.settle = self.settle, lambda before: False
    try:
        return _TAKE(self, size)
    finally:
        self.settle = settle


def _own_queues(self: Any, mode: str, issuer: str, descriptors: int) -> tuple[str, float]:
    queue, seconds = _ISSUE(self, mode, issuer, descriptors)
    return (f"software-{mode}" if queue == "software" else queue), seconds


def _one_rate(target: Target, instruction: Any, engine: str) -> float:
    return 1.0


LAWS = (
    # What the compiler does to a kernel
    _constant("beta1_product_awaits_load", False),
    _constant("unset_engine_prefers_scalar", False),
    Law(name="stores put off", patches=((timeline._Pass, "_transfer", _no_store_put_off),),
        code=(timeline._Pass._settle, timeline._Pass._book, dependence.Store,
              dependence.Dependences.put_off,
              dependence.Dependences._book_users)),
    Law(name="room waits for stores put off", patches=((resources.Pool, "take",
        _take_without_stores),)),
    Law(name="work in pieces", patches=((resources.Slots, "squeeze", resources.Slots.place),),
        code=(resources.Slots.squeeze,)),
    # TensorE
    Law(name="a sum waits for its first column",
        patches=((timeline.TensorClock, "__init__", _clock_without_sums),)),
    Law(name="the clock falls when idle",
        patches=((timeline.TensorClock, "__init__", _clock_that_stays_warm),)),
    _constant("tensor_ramp_seconds", 0.0),
    _constant("tensor_interval_overhead_cycles", 0),
    _constant("tensor_fp32_overhead_cycles", 0),
    _constant("tensor_fp32_min_columns", 0),
    _constant("tensor_fp32_short_rows", 0),
    _constant("tensor_latency_seconds", 0.0),
    # VectorE, ScalarE, GpSimd
    Law(name="fast modes", code=(cycles._fast_mode,),
        patches=((cycles, "_fast_mode", _one_rate),)),
    _constant("engine_streaming_overhead_cycles", 0),
    _constant("engine_isolated_overhead_cycles", 64),
    _constant("scalar_isolated_overhead_cycles", 64),
    _constant("scalar_operand_read_cycles", 0),
    _constant("vector_two_input_passes", 1.0),
    _constant("vector_reciprocal_cycles", 1.0),
    _constant("vector_memset_cycles", 1.0),
    _constant("wide_stride_factor", 1.0),
    _constant("activation_table_load_seconds", 0.0),
    # DMA
    Law(name="GpSimd's descriptors in one queue",
        patches=((dma.DmaCosts, "_issue", _own_queues),)),
    _constant("dma_issue_seconds", 0.6e-6),
    _constant("dma_issue_descriptor_seconds", 0.0),
    _constant("dma_static_issue_seconds", 0.5e-6),
    _constant("dma_software_gpsimd_seconds", 0.0),
    _constant("dma_descriptor_seconds", 0.0),
    _constant("dma_descriptor_min_seconds", 0.0),
    _constant("dma_short_row_bytes", 0),
    _constant("dma_read_latency_fraction", 0.0),
    _constant("dma_stagger_seconds", 0.0),
    _constant("dma_transpose_wide_fraction", 0.9),
    # Signals
    _constant("semaphore_seconds", 0.1e-6),
    _constant("engine_semaphore_seconds", 0.0),
    _constant("kernel_start_stop_seconds", 10e-6),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A published kernel: how to run it, and what was measured."""

    name: str
    publisher: str
    kind: str
    measured: float
    counted: bool
    figure: str
    run: Callable[[], tuple[Trace, Target]]


def kernels(clones: dict[str, Path]) -> list[Kernel]:
    """Return all points, and the texts of the clones; those of short runs first."""
    found = []
    for point in timing_points.points():

        def run(point: Any = point) -> tuple[Trace, Target]:
            return timing_points.simulated(point).trace, targets.get(point.target)

        found.append(Kernel(
            point.name, timing_points.publisher(point.source), point.kind, point.measured,
            point.counted, point.figure, run,
        ))  # fmt: skip
    kinds = timing_texts.recorded("kinds")
    for text in timing_texts.texts():
        clone = clones.get(text.repository)
        if clone is None:
            continue

        def run_text(text: Any = text, clone: Path = clone) -> tuple[Trace, Target]:
            code = timing_texts.published(text, clone)
            ran = timing_texts.run_text(code, text.problem)
            return ran.trace, targets.get(text.problem.target)

        found.append(Kernel(
            text.name, text.problem.repository, kinds.get(text.name, ""), text.measured,
            text.counted, "device us", run_text,
        ))  # fmt: skip
    return sorted(found, key=lambda kernel: kernel.measured)


def _figure(kernel: Kernel, line: Timeline) -> float:
    if kernel.figure == "device us":
        return line.latency_us + line.target.kernel_start_stop_seconds * 1e6
    return timing_points.FIGURES[kernel.figure](profile_timeline(line))


def times(kernel: Kernel, laws: tuple[Law, ...]) -> dict[str, float]:
    """Return what the model says of a kernel, whole ("") and without each law."""
    trace, target = kernel.run()
    whole = time_trace(trace, target)
    found = {"": _figure(kernel, whole)}
    for law in laws:
        same = all(getattr(target, field) == value for field, value in law.fields.items())
        if same and not law.patches:
            continue
        with law.off(target) as without:
            found[law.name] = _figure(kernel, time_trace(trace, without))
    return found


def _errors(rows: list[dict[str, Any]], law: str) -> list[float]:
    return [abs(row["times"].get(law, row["times"][""]) / row["measured"] - 1.0) for row in rows]


def table(rows: list[dict[str, Any]], laws: tuple[Law, ...]) -> list[str]:
    """Return a line a law, by the held-out kernels."""
    held = [row for row in rows if timing_points.side(row["publisher"]) == "held out"]
    if not held:
        return ["no kernel that is held out was timed"]
    lines = [
        "| law | mean with | without | worst with | without | moves | of problems | statements | "
        "earns |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    whole = _errors(held, "")
    for law in laws:
        without = _errors(held, law.name)
        moved = [
            row for row in rows
            if abs(row["times"].get(law.name, row["times"][""]) / row["times"][""] - 1.0) > MOVED
        ]  # fmt: skip
        gain = statistics.mean(without) - statistics.mean(whole)
        lines.append(
            f"| {law.name} | {statistics.mean(whole):.2%} | {statistics.mean(without):.2%} | "
            f"{max(whole):.0%} | {max(without):.0%} | {len(moved)} | "
            f"{len({row['name'].rsplit(', ', 1)[0] for row in moved})} | {law.statements} | "
            f"{'yes' if gain >= EARNED else 'no'} |"
        )
    return lines


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="kernels whose name contains this text")
    parser.add_argument("--law", default="", help="laws whose name contains this text")
    parser.add_argument("--record", type=Path, help="keep what was timed here, continue from it")
    for name in ("autocomp", "accelopt", "kda"):
        parser.add_argument(f"--{name}", type=Path, help="clone with texts to run")
    options = parser.parse_args()
    clones = {
        timing_texts.SEARCHED: options.autocomp, timing_texts.PROFILED: options.accelopt,
        timing_texts.LOGGED: options.kda,
    }  # fmt: skip
    laws = tuple(law for law in LAWS if options.law in law.name)
    record = RowFile(options.record, "name")
    contradicted = timing_conflicts.contradicted(timing_points.BARS["worst"])
    for kernel in kernels({n: clone for n, clone in clones.items() if clone}):
        if (kernel.name,) in record.rows or options.only not in kernel.name:
            continue
        if not kernel.counted or kernel.name in contradicted:
            continue
        try:
            found = times(kernel, laws)
        except (NmmError, SyntaxError) as error:
            print(f"{kernel.name}: {error}", file=sys.stderr)
            continue
        record.add({
            "name": kernel.name, "publisher": kernel.publisher, "kind": kernel.kind,
            "measured": kernel.measured, "times": found,
        })  # fmt: skip
        wrong = found[""] / kernel.measured - 1.0
        print(f"{kernel.name}: {wrong:+.1%}", file=sys.stderr, flush=True)
    print("\n".join(table(list(record.rows.values()), laws)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
