"""The work of the engines in a schedule, in counts that `codegen.cost` turns into time."""

from __future__ import annotations

import dataclasses
from typing import Any

from nmm_compiler.kernels.tiling import by_tensor, tiles
from nmm_compiler.records import Record

Passes = tuple[int, int]
"""The number of passes, and the columns of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work(Record):
    """The work of the engines in one schedule.

    matmuls: (count, moving columns) of TensorE passes. wide_matmuls: those with fp32 operands in a
    kernel whose other operands are narrower. evictions: (count, columns) of PSUM reads, by VectorE
    and ScalarE in turn. dmas: (count, bytes each, contiguous bytes, kind), kind "copy" or
    "transpose". lead_bytes: bytes that must arrive before the first matmul. tail_matmuls: (count,
    columns) left when the last bytes are in. tail_bytes: the last store. late_matmuls: those of
    stage 2, which waits for the loads of stage 1, early_bytes. chained_matmuls: passes that each
    add to the sum of the pass before, with no other sum to turn to.
    """

    matmuls: tuple[Passes, ...]
    evictions: tuple[Passes, ...]
    dmas: tuple[tuple[int, int, int, str], ...]
    lead_bytes: int
    tail_matmuls: Passes
    tail_bytes: int
    early_bytes: int = 0
    late_matmuls: tuple[Passes, ...] = ()
    wide_matmuls: tuple[Passes, ...] = ()
    chained_matmuls: tuple[Passes, ...] = ()

    @property
    def instructions(self) -> int:
        """All instructions of the kernel."""
        passes = (*self.matmuls, *self.wide_matmuls, *self.chained_matmuls, *self.evictions)
        return sum(count for count, _ in passes) + sum(dma[0] for dma in self.dmas)


class Tally:
    """Adds up the work of a kernel."""

    def __init__(self) -> None:
        self.matmuls: list[Passes] = []
        self.wide_matmuls: list[Passes] = []
        self.chained_matmuls: list[Passes] = []
        self.evictions: list[Passes] = []
        self.dmas: list[tuple[int, int, int, str]] = []

    def load(
        self, how: str, total: int, count: int, run: int, turned: tuple[int, int, int]
    ) -> None:
        """Add the loads of an operand: `total` bytes in `count` DMAs of contiguous `run` bytes.

        turned: for transposes on TensorE instead: squares of 128 x 128, DMAs, and their run.
        """
        if by_tensor(how):
            squares, count, run = turned
            self.matmuls.append((squares, 128))
            self.evictions.append((tiles(squares, 4), 512))
        kind = "transpose" if how == "dma" else "copy"
        self.dmas.append((count, total // count, run, kind))

    def store(self, total: int, count: int, run: int) -> None:
        """Add the stores of a result: `total` bytes in `count` DMAs of contiguous `run` bytes."""
        self.dmas.append((count, total // count, run, "copy"))

    def work(self, **rest: Any) -> Work:
        """Return the work; rest: the fields that are no sums."""
        return Work(
            matmuls=tuple(self.matmuls),
            wide_matmuls=tuple(self.wide_matmuls),
            chained_matmuls=tuple(self.chained_matmuls),
            evictions=tuple(self.evictions),
            dmas=tuple(self.dmas),
            **rest,
        )
