"""Chrome trace files, which Perfetto (ui.perfetto.dev) opens.

The format wants microseconds. Perfetto multiplies them by 1000 and cuts the fraction off, and drops
a slice that overlaps its neighbour on a row. So all times are put on one grid of whole nanoseconds,
both ends of a slice alike, and written as the least number that Perfetto reads as that nanosecond.
"""

from __future__ import annotations

import json
import math
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
