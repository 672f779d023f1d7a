"""The trace: the simulator records it while it runs a kernel, and the timing pass reads it.

A trace is the list of executed instructions in program order, with the exact regions each one
reads and writes, plus the on-chip allocations. It holds no data, so a trace made without data
(timing mode) is the same as one made with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Access:
    """A region of operands of instructions; all views of it in a trace share the record.

    storage: identity of the allocation; all views of a tensor share it.
    memory: "sbuf", "psum" or "hbm".
    partition_start, partition_stop: partitions touched (0, 1 in HBM).
    byte_start, byte_stop: bounding byte range, inside each partition on chip, from the start of
        the tensor in HBM.
    pattern: ((step_bytes, count), ...) of the free dimensions, outermost first, that walks exactly
        the elements of the region from byte_start; in HBM all dimensions.
    dense: the region is every byte of the range, in each partition; False if nobody has looked.
    """

    storage: int
    memory: str
    partition_start: int
    partition_stop: int
    byte_start: int
    byte_stop: int
    pattern: tuple[tuple[int, int], ...]
    dtype: str
    item_bytes: int
    dense: bool = field(default=False, repr=False, compare=False)

    @property
    def partitions(self) -> int:
        """Number of partitions touched."""
        return self.partition_stop - self.partition_start

    @property
    def elements_per_partition(self) -> int:
        """Elements in each partition (in HBM: in the whole region)."""
        return math.prod([count for _, count in self.pattern])

    @property
    def inner_step(self) -> int:
        """Bytes from an element to the next along the innermost dimension of several."""
        return next((s for s, n in reversed(self.pattern) if n > 1), self.item_bytes)


@dataclass(slots=True)
class Instruction:
    """One executed instruction.

    engine: "tensor", "vector", "scalar", "gpsimd", "sync" or "dma".
    attributes: what the cost of this op depends on beyond its regions, e.g. for nc_matmul
        {"k", "m", "n", "is_transpose", "perf_mode"}; for activation {"function", "reduces"};
        for dma_copy {"issuer", "dge_mode", "transpose"}.
    line, file: the kernel's own source line.
    after: instructions this one waits for beyond its data dependencies.
    kind: equal for instructions with the same op, engine and attributes and operands of the same
        geometry, wherever those begin in HBM or SBUF; 0 if nobody has compared them.
    index: its place in the trace.
    """

    op: str
    engine: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    attributes: dict[str, Any]
    file: str
    line: int
    name: str = ""
    after: tuple[Instruction, ...] = ()
    kind: int = field(default=0, repr=False, compare=False)
    index: int = field(default=-1, repr=False, compare=False)

    @property
    def operands(self) -> tuple[Access, ...]:
        """What it reads, then what it writes."""
        return self.reads + self.writes

    def depends_on(self, *producers: Instruction) -> Instruction:
        """Let this instruction wait for `producers`; returns itself (nki.isa.NkiInstruction)."""
        self.after = self.after + producers
        return self


@dataclass(slots=True)
class Allocation:
    """One tensor: HBM, or on chip with its live range in instruction indices.

    bytes_per_partition: on chip; whole size in bytes in HBM.
    address: (partition, byte) of a manual placement.
    last_write: index of the last instruction that writes it, -1 for none.
    """

    name: str
    memory: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_partition: int
    first_index: int
    last_index: int
    line: int
    address: tuple[int, int] | None = None
    last_write: int = -1


@dataclass(slots=True)
class Trace:
    """A whole run of one program (one core).

    sbuf_peak_bytes: largest sum, per partition, of SBUF tensors live at the same time.
    psum_peak_banks: largest number of PSUM banks in use at the same time.
    ordered: (first, stop) instruction ranges that keep program order (nl.no_reorder).
    turns: (first, stop, made, repeats) of each turn of a loop on the device: its instructions, the
        identities of the tensors that it makes, which end with it, and whether it repeats the first
        turn: the program that the compiler makes holds its instructions once. No instruction is
        moved across either edge.
    awaited: storages of right operands of Beta 1's nl.matmul, where that transposes the left one.
    """

    instructions: list[Instruction] = field(default_factory=list)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    sbuf_peak_bytes: int = 0
    psum_peak_banks: int = 0
    ordered: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[int, int, range, bool]] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)

    @property
    def program_instructions(self) -> int:
        """Instructions of the compiled program: the body of a loop on the device counts once."""
        again = [range(first, stop) for first, stop, _, repeats in self.turns if repeats]
        return len(self.instructions) - len(set().union(*again))
