"""When the operands of an instruction are ready: data dependences and on-chip capacity.

Every allocation that is written in the trace has a `Storage`: its recent writes and reads with
their end times. RAW, WAR and WAW wait for the other instruction on exactly overlapping regions,
plus the time a semaphore takes when the two are on different engines. On the same engine program
order already gives WAR and WAW: so TensorE, which reads SBUF and writes PSUM, never waits for
itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from nmm_compiler.simulator.timing.dma import DmaCost
from nmm_compiler.simulator.timing.load_reuse import reused_loads
from nmm_compiler.simulator.timing.regions import Record, Records, is_dense, overlaps
from nmm_compiler.simulator.timing.repeats import repeated_work
from nmm_compiler.simulator.timing.resources import Pool
from nmm_compiler.simulator.trace import Access, Allocation, Instruction, Trace
from nmm_compiler.targets import Target

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "sync", "dma")
TENSOR, VECTOR, SCALAR, GPSIMD, SYNC, DMA = range(6)

_US = 1e6


def wake_table(target: Target) -> list[list[float]]:
    """Return [producer][consumer] -> microseconds from the end of one to the start of the other."""
    engine = target.engine_semaphore_seconds * _US
    table = [[0.0 if a == b else engine for b in range(6)] for a in range(6)]
    for consumer in range(6):
        table[DMA][consumer] = target.semaphore_seconds * _US
    return table


@dataclasses.dataclass(slots=True, eq=False)
class Store:
    """A DMA to HBM that is not booked yet: nothing needs its end, so other DMAs can be issued
    first."""

    index: int
    instruction: Instruction
    ready: float
    cost: DmaCost


class _Place:
    """A manual address: memory, partitions and bytes."""

    __slots__ = ("bytes", "memory", "partitions")

    def __init__(self, allocation: Allocation) -> None:
        assert allocation.address is not None
        partition, byte = allocation.address
        self.memory = allocation.memory
        self.partitions = (partition, partition + allocation.shape[0])
        self.bytes = (byte, byte + allocation.bytes_per_partition)

    def meets(self, other: _Place) -> bool:
        """Return whether the two share a byte."""
        return self.memory == other.memory and all(
            a[0] < b[1] and b[0] < a[1]
            for a, b in ((self.partitions, other.partitions), (self.bytes, other.bytes))
        )

    def covers(self, other: _Place) -> bool:
        """Return whether every byte of `other` is in this place."""
        return self.memory == other.memory and all(
            a[0] <= b[0] and b[1] <= a[1]
            for a, b in ((self.partitions, other.partitions), (self.bytes, other.bytes))
        )


_NEVER_READ = Records()  # shared by all storages until one is read before a later write


class Storage:
    """The state of one allocation for the dependence check.

    end: end of the last access so far; floor: when its memory is free, negative before first use.
    """

    __slots__ = (
        "end",
        "floor",
        "last_use",
        "last_write",
        "place",
        "pool",
        "put_off",
        "reads",
        "size",
        "writes",
    )

    def __init__(self) -> None:
        self.writes = Records()
        self.reads = _NEVER_READ
        self.last_use = -1
        self.last_write = -1
        self.end = 0.0
        self.floor = -1.0
        self.place: _Place | None = None
        self.pool: Pool | None = None
        self.put_off: list[Store] = []
        self.size = 0


class Dependences:
    """Storages of one trace, and the memories they live in.

    book: books one put-off store, and calls `done` for it; settle: books the next of all, if any.
    """

    def __init__(
        self,
        trace: Trace,
        target: Target,
        book: Callable[[Store], None],
        settle: Callable[[], bool],
        reorder: bool = True,
    ) -> None:
        self.storages: dict[int, Storage] = {}
        # engines whose program order alone gives write-after-read and write-after-write
        self._in_order = [code == TENSOR or not reorder for code in range(DMA)] + [False]
        self.repeated: dict[int, int] = {}
        self.sbuf = Pool(target.sbuf_usable_bytes_per_partition, settle)
        self.psum = Pool(target.psum_banks * target.psum_bank_bytes_per_partition, settle)
        self._placed: list[Storage] = []
        self._book = book
        self._wake = wake_table(target)
        self._survey(trace, target)

    def _survey(self, trace: Trace, target: Target) -> None:
        """Find the last use and last write of each storage; HBM that nobody writes needs none."""
        self.repeated = repeated_work(trace)
        if trace.loads == "reused":
            self.repeated |= reused_loads(trace, target)
        storages, repeated = self.storages, self.repeated
        for index, instruction in enumerate(trace.instructions):
            if index in repeated:
                if repeated[index] == index:  # dead: nothing reads its result
                    continue
                # the result of the earlier instruction is used instead, so it lives longer
                earlier = trace.instructions[repeated[index]].writes[0].storage
                storages[instruction.writes[0].storage] = storages[earlier]
                continue
            for access in instruction.writes:
                storage = storages.get(access.storage)
                if storage is None:
                    storage = storages[access.storage] = Storage()
                storage.last_write = storage.last_use = index
            for access in instruction.reads:
                storage = storages.get(access.storage)
                if storage is None:
                    if access.memory == "hbm":
                        continue
                    storage = storages[access.storage] = Storage()
                storage.last_use = index
        bank = target.psum_bank_bytes_per_partition
        for identity, storage in storages.items():
            allocation = trace.allocations.get(identity)
            if allocation is None or allocation.memory == "hbm":
                continue
            storage.size = allocation.bytes_per_partition
            if allocation.address is not None:
                storage.place = _Place(allocation)
                continue
            storage.pool = self.sbuf
            if allocation.memory == "psum":
                storage.pool = self.psum
                storage.size = -(-storage.size // bank) * bank

    def ready(
        self, index: int, engine: int, reads: tuple[Access, ...], writes: tuple[Access, ...]
    ) -> float:
        """Return when the instruction's operands are there and its results may be written."""
        storages, wake, in_order = self.storages, self._wake, self._in_order
        ready = 0.0
        for access in reads:
            storage = storages.get(access.storage)
            if storage is None:
                continue
            if storage.floor < 0.0:
                self._enter(storage)
            if storage.put_off:
                self._book_writers(storage, access)
            for record in storage.writes.near(access):
                when = record.end + wake[record.engine][engine]
                if when > ready and overlaps(record.access, access):
                    ready = when
        for access in writes:
            storage = storages[access.storage]
            if storage.floor < 0.0:
                self._enter(storage)
            if storage.put_off:
                self._book_users(storage, access)
            when = storage.floor
            if when > 0.0:
                # the compiler reuses memory in the order of last uses; engines signal as usual
                when += wake[VECTOR if engine == TENSOR else TENSOR][engine]
                if when > ready:
                    ready = when
            for records in (storage.writes, storage.reads):
                for record in records.near(access):
                    producer = record.engine
                    if producer == engine and in_order[engine]:
                        continue
                    when = record.end + wake[producer][engine]
                    if when > ready and overlaps(record.access, access):
                        ready = when
        return ready

    def put_off(self, store: Store) -> None:
        """Remember that `store` has to be booked before its operands are used again."""
        for access in (*store.instruction.reads, *store.instruction.writes):
            storage = self.storages.get(access.storage)
            if storage is not None:
                storage.put_off.append(store)

    def booked(self, store: Store) -> None:
        """Forget a store that has been booked."""
        for access in (*store.instruction.reads, *store.instruction.writes):
            storage = self.storages.get(access.storage)
            if storage is not None and store in storage.put_off:
                storage.put_off.remove(store)

    def _book_writers(self, storage: Storage, access: Access) -> None:
        for store in list(storage.put_off):
            if self._touches(store.instruction.writes, storage, access):
                self._book(store)

    def _book_users(self, storage: Storage, access: Access) -> None:
        for store in list(storage.put_off):
            accesses = (*store.instruction.writes, *store.instruction.reads)
            if self._touches(accesses, storage, access):
                self._book(store)

    def _touches(self, accesses: tuple[Access, ...], storage: Storage, access: Access) -> bool:
        return any(
            self.storages.get(a.storage) is storage and overlaps(a, access) for a in accesses
        )

    def _enter(self, storage: Storage) -> None:
        if storage.place is not None:
            storage.floor = self._vacated(storage, storage.place)
        else:
            storage.floor = storage.pool.take(storage.size) if storage.pool is not None else 0.0

    def _vacated(self, storage: Storage, place: _Place) -> float:
        """Return when the earlier tensors at the same manual address have been used last."""
        when, kept = 0.0, []
        for other in self._placed:
            assert other.place is not None
            if not place.meets(other.place):
                kept.append(other)
                continue
            for store in list(other.put_off):
                self._book(store)
            when = max(when, other.end)
            if not place.covers(other.place):
                kept.append(other)
        self._placed = [*kept, storage]
        return when

    def done(
        self,
        index: int,
        engine: int,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...],
        read_end: float,
        end: float,
    ) -> None:
        """Remember the accesses of an instruction: sources read by `read_end`, results at `end`."""
        storages = self.storages
        for access in writes:
            storage = storages[access.storage]
            if end > storage.end:
                storage.end = end
            if index < storage.last_use:
                older, readers = storage.writes, storage.reads
                if older.used or readers.used:
                    dense = is_dense(
                        access.pattern, access.item_bytes, access.byte_stop - access.byte_start
                    )
                    older.replace_covered(access, dense)
                    readers.replace_covered(access, dense)
                older.add(Record(access, end, engine))
            elif storage.pool is not None:
                self._release(storage, storage.pool)
        for access in reads:
            source = storages.get(access.storage)
            if source is None:
                continue
            if read_end > source.end:
                source.end = read_end
            if index < source.last_write:
                if source.reads is _NEVER_READ:
                    source.reads = Records()
                self._remember_read(source.reads, access, engine, read_end)
            elif index == source.last_use and source.pool is not None:
                self._release(source, source.pool)

    def _release(self, storage: Storage, pool: Pool) -> None:
        """Give the memory of a tensor back after its last use in program order."""
        for store in list(storage.put_off):
            self._book(store)
        pool.release(storage.size, storage.end)
        storage.pool = None

    @staticmethod
    def _remember_read(records: Records, access: Access, engine: int, end: float) -> None:
        for record in records.near(access):
            old = record.access
            if (
                record.engine == engine
                and old.byte_start == access.byte_start
                and old.pattern == access.pattern
                and old.partition_start == access.partition_start
                and old.partition_stop == access.partition_stop
            ):
                if end > record.end:
                    record.end = end
                return
        records.add(Record(access, end, engine))
