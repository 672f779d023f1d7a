"""The timing pass: a trace and a target in, a timeline out.

Engines (tensor, vector, scalar, gpsimd, sync), DMA queues and the 16 DMA engines are resources.
Compute engines run in program order and wait for true data dependences; DMAs are issued as early
as their operands, their queue and on-chip capacity allow, because the NKI compiler hoists loads.
One walk over the trace in program order books every instruction, without iterations.

An instruction waits for others on exactly overlapping regions (read after write, write after read,
write after write), plus the time a semaphore takes when the two are on different engines. On the
same engine program order already gives the last two: so TensorE, which reads SBUF and writes PSUM,
never waits for itself.

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
import gc
import itertools
import math
from collections.abc import Iterator, Sequence

from nmm_compiler.errors import HazardError
from nmm_compiler.simulator.timing.compiler import awaited_tiles
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
from nmm_compiler.simulator.timing.regions import WRITE, Region, Storage, covers, overlaps
from nmm_compiler.simulator.timing.resources import Pool, Slots
from nmm_compiler.simulator.timing.timeline import (
    AT_ONCE,
    US,
    Booking,
    Timeline,
    Waited,
    stagger_us,
)
from nmm_compiler.simulator.trace import Access, Instruction, Trace
from nmm_compiler.targets import Target

_MADE_BY = ("result",) * DMA + ("load",)


def time_trace(trace: Trace, target: Target, *, reorder: bool = True) -> Timeline:
    """Return when each instruction of `trace` runs on `target`.

    reorder: the compiler's scheduler may move independent instructions and DMAs across each other
        (nki.language.no_reorder: it is free to, outside of such a block); False keeps program
        order on each engine and on each queue.
    """
    return time_traces([trace], target, reorder=reorder)[0]


def time_traces(
    traces: Sequence[Trace],
    target: Target,
    *,
    reorder: bool = True,
) -> list[Timeline]:
    """Return the timelines of the programs of a grid, which wait for each other at barriers.

    The garbage collector is off meanwhile: the pass makes few cycles, and scanning a trace of
    100,000 instructions takes longer than timing it.
    """
    with collector_held_off():
        walks = [Scheduler(trace, target, reorder) for trace in traces]
        for arrivals in itertools.zip_longest(*(walk.run() for walk in walks), fillvalue=0.0):
            for walk in walks:
                walk.floor = max(walk.floor, *arrivals)
        timelines = [walk.line for walk in walks]
        for walk in walks:
            walk.forget()
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


def wake_us(target: Target) -> list[list[float]]:
    """Return [consumer][producer] -> microseconds from the end of one to the start of the other."""
    engine, dma = target.engine_semaphore_seconds * US, target.semaphore_seconds * US
    return [[*(0.0 if a == b else engine for a in range(DMA)), dma] for b in range(len(ENGINES))]


Touched = tuple[list[Region], list[Region]]
"""The regions that an instruction reads and writes, but for HBM that nobody writes."""


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """A DMA that is not booked yet. A store may be put off: others are issued before it, until
    something needs its end."""

    index: int
    cost: DmaCost
    ready: float
    waited: Waited
    touched: Touched
    booked: bool = False


class Scheduler:
    """State of one walk over a trace."""

    def __init__(self, trace: Trace, target: Target, reorder: bool) -> None:
        self.trace, self.target, self.line = trace, target, Timeline(trace, target)
        count = len(trace.instructions)
        # instructions that keep program order: all, or those of nl.no_reorder
        self.in_order = bytearray(count) if reorder else bytearray(b"\1" * count)
        for first, stop in trace.ordered:
            self.in_order[first:stop] = b"\1" * (stop - first)
        self.edges, self.last_edge = set(trace.loop_edges), 0
        self.floor, self.floor_waited = 0.0, AT_ONCE
        self.engines = [Slots() for _ in ENGINES]
        self.tensor = TensorClock(target, self.engines[TENSOR])
        self.table: str | None = None
        # memories of which some engines share a port, with the last booking of each engine
        ports = (
            (target.vector_scalar_share_psum, "psum", (VECTOR, SCALAR)),
            (target.vector_gpsimd_share_sbuf, "sbuf", (VECTOR, GPSIMD)),
        )
        self.ports: list[tuple[str, tuple[int, ...], dict[int, Booking]]] = [
            (memory, engines, {}) for share, memory, engines in ports if share
        ]
        self.queues: dict[str, Slots] = collections.defaultdict(Slots)
        self.dma_engines = DmaEngines(target)
        self.dma_start_us = target.dma_start_latency_seconds * US
        self.waiting: list[tuple[float, int, Transfer]] = []  # by when it is ready, then index
        self.wake_us = wake_us(target)
        self.free_us = target.engine_semaphore_seconds * US  # what reused memory costs
        # engines whose program order alone gives write-after-read and write-after-write
        self.keeps_order = [code == TENSOR or not reorder for code in range(DMA)] + [False]
        self.sbuf = Pool(target.sbuf_usable_bytes_per_partition, self._settle)
        banks = target.psum_banks * target.psum_bank_bytes_per_partition
        # no store frees PSUM sooner than the copies out of it
        self.psum = Pool(banks, lambda before: before == math.inf and self._settle(before))
        self.storages: dict[int, Storage] = {}
        self.placed: list[tuple[Storage, Access]] = []
        self._survey()

    def _survey(self) -> None:
        """Find the last use and last write of each storage; HBM that nobody writes needs none."""
        one_buffer = awaited_tiles(self.trace, self.target)
        bank = self.target.psum_bank_bytes_per_partition
        for identity, found in self.trace.allocations.items():
            on_chip = found.memory != "hbm"
            if found.last_write < 0 and not (on_chip and found.last_index >= 0):
                continue
            storage = Storage(found.last_write, found.last_index, found.bytes_per_partition)
            self.storages[identity] = storage
            if not on_chip:
                continue
            if found.address is not None or identity in one_buffer:
                named = f"the buffer of line {found.line}" if found.address is None else ""
                row, byte = found.address or (0, 0)
                storage.place = Access(
                    identity, named or found.memory, row, row + found.shape[0], byte,
                    byte + storage.size, ((1, storage.size),), found.dtype, 1, True,
                )  # fmt: skip
            elif found.memory == "psum":
                storage.pool = self.psum
                storage.size = -(-storage.size // bank) * bank
            else:
                storage.pool = self.sbuf

    def run(self) -> Iterator[float]:
        """Walk the trace; yield when this program arrives at a barrier, with `floor` to be set."""
        line, edges, in_order, target = self.line, self.edges, self.in_order, self.target
        kinds, operands, product = line.kinds, self._operands, self.tensor.book
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
            engine = work.engine
            ready, waited, touched = operands(engine, instruction.reads, instruction.writes)
            if instruction.after:
                ready, waited = self._after(instruction, engine, ready, waited)
            if self.floor > ready:
                ready, waited = self.floor, self.floor_waited
            if work.dma is not None:
                self._transfer(Transfer(index, work.dma, ready, waited, touched))
            elif engine == TENSOR:
                into = instruction.writes[0]
                place = (into.storage, into.byte_start, into.partition_start)
                begin, free, end = product(work, place, ready, in_order[index])
                held = self._hold(index, engine, begin, free, end, waited, touched)
                self.engines[TENSOR].ended[self.tensor.sums[place]] = "engine", held, free
            else:
                self._compute(index, work, ready, waited, touched)
        while self._settle():
            pass
        line.sbuf_overflow_bytes = self.sbuf.overflow
        line.tensor_throttled_us = self.tensor.throttled_us

    def forget(self) -> None:
        """Let go of all that knows each other: so nobody has to find those cycles."""
        for storage in self.storages.values():
            for region in storage.regions.values():
                del region.near, region.storage
        vars(self).clear()

    def _ended(self, index: int) -> Waited:
        """Return the wait for the end of an instruction."""
        return "result", self.line.last(index), self.line.end[index]

    def _meet(self, index: int, why: str) -> None:
        """Make all engines wait at a barrier, or at the edge of a turn of a loop on the device.

        The hardware runs one copy of the body again, on the same tensors, and the compiler cannot
        move instructions across its edge (nki-dynamic-loops: allocated once and reused). The
        engines' own ends stay as they are.
        """
        while self._settle():
            pass
        last = max(range(self.last_edge, index), key=self.line.end.__getitem__, default=-1)
        if last >= 0:
            _, cause, when = self._ended(last)
            self.floor, self.floor_waited = max(self.floor, when), (why, cause, when)
        self.last_edge = index

    def _after(
        self, instruction: Instruction, engine: int, ready: float, waited: Waited
    ) -> tuple[float, Waited]:
        """Return when an instruction is ready that the kernel makes wait for others by name."""
        line = self.line
        for at in [producer.index for producer in instruction.after]:
            for store in [store for _, put_off, store in self.waiting if put_off == at]:
                self._book(store)
            if line.bookings[at]:  # in program order it may be later
                when = line.end[at] + self.wake_us[engine][line.work(at).engine]
                if when > ready:
                    ready, waited = when, self._ended(at)
        return ready, waited

    def _hold(
        self,
        index: int,
        engine: int,
        begin: float,
        free: float,
        end: float,
        waited: Waited,
        touched: Touched,
    ) -> Booking:
        """Book an engine from `begin` until it is free; the result is there at the end."""
        slots, line = self.engines[engine], self.line
        waited = slots.ended.get(begin, waited)
        held = Booking(index, "engine", ENGINES[engine], begin, free, *waited)
        slots.ended[free] = "engine", held, free
        line.bookings[index] = (held,)
        line.end[index] = end
        self._done(held, engine, touched, free, end)
        return held

    def _compute(
        self, index: int, work: Work, ready: float, waited: Waited, touched: Touched
    ) -> None:
        """Book VectorE, ScalarE, GpSimd or the sync engine."""
        target, engine, interval = self.target, work.engine, work.interval
        slots, begin = self.engines[engine], ready
        loads: tuple[Booking, ...] = ()
        if work.table and work.table != self.table:
            # placed by the compiler as early as ScalarE is free, before the operands come
            load_us = target.activation_table_load_seconds * US
            start = slots.place(max(slots.starts[-1], self.floor), load_us)
            stop, before = start + load_us, slots.ended.get(start, AT_ONCE)
            load = Booking(index, "table", "scalar", start, stop, *before)
            slots.ended[stop] = "table", load, stop
            slots.close(stop)
            self.table, loads = work.table, (load,)
        shared = [users for memory, engines, users in self.ports
                  if memory in work.memories and engine in engines]  # fmt: skip
        for users in shared:
            for other, user in users.items():
                if other != engine and user.stop > begin:
                    begin, waited = user.stop, ("port", user, user.stop)
        in_order = self.in_order[index]
        begin = slots.append(begin, interval) if in_order else slots.squeeze(begin, interval)
        end = begin + work.latency
        held = self._hold(index, engine, begin, begin + interval, end, waited, touched)
        if loads:
            self.line.bookings[index] = (held, *loads)
        for users in shared:
            if engine not in users or held.stop > users[engine].stop:
                users[engine] = held

    def _transfer(self, dma: Transfer) -> None:
        """Book a DMA, or put it off if it is a store that would keep its queue waiting."""
        queue, waiting, put_off = self.queues[dma.cost.queue], self.waiting, False
        if self.in_order[dma.index]:
            if queue.starts[-1] > dma.ready:
                dma.ready = queue.starts[-1]
        elif dma.ready > queue.starts[-1]:
            put_off = dma.cost.stores
        until = 0.0 if put_off else dma.ready
        while waiting:
            when, _, first = waiting[0]
            if when > until and when > self.queues[first.cost.queue].starts[-1]:
                break
            self._book(first)
        if not put_off:
            self._issue(dma)
            return
        bisect.insort(waiting, (dma.ready, dma.index, dma))
        for writes, regions in enumerate(dma.touched):
            for region in regions:
                region.storage.put_off.append((region, bool(writes), dma))

    def _settle(self, before: float = math.inf) -> bool:
        """Book the store that was put off and is ready first; return whether there was one."""
        if not self.waiting or self.waiting[0][0] >= before:
            return False
        self._book(self.waiting[0][2])
        return True

    def _book(self, store: Transfer) -> None:
        """Book a store that was put off."""
        waiting = self.waiting
        del waiting[bisect.bisect_left(waiting, (store.ready, store.index))]
        store.booked = True
        self._issue(store)

    def _book_users(
        self, storage: Storage, access: Access | None = None, *, writers_only: bool = False
    ) -> None:
        """Book the stores that overlap an access (None for any), or only those that write there."""
        for other, writes, store in list(storage.put_off):
            wanted = writes or not writers_only
            if wanted and not store.booked and (access is None or overlaps(other.access, access)):
                self._book(store)
        storage.put_off = [entry for entry in storage.put_off if not entry[2].booked]

    def _issue(self, dma: Transfer) -> None:
        """Book the issuing queue, then the DMA engines."""
        index, cost, begin, line = dma.index, dma.cost, dma.ready, self.line
        if cost.gpsimd_us:
            begin = self.engines[GPSIMD].place(begin, cost.gpsimd_us)
        queue, issue_us = self.queues[cost.queue], cost.issue_us
        start = queue.place(begin, issue_us)
        waited = queue.ended.get(start, dma.waited)
        issue = Booking(index, "queue", cost.queue, start, start + issue_us, *waited)
        queue.ended[issue.stop] = "queue", issue, issue.stop
        start_us = self.dma_start_us
        ready = start + (issue_us if issue_us > start_us else start_us)
        parts, last, end = self.dma_engines.place(issue, cost, ready)
        end += cost.tail_us
        line.bookings[index] = (issue, *parts)
        line.end[index] = end
        self._done(last, DMA, dma.touched, end, end)

    def _operands(
        self, engine: int, reads: tuple[Access, ...], writes: tuple[Access, ...]
    ) -> tuple[float, Waited, Touched]:
        """Return when the operands are there and the results may be written, and what that waits
        for."""
        storages, wake = self.storages, self.wake_us[engine]
        read: list[Region] = []
        written: list[Region] = []
        ready, waited = 0.0, AT_ONCE
        for access in reads:
            storage = storages.get(access.storage)
            if storage is None:
                continue
            if storage.floor < 0.0:
                self._enter(storage)
            if storage.put_off:
                self._book_users(storage, access, writers_only=True)
            region = storage.region(access)
            read.append(region)
            for near in region.near:
                if WRITE in near.uses:
                    ended, other, cause = near.uses[WRITE]
                    when = ended + wake[other]
                    if when > ready:
                        ready, waited = when, (_MADE_BY[other], cause, ended)
        own = engine if self.keeps_order[engine] else -1
        for access in writes:
            storage = storages[access.storage]
            if storage.floor < 0.0:
                self._enter(storage)
            if storage.put_off:
                self._book_users(storage, access)
            region = storage.region(access)
            written.append(region)
            when = storage.floor
            if when > 0.0:
                when += self.free_us
                if when > ready:
                    ready, waited = when, ("memory", storage.freed_by, storage.floor)
            for near in region.near:
                for ended, other, cause in near.uses.values():
                    when = ended + wake[other]
                    if when > ready and other != own:
                        ready, waited = when, ("reuse", cause, ended)
        return ready, waited, (read, written)

    def _enter(self, storage: Storage) -> None:
        """Find when the memory of a storage is free."""
        storage.floor = 0.0
        if storage.place is not None:
            storage.floor = self._vacated(storage, storage.place)
        elif storage.pool is not None:
            storage.floor = storage.pool.take(storage.size)
            storage.freed_by = storage.pool.freed_by

    def _vacated(self, storage: Storage, place: Access) -> float:
        """Return when the earlier tensors at the same manual address have been used last."""
        when, kept = 0.0, []
        for other, there in self.placed:
            if place.memory != there.memory or not overlaps(place, there):
                kept.append((other, there))
                continue
            self._book_users(other)
            if other.end > when:
                when, storage.freed_by = other.end, other.user
            if not covers(place, there):
                kept.append((other, there))
        self.placed = [*kept, (storage, place)]
        return when

    def _done(
        self, held: Booking, engine: int, touched: Touched, read_end: float, end: float
    ) -> None:
        """Remember the accesses of an instruction: sources read by `read_end`, results at `end`."""
        index = held.index
        for region in touched[1]:
            storage = region.storage
            if end > storage.end:
                storage.end, storage.user = end, held
            if index < storage.last_use:
                region.written((end, engine, held))
            elif storage.pool is not None:
                self._release(storage, storage.pool)
        for region in touched[0]:
            storage = region.storage
            if read_end > storage.end:
                storage.end, storage.user = read_end, held
            if index < storage.last_write:
                region.read((read_end, engine, held))
            elif index == storage.last_use and storage.pool is not None:
                self._release(storage, storage.pool)

    def _release(self, storage: Storage, pool: Pool) -> None:
        """Give the memory of a tensor back after its last use in program order."""
        if storage.put_off:
            self._book_users(storage)
        pool.release(storage.size, storage.end, storage.user)
        storage.pool = None


class TensorClock:
    """Books products on TensorE. Times in microseconds.

    sums: from when the next product may add to a sum, by (storage, byte, partition).
    throttled_us: what the clock ramp has cost so far.
    """

    def __init__(self, target: Target, slots: Slots) -> None:
        self.slots = slots
        self.sums: dict[tuple[int, int, int], float] = {}
        self.fill_us = target.tensor_latency_seconds * US
        # work done since the array was cold, recent utilization and until when
        self.ramp_us = target.tensor_ramp_seconds * US
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
        tail = slots.starts[-1]
        begin = max(ready, self.sums.get(into, 0.0))
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
        begin = slots.append(begin, interval) if in_order else slots.squeeze(begin, interval)
        tail = slots.starts[-1]
        if ramp_us and tail > self.utilization_at:
            self.utilization = 1.0 - (1.0 - used) * math.exp(-interval / self.window)
            self.utilization_at = tail
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
        self.alike: Slots | None = Slots()
        self.engines: list[Slots] = []

    def place(
        self, issue: Booking, cost: DmaCost, ready: float
    ) -> tuple[list[Booking], Booking, float]:
        """Book a transfer; return its parts, the last of them, and when that one ends.

        While all engines are booked alike there is one part, with row -1.
        """
        if self.alike is not None:
            if cost.uniform_us:
                part = _part(self.alike, issue, -1, ready, cost.uniform_us)
                return [part], part, part.stop + (self.count - 1) * self.step_us
            self.engines = [self.alike.later(e * self.step_us) for e in range(self.count)]
            self.alike = None
        parts = [
            _part(self.engines[engine], issue, engine, ready + rank * self.step_us, duration)
            for rank, (engine, duration) in enumerate(cost.shares)
        ]
        last = max(parts, key=lambda part: part.stop)
        return parts, last, last.stop


def _part(slots: Slots, issue: Booking, engine: int, ready: float, duration: float) -> Booking:
    """Book a DMA engine; it waits for another transfer, or for the queue that issues its own."""
    start = slots.place(ready, duration)
    waited = slots.ended[start] if start > ready else (issue.why, issue, issue.stop)
    part = Booking(issue.index, "dma engines", engine, start, start + duration, *waited)
    slots.ended[part.stop] = "dma engines", part, part.stop
    return part


_OUT_OF_A_LOOP = (
    "which is inside a loop on the device that it is not in; wait for an instruction of its own "
    "loop, or outside of it"
)
_CYCLE = "which waits for it in turn, so that neither ever runs; remove one of the two"


def check_dependencies(trace: Trace) -> None:
    """Refuse a `depends_on` whose semaphore fires once a turn for one wait, or never."""
    for place, consumer in enumerate(trace.instructions):
        for producer in consumer.after:
            source = producer.index
            if any(a <= source < b and not a <= place < b for a, b in trace.turns):
                why = _OUT_OF_A_LOOP
            elif source >= place and _waits_for(trace.instructions, producer, consumer):
                why = _CYCLE
            else:
                continue
            raise HazardError(
                f"nisa.{consumer.op} depends on nisa.{producer.op} (line {producer.line}), {why}",
                consumer.file,
                consumer.line,
            )


def _waits_for(instructions: list[Instruction], first: Instruction, wanted: Instruction) -> bool:
    """Return whether `first` is `wanted`, or waits for it over `depends_on` and data."""
    todo, seen = [first], {first.index}
    while todo:
        instruction = todo.pop()
        if instruction is wanted:
            return True
        between = instructions[wanted.index : instruction.index]
        awaited = [one for one in between if _shares_data(one, instruction)]
        for producer in (*instruction.after, *awaited):
            if producer.index not in seen:
                seen.add(producer.index)
                todo.append(producer)
    return False


def _shares_data(before: Instruction, after: Instruction) -> bool:
    """Return whether two instructions touch one place, and one of them writes there."""
    pairs = [(written, other) for written in before.writes for other in after.reads]
    pairs += [(other, written) for other in before.operands
              for written in after.writes]  # fmt: skip
    return any(a.storage == b.storage and overlaps(a, b) for a, b in pairs)
