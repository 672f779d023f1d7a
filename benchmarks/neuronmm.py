"""The paper's own kernels, unmodified, beside dense ones and ours: `make bench-neuronmm`.

    python benchmarks/kernels.py --tables neuronmm --targets trn1 --checkout NeuronMM
        [--models Llama-3.2-1B] [--m 1,512] [--only up]

A table of kernels.py: for the up (gate has its shape) and down projections of six models at 1 to
4,096 tokens, simulated latency in us of

    shipped   NeuronMM's kernel with the block sizes that its authors choose by token count
    tuned     the same with the block sizes that `Rival.fastest` finds
    tutorial  AWS's fully optimized matmul (as NeuronMM's file has it), tuned alike, dense
    dense     this project's strongest dense kernel

beside this project's low-rank kernel. Loads of other people's kernels that repeat are charged once
where SBUF can keep them, the faster of two bounds (reused_loads.py). Nothing is measured, and
nothing but time is simulated.

Block sizes are divisors of the tiles of their dimension, 2 and 4: a block that does not divide the
rank multiplies padding. From two starts, one size at a time moves to the value next to it that is
faster, until none is. Above 1,024 tokens only the five block sizes that are best at 1,024 are timed
(dense: 2,048), and at 4,096 the two of them that are best at 2,048. No block holds more tokens than
that: with more of them a kernel repeats its loop over blocks of tokens. This is an argument, not a
proof: a sixth could win by its first loads.

The kernels come from a clone of github.com/dinghongsong/NeuronMM. Every simulated time is kept in
out/kernel_times.jsonl, where a run that was interrupted goes on.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from beta1_kernels import LOW_RANK, TUTORIAL, unpacked
from kernel_timings import Timings, digest, rooms
from reused_loads import without_repeated_loads

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.simulator.timing.schedule import time_trace

# How many block sizes are timed at twice, and at four times, the tokens of the largest block.
SHORTLIST = (5, 2)
# Tokens of the largest block in each grid: more of them repeat the outermost loop.
LARGEST_BLOCK = {LOW_RANK: 1024, TUTORIAL: 2048}
# Kernel -> (block size, rows of a tile, the dimension that it cuts, the largest block in tiles).
SIZES = {
    LOW_RANK: (
        ("M_tiles_in_block", 128, "k", 16), ("r_tiles_in_block", 128, "r", 20),
        ("K_tiles_in_block", 128, "m", 8), ("N_tiles_in_block", 512, "n", 8),
    ),
    TUTORIAL: (
        ("TILES_IN_BLOCK_M", 128, "m", 16), ("TILES_IN_BLOCK_N", 512, "n", 8),
        ("TILES_IN_BLOCK_K", 128, "k", 16),
    ),
}  # fmt: skip
Blocks = tuple[int, ...]
# What is divided by ours: the faster of these.
RATIOS = {
    "over the strongest dense kernel": ("tutorial", "dense"),
    "over the paper's kernel, tuned": ("tuned",),
    "over the paper's kernel, its authors' fixed blocks": ("shipped",),
}


def judge(spec: LowRankSpec, timings: Timings) -> tuple[dict[str, float], list[str]]:
    """Return the times of the other kernels that run, and what they are over ours."""
    file = _file(timings.checkout)
    chain, dense = (Rival(timings, file, kernel, spec) for kernel in (LOW_RANK, TUTORIAL))
    blocks = [chain.shipped()]
    matmul = MatmulSpec(m=spec.m, k=spec.k, n=spec.n, x_layout="col")
    found = {
        "shipped": chain.latency(spec.m, blocks[0]),
        "tuned": chain.latency(spec.m, chain.fastest(blocks)),
        "tutorial": dense.latency(spec.m, dense.fastest([])),
        "dense": timings.us(matmul),
    }
    us = {name: time for name, time in found.items() if time is not None}
    return us | ratios(us, timings.us(spec)), []


def ratios(us: dict[str, float], ours: float) -> dict[str, float]:
    """Return latencies over ours, of RATIOS whose kernels all run."""
    return {
        name: min(us[way] for way in ways) / ours
        for name, ways in RATIOS.items() if us.keys() >= set(ways)
    }  # fmt: skip


@functools.cache
def _file(checkout: Path | None) -> Path:
    """Return the file of the paper's kernels, of the last commit of a clone."""
    if checkout is None:
        raise SystemExit(
            "git clone https://github.com/dinghongsong/NeuronMM and pass --checkout NeuronMM"
        )
    return unpacked(checkout, "HEAD", "test_speedup.py") / "test_speedup.py"


@dataclass(frozen=True)
class Rival:
    """Somebody else's kernel for the sizes of a low-rank projection; each time is kept."""

    timings: Timings
    file: Path
    kernel: str
    spec: LowRankSpec

    def shipped(self) -> Blocks:
        """Return the block sizes that its authors choose."""
        chosen = getattr(load_file(self.file), f"get_{self.kernel}_params")(self.spec.m)
        return tuple(chosen[name] for name, *_ in SIZES[self.kernel])

    def values(self, m: int) -> list[list[int]]:
        """Return the values of each block size, in tiles: divisors of its dimension, 2 and 4."""
        lengths = {"k": self.spec.k, "r": self.spec.r, "n": self.spec.n, "m": m}
        found = []
        for _, tile, dimension, largest in SIZES[self.kernel]:
            tiles = -(-lengths[dimension] // tile)
            most = min(largest, tiles)
            found.append([v for v in range(1, most + 1) if v in (2, 4) or tiles % v == 0])
        return found

    def fastest(self, shipped: list[Blocks]) -> Blocks:
        """Return the best block sizes that a descent meets.

        shipped: sizes to start from too, beside the largest up to 4.
        """
        tokens = min(self.spec.m, LARGEST_BLOCK[self.kernel])
        choices = self.values(tokens)
        tried: dict[Blocks, float] = {}

        def us(blocks: Blocks) -> float:
            tried[blocks] = self.latency(tokens, blocks) or math.inf
            return tried[blocks]

        for start in [tuple(max(v for v in given if v <= 4) for given in choices), *shipped]:
            best, before = start, None
            while best != before:
                before = best
                for place, given in enumerate(choices):
                    less = [v for v in given if v < best[place]][-1:]
                    more = [v for v in given if v > best[place]][:1]
                    near = [(*best[:place], v, *best[place + 1 :]) for v in less + more]
                    best = min([best, *near], key=us)
        for count in SHORTLIST:
            if tokens >= self.spec.m:
                break
            kept = sorted(tried, key=lambda blocks: tried[blocks])[:count]
            tokens = min(self.spec.m, 2 * tokens)
            tried = {blocks: self.latency(tokens, blocks) or math.inf for blocks in kept}
        return min(tried, key=lambda blocks: tried[blocks])

    def latency(self, m: int, blocks: Blocks) -> float | None:
        """Return the simulated latency in us; None when SBUF does not hold the blocks."""
        k, r, n = self.spec.k, self.spec.r, self.spec.n
        shapes = [(k, m), (k, n)] if self.kernel == TUTORIAL else [(k, m), (k, r), (r, n)]
        target = self.timings.target
        named = dict(zip((name for name, *_ in SIZES[self.kernel]), blocks, strict=True))

        def run() -> float | None:
            arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
            try:
                written = simulate(f"{self.file}:{self.kernel}", *arrays, target=target,
                                   mode="timing", named=named)  # fmt: skip
            except NmmError as error:
                print(f"{self.kernel} {shapes} {blocks}: {error}"[:300], file=sys.stderr)
                return None
            line = time_trace(without_repeated_loads(written.trace, target), target)
            return None if line.sbuf_overflow_bytes else line.latency_us

        key = digest(rooms(), target.name, self.kernel, shapes, blocks, "reused")
        return self.timings.of(key, run)  # type: ignore[no-any-return]
