"""The timing pass: a trace and a target in, a timeline out.

Engines (tensor, vector, scalar, gpsimd, sync), DMA queues and the 16 DMA engines are resources.
Compute engines run in program order and wait for true data dependences; DMAs are issued as early
as their operands, their queue and on-chip capacity allow, because the NKI compiler hoists loads.
One walk over the trace in program order books every instruction, without iterations.

An instruction waits for others on exactly overlapping regions (read after write, write after read,
write after write), plus the time a semaphore takes when the two are on different engines. On the
same engine program order already gives the last two: so TensorE, which reads SBUF and writes PSUM,
never waits for itself.

TensorE's clock runs at half until `tensor_ramp_seconds` of work are done, and again when less than
half of the array works in a window of that length: a float32 product counts by the part of the rows
that it uses. Products that come later in the program fill gaps; a clock that such a gap has slowed
is at full speed again from there on.

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
    US,
    VECTOR,
    DmaCost,
    InstructionTime,
)
from nmm_compiler.simulator.timing.regions import Region, Tracked, covers, overlaps
from nmm_compiler.simulator.timing.resources import Pool, Slots
from nmm_compiler.simulator.timing.timeline import (
    AT_ONCE,
    Booking,
    Timeline,
    Waited,
    stagger_us,
)
from nmm_compiler.simulator.trace import Access, Instruction, Trace
from nmm_compiler.targets import Target


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
        return [walk.finish() for walk in walks]


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


class Scheduler:
    """State of one walk over a trace."""

    def __init__(self, trace: Trace, target: Target, reorder: bool) -> None:
        self.trace, self.target, self.line = trace, target, Timeline(trace, target)
        # instructions that keep program order: all, or those of nl.no_reorder
        ordered = trace.ordered if reorder else [(0, len(trace.instructions))]
        self.in_order = {index for span in ordered for index in range(*span)}
        self.last_edge = 0
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
        # the DMA engines: one stands for all while all are booked alike
        self.alike, self.movers, self.step_us = Slots(), list[Slots](), stagger_us(target)
        self.waiting: list[tuple[float, int, Transfer]] = []  # by when it is ready, then index
        self.wake_us = wake_us(target)
        # engines whose program order alone gives write-after-read and write-after-write
        self.keeps_order = [code == TENSOR or not reorder for code in range(DMA)] + [False]
        self.sbuf = Pool(target.sbuf_usable_bytes_per_partition, self._settle)
        banks = target.psum_banks * target.psum_bank_bytes_per_partition
        # no store frees PSUM sooner than the copies out of it
        self.psum = Pool(banks, lambda before: before == math.inf and self._settle(before))
        self.storages: dict[int, Tracked | None] = {}  # None: of HBM that nobody writes
        # by the identity of their access, of which a trace has one for each region
        self.regions: dict[int, Region | None] = {}
        # storages at an address or in one buffer, by the memory or the buffer
        self.placed: dict[str, list[tuple[Tracked, Access]]] = collections.defaultdict(list)
        self.one_buffer = awaited_tiles(trace, target)

    def run(self) -> Iterator[float]:
        """Walk the trace; yield when this program arrives at a barrier, with `floor` to be set."""
        target, kinds = self.target, self.line.kinds
        edges = {edge for first, stop, *_ in self.trace.turns for edge in (first, stop)}
        for index, instruction in enumerate(self.trace.instructions):
            if index in edges:
                self._meet(index, "loop")
            if instruction.op == "core_barrier":
                self._meet(index, "barrier")
                yield self.floor
            kind = instruction.kind or -index  # of its own kind, where nobody has compared it
            work = kinds.get(kind)
            if work is None:
                work = kinds[kind] = InstructionTime(target, instruction)
            work.count += 1
            engine, writes = work.engine, instruction.writes
            ready, waited, touched = self._operands(engine, instruction.reads, writes)
            if instruction.after:
                ready, waited = self._after(instruction, engine, ready, waited)
            if self.floor > ready:
                ready, waited = self.floor, self.floor_waited
            if work.dma is not None:
                self._transfer(Transfer(index, work.dma, ready, waited, touched))
            elif engine == TENSOR:
                into = writes[0].storage, writes[0].byte_start, writes[0].partition_start
                start, free, end = self.tensor.book(work, into, ready, index in self.in_order)
                slots = self.engines[TENSOR]
                held = slots.hold(index, "engine", "tensor", start, free, waited)
                slots.ended[self.tensor.sums[into]] = "engine", held, free
                self._done((held,), held, engine, touched, free, end)
            else:
                self._compute(index, work, ready, waited, touched)
        while self._settle():
            pass

    def finish(self) -> Timeline:
        """Return the timeline, and let go of all that knows each other: nobody has to find it."""
        line = self.line
        line.sbuf_overflow_bytes = self.sbuf.overflow
        line.tensor_throttled_us = self.tensor.throttled_us
        for region in filter(None, self.regions.values()):
            del region.near, region.storage
        vars(self).clear()
        return line

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
            self.floor_waited = why, self.line.last(last), end[last]
            self.floor = max(self.floor, end[last])
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
                    ready, waited = when, ("result", line.last(at), line.end[at])
        return ready, waited

    def _compute(
        self, index: int, work: InstructionTime, ready: float, waited: Waited, touched: Touched
    ) -> None:
        """Book VectorE, ScalarE, GpSimd or the sync engine."""
        engine, interval = work.engine, work.interval
        slots, begin = self.engines[engine], ready
        loads: tuple[Booking, ...] = ()
        if work.table and work.table != self.table:
            # placed by the compiler as early as ScalarE is free, before the operands come
            load_us = self.target.activation_table_load_seconds * US
            start = slots.place(max(slots.starts[-1], self.floor), load_us)
            load = slots.hold(index, "table", "scalar", start, start + load_us, AT_ONCE)
            # nothing that comes later is booked before it
            slots.starts, slots.stops = [max(load.stop, slots.starts[-1])], [math.inf]
            self.table, loads = work.table, (load,)
        shared = [users for memory, engines, users in self.ports
                  if memory in work.memories and engine in engines]  # fmt: skip
        for users in shared:
            for other, user in users.items():
                if other != engine and user.stop > begin:
                    begin, waited = user.stop, ("port", user, user.stop)
        book = slots.append if index in self.in_order else slots.squeeze
        begin = book(begin, interval)
        held = slots.hold(index, "engine", ENGINES[engine], begin, begin + interval, waited)
        self._done((held, *loads), held, engine, touched, held.stop, begin + work.latency)
        for users in shared:
            users[engine] = max(users.get(engine, held), held, key=lambda user: user.stop)

    def _transfer(self, dma: Transfer) -> None:
        """Book a DMA, or put it off if it is a store that would keep its queue waiting."""
        free, waiting, put_off = self.queues[dma.cost.queue].starts[-1], self.waiting, False
        if dma.index in self.in_order:
            dma.ready = max(dma.ready, free)
        elif dma.ready > free:
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
        del self.waiting[bisect.bisect_left(self.waiting, (store.ready, store.index))]
        self._issue(store)

    def _book_users(
        self, storage: Tracked, access: Access | None = None, *, writers_only: bool = False
    ) -> None:
        """Book the stores that overlap an access (None for any), or only those that write there."""
        booked = self.line.bookings
        for other, writes, store in list(storage.put_off):
            wanted = (writes or not writers_only) and not booked[store.index]
            if wanted and (access is None or overlaps(other.access, access)):
                self._book(store)
        storage.put_off = [entry for entry in storage.put_off if not booked[entry[2].index]]

    def _issue(self, dma: Transfer) -> None:
        """Book the issuing queue, then the DMA engines.

        A transfer is started on one engine after another: each begins `step_us` after the one
        before. While all are booked alike there is one booking, with row -1.
        """
        index, cost, begin = dma.index, dma.cost, dma.ready
        if cost.gpsimd_us:
            begin = self.engines[GPSIMD].place(begin, cost.gpsimd_us)
        queue, issue_us = self.queues[cost.queue], cost.issue_us
        start = queue.place(begin, issue_us)
        issue = queue.hold(index, "queue", cost.queue, start, start + issue_us, dma.waited)
        start_us = self.target.dma_start_latency_seconds * US
        ready = start + (issue_us if issue_us > start_us else start_us)
        step_us, count = self.step_us, self.target.dma_engines
        moves = [(self.alike, -1, ready, cost.uniform_us)]
        if self.movers or not cost.uniform_us:
            self.movers = self.movers or [self.alike.later(e * step_us) for e in range(count)]
            moves = [(self.movers[engine], engine, ready + rank * step_us, us)
                     for rank, (engine, us) in enumerate(cost.shares)]  # fmt: skip
        waited, parts = (issue.why, issue, issue.stop), []
        for slots, row, begin, us in moves:
            start = slots.place(begin, us)
            parts.append(slots.hold(index, "dma engines", row, start, start + us, waited))
        last = max(parts, key=lambda part: part.stop)
        end = last.stop + (count - 1) * step_us if last.row == -1 else last.stop
        end += cost.tail_us
        self._done((issue, *parts), last, DMA, dma.touched, end, end)

    def _operands(
        self, engine: int, reads: tuple[Access, ...], writes: tuple[Access, ...]
    ) -> tuple[float, Waited, Touched]:
        """Return when the operands are there and the results may be written, and what that waits
        for."""
        regions, wake = self.regions, self.wake_us[engine]
        touched: Touched = [], []
        own = engine if self.keeps_order[engine] else -1
        ready, waited = 0.0, AT_ONCE
        for writing, accesses, ordered in ((False, reads, -1), (True, writes, own)):
            for access in accesses:
                key = id(access)
                if key not in regions:
                    regions[key] = self._region(access)
                region = regions[key]
                if region is None:
                    continue
                storage = region.storage
                if storage.put_off:
                    self._book_users(storage, access, writers_only=not writing)
                if region.seen < len(storage.used):
                    region.look()
                touched[writing].append(region)
                if writing and storage.floor > 0.0:
                    when = storage.floor + self.target.engine_semaphore_seconds * US
                    if when > ready:
                        ready, waited = when, ("memory", storage.freed_by, storage.floor)
                for near in region.near:
                    uses = (*near.made, *near.reads.values()) if writing else near.made
                    for ended, other, cause in uses:
                        when = ended + wake[other]
                        if when > ready and other != ordered:
                            why = "reuse" if writing else "load" if other == DMA else "result"
                            ready, waited = when, (why, cause, ended)
        return ready, waited, touched

    def _region(self, access: Access) -> Region | None:
        """Return the region of an access at its first use; None in HBM that nobody writes."""
        identity = access.storage
        if identity not in self.storages:
            self.storages[identity] = self._enter(identity)
        storage = self.storages[identity]
        return None if storage is None else Region(storage, access)

    def _enter(self, identity: int) -> Tracked | None:
        """Return a storage at its first use, with when its memory is free: of one at an address,
        when the earlier tensors there have been used last."""
        found = self.trace.allocations[identity]
        if found.memory == "hbm" and found.last_write < 0:
            return None
        storage = Tracked(found.last_write, found.last_index, found.bytes_per_partition)
        if found.memory == "hbm":
            return storage
        if found.address is None and identity not in self.one_buffer:
            storage.pool = self.sbuf
            if found.memory == "psum":
                bank = self.target.psum_bank_bytes_per_partition
                storage.pool, storage.size = self.psum, -(-storage.size // bank) * bank
            storage.floor = storage.pool.take(storage.size)
            storage.freed_by = storage.pool.freed_by
            return storage
        named = f"the buffer of line {found.line}" if found.address is None else found.memory
        row, byte = found.address or (0, 0)
        place = Access(
            identity, named, row, row + found.shape[0], byte, byte + storage.size,
            ((1, storage.size),), found.dtype, 1, True,
        )  # fmt: skip
        there = self.placed[named]
        for other, region in there:
            if overlaps(place, region):
                self._book_users(other)
                if other.end > storage.floor:
                    storage.floor, storage.freed_by = other.end, other.user
        there[:] = [*(each for each in there if not covers(place, each[1])), (storage, place)]
        return storage

    def _done(
        self,
        bookings: tuple[Booking, ...],
        held: Booking,
        engine: int,
        touched: Touched,
        read_end: float,
        end: float,
    ) -> None:
        """Remember the bookings of an instruction and its accesses: sources read by `read_end`,
        results at `end`, both by `held`. A tensor gives its memory back after its last use."""
        index = held.index
        self.line.bookings[index], self.line.end[index] = bookings, end
        for writes, until in ((True, end), (False, read_end)):
            for region in touched[writes]:
                storage = region.storage
                if until > storage.end:
                    storage.end, storage.user = until, held
                if index < (storage.last_use if writes else storage.last_write):
                    region.note((until, engine, held), writes)
                elif index == storage.last_use and storage.pool is not None:
                    if storage.put_off:
                        self._book_users(storage)
                    storage.pool.release(storage.size, storage.end, storage.user)
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
        # net work since the array was cold, when it was found cold and was last looked at, and
        # the mean part of its rows that is not in use
        self.ramp_us = target.tensor_ramp_seconds * US
        self.start_fraction = target.tensor_ramp_start_fraction
        self.ramp_done = self.cold_at = self.looked_at = self.spare = self.throttled_us = 0.0

    def book(
        self, work: InstructionTime, into: tuple[int, int, int], ready: float, in_order: bool
    ) -> tuple[float, float, float]:
        """Book a product into a sum; return its start, when TensorE is free, and its end.

        A product that adds to a sum starts no sooner than the first column of the product before
        it has come through.
        """
        slots, interval, ramp_us = self.slots, work.interval, self.ramp_us
        adds, tail = self.sums.get(into, 0.0), slots.starts[-1]
        begin = ready if ready > adds else adds
        if ramp_us:
            now = begin if begin > tail else tail
            if self.ramp_done < ramp_us:
                if begin < tail and self.cold_at and not self._idles(self.cold_at):
                    self.ramp_done = ramp_us  # products that are booked since have filled the gap
            elif now > self.looked_at + 0.25 * ramp_us:
                self.looked_at = now
                if self._idles(now):
                    self.ramp_done, self.cold_at = 0.0, now
            if self.ramp_done < ramp_us:
                interval /= self.start_fraction
                self.throttled_us += interval - work.interval
                self.ramp_done = max(0.0, self.ramp_done + interval * (1.0 - 2.0 * work.spare))
            self.spare += (work.spare - self.spare) * interval / ramp_us
        begin = slots.append(begin, interval) if in_order else slots.squeeze(begin, interval)
        free = begin + interval
        self.sums[into] = free if interval > self.fill_us else begin + self.fill_us
        return begin, free, free + (work.latency - work.interval)

    def _idles(self, stop: float) -> bool:
        """Return whether less than half of the array works in the window before a time."""
        start, idle, starts, stops = stop - self.ramp_us, 0.0, self.slots.starts, self.slots.stops
        place = bisect.bisect_left(starts, stop) - 1
        while place >= 0 and stops[place] > start:
            first, last = starts[place], stops[place]
            idle += (last if last < stop else stop) - (first if first > start else start)
            place -= 1
        return (self.ramp_us - idle) * (1.0 - self.spare) < 0.5 * self.ramp_us


def check_dependencies(trace: Trace) -> None:
    """Refuse a `depends_on` whose semaphore fires once a turn for one wait, or never."""
    for place, consumer in enumerate(trace.instructions):
        for producer in consumer.after:
            source = producer.index
            if any(a <= source < b and not a <= place < b for a, b, *_ in trace.turns):
                why = (
                    "which is inside a loop on the device that it is not in; wait for an "
                    "instruction of its own loop, or outside of it"
                )
            elif source >= place and _waits_for(trace.instructions, producer, consumer):
                why = "which waits for it in turn, so that neither ever runs; remove one of the two"
            else:
                continue
            raise HazardError(
                f"nisa.{consumer.op} depends on nisa.{producer.op} (line {producer.line}), {why}",
                consumer.file,
                consumer.line,
            )


def _waits_for(instructions: list[Instruction], first: Instruction, wanted: Instruction) -> bool:
    """Return whether `first` is `wanted`, or waits for it over `depends_on` and data."""
    todo: set[int] = {first.index}
    seen: set[int] = set()
    while todo:
        at = todo.pop()
        seen.add(at)
        between = (i for i in instructions[wanted.index : at] if _shares_data(i, instructions[at]))
        todo |= {producer.index for producer in (*instructions[at].after, *between)} - seen
    return wanted.index in seen


def _shares_data(before: Instruction, after: Instruction) -> bool:
    """Return whether two instructions touch one place, and one of them writes there."""
    pairs = [(written, other) for written in before.writes for other in after.reads]
    pairs += [(other, written) for other in before.operands
              for written in after.writes]  # fmt: skip
    return any(a.storage == b.storage and overlaps(a, b) for a, b in pairs)
