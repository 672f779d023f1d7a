"""The critical path of a timeline, why engines wait, and where time goes: as data and as tables.

The timing pass records for each booking what its start waited for. From that follow the shares of
source lines, instructions and engines. Nothing here changes a figure of the timeline.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import linecache
from collections.abc import Iterator, Mapping
from pathlib import Path

from nmm_compiler.records import Record
from nmm_compiler.report.charts import bars
from nmm_compiler.report.parts import Drawing, Grid, Section
from nmm_compiler.simulator.timing.costs import ENGINE_NAMES
from nmm_compiler.simulator.timing.timeline import Booking, Timeline

_SAME_US = 1e-6  # sums of floats in two orders: far above their error, far below a clock cycle
_LINES_IN_TEXT = 10
_LEAST_SHARE = 0.005

WHY = {
    "engine": "the instruction before it on its engine",
    "load": "data that a DMA brings",
    "result": "a result of another engine",
    "reuse": "a buffer that is still read or written",
    "memory": "room in SBUF or PSUM",
    "queue": "the DMA queue",
    "dma engines": "DMA engines at work on other transfers",
    "table": "loading an activation table",
    "loop": "the end of a turn of a loop on the device",
    "barrier": "the other core at a barrier",
    "port": "a memory port that another engine uses",
    "start": "nothing: it could start at once",
    "end": "nothing more to do",
}
"""The kinds of causes, each with what the instruction waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the critical path: from start_us to stop_us the latency depends on this
    instruction.

    what: "compute", "issue", "start" (what comes before: a DMA's descriptors from GpSimd, or its
    latency before bytes move), "move", "signal" (the semaphore from the instruction to the next)
    or "table".
    why: a key of `WHY`: what the instruction waited for before it started.
    """

    index: int
    what: str
    start_us: float
    stop_us: float
    why: str


_WHAT = {"engine": "compute", "queue": "issue", "dma engines": "move", "table": "table"}


def critical_path(timeline: Timeline) -> list[Stretch]:
    """Return the steps from the first instruction to the last result, without gaps."""
    steps: list[Stretch] = []
    until = timeline.latency_us
    index = max(range(len(timeline.end)), key=timeline.end.__getitem__, default=-1)
    held: Booking | None = None if index < 0 else timeline.last(index)
    while held is not None and until > _SAME_US:
        start = min(held.start, until)
        steps.append(Stretch(held.index, _WHAT[held.kind], start, until, held.why))
        until = min(held.since, start)
        if start - until > _SAME_US:
            before = held.cause or held
            what = "start" if before.index == held.index else "signal"
            steps.append(Stretch(before.index, what, until, start, held.why))
        held = held.cause
    return steps[::-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share(Record):
    """The time of one source line, or of one kind of instruction.

    name: the op; the ops of a line. engine: of its instructions, the busiest first. engine_us: time
    for which they hold their engines; a DMA counts its transfer time on one of the 16 engines, the
    mean. path_us: their part of the critical path, with signals and waits; the parts of all shares
    add up to the latency. hbm_bytes: read and written.
    """

    file: str = ""
    line: int = 0
    name: str
    engine: str
    instructions: int
    engine_us: float
    path_us: float
    hbm_bytes: int


def shares(timeline: Timeline, *, lines: bool) -> tuple[Share, ...]:
    """Return the source lines, or the kinds of instructions.

    The one with the largest part of the critical path is the first.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, ins in enumerate(timeline.trace.instructions):
        key = (ins.file, ins.line) if lines else (ins.op, timeline.engine(index))
        groups.setdefault(key, []).append(index)
    path: dict[int, float] = collections.defaultdict(float)
    for step in critical_path(timeline):
        path[step.index] += step.stop_us - step.start_us
    found = [_share(timeline, indices, path, lines) for indices in groups.values()]
    return tuple(sorted(found, key=lambda share: (-share.path_us, -share.engine_us)))


def _share(
    timeline: Timeline,
    indices: list[int],
    path: Mapping[int, float],
    lines: bool,
) -> Share:
    engines: dict[str, float] = collections.defaultdict(float)
    costs = []
    for index in indices:
        held, cost = timeline.bookings[index], timeline.work(index).dma
        us = held[0].stop - held[0].start
        if cost is not None:
            costs.append(cost)
            us = sum(part.stop - part.start for part in held[1:])
            us /= 1 if held[1].row == -1 else timeline.target.dma_engines
        engines[timeline.engine(index)] += us
    chosen = [timeline.trace.instructions[index] for index in indices]
    return Share(
        file=chosen[0].file if lines else "", line=chosen[0].line if lines else 0,
        name=", ".join(dict.fromkeys(ins.op for ins in chosen)),
        engine=", ".join(sorted(engines, key=lambda name: -engines[name])),
        instructions=len(indices), engine_us=sum(engines.values()),
        path_us=sum(path.get(index, 0.0) for index in indices),
        hbm_bytes=sum(cost.hbm_read_bytes + cost.hbm_write_bytes for cost in costs),
    )  # fmt: skip


def waits(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Return {engine: {kind of cause: microseconds}} of the time in which an engine stood idle.

    The kinds are those of `WHY`; "end" is after the engine's last instruction.
    """
    found: dict[str, dict[str, float]] = {}
    free: dict[str, float] = collections.defaultdict(float)
    for held in sorted(timeline.held("engine"), key=lambda held: held.stop):
        engine = str(held.row)
        kinds, idle = found.setdefault(engine, {}), held.start - free[engine]
        if idle > _SAME_US:
            kinds[held.why] = kinds.get(held.why, 0.0) + idle
        free[engine] = held.stop
    for engine, when in free.items():
        found[engine]["end"] = timeline.latency_us - when
    return found


def engine_table(found: Timeline) -> Grid:
    """Return how long each engine works, and what it waits for."""
    waiting = waits(found)
    total = found.latency_us or 1.0
    rows = []
    for number, (engine, name) in enumerate(ENGINE_NAMES.items()):
        busy = found.busy_us[engine]
        kinds = sorted(waiting.get(engine, {}).items(), key=lambda item: -item[1])
        if not (busy or kinds) or engine == "sync":
            continue
        counts = sum(work.count for work in found.kinds.values() if work.engine == number)
        why = "; ".join(f"{WHY[kind]} {us:.1f}" for kind, us in kinds if us > _LEAST_SHARE * total)
        if engine == "dma":
            why = f"16 engines, {found.dma_engine_busy_us / 16:.1f} us each on average"
        rows.append((name, f"{counts:,}", f"{busy:.1f}", f"{busy / total:.0%}", why))
    head = ("engine", "instructions", "busy us", "busy", "waits for, us")
    return Grid.of(head, rows, right=head[1:4])


def share_table(found: Timeline, *, lines: bool) -> Grid:
    """Return the source lines with the largest parts of the critical path, or all instructions."""
    rows = []
    for share in shares(found, lines=lines)[: _LINES_IN_TEXT if lines else None]:
        place = f"{Path(share.file).name}:{share.line}" if lines else share.name
        engines = ", ".join(ENGINE_NAMES[name] for name in share.engine.split(", "))
        figures = f"{share.engine_us:.2f}", f"{share.path_us:.2f}"
        source = [statement(share.file, share.line) or share.name] if lines else []
        rows.append((place, engines, f"{share.instructions:,}", *figures, *source))
    head = ("line" if lines else "instruction", "on", "count", "engine us", "critical us")
    return Grid.of((*head, *(("source",) if lines else ())), rows, right=head[2:])


def path_table(found: Timeline) -> Grid:
    """Return the critical path; steps that follow each other on one line are one row."""
    instructions = found.trace.instructions

    def place(step: Stretch) -> tuple[int, str]:
        return instructions[step.index].line, step.what

    cells = []
    for (line, what), group in itertools.groupby(critical_path(found), place):
        first, *others = group
        us = (others or [first])[-1].stop_us - first.start_us
        times = f" x {1 + len(others)}" if others else ""
        text = f"{instructions[first.index].op}: {what}{times}; waited for {WHY[first.why]}"
        cells.append((f"{first.start_us:.2f}", f"{us:.2f}", str(line), text))
    head = ("from us", "us", "line", "what")
    return Grid.of(head, cells, right=head[:3])


def listings(found: Timeline) -> Iterator[Section]:
    """Yield the source of each file of the kernel, with the time of each line beside it."""
    every = shares(found, lines=True)
    for file in dict.fromkeys(share.file for share in every):
        lines = {share.line: share for share in every if share.file == file}
        texts = linecache.getlines(file) or [""] * max(lines, default=0)
        rows, bars = [], [0.0] * len(texts)
        for number, text in enumerate(texts, 1):
            share, figures = lines.get(number), ("", "", "")
            if share is not None:
                moved = f"{share.hbm_bytes / 1e3:,.1f}" if share.hbm_bytes else ""
                figures = f"{share.path_us:.2f}", f"{share.engine_us:.2f}", moved
                bars[number - 1] = share.path_us / (found.latency_us or 1.0)
            rows.append((number, *figures, text.rstrip("\n")))
        head = ("line", "critical us", "engine us", "HBM KB", "source")
        table = Grid.of(head, rows, right=head[:-1], shares=bars)
        yield Section(f"{file}: the time of each line", (table,))


def statement(file: str, line: int) -> str:
    """Return the statement on a line of a file, of several lines too, cut at 100 characters."""
    text = ""
    for part in linecache.getlines(file)[line - 1 : line + 11]:
        text = f"{text} {part.strip()}".replace("( ", "(").strip()
        if text.count("(") + text.count("[") <= text.count(")") + text.count("]"):
            break
    text = text.replace(", )", ")").replace(" )", ")")
    return text if len(text) <= 100 else f"{text[:99]}…"


def time_drawing(found: Timeline) -> Drawing:
    """Return for each engine how long it works and how long it waits, by what it waits for."""
    waiting = waits(found)
    kinds = sorted({kind for reasons in waiting.values() for kind in reasons})
    rows = [
        (name, [found.busy_us[engine],
                *(waiting.get(engine, {}).get(kind, 0.0) for kind in kinds)])
        for engine, name in ENGINE_NAMES.items()
        if found.busy_us[engine] and engine != "sync"
    ]  # fmt: skip
    text = f"{found.latency_us:.1f} us on {found.target.name} (simulated): what each engine does"
    return bars(rows, ("works", *map(WHY.__getitem__, kinds)), "us", text)
