"""The timing pass: a trace and a target in, a timeline out.

Engines (tensor, vector, scalar, gpsimd, sync), DMA queues and the 16 DMA engines are resources.
Compute engines run in program order and wait for true data dependences; DMAs are issued as early
as their operands, their queue and on-chip capacity allow, because the NKI compiler hoists loads.
One walk over the trace in program order books every instruction, without iterations.

TensorE's clock runs at half until `tensor_ramp_seconds` of work are done, and starts again when
utilization over about that time falls below half.

`nmm_compiler.targets` says which constants are documented, measured or assumed; docs/timing.md says
what is not modelled.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import gc
import math
from collections.abc import Iterator, Sequence

from nmm_compiler.simulator.timing.costs import (
    DMA,
    ENGINES,
    GPSIMD,
    SCALAR,
    TENSOR,
    VECTOR,
    DmaCost,
    Work,
    work_of,
)
from nmm_compiler.simulator.timing.dependence import Dependences, Store, Touched
from nmm_compiler.simulator.timing.resources import AT_ONCE, Slots, Spans
from nmm_compiler.simulator.trace import Instruction, Trace
from nmm_compiler.targets import Target

__all__ = ["Timeline", "Transfer", "collector_held_off", "time_trace", "time_traces"]

_US = 1e6


Part = tuple[int, float, float, int]
"""What a DMA engine carries of a transfer: engine, start, end, and the transfer that it carried
before if the part waited for that, else -1."""


def stagger_us(target: Target) -> float:
    """Return by how much each DMA engine starts later than the one before."""
    return target.dma_stagger_seconds * _US / max(1, target.dma_engines - 1)


@dataclasses.dataclass(slots=True)
class Transfer:
    """One DMA: when its queue issued it and when each engine carried its part (microseconds).

    ready: when the first engine could begin.
    parts: of its engines. Engine -1 stands for all of them alike, with the times of engine 0;
        engine e runs e * stagger_us later.
    """

    cost: DmaCost
    issue_start: float
    issue_end: float
    ready: float
    parts: list[Part]


class Timeline:
    """The times of all instructions and transfers, in microseconds from the first instruction.

    start, end: per instruction of the trace; `end` is when its result can be used.
    interval_end: when its engine could take the next one.
    waited: per instruction what its start waited for; of a DMA, its issue.
    transfers: the DMAs, by their place in the trace.
    table_loads: (start, end) on ScalarE.
    kinds: the instructions that cost the same, by a number.
    spans: (start, end) of the instructions of each engine.
    sbuf_overflow_bytes: by how much live tensors exceeded SBUF.
    tensor_throttled_us: what TensorE's clock ramp has cost.
    """

    def __init__(self, trace: Trace, target: Target) -> None:
        self.trace, self.target = trace, target
        count = len(trace.instructions)
        self.start = [0.0] * count
        self.end = [0.0] * count
        self.interval_end = [0.0] * count
        self.waited = [AT_ONCE] * count
        self.transfers: dict[int, Transfer] = {}
        self.table_loads: Spans = []
        self.kinds: dict[int, Work] = {}
        self.spans: list[Spans] = [[] for _ in ENGINES]
        self.sbuf_overflow_bytes = 0
        self.tensor_throttled_us = 0.0

    def engine(self, index: int) -> str:
        """Return the engine that an instruction ran on, which the kernel may have left open."""
        instruction = self.trace.instructions[index]
        work = self.kinds.get(instruction.kind or -index)  # None of one that has no time yet
        return instruction.engine if work is None else ENGINES[work.engine]

    @functools.cached_property
    def latency_us(self) -> float:
        """The time until the last result can be used."""
        return max(self.end, default=0.0)

    @functools.cached_property
    def busy_us(self) -> dict[str, float]:
        """By engine the time in which at least one instruction was in flight.

        "dma": the time in which at least one DMA engine moved data.
        """
        spans = dict(zip(ENGINES, self.spans, strict=True))
        spans["scalar"] = spans["scalar"] + self.table_loads
        last_us = (self.target.dma_engines - 1) * stagger_us(self.target)
        spans["dma"] = [
            (start, stop + last_us if engine < 0 else stop)
            for transfer in self.transfers.values() for engine, start, stop, _ in transfer.parts
        ]  # fmt: skip
        return {name: _covered(found) for name, found in spans.items()}

    @property
    def dma_engine_busy_us(self) -> float:
        """Transfer time summed over the DMA engines."""
        return sum([
            (stop - start) * (self.target.dma_engines if engine < 0 else 1)
            for transfer in self.transfers.values() for engine, start, stop, _ in transfer.parts
        ])  # fmt: skip


def time_trace(trace: Trace, target: Target, *, reorder: bool = True) -> Timeline:
    """Return when each instruction of `trace` runs on `target`.

    reorder: the compiler's scheduler may move independent instructions and DMAs across each other
        (nki.language.no_reorder: it is free to, outside of such a block); False keeps program
        order on each engine and on each queue.

    The garbage collector is off meanwhile: the pass makes few cycles, and scanning a trace of
    100,000 instructions takes longer than timing it.
    """
    return time_traces([trace], target, reorder=reorder)[0]


def time_traces(
    traces: Sequence[Trace],
    target: Target,
    *,
    reorder: bool = True,
) -> list[Timeline]:
    """Return the timelines of the programs of a grid, which wait for each other at barriers."""
    with collector_held_off():
        walks = [_Pass(trace, target, reorder) for trace in traces]
        running = [(walk, walk.run()) for walk in walks]
        while running:
            arrivals = [(walk, steps, next(steps, None)) for walk, steps in running]
            latest = max((when for *_, when in arrivals if when is not None), default=0.0)
            running = [(walk, steps) for walk, steps, when in arrivals if when is not None]
            for walk, _ in running:
                walk.floor = max(walk.floor, latest)
        timelines = [walk.line for walk in walks]
        for walk in walks:  # it and its dependences know each other: nobody has to find that cycle
            walk.dependences.forget()
            vars(walk).clear()
        return timelines


@contextlib.contextmanager
def collector_held_off() -> Iterator[None]:
    """Keep Python's garbage collector from scanning a large trace again and again.

    What was made meanwhile joins the oldest generation without a scan: nearly all of it is alive.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # or else somebody wants to keep theirs frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class _Pass:
    """State of one walk over a trace."""

    def __init__(self, trace: Trace, target: Target, reorder: bool) -> None:
        self.trace, self.target, self.line = trace, target, Timeline(trace, target)
        self.dependences = Dependences(trace, target, self._book, self._settle, reorder)
        count = len(trace.instructions)
        self.engines = [Slots() for _ in ENGINES]
        self.tensor = TensorClock(target, self.engines[TENSOR])
        # instructions that keep program order: all, or those of nl.no_reorder
        self.in_order = bytearray(count) if reorder else bytearray(b"\1" * count)
        for first, stop in trace.ordered:
            self.in_order[first:stop] = b"\1" * (stop - first)
        self.edges = set(trace.loop_edges)
        self.floor, self.last_edge = 0.0, 0
        self.floor_waits = AT_ONCE
        self.queues: dict[str, Slots] = collections.defaultdict(Slots)
        self.waiting: list[tuple[float, int, Store]] = []  # by when it is ready, then index
        self.dma_engines = DmaEngines(target)
        self.dma_start_us = target.dma_start_latency_seconds * _US
        self.table: str | None = None
        # until when an engine uses a memory, and which instruction does
        self.psum_until = [(0.0, -1)] * len(ENGINES)
        self.sbuf_until = [(0.0, -1)] * len(ENGINES)

    def run(self) -> Iterator[float]:
        """Walk the trace; yield when this program arrives at a barrier, with `floor` to be set."""
        line, edges, in_order = self.line, self.edges, self.in_order
        start, end, interval_end, waited = line.start, line.end, line.interval_end, line.waited
        dependences, engines = self.dependences, self.engines
        ready_of, done = dependences.ready, dependences.done
        kinds, spans, target = line.kinds, line.spans, self.target
        tensor, compute, transfer = self.tensor.book, self._compute, self._transfer
        for index, instruction in enumerate(self.trace.instructions):
            if edges and index in edges:
                self._meet(index, "loop")
            if instruction.op == "core_barrier":
                self._meet(index, "barrier")
                yield self.floor
            kind = instruction.kind or -index  # of its own kind, where nobody has compared it
            work = kinds.get(kind)
            if work is None:
                work = kinds[kind] = work_of(target, instruction)
            work.count += 1
            reads, writes = instruction.reads, instruction.writes
            engine = work.engine
            ready = ready_of(engine, reads, writes)
            waited[index] = dependences.waited
            if instruction.after:
                ready = self._after(index, instruction, engine, ready)
            if self.floor > ready:
                ready, waited[index] = self.floor, self.floor_waits
            if engine == TENSOR:
                into = writes[0]
                place = (into.storage, into.byte_start, into.partition_start)
                begin, next_free, stop = tensor(work, place, ready, in_order[index])
                engines[engine].ended[self.tensor.sums[place]] = "engine", index, next_free
            elif work.dma is not None:
                transfer(index, ready, work.dma)
                continue
            else:
                begin, next_free, stop = compute(index, work, instruction, ready)
            ended = engines[engine].ended
            if begin in ended:
                waited[index] = ended[begin]
            ended[next_free] = "engine", index, next_free
            start[index], end[index], interval_end[index] = begin, stop, next_free
            spans[engine].append((begin, stop))
            done(index, engine, dependences.touched, next_free, stop)
        while self._settle():
            pass
        line.sbuf_overflow_bytes = dependences.sbuf.overflow
        line.tensor_throttled_us = self.tensor.throttled_us

    def _meet(self, index: int, why: str) -> None:
        """Make all engines wait at a barrier, or at the edge of a turn of a loop on the device.

        The hardware runs one copy of the body again, on the same tensors, and the compiler cannot
        move instructions across its edge (nki-dynamic-loops: allocated once and reused). The
        engines' own ends stay as they are.
        """
        while self._settle():
            pass
        end = self.line.end
        last = max(range(self.last_edge, index), key=end.__getitem__, default=-1)
        if last >= 0:
            self.floor = max(self.floor, end[last])
            self.floor_waits = why, last, end[last]
        self.last_edge = index

    def _after(self, index: int, instruction: Instruction, engine: int, ready: float) -> float:
        """Return when an instruction is ready that the kernel makes wait for others by name."""
        line = self.line
        for at in [producer.index for producer in instruction.after]:
            for store in [store for _, put_off, store in self.waiting if put_off == at]:
                self._book(store)
            wake = self.dependences.wake_us[engine][ENGINES.index(line.engine(at))]
            if line.end[at] + wake > ready:
                ready = line.end[at] + wake
                line.waited[index] = "result", at, line.end[at]
        return ready

    def _compute(
        self, index: int, work: Work, instruction: Instruction, ready: float
    ) -> tuple[float, float, float]:
        """Book VectorE, ScalarE, GpSimd or the sync engine."""
        target, engine = self.target, work.engine
        slots = self.engines[engine]
        interval, latency = work.interval, work.latency
        begin = ready
        in_order = self.in_order[index]
        if in_order and slots.tail > begin:
            begin = slots.tail
        if work.table and work.table != self.table:
            # placed by the compiler as early as ScalarE is free, before the operands come
            load_us = target.activation_table_load_seconds * _US
            loaded = slots.place(max(slots.tail, self.floor), load_us) + load_us
            before = slots.ended.get(loaded - load_us, AT_ONCE)[1]
            slots.ended[loaded] = "table", before, loaded - load_us
            self.line.table_loads.append((loaded - load_us, loaded))
            self.table = work.table
            slots.close(loaded)
        psum = work.psum and target.vector_scalar_share_psum and engine in (VECTOR, SCALAR)
        sbuf = work.sbuf and target.vector_gpsimd_share_sbuf and engine in (VECTOR, GPSIMD)
        shared = [self.psum_until] * psum + [self.sbuf_until] * sbuf
        for users in shared:
            for other, (when, user) in enumerate(users):
                if other != engine and when > begin:
                    begin, self.line.waited[index] = when, ("port", user, when)
        begin = slots.place(begin, interval) if in_order else slots.squeeze(begin, interval)
        for users in shared:
            users[engine] = max(users[engine], (begin + interval, index))
        return begin, begin + interval, begin + latency

    def _transfer(self, index: int, ready: float, cost: DmaCost) -> None:
        """Book a DMA, or put it off if it is a store that would keep its queue waiting."""
        queue, touched = self.queues[cost.queue], self.dependences.touched
        put_off = False
        if self.in_order[index]:
            if queue.tail > ready:
                ready = queue.tail
        elif ready > queue.tail:
            put_off = cost.stores
        waiting = self.waiting
        if waiting:
            until = 0.0 if put_off else ready
            while waiting:
                when, _, first = waiting[0]
                if when > until and when > self.queues[first.cost.queue].tail:
                    break
                self._book(first)
        if put_off:
            store = Store(index, touched, ready, cost)
            bisect.insort(waiting, (ready, index, store))
            self.dependences.put_off(store)
        else:
            self._issue(index, touched, ready, cost)

    def _settle(self, before: float = math.inf) -> bool:
        """Book the store that was put off and is ready first; return whether there was one."""
        if not self.waiting or self.waiting[0][0] >= before:
            return False
        self._book(self.waiting[0][2])
        return True

    def _book(self, store: Store) -> None:
        """Book a store that was put off."""
        waiting = self.waiting
        del waiting[bisect.bisect_left(waiting, (store.ready, store.index))]
        store.booked = True
        self._issue(store.index, store.touched, store.ready, store.cost)

    def _issue(self, index: int, touched: Touched, begin: float, cost: DmaCost) -> None:
        """Book the issuing queue, then the DMA engines."""
        if cost.gpsimd_us:
            begin = self.engines[GPSIMD].place(begin, cost.gpsimd_us)
        line, issue_us = self.line, cost.issue_us
        queue = self.queues[cost.queue]
        issued = queue.place(begin, issue_us)
        if issued in queue.ended:
            line.waited[index] = queue.ended[issued]
        queue.ended[issued + issue_us] = "queue", index, issued + issue_us
        start_us = self.dma_start_us
        ready = issued + (issue_us if issue_us > start_us else start_us)
        parts, end = self.dma_engines.place(index, cost, ready)
        end += cost.tail_us
        line.transfers[index] = Transfer(cost, issued, issued + issue_us, ready, parts)
        line.start[index], line.end[index], line.interval_end[index] = issued, end, end
        self.dependences.done(index, DMA, touched, end, end)


def _covered(spans: Spans) -> float:
    """Return the length of the union of intervals."""
    total, seen = 0.0, 0.0
    for begin, stop in sorted(spans):
        if stop > seen:
            total += stop - (begin if begin > seen else seen)
            seen = stop
    return total


class TensorClock:
    """Books products on TensorE. Times in microseconds.

    sums: from when the next product may add to a sum, by (storage, byte, partition).
    throttled_us: what the clock ramp has cost so far.
    """

    def __init__(self, target: Target, slots: Slots) -> None:
        self.slots = slots
        self.sums: dict[tuple[int, int, int], float] = {}
        self.fill_us = target.tensor_latency_seconds * _US
        # work done since the array was cold, recent utilization and until when
        self.ramp_us = target.tensor_ramp_seconds * _US
        self.start_fraction = target.tensor_ramp_start_fraction
        self.window = self.ramp_us / (2.0 * math.log(2.0))
        self.ramp_done = 0.0
        self.utilization = 0.0
        self.utilization_at = 0.0
        self.throttled_us = 0.0

    def book(
        self, work: Work, into: tuple[int, int, int], ready: float, in_order: int
    ) -> tuple[float, float, float]:
        """Book a product into a sum; return its start, when TensorE is free, and its end.

        A product that adds to a sum starts no sooner than the first column of the product before
        it has come through.
        """
        interval = work.interval
        slots = self.slots
        tail = slots.tail
        begin = self.sums.get(into, 0.0)
        if in_order and tail > begin:
            begin = tail
        if ready > begin:
            begin = ready
        fill = work.latency - interval
        ramp_us = self.ramp_us
        if ramp_us:
            gap = (begin if begin > tail else tail) - self.utilization_at
            used = self.utilization
            if gap > 0.0:
                used *= math.exp(-gap / self.window)
                if used < 0.5:
                    self.ramp_done = 0.0
            if self.ramp_done < ramp_us:
                slow = interval / self.start_fraction
                self.throttled_us += slow - interval
                interval = slow
                self.ramp_done += interval
        begin = slots.place(begin, interval) if in_order else slots.squeeze(begin, interval)
        if ramp_us and slots.tail > self.utilization_at:
            self.utilization = 1.0 - (1.0 - used) * math.exp(-interval / self.window)
            self.utilization_at = slots.tail
        free = begin + interval
        self.sums[into] = free if interval > self.fill_us else begin + self.fill_us
        return begin, free, free + fill


class DmaEngines:
    """The DMA engines of a core; kept as one while all are booked alike.

    A transfer is started on one engine after another: each begins `step_us` after the one before.
    """

    def __init__(self, target: Target) -> None:
        self.count = target.dma_engines
        self.step_us = stagger_us(target)
        self.last_us = (self.count - 1) * self.step_us
        self.alike: Slots | None = Slots()
        self.engines: list[Slots] = []

    def place(self, index: int, cost: DmaCost, ready: float) -> tuple[list[Part], float]:
        """Book a transfer; return its parts, and when the last one ends.

        While all engines are booked alike there is one part, with engine -1 and the times of
        engine 0; engine e is e steps later.
        """
        if self.alike is not None:
            if cost.uniform_us:
                part = _booked(self.alike, index, -1, ready, cost.uniform_us)
                return [part], part[2] + self.last_us
            self.engines = [self.alike.later(e * self.step_us) for e in range(self.count)]
            self.alike = None
        parts = [
            _booked(self.engines[engine], index, engine, ready + rank * self.step_us, duration)
            for rank, (engine, duration) in enumerate(cost.shares)
        ]
        return parts, max(part[2] for part in parts)


def _booked(slots: Slots, index: int, engine: int, ready: float, duration: float) -> Part:
    start = slots.place(ready, duration)
    before = slots.ended[start][1] if start > ready else -1
    stop = start + duration
    slots.ended[stop] = "dma engines", index, stop
    return engine, start, stop, before
