"""The cost of a compute instruction: how long it holds its engine, and when its result is ready.

`(interval, latency)` in microseconds: the engine can start the next instruction after `interval`;
a consumer waits for `latency`. The difference is the fixed pipeline overhead, which back-to-back
independent instructions hide and dependent ones pay. How many cycles an instruction streams is in
its row (`isa/cycles.py`). A trace repeats a few kinds of instructions thousands of times, and the
simulator numbers them while it runs (`Instruction.kind`), so each cost is found once.

A DMA takes its queue the time to issue it, and each DMA engine the time to move its part. It is
split over the 16 DMA engines by SBUF partition, eight to an engine. Each engine walks its
descriptors, one per contiguous run: a fixed time each plus bytes over rate, so short rows waste the
engine. The queue that triggers a DMA takes time for each instruction and, where the device itself
writes the descriptors, for each descriptor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from nmm_compiler.simulator.isa.cycles import one_pass
from nmm_compiler.simulator.isa.names import INSTRUCTIONS
from nmm_compiler.simulator.tensors.geometry import contiguous_run
from nmm_compiler.simulator.timing.compiler import scalar_can
from nmm_compiler.simulator.trace import Access, Instruction
from nmm_compiler.targets import Target

ENGINE_NAMES = {
    "tensor": "TensorE", "vector": "VectorE", "scalar": "ScalarE", "gpsimd": "GpSimd",
    "sync": "SyncE", "dma": "DMA",
}  # fmt: skip
ENGINES = tuple(ENGINE_NAMES)
TENSOR, VECTOR, SCALAR, GPSIMD, SYNC, DMA = range(6)

Cost = tuple[float, float]
_LARGEST_DESCRIPTOR_BYTES = 65536

US = 1e6
"""Microseconds in a second."""
RULES = {op: row.cycles for op, row in sorted(INSTRUCTIONS.items()) if row.cycles is not one_pass}
"""How long an instruction holds its engine, where that is not a pass over its elements."""


def tensor_dtype(instruction: Instruction) -> str:
    """Return the dtype that sets the rate of a product: float32 if an operand is, of any two."""
    dtypes = [access.dtype for access in instruction.reads]
    return "float32" if "float32" in dtypes else dtypes[-1]


def _clock_us(target: Target, engine: str) -> float:
    """Return the microseconds of a cycle of an engine."""
    return US / float(getattr(target, f"{engine}_clock_hz"))


def tensor_cost(target: Target, instruction: Instruction) -> Cost:
    """Return the cost of a matmul or a transpose on TensorE, at full clock.

    MultiplyMoving issues every max(N, 64) cycles; fp32 takes four passes.

    The next LoadStationary runs behind it at up to four times the speed, so it shows only when
    the stationary tile has more than four times the columns of the moving one.
    """
    attributes = instruction.attributes
    columns = max(attributes["n"], target.tensor_min_interval_cycles)
    columns = max(columns, attributes["m"] / target.stationary_load_speedup)
    if tensor_dtype(instruction) == "float32":
        # an operand of ones and zeros needs no low half, nor does what is only moved
        moved = target.tensor_transpose_mode and attributes.get("is_transpose")
        factor = target.fp32_pass_factor / (2.0 if moved or attributes.get("onezero") else 1.0)
        columns = max(columns, target.tensor_fp32_min_columns)
        cycles = factor * columns + target.tensor_fp32_overhead_cycles
    else:
        cycles = columns + target.tensor_interval_overhead_cycles
    interval = cycles * _clock_us(target, "tensor")
    return interval, interval + target.tensor_latency_seconds * US


def other_cost(target: Target, instruction: Instruction, engine: str = "") -> Cost:
    """Return the cost of an instruction of any engine but TensorE.

    engine: where the compiler has placed it, by default where the trace says.
    No instruction issues sooner than 64 cycles after the one before it.
    """
    engine = engine or instruction.engine
    clock = _clock_us(target, "gpsimd" if engine == "sync" else engine)
    if engine == "sync" or not instruction.operands:
        cycles = 0.0
    else:
        rule = RULES.get(instruction.op, one_pass)
        accesses, least = instruction.operands, target.wide_stride_bytes
        most = max(access.elements_per_partition for access in accesses)
        cycles = rule(target, instruction, engine, most)
        if any(a.memory != "hbm" and abs(a.inner_step) >= least for a in accesses):
            cycles *= target.wide_stride_factor
    interval = max(
        cycles + target.engine_streaming_overhead_cycles, float(target.engine_min_cycles)
    )
    latency = max(cycles + _pipeline_cycles(target, instruction, engine), interval)
    return interval * clock, latency * clock


def _pipeline_cycles(target: Target, instruction: Instruction, engine: str) -> float:
    """Return the cycles between the last element and its result.

    Nothing is read for a memset. ScalarE reads each bias and scale tile first, and every function
    but a copy reads a bias, given or not.
    """
    if not instruction.reads:
        return float(target.engine_min_cycles)
    if engine != "scalar":
        return float(target.engine_isolated_overhead_cycles)
    small = sum(a.elements_per_partition == 1 for a in instruction.reads[1:])
    if instruction.attributes.get("function", "copy") not in _COPIES:
        small = max(small, 1)
    return float(target.scalar_isolated_overhead_cycles + small * target.scalar_operand_read_cycles)


_COPIES = frozenset({"copy", "identity", "multiply", "add", ""})


@dataclasses.dataclass(frozen=True, slots=True)
class DmaCost:
    """One transfer.

    shares: (engine, microseconds) of every engine that carries a part.
    uniform_us: the share of each engine when all carry the same, else 0.
    tail_us: from the end of the last engine's work until the data is there; no engine is busy then.
    gpsimd_us: the time of GpSimd to write the descriptors.
    stores: all that it writes is in HBM.
    """

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


def _bytes(accesses: Iterable[Access]) -> int:
    return sum(a.elements_per_partition * a.partitions * a.item_bytes for a in accesses)


def dma_cost(target: Target, instruction: Instruction) -> DmaCost:
    """Return the cost of `instruction` (any op of engine "dma")."""
    attributes = instruction.attributes
    mode, issuer = attributes.get("dge_mode", "unknown"), attributes.get("issuer", "unknown")
    transpose = attributes.get("transpose", False)
    reads = [a for a in instruction.reads if not _is_index(a, instruction)]
    writes = list(instruction.writes)
    hbm_read = _bytes(a for a in reads if a.memory == "hbm")
    hbm_write = _bytes(a for a in writes if a.memory == "hbm")
    moved = max(_bytes(reads), _bytes(writes), 1)
    rate = target.dma_bytes_per_second_per_engine
    if hbm_read or hbm_write:
        passes = 2 if hbm_read and hbm_write else 1
        rate = min(rate, target.hbm_bytes_per_second / target.dma_engines / passes)
    shares = _split(target, reads, writes, transpose)
    total = sum(weight for _, weight in shares)
    if transpose:
        rate *= _transpose_fraction(target, reads, writes)
        run, descriptors = min(moved, _LARGEST_DESCRIPTOR_BYTES), max(1, min(128, moved // 2))
        timed = tuple((engine, moved * weight / total / rate * US) for engine, weight in shares)
    else:
        # rows of one partition end a run on chip
        runs_of = [contiguous_run(a.pattern, a.item_bytes) for a in (*reads, *writes)]
        run = max(1, min(*runs_of, _LARGEST_DESCRIPTOR_BYTES))
        descriptors = -(-moved // run)
        least = target.dma_descriptor_min_seconds
        if mode != "hwdge" and run < target.dma_short_row_bytes:
            least = target.dma_short_row_seconds
        per_run = max(least, target.dma_descriptor_seconds + run / rate)
        timed = tuple(
            (engine, max(1.0, descriptors * weight / total) * per_run * US)
            for engine, weight in shares
        )
    same = len(timed) == target.dma_engines and len({us for _, us in timed}) == 1
    queue, issue = _issue(target, mode, issuer, descriptors)
    largest = max(weight for _, weight in shares) / total
    tail = target.dma_read_latency_fraction * hbm_read * largest
    cost = DmaCost(
        hbm_read_bytes=hbm_read,
        hbm_write_bytes=hbm_write,
        descriptors=descriptors,
        run_bytes=run,
        issue_us=issue * US,
        queue=queue,
        shares=timed,
        uniform_us=timed[0][1] if same else 0.0,
        tail_us=tail / target.dma_bytes_per_second_per_engine * US,
        gpsimd_us=target.dma_software_gpsimd_seconds * US if mode == "swdge" else 0.0,
        stores=all(a.memory == "hbm" for a in writes),
    )
    together = attributes.get("collective_us")
    if together is None:
        return cost
    return dataclasses.replace(  # a queue of its own, for as long as is published
        cost, queue="collectives", issue_us=together, shares=((0, 0.0),),
        uniform_us=0.0, tail_us=0.0, gpsimd_us=0.0,
    )  # fmt: skip


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


# Functions that every activation table holds, so that switching to them loads nothing.
_IN_EVERY_TABLE = frozenset({"copy", "identity", "square", "abs", "relu", ""})


class InstructionTime:
    """One kind of instruction. Times in microseconds.

    first: one of them; count: how many there are in the trace.
    engine: where it runs, as an index of ENGINES: where the trace says, or the compiler puts it.
    interval, latency: as in costs.py.
    table: the activation function whose table it needs, "" for none. dma: the cost of a transfer.
    memories: of its operands. spare: the part of TensorE's rows that a float32 product leaves idle.
    """

    spare = 0.0

    def __init__(self, target: Target, instruction: Instruction) -> None:
        self.first, self.count = instruction, 0
        self.engine = ENGINES.index(instruction.engine)
        prefers = target.unset_engine_prefers_scalar and self.engine == VECTOR
        if prefers and scalar_can(instruction):
            self.engine = SCALAR
        self.interval = self.latency = 0.0
        self.table = ""
        self.dma: DmaCost | None = None
        self.memories = {access.memory for access in instruction.operands}
        if self.engine == DMA:
            self.dma = dma_cost(target, instruction)
        elif self.engine == TENSOR:
            self.interval, self.latency = tensor_cost(target, instruction)
            # probes: float32 products of 64 rows take 1,707 ns, of 128 860; bf16 of 32 do not wait
            if tensor_dtype(instruction) == "float32":
                self.spare = max(0.0, 1.0 - instruction.attributes["k"] / target.partitions)
        else:
            self.interval, self.latency = other_cost(target, instruction, ENGINES[self.engine])
            name = instruction.attributes.get("function", "")
            needs_table = self.engine == SCALAR and instruction.op.startswith("activat")
            if needs_table and name not in _IN_EVERY_TABLE:
                self.table = name
