"""Write a timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

One row per compute engine, per DMA queue (issuing) and per DMA engine (moving bytes); counters for
live SBUF and PSUM. An arrow leads from an instruction or a load to what waited for it. A slice
lasts as long as it keeps its row busy, and its full latency is an argument.

The format wants microseconds. Perfetto multiplies them by 1000 and cuts the fraction off, and drops
a slice that overlaps its neighbour on a row. So all times are put on one grid of whole nanoseconds,
both ends of a slice alike, and written as the least number that Perfetto reads as that nanosecond.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nmm_compiler.outputs import write_text
from nmm_compiler.simulator.timing.causes import causes_of
from nmm_compiler.simulator.timing.timeline import Timeline

_ROWS = {"tensor": 1, "vector": 2, "scalar": 3, "gpsimd": 4, "sync": 5}
_TITLES = {
    "tensor": "TensorE",
    "vector": "VectorE",
    "scalar": "ScalarE",
    "gpsimd": "GpSimd",
    "sync": "SyncE",
}
_FIRST_QUEUE_ROW = 10
_FIRST_ENGINE_ROW = 100
_CORE, _DMA = 1, 2
_PROCESSES_EACH = 10


def write_chrome_traces(timelines: Mapping[str, Timeline], path: str | Path) -> Path:
    """Write several timelines, the cores of a grid or rival schedules, below each other.

    Each has processes of its own, named after its key if it has one. Raises OutputError.
    """
    return write_events(_side_by_side(timelines), path)


def _side_by_side(timelines: Mapping[str, Timeline]) -> Iterator[Event]:
    arrows = 0
    for number, (name, timeline) in enumerate(timelines.items()):
        first = arrows
        for event in chrome_events(timeline):
            event["pid"] += number * _PROCESSES_EACH
            if "id" in event:
                event["id"] += first
                arrows = max(arrows, event["id"])
            if name and event["name"] == "process_name":
                event["args"]["name"] = f"{name}: {event['args']['name']}"
            yield event


def chrome_events(timeline: Timeline) -> Iterator[Event]:
    """Yield the events: names of the rows, slices, arrows, counters."""
    queues = sorted({transfer.queue for transfer in timeline.transfers})
    used = sorted({part[0] for transfer in timeline.transfers for part in transfer.parts})
    engines = {instruction.engine for instruction in timeline.trace.instructions}
    yield process_name(_CORE, f"NeuronCore {timeline.target.name} (simulated)")
    yield process_name(_DMA, "DMA (simulated)")
    for engine, row in _ROWS.items():
        if engine in engines or engine != "sync":
            yield row_name(_CORE, row, _TITLES[engine])
    queue_rows = {queue: _FIRST_QUEUE_ROW + at for at, queue in enumerate(queues)}
    for queue, row in queue_rows.items():
        yield row_name(_DMA, row, f"queue {queue} (issue)")
    for engine_number in used:
        title = "DMA engines, all alike" if engine_number < 0 else f"DMA engine {engine_number}"
        yield row_name(_DMA, _engine_row(engine_number), title)
    yield from _compute_slices(timeline)
    yield from _dma_slices(timeline, queue_rows)
    yield from _flows(timeline)
    yield from _counters(timeline)


def _engine_row(number: int) -> int:
    return _FIRST_ENGINE_ROW + number + 1


def _arguments(timeline: Timeline, index: int) -> dict[str, Any]:
    instruction = timeline.trace.instructions[index]
    args: dict[str, Any] = {
        "op": instruction.op,
        "source": f"{instruction.file}:{instruction.line}",
        "index": index,
        "latency_us": round(timeline.end[index] - timeline.start[index], 4),
    }
    for key, value in instruction.attributes.items():
        if value is not None and value is not False:
            args[key] = value if isinstance(value, (int, float, str)) else str(value)
    return args


def _compute_slices(timeline: Timeline) -> Iterator[Event]:
    """Yield the instructions by engine and time; one that fills stalls in pieces begins behind
    what runs before it, because slices of one row must not overlap.
    """
    free: dict[int, float] = {}
    instructions = timeline.trace.instructions
    for index in sorted(range(len(instructions)), key=timeline.interval_end.__getitem__):
        instruction = instructions[index]
        if instruction.engine == "dma":
            continue
        row = _ROWS[timeline.engine(index)]
        stop = timeline.interval_end[index]
        start = min(max(timeline.start[index], free.get(row, 0.0)), stop)
        free[row] = stop
        yield trace_slice(
            instruction.name or instruction.op, _CORE, row, start, stop, _arguments(timeline, index)
        )
    for start, stop in timeline.table_loads:
        yield trace_slice("activation table load", _CORE, _ROWS["scalar"], start, stop, {})


def _dma_slices(timeline: Timeline, queue_rows: dict[str, int]) -> Iterator[Event]:
    for transfer in timeline.transfers:
        instruction = timeline.trace.instructions[transfer.index]
        name = instruction.name or instruction.op
        args = _arguments(timeline, transfer.index)
        args |= {
            "descriptors": transfer.descriptors,
            "hbm_read_bytes": transfer.hbm_read_bytes,
            "hbm_write_bytes": transfer.hbm_write_bytes,
        }
        row = queue_rows[transfer.queue]
        yield trace_slice(name, _DMA, row, transfer.issue_start, transfer.issue_end, args)
        for engine, start, stop in transfer.parts:
            yield trace_slice(
                name, _DMA, _engine_row(engine), start, stop, {"index": transfer.index}
            )


def _flows(timeline: Timeline) -> Iterator[Event]:
    """Yield an arrow for each wait for another instruction's result or operands."""
    causes = causes_of(timeline)
    moves = {transfer.index: transfer.parts[0] for transfer in timeline.transfers}

    def place(index: int) -> tuple[int, int, float, float]:
        if index in moves:
            engine, start, stop = moves[index]
            return _DMA, _engine_row(engine), start, stop
        row = _ROWS[timeline.engine(index)]
        return _CORE, row, timeline.start[index], timeline.interval_end[index]

    for index in range(len(timeline.trace.instructions)):
        cause = causes[index]
        if cause.index < 0 or cause.kind not in ("result", "load", "reuse"):
            continue
        process, row, start, stop = place(cause.index)
        to_process, to_row, to_start, to_stop = place(index)
        shown = nanoseconds(stop) > nanoseconds(start), nanoseconds(to_stop) > nanoseconds(to_start)
        if all(shown) and to_start >= start:
            last = (nanoseconds(stop) - 1) / 1000  # within the slice, which ends before its stop
            name = "load to use" if cause.kind == "load" else "semaphore"
            yield from flow(name, index + 1, (process, row, last), (to_process, to_row, to_start))


def _counters(timeline: Timeline) -> Iterator[Event]:
    for memory in ("sbuf", "psum"):
        for when, live in live_bytes(timeline, memory):
            yield counter(f"{memory.upper()} bytes per partition", _CORE, when, live)


def live_bytes(timeline: Timeline, memory: str) -> Iterator[tuple[float, int]]:
    """Yield (moment, live bytes per partition of "sbuf" or "psum" from then on).

    A tensor lives from the first write that starts to the last use that ends.
    """
    trace = timeline.trace
    spans: dict[int, tuple[float, float]] = {}
    for index, instruction in enumerate(trace.instructions):
        for access in (*instruction.reads, *instruction.writes):
            if access.memory == memory:
                start, stop = spans.get(access.storage, (timeline.start[index], 0.0))
                spans[access.storage] = (
                    min(start, timeline.start[index]),
                    max(stop, timeline.end[index]),
                )
    changes: list[tuple[float, int]] = []
    for storage, (start, stop) in spans.items():
        allocation = trace.allocations.get(storage)
        if allocation is not None and allocation.memory == memory:
            size = allocation.bytes_per_partition
            changes += [(start, size), (stop, -size)]
    live = 0
    for when, size in sorted(changes):
        live += size
        yield when, live


Event = dict[str, Any]


def process_name(process: int, name: str) -> Event:
    """Return the event that names a group of rows."""
    return _name("process_name", process, 0, name)


def row_name(process: int, row: int, name: str) -> Event:
    """Return the event that names one row."""
    return _name("thread_name", process, row, name)


def trace_slice(
    name: str, process: int, row: int, start_us: float, stop_us: float, args: dict[str, Any]
) -> Event:
    """Return a stretch of work on a row."""
    start, stop = nanoseconds(start_us), nanoseconds(stop_us)
    return {
        "ph": "X", "name": name, "pid": process, "tid": row,
        "ts": _microseconds(start), "dur": _microseconds(stop - start), "args": args,
    }  # fmt: skip


def flow(
    name: str, number: int, start: tuple[int, int, float], stop: tuple[int, int, float]
) -> tuple[Event, Event]:
    """Return an arrow from one slice to another.

    number: different for every arrow of a file. start, stop: (process, row, a moment within the
    slice). A slice shorter than a nanosecond cannot hold an end of an arrow.
    """
    first, second = (
        {
            "ph": phase, "name": name, "cat": "flow", "id": number, "pid": process, "tid": row,
            "ts": _microseconds(nanoseconds(at_us)),
        }
        for phase, (process, row, at_us) in (("s", start), ("f", stop))
    )  # fmt: skip
    return first, {**second, "bp": "e"}


def nanoseconds(us: float) -> int:
    """Return the point of the common grid that is nearest to a time in microseconds."""
    return round(us * 1000)


def _microseconds(ns: int) -> float:
    """Return the least number of microseconds that Perfetto reads as `ns` nanoseconds."""
    us = ns / 1000
    while int(us * 1000.0) < ns:
        us = math.nextafter(us, math.inf)
    return us


def counter(name: str, process: int, at_us: float, value: float) -> Event:
    """Return the value of a counter from a moment on."""
    return {
        "ph": "C", "name": name, "pid": process,
        "ts": _microseconds(nanoseconds(at_us)), "args": {"live": value},
    }  # fmt: skip


def write_events(events: Iterable[Event], path: str | Path) -> Path:
    """Write trace events to `path` as one file, whole or not at all; return the path.

    Raises OutputError if it cannot be written.
    """

    def chunks() -> Iterator[str]:
        yield '{"displayTimeUnit": "ns", "traceEvents": [\n'
        for number, event in enumerate(events):
            yield (",\n" if number else "") + json.dumps(event)
        yield "\n]}\n"

    return write_text(path, chunks())


def _name(kind: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}
