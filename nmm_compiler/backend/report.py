"""The report of one compiled graph: chains found and left alone, kernels, cache, time per phase.

The record goes to Options.report, to `nmm_compiler.backend.reports()`, and as JSON into torch's
structured trace, where tlparse shows it. `str(report)` is the table people read. Latencies are the
simulator's predictions, never measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from nmm_compiler.codegen.build import Kernel
from nmm_compiler.codegen.choice_table import schedule_table
from nmm_compiler.codegen.choose import choose
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid, Line, Part, Section
from nmm_compiler.report.shown import Shown
from nmm_compiler.report.text import counted
from nmm_compiler.simulator.timing.profile_parts import (
    engine_table,
    listings,
    time_drawing,
)

_NAMES_SHOWN = 4
_KERNELS_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class KernelLine(Record):
    """One kernel of a graph.

    calls: launches of it in the graph and its backward pass; backward: those of the backward pass.
    origin: "built" or "cache".
    """

    name: str
    spec: str
    schedule: str
    path: str
    calls: int
    origin: str
    hbm_bytes: int
    predicted_us: float
    backward: int = 0


@dataclass(frozen=True, kw_only=True)
class Refusal(Record):
    """A chain that was left alone: why, and the node to blame."""

    reason: str
    node: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class CompileReport(Shown, Record):
    """What happened to one graph.

    chains: low-rank chains that were rewritten. matches: one line per call they became, fewer where
    chains share an input. fallback: why the inner backend got the original graph, or None. notes:
    further remarks. phases_ms: wall time of "passes", "kernels" and "inner". built: the Kernel
    objects, in the order of `kernels`.
    pictures: parts that show the graph before and after, for a page. predicted: a function that
    makes the headline, when it is asked for first.
    """

    graph: int
    nodes: int
    target: str
    executor: str
    inner: str
    kernels: tuple[KernelLine, ...]
    phases_ms: dict[str, float]
    chains: int = 0
    matches: tuple[str, ...] = ()
    declined: tuple[Refusal, ...] = ()
    fallback: str | None = None
    notes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    built: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    pictures: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    predicted: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def cache_hits(self) -> int:
        """Kernels that came whole from the cache."""
        return sum(line.origin == "cache" for line in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data: everything but Kernel objects, pictures and the headline."""
        return {**super().to_dict(), "cache_hits": self.cache_hits}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a report again from `to_dict`'s data; what that leaves out stays empty."""
        known = {f.name for f in dataclasses.fields(cls)}
        return super().from_dict({name: data[name] for name in known & set(data)})

    def summary(self) -> str:
        """Return one line: counts, kernels from the cache, times."""
        times = ", ".join(f"{name} {ms:.0f} ms" for name, ms in self.phases_ms.items())
        return (
            f"graph {self.graph}: {counted(self.chains, 'chain')} rewritten as "
            f"{counted(len(self.matches), 'call')}, {len(self.declined)} left alone, "
            f"{counted(len(self.kernels), 'kernel')} ({self.cache_hits} from the cache) for "
            f"{self.target}; executor {self.executor}, inner {self.inner}; {times}"
        )

    def headline(self) -> str:
        """Return what the graph gains over dense; "" where no report of it could know.

        It is computed when it is first asked for, and takes some tenths of a second.
        """
        return "" if self.predicted is None else str(self.predicted())

    def parts(self) -> list[Part]:
        """Return summary and headline, tables of calls, refusals and kernels, then the notes."""
        parts: list[Part] = [Line(self.summary(), "headline")]
        if self.predicted is not None:
            parts.append(Line(self.headline()))
        if self.matches:
            places: dict[str, list[str]] = {}
            for line in self.matches:
                what, _, where = line.partition(" at ")
                places.setdefault(what, []).append(where)
            rows = [(f"{len(at)} x {what}", _some(at, 2)) for what, at in places.items()]
            parts.append(Grid.of(("calls", "at"), rows))
        if self.declined:
            reasons: dict[str, list[str]] = {}
            for refusal in self.declined:
                remedy = f"; {refusal.remedy}" if refusal.remedy else ""
                reasons.setdefault(refusal.reason + remedy, []).append(refusal.node)
            rows = [(_some(nodes), reason) for reason, nodes in reasons.items()]
            parts.append(Grid.of(("left alone", "reason"), rows))
        if self.kernels:
            trained = any(kernel.backward for kernel in self.kernels)
            figures = ("calls", *(("backward",) if trained else ()), "HBM MB", "predicted us")
            kernels = [
                (
                    kernel.spec, kernel.calls, *((kernel.backward,) if trained else ()),
                    kernel.origin, f"{kernel.hbm_bytes / 1e6:.2f}",
                    f"{kernel.predicted_us:.1f}", kernel.schedule,
                )
                for kernel in self.kernels
            ]  # fmt: skip
            head = ("kernel", *figures[:-2], "from", *figures[-2:], "schedule")
            parts.append(Grid.of(head, kernels, right=figures))
        if self.fallback is not None:
            parts.append(Line(f"the graph was left as it was: {self.fallback}", "warning"))
        parts += [Line(text, "note") for text in self.rules]
        parts += [Line(f"note: {note}", "note") for note in self.notes]
        return parts

    def page_parts(self) -> list[Part]:
        """Return `parts`, the graph before and after, and of each kernel where its time goes."""
        return [*self.parts(), *self.pictures, *kernel_parts(self.built)]

    def __repr__(self) -> str:
        return f"<CompileReport: {self.summary()}>"


def _some(names: Sequence[str], count: int = _NAMES_SHOWN) -> str:
    shown = ", ".join(names[:count])
    more = len(names) - count
    return f"{shown} and {more} more" if more > 0 else shown


def kernel_parts(kernels: Sequence[Kernel]) -> list[Part]:
    """Return a folded section for each of the slowest kernels."""
    if not kernels:
        return []
    built = sorted(kernels, key=lambda k: -k.profile().latency_us)
    parts: list[Part] = []
    for kernel in built[:_KERNELS_SHOWN]:
        parts.append(Section(kernel.spec.short(), _of_kernel(kernel), folded=True))
    if len(built) > _KERNELS_SHOWN:
        more = counted(len(built) - _KERNELS_SHOWN, "faster kernel")
        parts.append(Line(f"{more} not shown one by one", "note"))
    return parts


def _of_kernel(kernel: Kernel) -> tuple[Part, ...]:
    """Return a kernel's engines, times, schedules and source.

    The schedules that were tried are timed anew where the kernel was cached.
    """
    profile = kernel.profile()
    found = profile.timeline
    choices = choose(kernel.spec, kernel.target)
    tried: tuple[Part, ...] = (schedule_table(choices),)
    if choices[0].schedule != kernel.schedule:
        given = "chosen by the caller or for another budget of instructions"
        tried = (Line(f"this kernel runs {kernel.schedule}, {given}", "note"), *tried)
    return (
        Line(profile.summary(), "headline"),
        Line(f"{kernel.spec} as {kernel.schedule}"),
        engine_table(found),
        time_drawing(found),
        Section("schedule and runners-up", tried, folded=True),
        Section("source", tuple(listings(found)), folded=True),
    )
