"""`make bench-neuronmm`: the paper's own kernels, unmodified, against dense kernels and ours.

For the up (gate has its shape) and down projections of six models at 1 to 4,096 tokens, simulated
latency in us of

    shipped   NeuronMM's kernel with the block sizes that its authors choose by token count
    tuned     the same with the block sizes that `fastest` finds
    tutorial  AWS's fully optimized matmul (as NeuronMM's file has it), tuned alike, dense
    dense     this project's strongest dense kernel
    ours      this project's low-rank kernel

Loads of other people's kernels that repeat are charged once where SBUF can keep them, the faster of
two bounds (reused_loads.py).
Nothing is measured, and nothing but time is simulated.

Block sizes are divisors of the tiles of their dimension, 2 and 4: a block that does not divide the
rank multiplies padding. From two starts, one size at a time moves to the value next to it that is
faster, until none is. Above 1,024 tokens only the five block sizes that are best at 1,024 are timed
(dense: 2,048), and at 4,096 the two of them that are best at 2,048. No block holds more tokens than
that: with more of them a kernel repeats its loop over blocks of tokens. This is an argument, not a
proof: a sixth could win by its first loads.

The kernels come from a clone of github.com/dinghongsong/NeuronMM, ./NeuronMM unless --checkout says
otherwise. Every simulated time is kept in out/kernel_times.jsonl, where a run that was
interrupted goes on.

Usage: python benchmarks/neuronmm.py [--checkout DIR] [--models Llama-3.2-1B] [--m 1,512]
       [--parts up,down] [--workers 2] [--target trn1]
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from beta1_kernels import unpacked
from kernel_timings import FILE, digest, rooms, timings_of
from model_sizes import MODELS, rank
from reused_loads import without_repeated_loads
from rich.console import Console
from rich.table import Table

from nmm_compiler import targets
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.simulator.timing.timeline import time_trace

PARTS = ("up", "down")
TOKENS = (1, 128, 512, 1024, 2048, 4096)
# How many block sizes are timed at twice, and at four times, the tokens of the largest block.
SHORTLIST = (5, 2)
# Tokens of the largest block in each grid: more of them repeat the outermost loop.
LARGEST_BLOCK = {"fused_three_mm_XTUV": 1024, "nki_matmul_fully_optimized_": 2048}
CLONE = "git clone https://github.com/dinghongsong/NeuronMM"
# Kernel -> (block size, rows of a tile, the dimension that it cuts, the largest block in tiles).
SIZES = {
    "fused_three_mm_XTUV": (
        ("M_tiles_in_block", 128, "k", 16), ("r_tiles_in_block", 128, "r", 20),
        ("K_tiles_in_block", 128, "m", 8), ("N_tiles_in_block", 512, "n", 8),
    ),
    "nki_matmul_fully_optimized_": (
        ("TILES_IN_BLOCK_M", 128, "m", 16), ("TILES_IN_BLOCK_N", 512, "n", 8),
        ("TILES_IN_BLOCK_K", 128, "k", 16),
    ),
}  # fmt: skip
Blocks = tuple[int, ...]
HOW = ("shipped", "tuned", "tutorial", "dense", "ours")
# What is divided by ours: the faster of these.
RATIOS = {
    "the strongest dense kernel": ("tutorial", "dense"),
    "the paper's kernel, tuned": ("tuned",),
    "the paper's kernel, its authors' fixed blocks": ("shipped",),
}


@dataclass(frozen=True)
class Job:
    """One figure: a way to compute a projection of a model for m tokens. Models share some."""

    file: str
    target: str
    model: str
    part: str
    m: int
    how: str

    @property
    def kernel(self) -> str:
        """The name of somebody else's kernel, or of a family of ours."""
        ours = {"tutorial": "nki_matmul_fully_optimized_", "dense": "matmul", "ours": "lowrank"}
        return ours.get(self.how, "fused_three_mm_XTUV")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(input features, rank, output features)."""
        k, n = MODELS[self.model].mlp(self.part)
        return k, rank(k, n), n


def simulated(job: Job) -> float | None:
    """Return the latency of a job in us; None where no block sizes run."""
    m = job.m
    k, r, n = job.sizes
    if job.how in ("ours", "dense"):
        low = LowRankSpec(m=m, k=k, r=r, n=n, x_layout="col")
        spec = low if job.how == "ours" else MatmulSpec(m=m, k=k, n=n, x_layout="col")
        return timings_of(FILE).us(spec, job.target)
    clock = Clock(job)
    shipped: list[Blocks] = []
    if job.how != "tutorial":
        chosen = getattr(load_file(Path(job.file)), f"get_{job.kernel}_params")(m)
        shipped = [tuple(chosen[name] for name, *_ in SIZES[job.kernel])]
    found = shipped if job.how == "shipped" else fastest(clock, m, shipped)
    return min((us for one in found if (us := clock.latency(m, one)) is not None), default=None)


def values(job: Job, m: int) -> list[list[int]]:
    """Return the values of each block size, in tiles: divisors of its dimension, and 2 and 4."""
    lengths = dict(zip("krn", job.sizes, strict=True), m=m)
    found = []
    for _, tile, dimension, largest in SIZES[job.kernel]:
        tiles = -(-lengths[dimension] // tile)
        most = min(largest, tiles)
        found.append([v for v in range(1, most + 1) if v in (2, 4) or tiles % v == 0])
    return found


def fastest(clock: Clock, m: int, shipped: list[Blocks]) -> list[Blocks]:
    """Return the block sizes to time for m tokens: the best that a descent meets, fastest first.

    shipped: sizes to start from too, beside the largest up to 4.
    """
    tokens = min(m, LARGEST_BLOCK[clock.job.kernel])
    choices = values(clock.job, tokens)
    tried: dict[Blocks, float] = {}

    def us(blocks: Blocks) -> float:
        tried[blocks] = clock.latency(tokens, blocks) or math.inf
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
        if tokens >= m:
            break
        kept = sorted(tried, key=lambda blocks: tried[blocks])[:count]
        tokens = min(m, 2 * tokens)
        tried = {blocks: clock.latency(tokens, blocks) or math.inf for blocks in kept}
    return sorted(tried, key=lambda blocks: tried[blocks])[:1]


class Clock:
    """Simulates somebody else's kernel with block sizes, each once, kept in a file."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def latency(self, m: int, blocks: Blocks) -> float | None:
        """Return the simulated latency in us; None when SBUF does not hold the blocks."""
        job, (k, r, n) = self.job, self.job.sizes
        shapes = [(k, m), (k, n)] if job.how == "tutorial" else [(k, m), (k, r), (r, n)]
        named = dict(zip((name for name, *_ in SIZES[job.kernel]), blocks, strict=True))

        def run() -> float | None:
            arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
            try:
                written = simulate(
                    f"{job.file}:{job.kernel}", *arrays, target=job.target, mode="timing",
                    named=named,
                )  # fmt: skip
            except NmmError as error:
                print(f"{job} {blocks}: {error}"[:300], file=sys.stderr)
                return None
            target = targets.get(job.target)
            line = time_trace(without_repeated_loads(written.trace, target), target)
            return None if line.sbuf_overflow_bytes else line.latency_us

        key = digest(rooms(), job.target, job.kernel, shapes, blocks, "reused")
        us: float | None = timings_of(FILE).of(key, run)
        return us


def ratios(us: dict[str, float | None]) -> list[float | None]:
    """Return latencies over ours, in the order of RATIOS; None where a kernel does not run."""
    found: list[float | None] = []
    for ways in RATIOS.values():
        times = [us[how] for how in (*ways, "ours")]
        ran = [time for time in times if time is not None]
        found.append(min(ran[:-1]) / ran[-1] if len(ran) == len(times) else None)
    return found


def show(console: Console, rows: dict[tuple[str, str, int], dict[str, float | None]]) -> None:
    """Print the rows, and each ratio's mean, least and most over the shapes that have all."""
    table = Table("model", "part", "tokens", *HOW, *(f"over {name}" for name in RATIOS))
    for (model, part, m), us in rows.items():
        cells = ["-" if value is None else f"{value:,.2f}" for value in (*us.values(), *ratios(us))]
        table.add_row(model, part, str(m), *cells)
    console.print(table)
    whole = [found for us in rows.values() if None not in (found := ratios(us))]
    for name, values in zip(RATIOS, zip(*whole, strict=True), strict=False):
        given = [value for value in values if value is not None]
        mean = sum(given) / len(given)
        console.print(f"over {name}: {mean:.2f}x, {min(given):.2f}x to {max(given):.2f}x "
                      f"of {len(given)} shapes")  # fmt: skip


def main() -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path("NeuronMM"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--target", default="trn1")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args()
    file = given.checkout / "test_speedup.py"
    if (given.checkout / "HEAD").is_file():
        file = unpacked(given.checkout, "HEAD", "test_speedup.py") / "test_speedup.py"
    if not file.is_file():
        print(f"{file} is not there. Get the paper's kernels with\n    {CLONE}\n"
              "or pass --checkout DIR", file=sys.stderr)  # fmt: skip
        return 2
    sizes = [int(m) for m in given.m.split(",")]
    jobs = [
        Job(str(file), given.target, *shape)
        for shape in itertools.product(given.models.split(","), given.parts.split(","), sizes, HOW)
    ]
    rows: dict[tuple[str, str, int], dict[str, float | None]] = {}
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        for job, us in zip(jobs, pool.imap(simulated, jobs), strict=True):
            rows.setdefault((job.model, job.part, job.m), {})[job.how] = us
            print(f"{job.model} {job.part} m={job.m} {job.how}: {us} us", file=sys.stderr)
    show(Console(width=None if sys.stdout.isatty() else 160), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
