"""The parts of a profile: figures, why engines wait, the roofline, the source lines."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Iterator, Sequence
from pathlib import Path

from nmm_compiler.report.charts import bars
from nmm_compiler.report.parts import Drawing, Grid, Line, Listing, Part, Section
from nmm_compiler.simulator.timing.advice import Advice, line_numbers
from nmm_compiler.simulator.timing.causes import (
    WHY,
    Share,
    Step,
    critical_path,
    shares,
    waits,
)
from nmm_compiler.simulator.timing.costs import ENGINE_NAMES
from nmm_compiler.simulator.timing.timeline import Timeline

_LINES_IN_TEXT = 10
_LEAST_SHARE = 0.005


def engine_table(found: Timeline) -> Grid:
    """Return how long each engine works, and what it waits for."""
    waiting = waits(found)
    total = found.latency_us or 1.0
    rows = []
    for number, (engine, name) in enumerate(ENGINE_NAMES.items()):
        busy = found.busy_us.get(engine, 0.0)
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


def advice_table(advice: Sequence[Advice]) -> Part:
    """Return the advice, the largest gain first."""
    if not advice:
        return Line("none of the changes that were tried saves half a percent", "note")
    rows = [
        (
            f"{'<=' if a.at_most else '~'} {a.gain_us:.2f}",
            line_numbers(a.lines) or "-",
            f"{a.unsure}{a.seen}: {a.remedy}",
        )
        for a in advice
    ]
    return Grid.of(("saves us", "lines", "what"), rows, right=("saves us",))


def path_table(found: Timeline) -> Grid:
    """Return the critical path; steps that follow each other on one line are one row."""
    instructions = found.trace.instructions

    def place(step: Step) -> tuple[int, str]:
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


def listings(found: Timeline) -> Iterator[Listing]:
    """Yield the source of each file of the kernel, with the time of each line beside it."""
    every = shares(found, lines=True)
    for file in dict.fromkeys(share.file for share in every):
        lines = {share.line: share for share in every if share.file == file}
        texts = linecache.getlines(file) or [""] * max(lines, default=0)
        rows, bars = [], []
        for number, text in enumerate(texts, 1):
            share = lines.get(number)
            figures = _figures(share) if share else ("",) * 3
            rows.append((number, *figures, text.rstrip("\n")))
            bars.append(share.path_us / found.latency_us if share and found.latency_us else 0.0)
        head = ("line", "critical us", "engine us", "HBM KB", "source")
        table = Grid.of(head, rows, right=head[:-1])
        yield Listing(f"{file}: the time of each line", table, tuple(bars))


def _figures(share: Share) -> tuple[str, ...]:
    moved = f"{share.hbm_bytes / 1e3:,.1f}" if share.hbm_bytes else ""
    return f"{share.path_us:.2f}", f"{share.engine_us:.2f}", moved


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
        (name, [found.busy_us.get(engine, 0.0),
                *(waiting.get(engine, {}).get(kind, 0.0) for kind in kinds)])
        for engine, name in ENGINE_NAMES.items()
        if found.busy_us.get(engine, 0.0) and engine != "sync"
    ]  # fmt: skip
    text = f"{found.latency_us:.1f} us on {found.target.name} (simulated): what each engine does"
    return bars(rows, ("works", *map(WHY.__getitem__, kinds)), "us", text)


def timeline_parts(found: Timeline, advice: Sequence[Advice] | None = None) -> list[Part]:
    """Return where the time goes: engines, advice if it was computed, lines, a chart."""
    parts: list[Part] = [Section("engines", (engine_table(found),))]
    if advice is not None:
        parts.append(Section("what would save time (each change timed again)",
                             (advice_table(advice),)))  # fmt: skip
    parts.append(Section("lines", (share_table(found, lines=True),)))
    parts.append(Section("instructions", (share_table(found, lines=False),)))
    parts.append(time_drawing(found))
    return parts
