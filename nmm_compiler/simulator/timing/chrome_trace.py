"""Write a timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

One row per compute engine, per DMA queue (issuing) and per DMA engine (moving bytes). An arrow
leads from an instruction or a load to what waited for it. A slice lasts as long as it keeps its row
busy, and its full latency is an argument.

The format wants microseconds. Perfetto multiplies them by 1000 and cuts the fraction off, and drops
a slice that overlaps its neighbour on a row. So all times are whole nanoseconds here, both ends of
a slice alike, and are written a tenth of one later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nmm_compiler.outputs import write_text
from nmm_compiler.simulator.timing.costs import ENGINE_NAMES
from nmm_compiler.simulator.timing.timeline import Timeline

Event = dict[str, Any]

_ROWS = {engine: row for row, engine in enumerate(ENGINE_NAMES, 1) if engine != "dma"}
_FIRST_QUEUE_ROW = 10
_FIRST_ENGINE_ROW = 100
_CORE, _DMA = 1, 2
_PROCESSES_EACH = 10


def write_chrome_traces(timelines: Mapping[str, Timeline], path: str | Path) -> Path:
    """Write several timelines, the cores of a grid or rival schedules, below each other.

    Each has processes of its own, named after its key if it has one. The file is written whole or
    not at all. Raises OutputError.
    """

    def chunks() -> Iterator[str]:
        arrows, before = 0, '{"displayTimeUnit": "ns", "traceEvents": [\n'
        for number, (name, timeline) in enumerate(timelines.items()):
            for event in _events(timeline, name and f"{name}: "):
                shown = {**event, "pid": event["pid"] + number * _PROCESSES_EACH}
                if "id" in event:  # different for every arrow of the file
                    shown["id"] += arrows
                shown |= {key: event[key] / 1000 + 1e-4 for key in ("ts", "dur") if key in event}
                yield before + json.dumps(shown)
                before = ",\n"
            arrows += len(timeline.trace.instructions)
        yield "\n]}\n"

    return write_text(path, chunks())


def _events(timeline: Timeline, prefix: str) -> Iterator[Event]:
    """Yield the names of the rows, slices and arrows."""
    engines = {instruction.engine for instruction in timeline.trace.instructions}
    core = f"{prefix}NeuronCore {timeline.target.name} (simulated)"
    yield _named("process_name", _CORE, 0, core)
    yield _named("process_name", _DMA, 0, f"{prefix}DMA (simulated)")
    transfers = timeline.transfers.values()
    queues = sorted({transfer.cost.queue for transfer in transfers})
    moving = sorted({part[0] for transfer in transfers for part in transfer.parts})
    rows = [
        *((_CORE, row, ENGINE_NAMES[engine]) for engine, row in _ROWS.items()
          if engine in engines or engine != "sync"),
        *((_DMA, row, f"queue {queue} (issue)")
          for row, queue in enumerate(queues, _FIRST_QUEUE_ROW)),
        *((_DMA, _engine_row(n), "DMA engines, all alike" if n < 0 else f"DMA engine {n}")
          for n in moving),
    ]  # fmt: skip
    for process, row, title in rows:
        yield _named("thread_name", process, row, title)
    slices: dict[int, Event] = {}
    yield from _compute_slices(timeline, slices)
    yield from _dma_slices(timeline, queues, slices)
    yield from _flows(timeline, slices)


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


def _compute_slices(timeline: Timeline, slices: dict[int, Event]) -> Iterator[Event]:
    """Yield the instructions by engine and time, and keep each in `slices`.

    One that fills stalls in pieces begins behind what runs before it, because slices of one row
    must not overlap.
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
        name = instruction.name or instruction.op
        slices[index] = _slice(name, _CORE, row, start, stop, _arguments(timeline, index))
        yield slices[index]
    for start, stop in timeline.table_loads:
        yield _slice("activation table load", _CORE, _ROWS["scalar"], start, stop, {})


def _dma_slices(timeline: Timeline, queues: list[str], slices: dict[int, Event]) -> Iterator[Event]:
    """Yield the issue and the parts of each DMA, and keep its first part in `slices`."""
    for index, transfer in sorted(timeline.transfers.items()):
        instruction, cost = timeline.trace.instructions[index], transfer.cost
        name = instruction.name or instruction.op
        args = _arguments(timeline, index) | {
            "descriptors": cost.descriptors,
            "hbm_read_bytes": cost.hbm_read_bytes,
            "hbm_write_bytes": cost.hbm_write_bytes,
        }
        row = _FIRST_QUEUE_ROW + queues.index(cost.queue)
        yield _slice(name, _DMA, row, transfer.issue_start, transfer.issue_end, args)
        for engine, start, stop, _ in transfer.parts:
            part = _slice(name, _DMA, _engine_row(engine), start, stop, {"index": index})
            slices.setdefault(index, part)
            yield part


def _flows(timeline: Timeline, slices: dict[int, Event]) -> Iterator[Event]:
    """Yield both ends of an arrow for each wait for another instruction's result or operands.

    A slice shorter than a nanosecond cannot hold an end of an arrow.
    """
    for index, (kind, cause, _) in enumerate(timeline.waited):
        if cause < 0 or kind not in ("result", "load", "reuse"):
            continue
        source, sink = slices[cause], slices[index]
        if source["dur"] and sink["dur"] and sink["ts"] >= source["ts"]:
            name = "load to use" if kind == "load" else "semaphore"
            arrow = {"name": name, "cat": "flow", "id": index + 1}
            last = source["ts"] + source["dur"] - 1  # within the slice, which ends before its stop
            yield {"ph": "s", **arrow, "pid": source["pid"], "tid": source["tid"], "ts": last}
            yield {**arrow, "ph": "f", "pid": sink["pid"], "tid": sink["tid"], "ts": sink["ts"],
                   "bp": "e"}  # fmt: skip


def _slice(
    name: str, process: int, row: int, start_us: float, stop_us: float, args: dict[str, Any]
) -> Event:
    """Return a slice, in nanoseconds."""
    start, stop = round(start_us * 1000), round(stop_us * 1000)
    return {
        "ph": "X", "name": name, "pid": process, "tid": row, "ts": start, "dur": stop - start,
        "args": args,
    }  # fmt: skip


def _named(kind: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}
