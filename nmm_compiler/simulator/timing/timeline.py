"""The timing pass: a trace and a target in, a timeline out.

Engines (tensor, vector, scalar, gpsimd, sync), DMA queues and the 16 DMA engines are resources.
Compute engines run in program order and wait for true data dependences; DMAs are issued as early
as their operands, their queue and on-chip capacity allow, because the NKI compiler hoists loads.
One walk over the trace in program order books every instruction; nothing iterates. Which constants
are documented, measured or assumed is in `nmm_compiler.targets`; docs/timing.md says what is not
modelled.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterator

from nmm_compiler.simulator.timing.costs import ComputeCosts
from nmm_compiler.simulator.timing.dependence import (
    DMA,
    ENGINES,
    GPSIMD,
    SCALAR,
    TENSOR,
    VECTOR,
    Dependences,
    Store,
    wake_table,
)
from nmm_compiler.simulator.timing.dma import DmaCosts, DmaEngines
from nmm_compiler.simulator.timing.resources import Slots
from nmm_compiler.simulator.trace import Instruction, Trace
from nmm_compiler.targets import Target

__all__ = ["Timeline", "Transfer", "collector_held_off", "time_trace"]

_US = 1e6

# Functions that every activation table holds, so that switching to them loads nothing.
_IN_EVERY_TABLE = frozenset({"copy", "identity", "square", "abs", "relu", ""})


@dataclasses.dataclass(slots=True)
class Transfer:
    """One DMA: when its queue issued it and when each engine carried its part (microseconds).

    parts: (engine, start, end). Engine -1 stands for all of them alike, with the times of engine
        0; engine e runs e * dma_stagger_us later.
    """

    index: int
    queue: str
    issue_start: float
    issue_end: float
    parts: list[tuple[int, float, float]]
    hbm_read_bytes: int
    hbm_write_bytes: int
    descriptors: int


@dataclasses.dataclass(slots=True)
class Timeline:
    """When everything happened, in microseconds from the first instruction.

    start, end: per instruction of the trace; `end` is when its result can be used.
    interval_end: when its engine could take the next one.
    transfers: the DMAs, in trace order.
    table_loads: (start, end) on ScalarE.
    busy_us: per engine the time in which at least one instruction was in flight; "dma" the time
        in which at least one DMA engine moved data.
    repeated: instructions that the compiler drops, with the earlier one whose result they reuse.
    sbuf_overflow_bytes, psum_overflow_bytes: by how much live tensors exceeded the memory.
    """

    trace: Trace
    target: Target
    start: list[float]
    end: list[float]
    interval_end: list[float]
    transfers: list[Transfer]
    table_loads: list[tuple[float, float]]
    busy_us: dict[str, float]
    dma_engine_busy_us: float
    dma_stagger_us: float
    tensor_throttled_us: float
    latency_us: float
    repeated: dict[int, int]
    sbuf_peak_bytes: int
    psum_peak_bytes: int
    sbuf_overflow_bytes: int
    psum_overflow_bytes: int


def time_trace(trace: Trace, target: Target, *, dma_costs: DmaCosts | None = None) -> Timeline:
    """Return when each instruction of `trace` runs on `target`.

    dma_costs: what DMAs cost, for experiments; by default what they cost on the target.

    The garbage collector is held off meanwhile: the pass makes no cycles that matter, and scanning
    a trace of 100,000 instructions takes longer than timing it.
    """
    with collector_held_off():
        return _Pass(trace, target, dma_costs or DmaCosts(target)).run()


@contextlib.contextmanager
def collector_held_off() -> Iterator[None]:
    """Keep Python's garbage collector from scanning a large trace again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Pass:
    """State of one walk over a trace."""

    def __init__(self, trace: Trace, target: Target, dma_costs: DmaCosts) -> None:
        self.trace, self.target = trace, target
        self.costs = ComputeCosts(target)
        self.dma_costs = dma_costs
        self.dependences = Dependences(trace, target, self._book, self._settle)
        count = len(trace.instructions)
        self.start = [0.0] * count
        self.end = [0.0] * count
        self.interval_end = [0.0] * count
        self.free = [0.0] * len(ENGINES)
        self.flight_end = [0.0] * len(ENGINES)
        self.busy = [0.0] * len(ENGINES)
        self.codes = {name: code for code, name in enumerate(ENGINES)}
        self.wake = wake_table(target)
        self.numbers: dict[int, int] = {}
        self.in_order = bytearray(count)  # DMAs that nl.no_reorder keeps in program order
        for first, stop in trace.ordered:
            self.in_order[first:stop] = b"\1" * (stop - first)
        self.edges = set(trace.loop_edges)
        self.floor, self.last_edge = 0.0, 0
        self.queues: dict[str, Slots] = {}
        self.waiting: list[Store] = []
        self.dma_engines = DmaEngines(target)
        self.dma_start_us = target.dma_start_latency_seconds * _US
        self.transfers: list[Transfer] = []
        self.table_loads: list[tuple[float, float]] = []
        self.table: str | None = None
        self.psum_until = [0.0] * len(ENGINES)
        self.sbuf_until = [0.0] * len(ENGINES)
        # TensorE clock ramp: rate, recent utilization, and until when utilization is known
        self.ramp_us = target.tensor_ramp_seconds * _US
        self.ramp_rate = target.tensor_ramp_start_fraction if self.ramp_us else 1.0
        self.utilization = 0.0
        self.utilization_at = 0.0
        self.throttled_us = 0.0

    def run(self) -> Timeline:
        instructions = self.trace.instructions
        start, end, interval_end = self.start, self.end, self.interval_end
        codes = self.codes
        ready_of, done = self.dependences.ready, self.dependences.done
        free, flight_end, busy = self.free, self.flight_end, self.busy
        repeated = self.dependences.repeated
        for index, instruction in enumerate(instructions):
            if index in self.edges:
                self._meet(index)
            if index in repeated:
                start[index] = end[index] = interval_end[index] = end[repeated[index]]
                continue
            engine = codes[instruction.engine]
            reads, writes = instruction.reads, instruction.writes
            ready = ready_of(index, engine, reads, writes)
            if instruction.after:
                ready = max(ready, self._after(instruction, engine))
            if engine == DMA:
                self._transfer(index, instruction, ready)
                continue
            if engine == TENSOR:
                begin, next_free, stop = self._tensor(instruction, ready)
            else:
                begin, next_free, stop = self._compute(engine, instruction, ready)
            free[engine] = next_free
            seen = flight_end[engine]
            if stop > seen:
                busy[engine] += stop - (begin if begin > seen else seen)
                flight_end[engine] = stop
            start[index], end[index], interval_end[index] = begin, stop, next_free
            done(index, engine, reads, writes, next_free, stop)
        while self._settle():
            pass
        return self._timeline(start, end, interval_end)

    def _meet(self, index: int) -> None:
        """Let everything wait where a turn of a loop on the device begins or ends.

        The hardware runs one copy of the body again, on the same tensors, and the compiler cannot
        move instructions across its edge (nki-dynamic-loops: allocated once and reused).
        """
        while self._settle():
            pass
        self.floor = max(self.floor, max(self.end[self.last_edge : index], default=0.0))
        self.last_edge = index
        self.free[:] = [max(free, self.floor) for free in self.free]

    def _after(self, instruction: Instruction, engine: int) -> float:
        """Return when the instructions that the kernel names as predecessors have signalled."""
        if not self.numbers:
            self.numbers = {id(ins): at for at, ins in enumerate(self.trace.instructions)}
        ready = 0.0
        for producer in instruction.after:
            at = self.numbers[id(producer)]
            for store in [store for store in self.waiting if store.index == at]:
                self._book(store)
            wake = self.wake[self.codes[producer.engine]][engine]
            ready = max(ready, self.end[at] + wake)
        return ready

    def _tensor(self, instruction: Instruction, ready: float) -> tuple[float, float, float]:
        """Book TensorE; the clock limit re-engages when recent utilization falls below half."""
        interval, latency = self.costs.tensor(instruction)
        begin = self.free[TENSOR]
        if ready > begin:
            begin = ready
            if begin > 0.0:
                latency += self.costs.stationary_load_us(instruction)
        if self.ramp_us:
            fill = latency - interval
            gap = begin - self.utilization_at
            window = self.ramp_us / (2.0 * math.log(2.0))
            used = self.utilization * math.exp(-gap / window) if gap > 0.0 else self.utilization
            floor = self.target.tensor_ramp_start_fraction
            if used < 0.5 and gap > 0.0:
                self.ramp_rate = floor
            rate = self.ramp_rate
            if rate < 1.0:
                slow = interval / rate
                self.throttled_us += slow - interval
                interval = slow
                self.ramp_rate = min(1.0, rate + (1.0 - floor) * interval / self.ramp_us)
            self.utilization = 1.0 - (1.0 - used) * math.exp(-interval / window)
            self.utilization_at = begin + interval
            latency = interval + fill
        return begin, begin + interval, begin + latency

    def _compute(
        self, engine: int, instruction: Instruction, ready: float
    ) -> tuple[float, float, float]:
        """Book VectorE, ScalarE, GpSimd or the sync engine."""
        target = self.target
        interval, latency = self.costs.other(instruction)
        begin = self.free[engine]
        if engine == SCALAR:
            name = instruction.attributes.get("function", "")
            table_free = name in _IN_EVERY_TABLE or name == self.table
            if not table_free and instruction.op.startswith("activat"):
                # placed by the compiler as early as ScalarE is free, before the operands come
                loaded = begin + target.activation_table_load_seconds * _US
                self.table_loads.append((begin, loaded))
                self.table = name
                begin = loaded
        if ready > begin:
            begin = ready
        if target.vector_scalar_share_psum and engine in (VECTOR, SCALAR):
            begin = self._share(engine, instruction, "psum", self.psum_until, begin, interval)
        if target.vector_gpsimd_share_sbuf and engine in (VECTOR, GPSIMD):
            begin = self._share(engine, instruction, "sbuf", self.sbuf_until, begin, interval)
        return begin, begin + interval, begin + latency

    @staticmethod
    def _share(
        engine: int,
        instruction: Instruction,
        memory: str,
        until: list[float],
        begin: float,
        interval: float,
    ) -> float:
        """Keep two engines of an older core out of one memory at the same time."""
        if not any(a.memory == memory for a in (*instruction.reads, *instruction.writes)):
            return begin
        for other, when in enumerate(until):
            if other != engine and when > begin:
                begin = when
        until[engine] = begin + interval
        return begin

    def _transfer(self, index: int, instruction: Instruction, ready: float) -> None:
        """Book a DMA, or put it off if it is a store that would keep its queue waiting."""
        cost = self.dma_costs.cost(instruction)
        ready = max(ready, self.floor)
        if cost.queue == "swdge-gpsimd":  # writing the descriptors is work of GpSimd itself
            ready = max(ready, self.free[GPSIMD])
        queue = self.queues.get(cost.queue)
        if queue is None:
            queue = self.queues[cost.queue] = Slots()
        if self.in_order[index]:
            ready = max(ready, queue.tail)
        store = Store(index, instruction, ready, cost)
        put_off = (
            ready > queue.tail
            and not self.in_order[index]
            and all(a.memory == "hbm" for a in instruction.writes)
        )
        waiting = self.waiting
        until = 0.0 if put_off else ready
        while waiting and waiting[0].ready <= max(until, self.queues[waiting[0].cost.queue].tail):
            self._book(waiting[0])
        if put_off:
            bisect.insort(waiting, store, key=_ready_then_index)
            self.dependences.put_off(store)
        else:
            self._issue(store)

    def _settle(self) -> bool:
        """Book the first store that was put off; tell whether there was one."""
        if not self.waiting:
            return False
        self._book(self.waiting[0])
        return True

    def _book(self, store: Store) -> None:
        """Book a store that was put off."""
        self.waiting.remove(store)
        self.dependences.booked(store)
        self._issue(store)

    def _issue(self, job: Store) -> None:
        """Book the issuing queue, then the DMA engines."""
        cost, index = job.cost, job.index
        issued = self.queues[cost.queue].place(job.ready, cost.issue_us)
        stop = issued + cost.issue_us
        if cost.queue == "swdge-gpsimd":
            self.free[GPSIMD] = max(self.free[GPSIMD], stop)
        parts = self.dma_engines.place(cost, issued + max(cost.issue_us, self.dma_start_us))
        end = self.dma_engines.end(parts)
        self.transfers.append(
            Transfer(
                index,
                cost.queue,
                issued,
                stop,
                parts,
                cost.hbm_read_bytes,
                cost.hbm_write_bytes,
                cost.descriptors,
            )
        )
        self.start[index], self.end[index], self.interval_end[index] = issued, end, end
        instruction = job.instruction
        self.dependences.done(index, DMA, instruction.reads, instruction.writes, end, end)

    def _psum_peak_bytes(self) -> int:
        banks = self.trace.psum_peak_banks * self.target.psum_bank_bytes_per_partition
        return banks or self.dependences.psum.peak

    def _timeline(
        self, start: list[float], end: list[float], interval_end: list[float]
    ) -> Timeline:
        dependences = self.dependences
        parts = [part for transfer in self.transfers for part in transfer.parts]
        moving = self.dma_engines.spans
        spans = sorted(span for transfer in self.transfers for span in moving(transfer.parts))
        active, seen = 0.0, 0.0
        for begin, stop in spans:
            if stop > seen:
                active += stop - (begin if begin > seen else seen)
                seen = stop
        work = sum(
            (stop - begin) * (self.target.dma_engines if engine < 0 else 1)
            for engine, begin, stop in parts
        )
        busy = dict(zip(ENGINES, self.busy, strict=True))
        busy["scalar"] += sum(stop - begin for begin, stop in self.table_loads)
        busy["dma"] = active
        return Timeline(
            trace=self.trace,
            target=self.target,
            start=start,
            end=end,
            interval_end=interval_end,
            transfers=sorted(self.transfers, key=lambda transfer: transfer.index),
            table_loads=self.table_loads,
            busy_us=busy,
            dma_engine_busy_us=work,
            dma_stagger_us=self.dma_engines.step_us,
            tensor_throttled_us=self.throttled_us,
            latency_us=max(end, default=0.0),
            repeated=dependences.repeated,
            sbuf_peak_bytes=self.trace.sbuf_peak_bytes or dependences.sbuf.peak,
            psum_peak_bytes=self._psum_peak_bytes(),
            sbuf_overflow_bytes=dependences.sbuf.overflow,
            psum_overflow_bytes=dependences.psum.overflow,
        )


def _ready_then_index(store: Store) -> tuple[float, int]:
    return store.ready, store.index
