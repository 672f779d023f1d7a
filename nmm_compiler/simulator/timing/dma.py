"""The cost of a DMA: the time its queue takes to issue it, and each DMA engine to move it.

A transfer is split over the 16 DMA engines by SBUF partition, eight to an engine. Each engine
walks its descriptors, one per contiguous run: a fixed time each plus bytes over rate, so short
rows waste the engine. The queue that triggers a DMA takes time for each instruction and, where the
device itself writes the descriptors, for each descriptor.
"""

from __future__ import annotations

import dataclasses

from nmm_compiler.simulator.tensors.geometry import contiguous_run
from nmm_compiler.simulator.timing.resources import Slots
from nmm_compiler.simulator.trace import Access, Instruction
from nmm_compiler.targets import Target

_LARGEST_DESCRIPTOR_BYTES = 65536
_US = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class DmaCost:
    """One transfer.

    shares: (engine, microseconds) of every engine that carries a part.
    uniform_us: the share of each engine when all carry the same, else 0.
    tail_us: from the end of the last engine's work until the data is there; no engine is busy then.
    gpsimd_us: the time of GpSimd to write the descriptors.
    stores: all that it writes is in HBM.
    """

    read_bytes: int
    write_bytes: int
    hbm_read_bytes: int
    hbm_write_bytes: int
    descriptors: int
    run_bytes: int
    issue_us: float
    queue: str
    shares: tuple[tuple[int, float], ...]
    uniform_us: float
    tail_us: float
    gpsimd_us: float
    stores: bool


def _bytes(access: Access) -> int:
    return access.elements_per_partition * access.partitions * access.item_bytes


def dma_cost(target: Target, instruction: Instruction) -> DmaCost:
    """Return the cost of `instruction` (any op of engine "dma")."""
    attributes = instruction.attributes
    mode, issuer = attributes.get("dge_mode", "unknown"), attributes.get("issuer", "unknown")
    transpose = attributes.get("transpose", False)
    reads = [a for a in instruction.reads if not _is_index(a, instruction)]
    writes = list(instruction.writes)
    read_bytes = sum(_bytes(a) for a in reads)
    write_bytes = sum(_bytes(a) for a in writes)
    hbm_read = sum(_bytes(a) for a in reads if a.memory == "hbm")
    hbm_write = sum(_bytes(a) for a in writes if a.memory == "hbm")
    moved = max(read_bytes, write_bytes, 1)
    # rows of one partition end a run on chip
    runs_of = [contiguous_run(a.pattern, a.item_bytes) for a in (*reads, *writes)]
    run = max(1, min(*runs_of, _LARGEST_DESCRIPTOR_BYTES))
    descriptors = max(1, -(-moved // run))
    rate = target.dma_bytes_per_second_per_engine
    if hbm_read or hbm_write:
        passes = 2 if hbm_read and hbm_write else 1
        rate = min(rate, target.hbm_bytes_per_second / target.dma_engines / passes)
    if transpose:
        rate *= _transpose_fraction(target, reads, writes)
        each = 0.0
        run = min(moved, _LARGEST_DESCRIPTOR_BYTES)
        descriptors = max(1, min(128, moved // 2))
    else:
        each = target.dma_descriptor_seconds
    software = mode != "hwdge"
    least = target.dma_descriptor_min_seconds
    if software and not transpose and run < target.dma_short_row_bytes:
        least = target.dma_short_row_seconds
    per_run = max(least, each + run / rate)
    runs = -(-moved // run)
    shares = _split(target, reads, writes, transpose)
    total = sum(weight for _, weight in shares)
    timed = tuple(
        (engine, max(1.0, runs * weight / total) * per_run * _US)
        if not transpose
        else (engine, moved * weight / total / rate * _US)
        for engine, weight in shares
    )
    same = len(timed) == target.dma_engines and len({us for _, us in timed}) == 1
    queue, issue = _issue(target, mode, issuer, descriptors)
    largest = max(weight for _, weight in shares) / total
    tail = target.dma_read_latency_fraction * hbm_read * largest
    by_gpsimd = mode == "swdge"
    cost = DmaCost(
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        hbm_read_bytes=hbm_read,
        hbm_write_bytes=hbm_write,
        descriptors=descriptors,
        run_bytes=run,
        issue_us=issue * _US,
        queue=queue,
        shares=timed,
        uniform_us=timed[0][1] if same else 0.0,
        tail_us=tail / target.dma_bytes_per_second_per_engine * _US,
        gpsimd_us=target.dma_software_gpsimd_seconds * _US if by_gpsimd else 0.0,
        stores=all(a.memory == "hbm" for a in writes),
    )
    together = attributes.get("collective_us")
    if together is not None:  # a queue of its own, for as long as is published
        cost = dataclasses.replace(
            cost, queue="collectives", issue_us=together, shares=((0, 0.0),),
            uniform_us=0.0, tail_us=0.0, gpsimd_us=0.0,
        )  # fmt: skip
    return cost


def _issue(target: Target, mode: str, issuer: str, descriptors: int) -> tuple[str, float]:
    """Return the resource that issues and the seconds it needs.

    nki-dge: a core of trn2 has two hardware generators, triggered by the scalar and the sync
    engine; GpSimd writes descriptors; others are made before the run and read from HBM.
    `dge_mode.unknown` shares GpSimd's path: profiles of AWS's kernel of all modes lack the same
    records for it and for swdge.
    """
    if mode == "hwdge":
        queue = issuer if issuer in ("scalar", "sync") else "sync"
        return f"hwdge-{queue}", target.dma_hardware_issue_seconds
    if mode == "none" or not target.dma_generates_descriptors:
        return "static", target.dma_static_issue_seconds
    each = target.dma_issue_descriptor_seconds
    return "software", target.dma_issue_seconds + descriptors * each


def _transpose_fraction(target: Target, reads: list[Access], writes: list[Access]) -> float:
    """Return the part of the copy rate that a DMA transpose reaches."""
    on_chip = all(a.memory == "sbuf" for a in reads)
    fraction = target.dma_transpose_sbuf_fraction if on_chip else target.dma_transpose_fraction
    if any(a.item_bytes != 2 for a in writes):
        fraction = min(fraction, target.dma_transpose_wide_fraction)
    out = writes[0]
    fraction *= min(1.0, out.partitions / target.partitions)
    inner = next((count for _, count in reversed(out.pattern) if count > 1), 1)
    return fraction if inner % 16 == 0 else fraction * inner / (16 * -(-inner // 16))


def _is_index(access: Access, instruction: Instruction) -> bool:
    """Return whether `access` is a runtime index, one or one per row, and not moved data."""
    one = access.elements_per_partition == 1 and access.partitions == 1
    return (
        (one or bool(instruction.attributes.get("indirect")))
        and access is not instruction.reads[0]
        and access.memory == "sbuf"
        and access.dtype in ("int32", "uint32")
    )


def _split(
    target: Target, reads: list[Access], writes: list[Access], transpose: bool
) -> list[tuple[int, float]]:
    """Return (engine, weight): by partition of the on-chip side, else evenly."""
    engines = target.dma_engines
    chip = [a for a in (*writes, *reads) if a.memory != "hbm"]
    if transpose or not chip:
        return [(engine, 1.0) for engine in range(engines)]
    per_engine = target.partitions // engines
    start, stop = chip[0].partition_start, chip[0].partition_stop
    first, last = start // per_engine, (stop - 1) // per_engine
    return [
        (
            engine % engines,
            float(min(stop, (engine + 1) * per_engine) - max(start, engine * per_engine)),
        )
        for engine in range(first, last + 1)
    ]


Part = tuple[int, float, float, int]
"""What a DMA engine carries of a transfer: engine, start, end, and the transfer that it carried
before if the part waited for that, else -1."""


def stagger_us(target: Target) -> float:
    """Return by how much each DMA engine starts later than the one before."""
    return target.dma_stagger_seconds * _US / max(1, target.dma_engines - 1)


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
