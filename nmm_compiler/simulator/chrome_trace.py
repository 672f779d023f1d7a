"""Write a timeline as Chrome trace JSON, which Perfetto (ui.perfetto.dev) opens.

One row per compute engine, per DMA queue (issuing) and per DMA engine (moving bytes); counters for
live SBUF and PSUM. Times are microseconds, as the format wants; a slice lasts as long as it keeps
its row busy, and its full latency is among its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nmm_compiler.errors import OutputError
from nmm_compiler.simulator.timing import Timeline

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


def write_chrome_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write `timeline` to `path`; return the path. Raises OutputError if it cannot be written."""
    return write_events(chrome_events(timeline), path)


def write_events(events: Iterable[dict[str, Any]], path: str | Path) -> Path:
    """Write trace events to `path` as one Chrome JSON file; return the path."""
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError(f"cannot write the trace {path}: {error.strerror or error}") from error
    return path


def chrome_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events: names of the rows, slices, counters."""
    queues = sorted({transfer.queue for transfer in timeline.transfers})
    used = sorted({part[0] for transfer in timeline.transfers for part in transfer.parts})
    engines = {instruction.engine for instruction in timeline.trace.instructions}
    yield _name("process_name", _CORE, 0, f"NeuronCore {timeline.target.name} (simulated)")
    yield _name("process_name", _DMA, 0, "DMA (simulated)")
    for engine, row in _ROWS.items():
        if engine in engines or engine != "sync":
            yield _name("thread_name", _CORE, row, _TITLES[engine])
    queue_rows = {queue: _FIRST_QUEUE_ROW + at for at, queue in enumerate(queues)}
    for queue, row in queue_rows.items():
        yield _name("thread_name", _DMA, row, f"queue {queue} (issue)")
    for engine_number in used:
        title = "DMA engines, all alike" if engine_number < 0 else f"DMA engine {engine_number}"
        yield _name("thread_name", _DMA, _engine_row(engine_number), title)
    yield from _compute_slices(timeline)
    yield from _dma_slices(timeline, queue_rows)
    yield from _counters(timeline)


def _name(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}


def _engine_row(number: int) -> int:
    return _FIRST_ENGINE_ROW + number + 1


def _slice(
    name: str, process: int, row: int, start: float, stop: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": row,
        "ts": round(start, 4),
        "dur": round(stop - start, 4),
        "args": args,
    }


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


def _compute_slices(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for index, instruction in enumerate(timeline.trace.instructions):
        if instruction.engine == "dma" or index in timeline.repeated:
            continue
        yield _slice(
            instruction.name or instruction.op,
            _CORE,
            _ROWS[instruction.engine],
            timeline.start[index],
            timeline.interval_end[index],
            _arguments(timeline, index),
        )
    for start, stop in timeline.table_loads:
        yield _slice("activation table load", _CORE, _ROWS["scalar"], start, stop, {})


def _dma_slices(timeline: Timeline, queue_rows: dict[str, int]) -> Iterator[dict[str, Any]]:
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
        yield _slice(name, _DMA, row, transfer.issue_start, transfer.issue_end, args)
        for engine, start, stop in transfer.parts:
            yield _slice(name, _DMA, _engine_row(engine), start, stop, {"index": transfer.index})


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Live bytes per partition, from the first write that starts to the last use that ends."""
    trace = timeline.trace
    spans: dict[int, tuple[float, float]] = {}
    for index, instruction in enumerate(trace.instructions):
        for access in (*instruction.reads, *instruction.writes):
            if access.memory == "hbm":
                continue
            start, stop = spans.get(access.storage, (timeline.start[index], 0.0))
            spans[access.storage] = (
                min(start, timeline.start[index]),
                max(stop, timeline.end[index]),
            )
    for memory in ("sbuf", "psum"):
        changes: list[tuple[float, int]] = []
        for storage, (start, stop) in spans.items():
            allocation = trace.allocations.get(storage)
            if allocation is not None and allocation.memory == memory:
                size = allocation.bytes_per_partition
                changes += [(start, size), (stop, -size)]
        live = 0
        for when, size in sorted(changes):
            live += size
            yield {
                "ph": "C",
                "name": f"{memory.upper()} bytes per partition",
                "pid": _CORE,
                "ts": round(when, 4),
                "args": {"live": live},
            }
