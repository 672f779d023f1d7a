"""The report of one compiled graph: chains found and left alone, kernels, cache, time per phase.

`str(report)` is the table people read; latencies are the simulator's predictions, never
measurements. `publish` keeps the reports of this process and hands each to Options.report, to logs
and to torch's structured trace, where tlparse shows it.

`options={"report": "out.html"}` is one page of all graphs that were compiled with this option. It
is written again after each graph, whole or not at all. TORCH_LOGS="nmm_compiler" logs a line for
each graph, "+nmm_compiler" also the report, the graph before and after, the kernels' sources and
their schedules. TORCH_TRACE=DIRECTORY gets all of them and the page.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx
from torch._logging._internal import trace_log, trace_structured_artifact

from nmm_compiler.codegen.build import Kernel
from nmm_compiler.codegen.choose import choose, schedule_table
from nmm_compiler.errors import OutputError
from nmm_compiler.options import Options
from nmm_compiler.outputs import write_text
from nmm_compiler.passes.result import declined_parts, grouped, places_of, readable
from nmm_compiler.passes.rules.base import Declined
from nmm_compiler.records import Record
from nmm_compiler.report.page import page
from nmm_compiler.report.parts import Grid, Line, Part, Section
from nmm_compiler.report.shown import Shown
from nmm_compiler.report.text import as_text, counted
from nmm_compiler.simulator.timing.causes import (
    engine_table,
    listings,
    time_drawing,
)

_KERNELS_SHOWN = 16
_log = logging.getLogger("nmm_compiler.backend")
_REPORTS_KEPT = 256
_reports: deque[CompileReport] = deque(maxlen=_REPORTS_KEPT)
_pages: dict[str, list[CompileReport]] = {}


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
    declined: tuple[Declined, ...] = ()
    fallback: str | None = None
    notes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    built: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    pictures: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    predicted: Any = dataclasses.field(default=None, repr=False, compare=False)

    derived: ClassVar[tuple[str, ...]] = ("cache_hits",)

    @property
    def cache_hits(self) -> int:
        """Kernels that came whole from the cache."""
        return sum(line.origin == "cache" for line in self.kernels)

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
        calls = grouped(line.partition(" at ")[::2] for line in self.matches)
        if calls:
            rows = [(f"{len(at)} x {what}", places_of(at)) for what, at in calls.items()]
            parts.append(Grid.of(("calls", "at"), rows))
        parts += declined_parts(self.declined)
        if self.kernels:
            kernels = [
                (
                    kernel.spec, kernel.calls, kernel.backward, kernel.origin,
                    f"{kernel.hbm_bytes / 1e6:.2f}", f"{kernel.predicted_us:.1f}", kernel.schedule,
                )
                for kernel in self.kernels
            ]  # fmt: skip
            figures = ("calls", "backward", "HBM MB", "predicted us")
            head = ("kernel", *figures[:2], "from", *figures[2:], "schedule")
            parts.append(Grid.of(head, kernels, right=figures))
        if self.fallback is not None:
            parts.append(Line(f"the graph was left as it was: {self.fallback}", "warning"))
        parts += [Line(text, "note") for text in self.rules]
        parts += [Line(f"note: {note}", "note") for note in self.notes]
        return parts

    def page_parts(self) -> list[Part]:
        """Return `parts`, the graph before and after, and of each kernel where its time goes."""
        return compile_parts([self])

    def __repr__(self) -> str:
        return f"<CompileReport: {self.summary()}>"


def _of_kernel(kernel: Kernel) -> tuple[Part, ...]:
    """Return a kernel's engines, times, schedules and source.

    The schedules that were tried are timed anew where the kernel was cached.
    """
    profile = kernel.profile()
    timeline = profile.timeline
    choices = choose(kernel.spec, kernel.target)
    tried: tuple[Part, ...] = (schedule_table(choices),)
    if choices[0].schedule != kernel.schedule:
        given = "chosen by the caller or for another budget of instructions"
        tried = (Line(f"this kernel runs {kernel.schedule}, {given}", "note"), *tried)
    return (
        Line(profile.summary(), "headline"),
        Line(f"{kernel.spec} as {kernel.schedule}"),
        engine_table(timeline),
        time_drawing(timeline),
        Section("schedule and runners-up", tried, folded=True),
        Section("source", tuple(listings(timeline)), folded=True),
    )


def reports() -> list[CompileReport]:
    """Return the reports of the latest graphs, oldest first (at most 256, since the last reset)."""
    return list(_reports)


def last_report() -> CompileReport | None:
    """Return the report of the graph compiled last, or None."""
    return _reports[-1] if _reports else None


def forget_reports() -> None:
    """Forget all reports, and begin their pages anew; torch._dynamo.reset() calls this."""
    _reports.clear()
    _pages.clear()


def publish(report: CompileReport, options: Options, *graphs: fx.GraphModule) -> None:
    """Keep the report, hand it to the user, and put it into logs and torch's structured trace.

    graphs: the graph before and after the passes, if both are still in memory. Raises OutputError
    for a page that cannot be written.
    """
    _reports.append(report)
    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report)
        for name, text in _artifacts(report, graphs):
            _log.debug("%s of graph %d\n%s", name, report.graph, text)
    trace_structured_artifact("nmm_compile_report", "json", report.to_json)
    places = (getattr(handler, "root_dir", None) for handler in trace_log.handlers)
    folder = next(filter(None, places), None)
    if folder is not None:  # handlers of others read no pages, and one takes seconds
        _trace(report, graphs, Path(folder))
    if isinstance(options.report, str):
        shown = _pages.setdefault(options.report, [])
        shown.append(report)
        write_text(options.report, page("nmm_compiler report", compile_parts(shown)))
    elif callable(options.report):
        options.report(report)
    elif options.report:
        print(report)


def compile_parts(reports: Sequence[CompileReport]) -> list[Part]:
    """Return the parts of a page: each graph's report and pictures, then the slowest kernels once,
    folded."""
    kernels = {str(kernel.path): kernel for report in reports for kernel in report.built}
    built = sorted(kernels.values(), key=lambda k: -k.predicted.latency_us)
    each = [(*report.parts(), *report.pictures) for report in reports]
    shown: list[Part] = list(each[0])
    if len(each) > 1:
        titles = (f"graph {report.graph}" for report in reports)
        shown = [Section(title, parts) for title, parts in zip(titles, each, strict=True)]
    for kernel in built[:_KERNELS_SHOWN]:
        shown.append(Section(kernel.spec.short(), _of_kernel(kernel), folded=True))
    if len(built) > _KERNELS_SHOWN:
        more = counted(len(built) - _KERNELS_SHOWN, "faster kernel")
        shown.append(Line(f"{more} not shown one by one", "note"))
    return shown


def _artifacts(report: CompileReport, graphs: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the graph before and after, each kernel and all schedules."""
    if report.matches:
        for when, graph in zip(("before", "after"), graphs, strict=False):
            yield f"nmm_graph_{when}", readable(graph)
    for kernel in report.built:
        yield f"nmm_kernel_{kernel.spec.short().replace(' ', '_')}", kernel.source
    if report.built:
        tables = (
            as_text([Line(one.spec.short()), schedule_table(choose(one.spec, one.target))])
            for one in report.built
        )
        yield "nmm_schedules", "\n\n".join(tables)


def _trace(report: CompileReport, graphs: Sequence[Any], folder: Path) -> None:
    """Write all of a graph's texts to torch's structured trace, and its page beside it.

    tlparse shows artefacts as plain text only, so the page is a file that the trace links to.
    """
    shown = page(f"nmm_compiler: graph {report.graph}", compile_parts([report]))
    for name, text in (*_artifacts(report, graphs), ("nmm_report.html", shown)):
        trace_structured_artifact(name, "string", text.__str__)
    name = f"nmm_report_{report.graph}"
    place = folder.resolve() / f"{name}_of_{os.getpid()}.html"
    try:
        link = {"name": name, "url": write_text(place, [shown]).as_uri()}
    except OutputError as error:
        _log.warning("%s", error)
    else:
        torch._logging.trace_structured("link", metadata_fn=lambda: link)
