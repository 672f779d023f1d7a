"""Tensors' storage, and the capacity of SBUF and PSUM over live ranges.

A `Storage` is one allocation. Its data is a flat byte array, so that any view, also one with
another dtype, is a NumPy array over the same bytes. Elements that were never written are
tracked one by one until all are written; from then on the tracking costs nothing.

The NKI compiler places on-chip tensors itself, so the tensors that are live at the same time must
fit together. A tensor is live from the first to the last instruction that touches it.
`check_capacity` computes that sum once, after the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, OnChipCapacityError, OperandError
from nmm_compiler.simulator.machine import Machine, kernel_frame
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.trace import Allocation

_SHARED = "shared_hbm"


class Storage:
    """One allocation in HBM, SBUF or PSUM.

    raw: the bytes (None in timing mode). line: the kernel's line that allocates it, if known.
    unwritten: bool per `granule` bytes: never written, or dependent on unwritten elements; None
        when there are none. origin: of dependent elements, which unwritten elements were read
        first, and where. shared: several programs use it, with data. uses: which of those read and
        wrote each element since they last met (`races.py`); None if nobody.
    """

    __slots__ = (
        "address", "allocation", "bytes_per_partition", "constant", "dtype", "granule",
        "identity", "is_input", "machine", "matmul",
        "matmul_granule", "memory", "missing", "name", "origin", "products",
        "raw", "region", "shape", "shared", "unwritten", "uses",
    )  # fmt: skip

    def __init__(
        self,
        machine: Machine,
        name: str,
        region: Any,
        memory: str,
        shape: tuple[int, ...],
        dtype: DType,
        address: tuple[int, int] | None = None,
        raw: np.ndarray | None = None,
        line: int = -1,
    ) -> None:
        self.machine = machine
        self.name = name
        self.region = region
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.address = address
        self.constant = self.is_input = False
        self.matmul: Any = None
        self.matmul_granule = 1
        self.shared = machine.data and machine.grid > 1 and getattr(region, "name", "") == _SHARED
        self.uses: Any = None
        self.products: Any = None
        self.unwritten: np.ndarray | None = None
        self.missing = 0
        self.origin = ""
        row = item = dtype.item_bytes
        for size in shape if memory == "hbm" else shape[1:]:
            row *= size
        self.bytes_per_partition = row
        self.granule = item
        self.raw = raw
        if machine.data and raw is None:
            total = math.prod(shape)
            self.raw = np.empty(total * item, np.uint8)
            self.unwritten = np.ones(total, np.bool_)
            self.missing = total
        self.identity = identity = machine.storages
        machine.storages = identity + 1
        self.allocation = machine.trace.allocations[identity] = Allocation(
            identity, name, memory, shape, dtype, row, -1, -1,
            kernel_frame()[1] if line < 0 else line, address,
        )  # fmt: skip

    def refine(self, granule: int) -> None:
        """Track written elements at a finer size than the tensor's own dtype."""
        if self.unwritten is not None and granule < self.granule:
            factor = self.granule // granule
            self.unwritten = np.repeat(self.unwritten, factor)
            self.missing *= factor
        self.granule = min(granule, self.granule)


def check_allocation(machine: Machine, storage: Storage) -> None:
    """Refuse at once an allocation that can never fit, or a manual address outside its memory."""
    target = machine.target
    partitions, size = storage.shape[0], storage.bytes_per_partition
    if (
        storage.address is None
        and partitions <= target.partitions
        and size <= target.psum_bank_bytes_per_partition
    ):
        return
    start_partition, start = storage.address or (0, 0)
    if partitions + start_partition > target.partitions:
        raise machine.error(
            OperandError,
            f"tensor {storage.name!r} {storage.shape} takes partitions {start_partition}.."
            f"{start_partition + partitions - 1}, {target.name} has {target.partitions}; "
            "the first dimension is the partition dimension, tile it",
        )
    if storage.memory == "sbuf":
        limit, what = target.sbuf_bytes_per_partition, "SBUF"
    else:
        limit, what = target.psum_banks * target.psum_bank_bytes_per_partition, "PSUM"
    if start + size > limit or start < 0:
        at = f" at address {storage.address}" if storage.address else ""
        raise machine.error(
            OnChipCapacityError,
            f"tensor {storage.name!r} {storage.shape} {storage.dtype}{at} needs {start + size:,} "
            f"B per {what} partition, {target.name} has {limit:,}; make the tile smaller",
        )
    bank = target.psum_bank_bytes_per_partition
    if storage.memory == "psum" and storage.address is not None and start % bank and size > 0:
        first, last = start // bank, (start + size - 1) // bank
        if first != last:
            raise machine.error(
                OnChipCapacityError,
                f"PSUM tensor {storage.name!r} at byte {start} crosses a bank of {bank} B; "
                "start it on a bank boundary",
            )


def _describe(items: Iterable[tuple[Allocation, int]], unit: str, limit: int = 12) -> str:
    ranked = sorted(items, key=lambda item: -item[1])
    shown = [
        f"  {a.name} {a.shape} {a.dtype}: {size:,} {unit}, allocated on line {a.line}, live in "
        f"instructions {a.first_index}..{a.last_index}"
        for a, size in ranked[:limit]
    ]
    if len(ranked) > limit:
        rest = sum(size for _, size in ranked[limit:])
        shown.append(f"  and {len(ranked) - limit} more, {rest:,} {unit} together")
    return "\n".join(shown)


def _peak(items: list[tuple[Allocation, int]]) -> tuple[int, int]:
    """Return (largest sum of sizes live at once, an instruction where it is reached)."""
    if not items:
        return 0, 0
    sizes = [size for _, size in items]
    first = [a.first_index for a, _ in items]
    stop = [a.last_index + 1 for a, _ in items]
    count = max(stop) + 1
    # sums of whole numbers below 2**53, so exact
    change = np.bincount(first, sizes, count) - np.bincount(stop, sizes, count)
    live = np.cumsum(change)
    at = int(live.argmax())
    return int(live[at]), at


def _fits_side_by_side(items: list[tuple[Allocation, int]], limit: int) -> bool:
    """Return whether live tensors take no more than SBUF in quarters of its partitions.

    A tensor of up to 32 partitions starts at any quarter, one of up to 64 at either half
    (trainium_inferentia2_arch: start_partition), so the compiler can place two of 64 rows at the
    same bytes. Adding up areas says what certainly does not fit.
    """
    areas = []
    for allocation, size in items:
        rows = allocation.shape[0]
        areas.append((allocation, size * (1 if rows <= 32 else 2 if rows <= 64 else 4)))
    return _peak(areas)[0] <= 4 * limit


def check_capacity(machine: Machine) -> None:
    """Compute peak SBUF bytes and PSUM banks over live ranges; refuse an overflow.

    SBUF is added up per partition as if every tensor started at partition 0. A sum that exceeds it
    is only a warning if tensors of few partitions can lie beside each other.
    """
    target, trace = machine.target, machine.trace
    bank = target.psum_bank_bytes_per_partition
    sbuf: list[tuple[Allocation, int]] = []
    psum: list[tuple[Allocation, int]] = []
    for a in trace.allocations.values():
        if a.first_index >= 0:
            if a.memory == "sbuf":
                sbuf.append((a, a.bytes_per_partition))
            elif a.memory == "psum":
                psum.append((a, -(-a.bytes_per_partition // bank)))
    file = machine.instructions[0].file if machine.instructions else ""
    for memory, items in (("sbuf", sbuf), ("psum", psum)):
        placed = [a for a, _ in items if a.address is not None]
        floating = len(placed) < len(items)
        _check_addresses(machine, placed, memory)
        if memory == "sbuf":
            limit, unit = target.sbuf_usable_bytes_per_partition, "B"
            peak, at = _peak(items)
            if placed and not floating:
                peak = max(a.address[1] + a.bytes_per_partition for a in placed if a.address)
            trace.sbuf_peak_bytes = peak
        else:
            limit, unit = target.psum_banks, "bank(s)"
            peak, at = _banks_in_use(items, bank) if placed else _peak(items)
            trace.psum_peak_banks = peak
        if peak > limit and floating:
            if memory == "sbuf" and _fits_side_by_side(sbuf, limit):
                machine.warnings.append(
                    f"{peak:,} SBUF bytes per partition are live at once at instruction {at}, "
                    f"{target.name} has {limit:,}; they fit only if the compiler places tensors of "
                    "at most 64 partitions beside each other"
                )
                continue
            what = "SBUF bytes per partition" if memory == "sbuf" else "PSUM banks"
            live = [item for item in items if item[0].first_index <= at <= item[0].last_index]
            message = (
                f"{peak:,} {what} are live at once at instruction {at}, "
                f"{target.name} has {limit:,}; use smaller or fewer tiles. Live tensors:\n"
                + _describe(live, unit)
            )
            if machine.strict and not getattr(machine.dialect, "spills", False):
                line = machine.instructions[at].line if machine.instructions else 0
                raise OnChipCapacityError(message, file, line)
            machine.warnings.append(message)


def _banks_in_use(items: list[tuple[Allocation, int]], bank: int) -> tuple[int, int]:
    """Return the most PSUM banks in use at once, and an instruction where they are.

    Banks that placed tensors share count once.
    """
    events: list[tuple[int, int, Allocation, int]] = []
    for a, size in items:
        events += [(a.first_index, 0, a, size), (a.last_index, 1, a, size)]
    events.sort(key=lambda e: (e[0], e[1]))
    used: dict[int, int] = {}
    free = best = at = 0
    for index, end, a, size in events:
        step = -1 if end else 1
        if a.address is None:
            free += step * size
        else:
            first = a.address[1] // bank
            last = (a.address[1] + max(a.bytes_per_partition, 1) - 1) // bank
            for number in range(first, last + 1):
                used[number] = used.get(number, 0) + step
                if not used[number]:
                    del used[number]
        if free + len(used) > best:
            best, at = free + len(used), index
    return best, at


def _check_addresses(machine: Machine, placed: list[Allocation], memory: str) -> None:
    """Refuse two placed tensors that share bytes while both are live."""
    placed = sorted(placed, key=lambda a: a.first_index)
    active: list[Allocation] = []
    for a in placed:
        assert a.address is not None
        active = [b for b in active if b.last_index > a.first_index]
        for b in active:
            assert b.address is not None
            bytes_meet = (
                a.address[1] < b.address[1] + b.bytes_per_partition
                and b.address[1] < a.address[1] + a.bytes_per_partition
            )
            partitions_meet = (
                a.address[0] < b.address[0] + b.shape[0]
                and b.address[0] < a.address[0] + a.shape[0]
            )
            if bytes_meet and partitions_meet:
                message = (
                    f"{memory.upper()} tensors {a.name!r} (line {a.line}, address {a.address}, "
                    f"{a.bytes_per_partition} B) and {b.name!r} (line {b.line}, address "
                    f"{b.address}, {b.bytes_per_partition} B) overlap while both are live "
                    f"(instruction {a.first_index}); move one or end its use earlier"
                )
                if machine.strict:
                    instruction = machine.instructions[a.first_index]
                    raise HazardError(message, instruction.file, instruction.line)
                machine.warnings.append(message)
                return
        active.append(a)
