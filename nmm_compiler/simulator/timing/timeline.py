"""When and where each instruction of a trace runs, and what each start waited for.

`schedule.py` fills a `Timeline`; profiles, advice and traces read it.
"""

from __future__ import annotations

import dataclasses
import functools

from nmm_compiler.simulator.timing.costs import ENGINES, US, InstructionTime
from nmm_compiler.simulator.trace import Trace
from nmm_compiler.targets import Target


@dataclasses.dataclass(slots=True, eq=False)
class Booking:
    """A resource that an instruction holds. Times in microseconds.

    kind: "engine"; "table", ScalarE while it loads the instruction's activation table; "queue",
        which issues a DMA; "dma engines", which move its bytes.
    row: the engine, the queue or the number of the DMA engine. -1 stands for all DMA engines
        alike, with the times of engine 0; engine e runs e * stagger_us later.
    why: what the start waited for, a key of `causes.WHY`.
    cause: the booking that it waited for, if it was one; since: when that one let it go.
    """

    index: int
    kind: str
    row: str | int
    start: float
    stop: float
    why: str
    cause: Booking | None
    since: float


Waited = tuple[str, Booking | None, float]
"""The last three fields of a booking."""
AT_ONCE: Waited = ("start", None, 0.0)


def stagger_us(target: Target) -> float:
    """Return by how much each DMA engine starts later than the one before."""
    return target.dma_stagger_seconds * US / max(1, target.dma_engines - 1)


class Timeline:
    """The times of all instructions, in microseconds from the first one.

    bookings: of each instruction of the trace, the first that it starts with: its engine, or the
        queue of a DMA, which the DMA engines follow.
    end: of each, when its result can be used.
    kinds: the instructions that cost the same, by a number.
    sbuf_overflow_bytes: by how much live tensors exceeded SBUF.
    tensor_throttled_us: what TensorE's clock ramp has cost.
    """

    def __init__(self, trace: Trace, target: Target) -> None:
        self.trace, self.target = trace, target
        self.bookings: list[tuple[Booking, ...]] = [()] * len(trace.instructions)
        self.end = [0.0] * len(trace.instructions)
        self.kinds: dict[int, InstructionTime] = {}
        self.sbuf_overflow_bytes = 0
        self.tensor_throttled_us = 0.0

    def work(self, index: int) -> InstructionTime:
        """Return what an instruction costs, and where it runs."""
        return self.kinds[self.trace.instructions[index].kind or -index]

    def engine(self, index: int) -> str:
        """Return the engine that an instruction ran on, which the kernel may have left open."""
        return ENGINES[self.work(index).engine]

    def last(self, index: int) -> Booking:
        """Return the booking that gives an instruction's result."""
        return max(self.bookings[index], key=lambda held: held.stop)

    def held(self, kind: str) -> list[Booking]:
        """Return the bookings of a kind, in program order."""
        return [held for several in self.bookings for held in several if held.kind == kind]

    @functools.cached_property
    def latency_us(self) -> float:
        """The time until the last result can be used."""
        return max(self.end, default=0.0)

    @functools.cached_property
    def busy_us(self) -> dict[str, float]:
        """By engine the time in which at least one instruction was in flight.

        "dma": the time in which at least one DMA engine moved data.
        """
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in ENGINES}
        last_us = (self.target.dma_engines - 1) * stagger_us(self.target)
        for held in self.held("engine"):
            spans[str(held.row)] += [(held.start, self.end[held.index])]
        spans["scalar"] += [(held.start, held.stop) for held in self.held("table")]
        spans["dma"] = [
            (held.start, held.stop + last_us if held.row == -1 else held.stop)
            for held in self.held("dma engines")
        ]
        return {name: _covered(found) for name, found in spans.items()}

    @property
    def dma_engine_busy_us(self) -> float:
        """Transfer time summed over the DMA engines."""
        return sum(
            (held.stop - held.start) * (self.target.dma_engines if held.row == -1 else 1)
            for held in self.held("dma engines")
        )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, each (start, end)."""
    total, seen = 0.0, 0.0
    for begin, stop in sorted(spans):
        if stop > seen:
            total += stop - (begin if begin > seen else seen)
            seen = stop
    return total
