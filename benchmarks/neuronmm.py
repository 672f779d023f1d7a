"""`make bench-neuronmm`: the paper's own kernels, unmodified, against dense kernels and ours.

For the projections of six models at 1 to 4,096 tokens on trn1, simulated latency in us of

    shipped   NeuronMM's kernel with the block sizes that its authors choose by token count
    tuned     the same with the block sizes that `fastest` finds
    tutorial  AWS's fully optimized matmul (as NeuronMM's file has it), tuned alike, dense
    dense     this project's strongest dense kernel
    ours      this project's low-rank kernel

up (the gate projection has its shape) and down run `fused_three_mm_XTUV`; gated (gate and up in
one, if asked for) runs `fused_mlp_up_T`, and dense kernels then run once per weight. Their
kernels' loads are charged with --loads, "reused" unless told: the faster of two bounds
(docs/simulator.md). Nothing is measured, and nothing but time is simulated.

Block sizes are divisors of the tiles of their dimension, 2 and 4: a block that does not divide the
rank multiplies padding. From two starts, one size at a time moves to the value next to it that is
faster, until none is. Above 1,024 tokens only the five block sizes that are best at 1,024 are timed
(dense: 2,048), and at 4,096 the two of them that are best at 2,048. No block holds more tokens than
that: with more of them a kernel repeats its loop over blocks of tokens. This is an argument, not a
proof: a sixth could win by its first loads.

The kernels come from a clone of github.com/dinghongsong/NeuronMM, ./NeuronMM unless --checkout says
otherwise. Every figure is a line of --rows (benchmarks/data/neuronmm.jsonl); a run that is
interrupted continues there; --print computes nothing. A figure that other code than
today's made is stale: it is counted, and a run makes it anew. The block sizes of other
people's kernels are kept where their latency is still the same, else searched again.

Usage: python benchmarks/neuronmm.py [--checkout DIR] [--models Llama-3.2-1B] [--m 1,512]
       [--parts up,down,gated] [--workers 2] [--target trn1] [--loads as_written]
       [--print] [--markdown docs/neuronmm.md]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beta1_kernels import unpacked
from model_sizes import MODELS, rank
from neuronmm_table import HOW, checked, markdown, written
from row_file import Row, computed, is_stale, read_rows, version

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.gated_mlp import GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import ArraySpec, simulate

PARTS = ("up", "down", "gated")
TOKENS = (1, 128, 512, 1024, 2048, 4096)
ROWS = Path(__file__).parent / "data" / "neuronmm.jsonl"
TIMED = Path("out/neuronmm.timed.jsonl")
# How many block sizes are timed at twice, and at four times, the tokens of the largest block.
SHORTLIST = (5, 2)
# Tokens of the largest block in each grid: more of them repeat the outermost loop.
LARGEST_BLOCK = {
    "fused_three_mm_XTUV": 1024, "fused_mlp_up_T": 1024, "nki_matmul_fully_optimized_": 2048,
}  # fmt: skip
CLONE = "git clone https://github.com/dinghongsong/NeuronMM"
# Kernel -> (block size, rows of a tile, the dimension that it cuts, the largest block in tiles).
SIZES = {
    "fused_three_mm_XTUV": (
        ("M_tiles_in_block", 128, "k", 16), ("r_tiles_in_block", 128, "r", 20),
        ("K_tiles_in_block", 128, "m", 8), ("N_tiles_in_block", 512, "n", 8),
    ),
    "fused_mlp_up_T": (
        ("M_tiles_in_block", 128, "k", 16), ("r_tiles_in_block", 128, "r", 20),
        ("K_tiles_in_block", 512, "m", 2), ("N_tiles_in_block", 128, "n", 16),
    ),
    "nki_matmul_fully_optimized_": (
        ("TILES_IN_BLOCK_M", 128, "m", 16), ("TILES_IN_BLOCK_N", 512, "n", 8),
        ("TILES_IN_BLOCK_K", 128, "k", 16),
    ),
}  # fmt: skip
Blocks = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """One figure: a way to compute a part of a model for m tokens. Models share some."""

    file: str
    target: str
    loads: str
    model: str
    part: str
    m: int
    how: str

    @property
    def times(self) -> int:
        """How often the kernel runs: a dense one once for each of two weights."""
        return 2 if self.part == "gated" and self.how in ("tutorial", "dense") else 1

    @property
    def kernel(self) -> str:
        """The name of somebody else's kernel, or of a family of ours."""
        gated = self.part == "gated"
        return {
            "tutorial": "nki_matmul_fully_optimized_", "dense": "matmul",
            "ours": "gated_mlp_up" if gated else "lowrank",
        }.get(self.how, "fused_mlp_up_T" if gated else "fused_three_mm_XTUV")  # fmt: skip

    @property
    def spec(self) -> Any:
        """What a kernel of ours computes here."""
        k, r, n = self.sizes
        if self.how == "dense":
            return MatmulSpec(m=self.m, k=k, n=n, x_layout="col")
        if self.part == "gated":
            return GatedMLPUpSpec(m=self.m, k=k, r=r, n=n, x_layout="row", out_layout="col")
        return LowRankSpec(m=self.m, k=k, r=r, n=n, x_layout="col")

    @property
    def key(self) -> str:
        """What the figure is of: the kernel, the way and the sizes, not the model."""
        k, r, n = self.sizes
        named = [self.target, self.how, self.kernel, self.m, k, r, n]
        if self.how in ("tutorial", "dense"):
            named.remove(r)
        return "/".join(map(str, named + [self.loads] * (self.how not in ("ours", "dense"))))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(input features, rank, output features)."""
        k, n = MODELS[self.model].mlp(self.part)
        return k, rank(k, n), n


def rows_of(job: tuple[Job, Row | None]) -> list[Row]:
    """Return the figure of a job; where a stale one still holds, it is kept."""
    wanted, stale = job
    return [measured(wanted, stale)]


def measured(job: Job, stale: Row | None) -> Row:
    """Return the job's row: its latency in us and the block sizes or schedule that gave it."""
    m = job.m
    if job.how in ("ours", "dense"):
        kernel = build_kernel(job.spec, job.target, options=Options(cache="off"))
        us, schedule = kernel.profile().latency_us, kernel.schedule
        return {**_row(job, us, schedule.short(), 1), "schedule": schedule.to_dict()}
    clock = Clock(job)
    if stale is not None and stale["us"]:
        blocks = tuple(map(int, stale["what"].split(", ")))
        if clock.latency(m, blocks) == stale["us"]:
            return {**stale, "code": version()}
    shipped: list[Blocks] = []
    if job.how != "tutorial":
        chosen = getattr(load_file(Path(job.file)), f"get_{job.kernel}_params")(m)
        shipped = [tuple(chosen[name] for name, *_ in SIZES[job.kernel])]
    found = shipped if job.how == "shipped" else fastest(clock, m, shipped)
    ranked = [(us, blocks) for blocks in found if (us := clock.latency(m, blocks)) is not None]
    if not ranked:
        return _row(job, None, "no block sizes run", len(clock.asked))
    latency, best = min(ranked)
    return _row(job, latency, ", ".join(map(str, best)), len(clock.asked))


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

    def __init__(self, job: Job, timed: Path = TIMED) -> None:
        self.job, self.file = job, timed
        self.known: dict[str, float | None] = {}
        self.asked: set[str] = set()
        for row in read_rows(timed):
            self.known.update(row)

    def latency(self, m: int, blocks: Blocks) -> float | None:
        """Return the simulated latency in us; None when SBUF does not hold the blocks."""
        job = self.job
        shapes = self._shapes(m)
        key = "/".join(map(str, (version(), job.target, job.loads, job.kernel, shapes, blocks)))
        self.asked.add(key)
        if key not in self.known:
            self.known[key] = self._simulated(shapes, blocks)
            self.file.parent.mkdir(exist_ok=True)
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({key: self.known[key]}) + "\n")
        return self.known[key]

    def _shapes(self, m: int) -> list[tuple[int, int]]:
        """Return the shapes of the operands for m tokens."""
        k, r, n = self.job.sizes
        if self.job.how == "tutorial":
            return [(k, m), (k, n)]
        if self.job.part == "gated":
            return [(m, k), (k, r), (r, n), (k, r), (r, n)]
        return [(k, m), (k, r), (r, n)]

    def _simulated(self, shapes: list[tuple[int, int]], blocks: Blocks) -> float | None:
        job = self.job
        arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
        named = dict(zip((name for name, *_ in SIZES[job.kernel]), blocks, strict=True))
        try:
            run = simulate(
                f"{job.file}:{job.kernel}", *arrays, target=job.target, mode="timing",
                loads=job.loads, named=named,
            )  # fmt: skip
        except NmmError as error:
            print(f"{job.key} {blocks}: {error}"[:300], file=sys.stderr)
            return None
        profile = run.profile
        assert profile is not None
        return None if profile.sbuf_overflow_bytes else float(profile.latency_us)


def _row(job: Job, latency: float | None, what: str, simulations: int) -> Row:
    return {
        "key": job.key, "us": latency, "what": what, "simulations": simulations, "code": version(),
    }  # fmt: skip


def run(jobs: list[Job], rows: Path, workers: int) -> dict[str, Row]:
    """Return the rows of the jobs by key; those in the file that are not stale are kept."""
    known = {row["key"]: row for row in read_rows(rows)}
    wanted = {job.key: job for job in reversed(jobs)}
    todo = [
        (job, known.get(key)) for key, job in wanted.items()
        if key not in known or is_stale(known[key])
    ]  # fmt: skip
    todo.sort(key=lambda one: (one[0].m, one[0].part, one[0].model, one[0].how == "tuned"))
    for row in computed(rows, todo, rows_of, workers):
        known[row["key"]] = row
        print(f"{row['key']} {row['us']} us ({row['what']})", flush=True)
    return known


def jobs_of(
    file: Path, target: str, loads: str, parts: Sequence[str],
    models: Iterable[str] = tuple(MODELS), tokens: Sequence[int] = TOKENS,
    hows: Sequence[str] = HOW,
) -> list[Job]:  # fmt: skip
    """Return the figures of a table, its rows in order."""
    return [
        Job(str(file), target, loads, model, part, m, how)
        for model in models
        for part in parts
        for m in tokens
        for how in hows
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path("NeuronMM"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default="up,down", help=",".join(PARTS))
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--how", default=",".join(HOW))
    parser.add_argument("--target", default="trn1")
    parser.add_argument("--loads", choices=("as_written", "reused"), default="reused")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--print", action="store_true", help="the rows that are there, no more")
    parser.add_argument("--markdown", type=Path, help="the page whose tables are written anew")
    given = parser.parse_args()
    file = given.checkout / "test_speedup.py"
    if (given.checkout / "HEAD").is_file():
        file = unpacked(given.checkout, "HEAD", "test_speedup.py") / "test_speedup.py"
    ready = given.print or given.markdown is not None
    if not file.is_file() and not ready:
        print(f"{file} is not there. Get the paper's kernels with\n    {CLONE}\n"
              "or pass --checkout DIR", file=sys.stderr)  # fmt: skip
        return 2
    jobs = jobs_of(
        file, given.target, given.loads, given.parts.split(","), given.models.split(","),
        [int(m) for m in given.m.split(",")], given.how.split(","),
    )  # fmt: skip
    if not ready:
        run(jobs, given.rows, given.workers)
    rows = {row["key"]: row for row in read_rows(given.rows)}
    if given.markdown is not None:
        written(given.markdown, jobs, rows)
    else:
        print(markdown(jobs, rows))
        checked(jobs, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
