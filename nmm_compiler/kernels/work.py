"""The work of the engines in a schedule, in counts that `codegen.cost` turns into time."""

from __future__ import annotations

import dataclasses

from nmm_compiler.kernels.tiling import tiles

Passes = tuple[int, int]
"""The number of passes, and the columns of each."""


@dataclasses.dataclass
class Work:
    """The work of the engines in one schedule, added up by a walk over the kernel's operands.

    lead_bytes: that must arrive before the first matmul. lead_passes: passes of VectorE that it
    waits for, too. tail_matmuls: (count, columns) left when the last bytes are in. tail_bytes: that
    no work hides: the last store, and what two cores exchange. hops: engines that wait for another
    one, one after the other, from the first load to the last store.

    matmuls: (count, moving columns) of TensorE passes. evictions: (count, columns) of PSUM reads,
    by VectorE and ScalarE in turn. dmas: (count, bytes each, contiguous bytes, kind), kind "copy"
    or "transpose".
    """

    lead_bytes: int
    tail_matmuls: Passes
    tail_bytes: int
    lead_passes: Passes = (0, 0)
    hops: int = 0
    matmuls: list[Passes] = dataclasses.field(default_factory=list)
    evictions: list[Passes] = dataclasses.field(default_factory=list)
    dmas: list[tuple[int, int, int, str]] = dataclasses.field(default_factory=list)

    @property
    def instructions(self) -> int:
        """All instructions of the kernel."""
        passes = sum(count for count, _ in (*self.matmuls, *self.evictions))
        return passes + sum(dma[0] for dma in self.dmas)

    def load(
        self, how: str, total: int, count: int, run: int, turned: tuple[int, int, int]
    ) -> None:
        """Add the loads of an operand: `total` bytes in `count` DMAs of contiguous `run` bytes.

        turned: for transposes on TensorE instead: squares of 128 x 128, DMAs, and their run.
        """
        if how.startswith("tensor"):
            squares, count, run = turned
            self.matmuls.append((squares, 128))
            self.evictions.append((tiles(squares, 4), 512))
        self.move(
            total, count, run, {"dma": "transpose", "short_rows": "hardware"}.get(how, "copy")
        )

    def move(self, total: int, count: int, run: int, kind: str = "copy") -> None:
        """Add `total` bytes in `count` DMAs of contiguous `run` bytes."""
        self.dmas.append((count, total // count, run, kind))
