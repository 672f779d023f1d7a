"""Chrome trace files, which Perfetto (ui.perfetto.dev) opens.

The format wants microseconds. Times are rounded to whole nanoseconds, both ends of a slice alike,
so that slices which touch do not overlap: Perfetto drops slices that do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nmm_compiler.outputs import write_text

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
    start, stop = round(start_us, 3), round(stop_us, 3)
    return {
        "ph": "X", "name": name, "pid": process, "tid": row,
        "ts": start, "dur": round(stop - start, 3), "args": args,
    }  # fmt: skip


def counter(name: str, process: int, at_us: float, value: float) -> Event:
    """Return the value of a counter from a moment on."""
    return {
        "ph": "C", "name": name, "pid": process, "ts": round(at_us, 3), "args": {"live": value}
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
