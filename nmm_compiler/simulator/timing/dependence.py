"""When the operands of an instruction are ready: data dependences and on-chip capacity.

Every allocation that is written in the trace has a `Storage`: its recent writes and reads with
their end times. RAW, WAR and WAW wait for the other instruction on exactly overlapping regions,
plus the time a semaphore takes when the two are on different engines. On the same engine program
order already gives WAR and WAW: so TensorE, which reads SBUF and writes PSUM, never waits for
itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

from nmm_compiler.errors import HazardError
from nmm_compiler.simulator.timing.compiler import awaited_tiles
from nmm_compiler.simulator.timing.costs import DMA, ENGINES, TENSOR, DmaCost
from nmm_compiler.simulator.timing.regions import covers, overlaps
from nmm_compiler.simulator.timing.resources import AT_ONCE, Pool
from nmm_compiler.simulator.trace import Access, Instruction, Trace
from nmm_compiler.targets import Target

_US = 1e6

_MADE_BY = ("result",) * DMA + ("load",)


def wake_us(target: Target) -> list[list[float]]:
    """Return [consumer][producer] -> microseconds from the end of one to the start of the other."""
    engine, dma = target.engine_semaphore_seconds * _US, target.semaphore_seconds * _US
    return [[*(0.0 if a == b else engine for a in range(DMA)), dma] for b in range(len(ENGINES))]


@dataclasses.dataclass(slots=True, eq=False)
class Store:
    """A DMA to HBM that is put off: others are issued first until something needs its end."""

    index: int
    touched: Touched
    ready: float
    cost: DmaCost
    booked: bool = False


Use = tuple[float, int, int]
"""A write or a read: when it ends (microseconds), the engine and the index of the instruction."""
WRITE = -1


class Region:
    """Bytes of a storage that instructions touch.

    uses: the last write of exactly these bytes, by `WRITE`, and the last read since then of each
    engine; later writes hide both. near: the regions that share a byte with it, of the first `seen`
    that were used.
    """

    __slots__ = ("access", "near", "seen", "storage", "used", "uses")

    def __init__(self, storage: Storage, access: Access) -> None:
        self.storage, self.access = storage, access
        self.near: list[Region] = []
        self.seen, self.used = 0, False
        self.uses: dict[int, Use] = {}

    def written(self, use: Use) -> None:
        """Remember a write, and forget what it covers."""
        for other in self.near:
            if other is self or covers(self.access, other.access):
                other.uses.clear()
        self._remember(WRITE, use)

    def read(self, use: Use) -> None:
        """Remember a read."""
        before = self.uses.get(use[1])
        if before is None or use[0] > before[0]:
            self._remember(use[1], use)

    def _remember(self, key: int, use: Use) -> None:
        if not self.used:
            self.used = True
            self.storage.remember(self)
        self.uses[key] = use


class Storage:
    """The state of one allocation for the dependence check.

    regions: those that instructions have touched; kernels touch the same ones again and again, so
    which of them overlap is found once for each. used: how many have uses. wide: those of them that
    bound more than an eighth of it; narrow: the others, by their first byte; longest: the most
    bytes that one of these bounds.
    end: end of the last access so far, by the instruction `user`.
    floor: when its memory is free, negative before first use; the instruction `freed_by` frees it.
    place: all of its bytes in its memory, of a tensor that lies at an address or in one buffer.
    put_off: (region, whether it writes, store) of each store that was put off and touches it.
    """

    __slots__ = (
        "end", "floor", "freed_by", "last_use", "last_write", "longest", "narrow", "place", "pool",
        "put_off", "regions", "size", "used", "user", "whole", "wide",
    )  # fmt: skip

    def __init__(self, last_write: int, last_use: int, whole: int) -> None:
        self.regions: dict[tuple[Any, ...], Region] = {}
        self.wide: list[Region] = []
        self.narrow: list[tuple[int, int, Region]] = []
        self.whole, self.used, self.longest = whole, 0, 0
        self.last_write, self.last_use = last_write, last_use
        self.user = self.freed_by = -1
        self.end = 0.0
        self.floor = -1.0
        self.place: Access | None = None
        self.pool: Pool | None = None
        self.put_off: list[tuple[Region, bool, Store]] = []
        self.size = 0

    def region(self, access: Access) -> Region:
        """Return the region of an access; it knows all that it overlaps."""
        key = access.partition_start, access.partition_stop, access.byte_start, access.pattern
        region = self.regions.get(key)
        if region is None:
            region = self.regions[key] = Region(self, access)
        if region.seen < self.used:
            region.seen, others = self.used, self.wide
            if self.narrow:
                first = bisect.bisect_left(self.narrow, (access.byte_start - self.longest,))
                stop = bisect.bisect_left(self.narrow, (access.byte_stop,))
                others = [*others, *(entry[2] for entry in self.narrow[first:stop])]
            region.near = [other for other in others if overlaps(other.access, access)]
        return region

    def remember(self, region: Region) -> None:
        """Remember that a region has uses."""
        start, extent = region.access.byte_start, region.access.byte_stop - region.access.byte_start
        if region.seen == self.used:  # as mostly: it knows all others
            region.near.append(region)
            region.seen += 1
        self.used += 1
        if extent * 8 > self.whole:
            self.wide.append(region)
        else:
            bisect.insort(self.narrow, (start, self.used, region))
            self.longest = max(self.longest, extent)


Touched = tuple[list[Region], list[Region]]
"""The regions that an instruction reads and writes, but for HBM that nobody writes."""


class Dependences:
    """Storages of one trace, and the memories they live in.

    book: books one put-off store, and calls `done` for it; settle: books the next of all, if it is
    ready before a time.
    waited: what the last result of `ready` waits for. touched: the regions that it looked at, of
    reads and of writes.
    """

    def __init__(
        self,
        trace: Trace,
        target: Target,
        book: Callable[[Store], None],
        settle: Callable[[float], bool],
        reorder: bool = True,
    ) -> None:
        self.storages: dict[int, Storage] = {}
        self.waited = AT_ONCE
        self.touched: Touched = [], []
        # engines whose program order alone gives write-after-read and write-after-write
        self._in_order = [code == TENSOR or not reorder for code in range(DMA)] + [False]
        self.sbuf = Pool(target.sbuf_usable_bytes_per_partition, settle)
        banks = target.psum_banks * target.psum_bank_bytes_per_partition
        # no store frees PSUM sooner than the copies out of it
        self.psum = Pool(banks, lambda before: before == math.inf and settle(before))
        self._placed: list[tuple[Storage, Access]] = []
        self._book = book
        self.wake_us = wake_us(target)
        self._free_us = target.engine_semaphore_seconds * _US  # what reused memory costs
        self._survey(trace, target)

    def _survey(self, trace: Trace, target: Target) -> None:
        """Find the last use and last write of each storage; HBM that nobody writes needs none."""
        one_buffer = awaited_tiles(trace, target)
        bank = target.psum_bank_bytes_per_partition
        for identity, found in trace.allocations.items():
            on_chip = found.memory != "hbm"
            if found.last_write < 0 and not (on_chip and found.last_index >= 0):
                continue
            storage = self.storages[identity] = Storage(
                found.last_write, found.last_index, found.bytes_per_partition
            )
            if not on_chip:
                continue
            storage.size = found.bytes_per_partition
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

    def ready(self, engine: int, reads: tuple[Access, ...], writes: tuple[Access, ...]) -> float:
        """Return when the instruction's operands are there and its results may be written."""
        storages, wake = self.storages, self.wake_us[engine]
        touched: Touched = [], []
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
            touched[0].append(region)
            for near in region.near:
                if WRITE in near.uses:
                    ended, other, index = near.uses[WRITE]
                    when = ended + wake[other]
                    if when > ready:
                        ready, waited = when, (_MADE_BY[other], index, ended)
        own = engine if self._in_order[engine] else -1
        for access in writes:
            storage = storages[access.storage]
            if storage.floor < 0.0:
                self._enter(storage)
            if storage.put_off:
                self._book_users(storage, access)
            region = storage.region(access)
            touched[1].append(region)
            when = storage.floor
            if when > 0.0:
                when += self._free_us
                if when > ready:
                    ready, waited = when, ("memory", storage.freed_by, storage.floor)
            for near in region.near:
                for ended, other, index in near.uses.values():
                    when = ended + wake[other]
                    if when > ready and other != own:
                        ready, waited = when, ("reuse", index, ended)
        self.waited, self.touched = waited, touched
        return ready

    def put_off(self, store: Store) -> None:
        """Remember that `store` still has to be booked before its operands are touched again."""
        for writes, regions in enumerate(store.touched):
            for region in regions:
                region.storage.put_off.append((region, bool(writes), store))

    def _book_users(
        self, storage: Storage, access: Access | None = None, *, writers_only: bool = False
    ) -> None:
        """Book the stores that overlap an access (None for any), or only those that write there."""
        for other, writes, store in list(storage.put_off):
            wanted = writes or not writers_only
            if wanted and not store.booked and (access is None or overlaps(other.access, access)):
                self._book(store)
        storage.put_off = [entry for entry in storage.put_off if not entry[2].booked]

    def _enter(self, storage: Storage) -> None:
        if storage.place is not None:
            storage.floor = self._vacated(storage, storage.place)
        elif storage.pool is not None:
            storage.floor = storage.pool.take(storage.size)
            storage.freed_by = storage.pool.freed_by
        else:
            storage.floor = 0.0

    def _vacated(self, storage: Storage, place: Access) -> float:
        """Return when the earlier tensors at the same manual address have been used last."""
        when, kept = 0.0, []
        for other, there in self._placed:
            if place.memory != there.memory or not overlaps(place, there):
                kept.append((other, there))
                continue
            self._book_users(other)
            if other.end > when:
                when, storage.freed_by = other.end, other.user
            if not covers(place, there):
                kept.append((other, there))
        self._placed = [*kept, (storage, place)]
        return when

    def done(self, index: int, engine: int, touched: Touched, read_end: float, end: float) -> None:
        """Remember the accesses of an instruction: sources read by `read_end`, results at `end`."""
        for region in touched[1]:
            storage = region.storage
            if end > storage.end:
                storage.end, storage.user = end, index
            if index < storage.last_use:
                region.written((end, engine, index))
            elif storage.pool is not None:
                self._release(storage, storage.pool)
        for region in touched[0]:
            storage = region.storage
            if read_end > storage.end:
                storage.end, storage.user = read_end, index
            if index < storage.last_write:
                region.read((read_end, engine, index))
            elif index == storage.last_use and storage.pool is not None:
                self._release(storage, storage.pool)

    def forget(self) -> None:
        """Let go of all regions, which know each other: so nobody has to find those cycles."""
        for storage in self.storages.values():
            for region in storage.regions.values():
                del region.near
            del storage.regions, storage.wide, storage.narrow, storage.put_off

    def _release(self, storage: Storage, pool: Pool) -> None:
        """Give the memory of a tensor back after its last use in program order."""
        if storage.put_off:
            self._book_users(storage)
        pool.release(storage.size, storage.end, storage.user)
        storage.pool = None


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
