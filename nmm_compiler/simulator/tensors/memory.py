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
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, OnChipCapacityError, OperandError
from nmm_compiler.simulator.machine import Machine, kernel_frame
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.trace import Access, Allocation

_SHOWN = 12  # live tensors that a message names


class Storage:
    """One allocation in HBM, SBUF or PSUM.

    accesses: of its views, by their geometry and where they begin.
    raw: the bytes (None in timing mode). line: the kernel's line that allocates it, if known.
    unwritten: marks of the bytes that were never written, or depend on such, `left` of them; None
        when there are none. origin: of dependent ones, which unwritten elements were read, where.
    writers: marks of who wrote each byte of PSUM last.
    shared: several programs use it, with data.
    """

    def __init__(
        self,
        machine: Machine,
        name: str,
        region: Any,
        memory: str,
        shape: tuple[int, ...],
        dtype: DType,
        address: tuple[int, int] | None = None,
        raw: Any = None,
        line: int = -1,
    ) -> None:
        self.accesses: dict[Any, Access] = {}
        self.name = name
        self.region = region
        self.memory = memory
        self.shape = shape
        self.dtype = dtype
        self.address = address
        self.constant = self.is_input = False
        self.shared = machine.data and machine.grid > 1 and region.name == "shared_hbm"
        self.unwritten: np.ndarray | None = None
        row = math.prod(shape if memory == "hbm" else shape[1:]) * dtype.item_bytes
        self.bytes_per_partition = row
        self.raw, self.origin, self.left = raw, "", 0
        if machine.data and raw is None:
            self.left = math.prod(shape) * dtype.item_bytes
            self.raw, self.unwritten = np.empty(self.left, np.uint8), np.ones(self.left, np.bool_)
            if memory == "psum":
                self.writers = np.zeros(self.left, np.uint8)
        self.identity = identity = machine.new_identity()
        self.allocation = machine.trace.allocations[identity] = Allocation(
            name, memory, shape, dtype, row, -1, -1,
            kernel_frame()[1] if line < 0 else line, address,
        )  # fmt: skip


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
    machine.need(
        partitions + start_partition <= target.partitions,
        f"tensor {storage.name!r} {storage.shape} takes partitions {start_partition}.."
        f"{start_partition + partitions - 1}, {target.name} has {target.partitions}; the first "
        "dimension is the partition dimension, tile it",
        OperandError,
    )
    if storage.memory == "sbuf":
        limit, what = target.sbuf_bytes_per_partition, "SBUF"
    else:
        limit, what = target.psum_banks * target.psum_bank_bytes_per_partition, "PSUM"
    at = f" at address {storage.address}" if storage.address else ""
    machine.need(
        0 <= start <= limit - size,
        f"tensor {storage.name!r} {storage.shape} {storage.dtype}{at} needs {start + size:,} "
        f"B per {what} partition, {target.name} has {limit:,}; make the tile smaller",
        OnChipCapacityError,
    )
    bank = target.psum_bank_bytes_per_partition
    machine.need(
        storage.memory == "sbuf" or not start % bank or start // bank == (start + size - 1) // bank,
        f"PSUM tensor {storage.name!r} at byte {start} crosses a bank of {bank} B; start it on "
        "a bank boundary",
        OnChipCapacityError,
    )


def _peak(tensors: list[Allocation], sizes: list[int]) -> tuple[int, int]:
    """Return (largest sum of sizes live at once, an instruction where it is reached)."""
    if not tensors:
        return 0, 0
    ends = np.asarray([a.last_index for a in tensors]) + 1
    count = int(ends.max()) + 1
    # sums of whole numbers below 2**53, so exact
    begun = np.bincount([a.first_index for a in tensors], sizes, count)
    live = np.cumsum(begun - np.bincount(ends, sizes, count))
    at = int(live.argmax())
    return int(live[at]), at


def _quarters(a: Allocation) -> int:
    """Return the least area that a tensor takes of SBUF in quarters of its partitions.

    A tensor of up to 32 partitions starts at any quarter, one of up to 64 at either half
    (trainium_inferentia2_arch: start_partition), so the compiler can place two of 64 rows at the
    same bytes. Adding up areas says what certainly does not fit.
    """
    return a.bytes_per_partition * (1 if a.shape[0] <= 32 else 2 if a.shape[0] <= 64 else 4)


def check_capacity(machine: Machine) -> None:
    """Compute peak SBUF bytes and PSUM banks over live ranges; refuse an overflow.

    SBUF is added up per partition as if every tensor started at partition 0. A sum that exceeds it
    is only a warning if tensors of few partitions can lie beside each other. Where all tensors have
    addresses, the last of those counts.
    """
    target, trace = machine.target, machine.trace
    bank = target.psum_bank_bytes_per_partition
    peaks = []
    for memory, limit, step, unit, what in (
        ("sbuf", target.sbuf_usable_bytes_per_partition, 1, "B", "SBUF bytes per partition"),
        ("psum", target.psum_banks, bank, "bank(s)", "PSUM banks"),
    ):
        tensors = [
            a for a in trace.allocations.values() if a.memory == memory and a.first_index >= 0
        ]
        sizes = [-(-a.bytes_per_partition // step) for a in tensors]
        peak, at = _peak(tensors, sizes)
        ends = [a.address[1] + a.bytes_per_partition for a in tensors if a.address is not None]
        _check_addresses(machine, [a for a in tensors if a.address is not None], memory)
        if len(ends) == len(tensors):
            peak = -(-max(ends, default=0) // step)
        peaks.append(peak)
        if peak > limit and len(ends) < len(tensors):
            says = f"{peak:,} {what} are live at once at instruction {at}, {target.name} has "
            place = machine.instructions[at].file, machine.instructions[at].line
            if memory == "sbuf" and _peak(tensors, [*map(_quarters, tensors)])[0] <= 4 * limit:
                machine.warn(
                    f"{says}{limit:,}; they fit only if the compiler places tensors of at most 64 "
                    "partitions beside each other",
                    place,
                )
                continue
            says += f"{limit:,}; use smaller or fewer tiles. Live tensors:\n"
            live = [
                (size, a)
                for size, a in zip(sizes, tensors, strict=True)
                if a.first_index <= at <= a.last_index
            ]
            says += _listed(live, unit)
            if machine.dialect is not None:
                # Beta 1's compiler "inserts ... spills or refills" (programming model, 2.26)
                machine.warn(says, place)
            else:
                machine.rule(OnChipCapacityError, says, place)
    trace.sbuf_peak_bytes, trace.psum_peak_banks = peaks


def _listed(live: list[tuple[int, Allocation]], unit: str) -> str:
    """Return a line for each of the largest tensors, and one for the others."""
    ordered = sorted(live, key=lambda sized: -sized[0])
    shown = [
        f"  {a.name} {a.shape} {a.dtype}: {size:,} {unit}, allocated on line {a.line}, live "
        f"in instructions {a.first_index}..{a.last_index}"
        for size, a in ordered[:_SHOWN]
    ]
    rest = [size for size, _ in ordered[_SHOWN:]]
    if rest:
        shown.append(f"  and {len(rest)} more, {sum(rest):,} {unit} together")
    return "\n".join(shown)


def _check_addresses(machine: Machine, placed: list[Allocation], memory: str) -> None:
    """Refuse two placed tensors that share bytes while both are live."""
    active: list[Allocation] = []
    for a in sorted(placed, key=lambda a: a.first_index):
        active = [b for b in active if b.last_index > a.first_index]
        for b in active:
            (row, byte), (other_row, other_byte) = a.address or (0, 0), b.address or (0, 0)
            if (
                byte < other_byte + b.bytes_per_partition
                and other_byte < byte + a.bytes_per_partition
                and row < other_row + b.shape[0]
                and other_row < row + a.shape[0]
            ):
                message = (
                    f"{memory.upper()} tensors {a.name!r} (line {a.line}, address {a.address}, "
                    f"{a.bytes_per_partition} B) and {b.name!r} (line {b.line}, address "
                    f"{b.address}, {b.bytes_per_partition} B) overlap while both are live "
                    f"(instruction {a.first_index}); move one or end its use earlier"
                )
                first = machine.instructions[a.first_index]
                machine.rule(HazardError, message, (first.file, first.line))
                return
        active.append(a)
