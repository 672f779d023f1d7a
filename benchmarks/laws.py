"""Which laws of the timing model earn their keep: each is switched off alone, and errors compared.

A law is a constant that no data sheet has, or a rule of the model's code. Every published kernel
(timing_points.py, timing_texts.py) is simulated once; its trace is timed with the whole model and
once more without each law. The table has, for each law, the mean and the worst error of the kernels
whose publisher set no law, with it and without it, how many kernels it moves by more than half a
percent, and of how many problems. Nothing here was measured by us.

    python benchmarks/laws.py [--only TEXT] [--law TEXT] [--record FILE]
        [--autocomp CLONE] [--accelopt CLONE] [--kda CLONE]

`--record` keeps what was timed, a kernel a line, and continues from it; without `--only` and clones
the table is of the kernels that the record has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import tomllib
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timing_points
import timing_texts
import typer
from row_file import RowFile
from timing_texts import Point

from nmm_compiler import targets
from nmm_compiler.errors import NmmError
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.timing import (
    costs,
    resources,
    schedule,
    timeline,
)
from nmm_compiler.simulator.timing.profile import profile_timeline
from nmm_compiler.targets import Target

MOVED = 0.005
EARNED = 0.003


@dataclasses.dataclass(frozen=True)
class Law:
    """A law and how it is switched off: a field of the target, whose `silent` value says nothing,
    or a patch: (owner, name, replacement)."""

    name: str
    silent: Any = None
    patch: tuple[Any, str, Any] | None = None

    @contextlib.contextmanager
    def off(self, target: Target) -> Iterator[Target]:
        """Give the target without the law, or the model without its code meanwhile."""
        if self.patch is None:
            yield dataclasses.replace(target, **{self.name: self.silent})
        else:
            with unittest.mock.patch.object(*self.patch):
                yield target


class _NoSums(dict[Any, float]):
    """Sums that are always ready."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


_CLOCK = schedule.TensorClock.__init__
_TRANSFER = schedule.Scheduler._transfer
_ISSUE = costs._issue
_TAKE = resources.Pool.take


def _clock_without_sums(self: Any, target: Target, slots: Any) -> None:
    _CLOCK(self, target, slots)
    self.sums = _NoSums()


def _clock_that_stays_warm(self: Any, target: Target, slots: Any) -> None:
    _CLOCK(self, target, slots)
    self.looked_at = 1e30


def _no_store_put_off(self: Any, dma: Any) -> None:
    dma.cost = dataclasses.replace(dma.cost, stores=False)
    _TRANSFER(self, dma)


def _take_without_stores(self: Any, size: int) -> float:
    while self.free < size and not self.dead and self.settle(float("inf")):
        pass
    settle, self.settle = self.settle, lambda before: False
    try:
        return _TAKE(self, size)
    finally:
        self.settle = settle


def _own_queues(target: Target, mode: str, issuer: str, descriptors: int) -> tuple[str, float]:
    queue, seconds = _ISSUE(target, mode, issuer, descriptors)
    return (f"software-{mode}" if queue == "software" else queue), seconds


SILENT = tomllib.loads((timing_texts.DATA / "silent_laws.toml").read_text())
"""Constants of a target, with the values that say nothing."""
RULES: dict[str, tuple[Any, str, Any]] = {
    "stores put off": (schedule.Scheduler, "_transfer", _no_store_put_off),
    "room waits for stores put off": (resources.Pool, "take", _take_without_stores),
    "work in pieces": (resources.Slots, "squeeze", resources.Slots.place),
    "a sum waits for its first column": (schedule.TensorClock, "__init__", _clock_without_sums),
    "the clock falls when idle": (schedule.TensorClock, "__init__", _clock_that_stays_warm),
    "a product counts by its rows": (
        costs.InstructionTime,
        "spare",
        property(lambda self: 0.0, lambda self, value: None),
    ),
    "fast modes": (cycles, "_fast_mode", lambda target, instruction, engine: 1.0),
    "GpSimd's descriptors in one queue": (costs, "_issue", _own_queues),
}
"""Rules of the model's code, with what stands in for them."""
LAWS = (
    *(Law(name, patch=patch) for name, patch in RULES.items()),
    *(Law(name, value) for name, value in SILENT.items()),
)


def _figure(point: Point, line: timeline.Timeline) -> float:
    return timing_points.FIGURES[point.figure](profile_timeline(line))


def times(point: Point, clones: dict[str, Path], laws: tuple[Law, ...]) -> dict[str, float]:
    """Return what the model says of a kernel, whole ("") and without each law."""
    trace, target = timing_texts.simulated(point, clones).trace, targets.get(point.target)
    whole = schedule.time_trace(trace, target)
    found = {"": _figure(point, whole)}
    for law in laws:
        if law.patch or getattr(target, law.name) != law.silent:
            with law.off(target) as without:
                found[law.name] = _figure(point, schedule.time_trace(trace, without))
    return found


def table(rows: list[dict[str, Any]], laws: tuple[Law, ...]) -> list[str]:
    """Return a line a law, by the held-out kernels."""
    held = [row for row in rows if timing_texts.side(row["publisher"]) == "held out"]
    if not held:
        return ["no kernel that is held out was timed"]

    def of(row: dict[str, Any], law: str) -> float:
        return float(row["times"].get(law, row["times"][""]))

    def mean_and_worst(law: str) -> tuple[float, float]:
        errors = [abs(of(row, law) / row["measured"] - 1.0) for row in held]
        return statistics.mean(errors), max(errors)

    (mean, worst), cells = mean_and_worst(""), []
    for law in laws:
        mean_without, worst_without = mean_and_worst(law.name)
        moved = [row["name"] for row in rows if abs(of(row, law.name) / of(row, "") - 1.0) > MOVED]
        cells.append((
            law.name, f"{mean:.2%}", f"{mean_without:.2%}", f"{worst:.0%}", f"{worst_without:.0%}",
            str(len(moved)), str(len({name.rsplit(", ", 1)[0] for name in moved})),
            "yes" if mean_without - mean >= EARNED else "no",
        ))  # fmt: skip
    return timing_points.markdown(
        ("law", "mean with", "without", "worst with", "without", "moves", "of problems",
         "earns"), cells,
    )  # fmt: skip


def main(
    only: str = "",
    law: str = "",
    record: Path | None = None,
    autocomp: Path | None = None,
    accelopt: Path | None = None,
    kda: Path | None = None,
) -> None:
    """Time kernels without each law.

    Kernels whose name contains ONLY, laws whose name contains LAW; RECORD keeps what was timed.
    """
    clones = timing_texts.clones_of(autocomp, accelopt, kda)
    laws = tuple(one for one in LAWS if law in one.name)
    known = RowFile(record, "name")
    given = [*timing_texts.points(), *(t for t in timing_texts.texts() if t.clone in clones)]
    contradicted = timing_texts.contradicted(timing_points.BARS["worst"])
    for point in sorted(given, key=lambda point: point.measured):  # short runs first
        chosen = only in point.name and point.counted and point.name not in contradicted
        if not chosen or (point.name,) in known.rows:
            continue
        try:
            found = times(point, clones, laws)
        except (NmmError, SyntaxError) as error:
            print(f"{point.name}: {error}", file=sys.stderr)
            continue
        known.add({"name": point.name, "publisher": point.repository, "kind": point.kind,
                   "measured": point.measured, "times": found})  # fmt: skip
        wrong = found[""] / point.measured - 1.0
        print(f"{point.name}: {wrong:+.1%}", file=sys.stderr, flush=True)
    print("\n".join(table(list(known.rows.values()), laws)))


if __name__ == "__main__":
    typer.run(main)
