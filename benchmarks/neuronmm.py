"""`make bench-neuronmm`: the paper's own kernels, unmodified, against dense kernels and ours.

For the projections of six models at 1 to 4,096 tokens on trn1, simulated latency in us of

    shipped   NeuronMM's kernel with the block sizes that its authors choose by token count
    tuned     the same with the block sizes that `fastest` finds
    tutorial  AWS's fully optimized matmul (as NeuronMM's file has it), tuned alike, dense
    dense     this project's strongest dense kernel
    ours      this project's low-rank kernel

up (the gate projection has its shape) and down run `fused_three_mm_XTUV`, gated (gate and up in
one) `fused_mlp_up_T`; dense kernels then run once per weight. Their kernels' loads are charged
with --loads, "reused" unless told: the faster of two bounds (docs/simulator.md). Nothing is
measured, and nothing but time is simulated.

Block sizes are divisors of the tiles of their dimension, 2 and 4: a block that does not divide the
rank multiplies padding. From two starts, one size at a time moves to the value next to it that is
faster, until none is. Above 1,024 tokens only the five block sizes that are best at 1,024 are timed
(dense: 2,048). No block holds more tokens than that: with more of them a kernel repeats its loop
over blocks of tokens. This is an argument, not a proof: a sixth could win by its first loads.

The kernels come from a clone of github.com/dinghongsong/NeuronMM, ./NeuronMM unless --checkout says
otherwise. Results go to --results line by line, and what each block size takes to a file beside it;
a run that is interrupted continues there. A change of the code that a figure depends on makes it
anew.

Usage: python benchmarks/neuronmm.py [--checkout DIR] [--models Llama-3.2-1B] [--m 1,512]
       [--parts up,down,gated] [--workers 2] [--target trn1] [--loads as_written]
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beta1_kernels import unpacked
from kernel_rows import MODELS, rank
from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.code_digests import code_digests
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.gated_mlp import GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.options import Options
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import ArraySpec, simulate

HOW = ("shipped", "tuned", "tutorial", "dense", "ours")
# What is divided by ours: the faster of these.
RATIOS = {
    "shipped": ("shipped",), "tuned": ("tuned",), "strongest dense": ("tutorial", "dense"),
}  # fmt: skip
PARTS = ("up", "down", "gated")
TOKENS = (1, 128, 512, 1024, 2048, 4096)
SHORTLIST = 5
# Tokens of the largest block in each grid: more of them repeat the outermost loop.
LARGEST_BLOCK = {
    "fused_three_mm_XTUV": 1024, "fused_mlp_up_T": 1024, "nki_matmul_fully_optimized_": 2048,
}  # fmt: skip
THEIR_ROOMS = ("simulator", "targets")
OWN_ROOMS = (*THEIR_ROOMS, "kernels", "codegen")
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
    """One figure: a way to compute a part of a model for m tokens."""

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
        """The name of somebody else's kernel."""
        if self.how == "tutorial":
            return "nki_matmul_fully_optimized_"
        return "fused_mlp_up_T" if self.part == "gated" else "fused_three_mm_XTUV"

    @property
    def made_by(self) -> str:
        """A digest of the code, theirs and ours, that the figure depends on."""
        mine = self.how in ("ours", "dense")
        rooms = [code_digests()[room] for room in (OWN_ROOMS if mine else THEIR_ROOMS)]
        theirs = b"" if mine else Path(self.file).read_bytes() + repr(SIZES[self.kernel]).encode()
        return hashlib.sha256("".join(rooms).encode() + theirs).hexdigest()[:12]

    @property
    def key(self) -> str:
        """What a result belongs to; gate and up take one dense kernel twice."""
        part = "up" if self.times > 1 else self.part
        return "/".join(map(str, (self.made_by, self.target, self.loads, self.model, part, self.m,
                                  self.how)))  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(input features, rank, output features)."""
        hidden, intermediate = MODELS[self.model]
        k, n = (intermediate, hidden) if self.part == "down" else (hidden, intermediate)
        return k, rank(k, n), n


def measure(job: Job, timed: Path) -> dict[str, Any]:
    """Return the job's key, a latency in us, and the block sizes or schedule that gave it."""
    k, r, n = job.sizes
    m = job.m
    if job.how in ("ours", "dense"):
        spec: Any = LowRankSpec(m=m, k=k, r=r, n=n, x_layout="col")
        if job.how == "dense":
            spec = MatmulSpec(m=m, k=k, n=n, x_layout="col")
        elif job.part == "gated":
            spec = GatedMLPUpSpec(m=m, k=k, r=r, n=n, x_layout="row", out_layout="col")
        kernel = build_kernel(spec, job.target, options=Options(cache="off"))
        return _result(job, kernel.profile().latency_us, kernel.schedule.short())
    clock = Clock(job, timed)
    shipped: list[Blocks] = []
    if job.how != "tutorial":
        chosen = getattr(load_file(Path(job.file)), f"get_{job.kernel}_params")(m)
        shipped = [tuple(chosen[name] for name, *_ in SIZES[job.kernel])]
    found = shipped if job.how == "shipped" else fastest(clock, m, shipped)
    ranked = [(us, blocks) for blocks in found if (us := clock.latency(m, blocks)) is not None]
    if not ranked:
        return _result(job, None, "no block sizes run")
    latency, best = min(ranked)
    return _result(job, latency, ", ".join(map(str, best)))


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
    few = min(m, LARGEST_BLOCK[clock.job.kernel])
    choices = values(clock.job, few)
    tried: dict[Blocks, float] = {}

    def us(blocks: Blocks) -> float:
        tried[blocks] = clock.latency(few, blocks) or math.inf
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
    ranked = sorted(tried, key=lambda blocks: tried[blocks])
    return ranked[: SHORTLIST if m > few else 1]


class Clock:
    """Simulates somebody else's kernel with block sizes, each once, kept in a file."""

    def __init__(self, job: Job, timed: Path) -> None:
        self.job, self.file = job, timed
        lines = timed.read_text("utf-8").splitlines() if timed.is_file() else []
        self.known: dict[str, float | None] = {}
        for line in lines:
            self.known.update(json.loads(line))

    def latency(self, m: int, blocks: Blocks) -> float | None:
        """Return the simulated latency in us; None when SBUF does not hold the blocks."""
        job = self.job
        shapes = self._shapes(m)
        key = "/".join(map(str, (job.made_by, job.target, job.loads, job.kernel, shapes, blocks)))
        if key not in self.known:
            self.known[key] = self._simulated(shapes, blocks)
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


def _result(job: Job, latency: float | None, what: str) -> dict[str, Any]:
    return {"key": job.key, "us": latency, "what": what}


def run(jobs: list[Job], results: Path, workers: int) -> dict[str, dict[str, Any]]:
    """Return the results of the jobs by key; those in the file are not run again."""
    results.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, dict[str, Any]] = {}
    if results.is_file():
        for line in results.read_text("utf-8").splitlines():
            row = json.loads(line)
            known[row["key"]] = row
    missing = {job.key: job for job in reversed(jobs) if job.key not in known}
    todo = sorted(missing.values(), key=lambda j: (j.m, j.how == "tuned"))
    work = functools.partial(measure, timed=results.with_suffix(".timed.jsonl"))
    with (
        multiprocessing.get_context("spawn").Pool(workers) as pool,
        results.open("a", encoding="utf-8") as file,
    ):
        for done, row in enumerate(pool.imap_unordered(work, todo), 1):
            known[row["key"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{done} of {len(todo)}: {row['key']} {row['us']} us ({row['what']})", flush=True)
    return known


def show(console: Console, jobs: list[Job], known: dict[str, dict[str, Any]]) -> None:
    """Print a row per shape, then the ratios."""
    table = Table(title="predicted by the simulator, microseconds; ratios: over ours")
    for name in ("model", "part", "m", *HOW, *RATIOS):
        table.add_column(name, justify="left" if name in ("model", "part") else "right")
    ratios: dict[str, list[float]] = {name: [] for name in RATIOS}
    shapes = dict.fromkeys((j.model, j.part, j.m) for j in jobs)
    for shape in shapes:
        us = {
            j.how: j.times * known[j.key]["us"] for j in jobs
            if (j.model, j.part, j.m) == shape and known.get(j.key, {}).get("us")
        }  # fmt: skip
        over = {}
        for name, ways in RATIOS.items():
            if "ours" in us and all(how in us for how in ways):
                over[name] = min(us[how] for how in ways) / us["ours"]
                ratios[name].append(over[name])
        table.add_row(
            *map(str, shape), *(f"{us[how]:.1f}" if us.get(how) else "-" for how in HOW),
            *(f"{over[name]:.2f}x" if name in over else "-" for name in RATIOS),
        )  # fmt: skip
    console.print(table)
    for name, found in ratios.items():
        if found:
            mean = sum(found) / len(found)
            console.print(
                f"over {name}: mean {mean:.2f}x, least {min(found):.2f}x, most {max(found):.2f}x "
                f"({len(found)} shapes)"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path("NeuronMM"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--how", default=",".join(HOW))
    parser.add_argument("--target", default="trn1")
    parser.add_argument("--loads", choices=("as_written", "reused"), default="reused")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--results", type=Path, default=Path("out/neuronmm.jsonl"))
    given = parser.parse_args()
    file = given.checkout / "test_speedup.py"
    if (given.checkout / "HEAD").is_file():
        file = unpacked(given.checkout, "HEAD", "test_speedup.py") / "test_speedup.py"
    if not file.is_file():
        print(f"{file} is not there. Get the paper's kernels with\n    {CLONE}\n"
              "or pass --checkout DIR", file=sys.stderr)  # fmt: skip
        return 2
    jobs = [
        Job(str(file), given.target, given.loads, model, part, int(m), how)
        for model in given.models.split(",")
        for part in given.parts.split(",")
        for m in given.m.split(",")
        for how in given.how.split(",")
    ]
    known = run(jobs, given.results, given.workers)
    show(Console(width=None if sys.stdout.isatty() else 160), jobs, known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
