"""Write a timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

One row per compute engine, per DMA queue (issuing) and per DMA engine (moving bytes). An arrow
leads from an instruction or a load to what waited for it. A slice lasts as long as it keeps its row
busy, and its full latency is an argument.

The format wants microseconds. Perfetto multiplies them by 1000 and cuts the fraction off, and drops
a slice that overlaps its neighbour on a row. So all times are whole nanoseconds here, both ends of
a slice alike, and are written a tenth of one later.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nmm_compiler.outputs import write_text
from nmm_compiler.simulator.timing.costs import ENGINE_NAMES
from nmm_compiler.simulator.timing.timeline import Booking, Timeline

Event = dict[str, Any]
Row = tuple[int, int]
"""A process and a thread, in the words of the format."""

_OF_DMA = ("descriptors", "hbm_read_bytes", "hbm_write_bytes")
_ALIKE = "DMA engines, all alike"
_CORE, _DMA = 1, 2
_PROCESSES_EACH = 10


def write_trace(profiles: Mapping[str, Any], path: str | Path) -> Path:
    """Write the timelines of `profiles` to `path`, one below the other.

    The file is written whole or not at all.

    Args:
        profiles: by name: the cores of a grid, or rival schedules. Each has processes of its own,
            named after it if it has a name.
        path: a file for ui.perfetto.dev.

    Returns:
        The path.

    Raises:
        SimulationError: a profile came from JSON.
        OutputError: the file cannot be written.
    """
    timelines = {name: profile.timeline for name, profile in profiles.items()}
    arrows = itertools.count()  # different for every arrow of the file

    def chunks() -> Iterator[str]:
        before = '{"displayTimeUnit": "ns", "traceEvents": [\n'
        for number, (name, timeline) in enumerate(timelines.items()):
            for event in _events(timeline, name and f"{name}: ", arrows):
                shown = {**event, "pid": event["pid"] + number * _PROCESSES_EACH}
                shown |= {key: event[key] / 1000 + 1e-4 for key in ("ts", "dur") if key in event}
                yield before + json.dumps(shown)
                before = ",\n"
        yield "\n]}\n"

    return write_text(path, chunks())


def _events(timeline: Timeline, prefix: str, arrows: Iterator[int]) -> Iterator[Event]:
    """Yield the names of the rows, slices and arrows."""
    core = f"{prefix}NeuronCore {timeline.target.name} (simulated)"
    yield _named("process_name", _CORE, 0, core)
    yield _named("process_name", _DMA, 0, f"{prefix}DMA (simulated)")
    engines = [("engine", name, title) for name, title in ENGINE_NAMES.items() if name != "dma"]
    queues = sorted({str(held.row) for held in timeline.held("queue")})
    movers = sorted({int(held.row) for held in timeline.held("dma engines")})
    dma: list[tuple[str, str | int, str]] = [
        *(("queue", name, f"queue {name} (issue)") for name in queues),
        *(("dma engines", number, f"DMA engine {number}" if number >= 0 else _ALIKE)
          for number in movers),
    ]  # fmt: skip
    rows: dict[tuple[str, str | int], Row] = {}
    for process, named in ((_CORE, engines), (_DMA, dma)):
        for number, (kind, name, title) in enumerate(named, 1):
            rows[kind, name] = process, number
            yield _named("thread_name", process, number, title)
    rows["table", "scalar"] = rows["engine", "scalar"]
    slices: dict[Booking, Event] = {}
    free: dict[Row, int] = {}
    bookings = itertools.chain.from_iterable(timeline.bookings)
    for held in sorted(bookings, key=lambda held: held.stop):
        row = rows[held.kind, held.row]
        slices[held] = _slice(timeline, held, row, free.get(row, 0))
        free[row] = slices[held]["ts"] + slices[held]["dur"]
        yield slices[held]
        if held.cause in slices and held.kind in ("engine", "queue"):
            yield from _arrow(held, slices[held.cause], slices[held], next(arrows))


def _slice(timeline: Timeline, held: Booking, row: Row, free: int) -> Event:
    """Return the slice of a booking, in nanoseconds.

    One that fills stalls in pieces begins when its row is free, because slices of one row must not
    overlap.
    """
    stop = round(held.stop * 1000)
    start = min(max(round(held.start * 1000), free), stop)
    instruction = timeline.trace.instructions[held.index]
    name = instruction.name or instruction.op
    args: dict[str, Any] = {"index": held.index}
    if held.kind == "table":
        name = "activation table load"
    elif held.kind != "dma engines":
        latency = timeline.end[held.index] - timeline.bookings[held.index][0].start
        args |= {
            "op": instruction.op,
            "source": f"{instruction.file}:{instruction.line}",
            "latency_us": round(latency, 4),
        }
        args |= {
            key: value if isinstance(value, (int, float, str)) else str(value)
            for key, value in instruction.attributes.items()
            if value is not None and value is not False
        }
    if held.kind == "queue":
        args |= {name: getattr(timeline.work(held.index).dma, name) for name in _OF_DMA}
    return {
        "ph": "X", "name": name, "pid": row[0], "tid": row[1], "ts": start, "dur": stop - start,
        "args": args,
    }  # fmt: skip


def _arrow(held: Booking, source: Event, sink: Event, number: int) -> Iterator[Event]:
    """Yield both ends of an arrow, if a booking waits for a result or for operands.

    A slice shorter than a nanosecond cannot hold an end of an arrow.
    """
    wanted = held.why in ("result", "load", "reuse") and sink["ts"] >= source["ts"]
    if wanted and source["dur"] and sink["dur"]:
        name = "load to use" if held.why == "load" else "semaphore"
        arrow = {"name": name, "cat": "flow", "id": number}
        last = source["ts"] + source["dur"] - 1  # within the slice, which ends before its stop
        yield {"ph": "s", **arrow, "pid": source["pid"], "tid": source["tid"], "ts": last}
        yield {**arrow, "ph": "f", "pid": sink["pid"], "tid": sink["tid"], "ts": sink["ts"],
               "bp": "e"}  # fmt: skip


def _named(kind: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}
