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
otherwise. Every figure is a line of --rows; a run that is interrupted continues there, and makes
rows of other code anew. Block sizes of a row are kept where their latency is still the same.

Usage: python benchmarks/neuronmm.py [--checkout DIR] [--models Llama-3.2-1B] [--m 1,512]
       [--parts up,down] [--workers 2] [--target trn1] [--print] [--markdown docs/neuronmm.md]
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beta1_kernels import unpacked
from kernel_timings import FILE, digest, rooms, timings_of
from model_sizes import MODELS, rank
from reused_loads import without_repeated_loads
from row_file import Row, computed, is_stale, read_rows, version

from nmm_compiler import targets
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.simulator.timing.timeline import time_trace

PARTS = ("up", "down")
TOKENS = (1, 128, 512, 1024, 2048, 4096)
ROWS = Path(__file__).parent / "data" / "neuronmm.jsonl"
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
Shape = tuple[str, str, int]  # model, part, tokens
HOW = ("shipped", "tuned", "tutorial", "dense", "ours")
# What is divided by ours: the faster of these.
RATIOS = {
    "the strongest dense kernel": ("tutorial", "dense"),
    "the paper's kernel, tuned": ("tuned",),
    "the paper's kernel, its authors' fixed blocks": ("shipped",),
}
SHORT = ("over dense", "over tuned", "over shipped")
MARKS = ("<!-- rows -->", "<!-- end of rows -->")


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

    @property
    def key(self) -> str:
        """What the figure is of: the kernel, the way and the sizes, not the model."""
        k, r, n = self.sizes
        sizes = (k, n) if self.how in ("tutorial", "dense") else (k, r, n)
        named = (self.target, self.how, self.kernel, self.m, *sizes)
        return "/".join([*map(str, named), *["reused"] * (self.kernel in SIZES)])


def rows_of(job: tuple[Job, Row | None]) -> list[Row]:
    """Return the figure of a job; where a stale one still holds, it is kept."""
    wanted, stale = job
    return [measured(wanted, stale)]


def measured(job: Job, stale: Row | None) -> Row:
    """Return the job's row: its latency in us and the block sizes or schedule that gave it."""
    m = job.m
    k, r, n = job.sizes
    if job.how in ("ours", "dense"):
        low = LowRankSpec(m=m, k=k, r=r, n=n, x_layout="col")
        spec = low if job.how == "ours" else MatmulSpec(m=m, k=k, n=n, x_layout="col")
        schedule = timings_of(FILE).choose(spec, job.target).schedule
        us = timings_of(FILE).us(spec, job.target)
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

    def __init__(self, job: Job) -> None:
        self.job = job
        self.asked: set[tuple[int, Blocks]] = set()

    def latency(self, m: int, blocks: Blocks) -> float | None:
        """Return the simulated latency in us; None when SBUF does not hold the blocks."""
        job, (k, r, n) = self.job, self.job.sizes
        shapes = [(k, m), (k, n)] if job.how == "tutorial" else [(k, m), (k, r), (r, n)]
        named = dict(zip((name for name, *_ in SIZES[job.kernel]), blocks, strict=True))

        def simulated() -> float | None:
            arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
            try:
                written = simulate(
                    f"{job.file}:{job.kernel}", *arrays, target=job.target, mode="timing",
                    named=named,
                )  # fmt: skip
            except NmmError as error:
                print(f"{job.key} {blocks}: {error}"[:300], file=sys.stderr)
                return None
            target = targets.get(job.target)
            line = time_trace(without_repeated_loads(written.trace, target), target)
            return None if line.sbuf_overflow_bytes else line.latency_us

        self.asked.add((m, blocks))
        key = digest(rooms(), job.target, job.kernel, shapes, blocks, "reused")
        us: float | None = timings_of(FILE).of(key, simulated)
        return us


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
    file: Path, target: str, models: Sequence[str] = tuple(MODELS), parts: Sequence[str] = PARTS,
    tokens: Sequence[int] = TOKENS,
) -> list[Job]:  # fmt: skip
    """Return the figures of a table, its rows in order."""
    shapes = itertools.product(models, parts, tokens, HOW)
    return [Job(str(file), target, *shape) for shape in shapes]


def ratios(us: dict[str, float]) -> list[float | None]:
    """Return latencies over ours, in the order of RATIOS; None where a kernel has no row."""
    return [
        min(us[how] for how in ways) / us["ours"]
        if "ours" in us and all(how in us for how in ways) else None
        for ways in RATIOS.values()
    ]  # fmt: skip


def lines(
    jobs: list[Any], rows: dict[str, Row]
) -> Iterator[tuple[tuple[str, str, int], dict[str, float]]]:
    """Yield (shape, us of each way) of each shape with rows."""
    for shape in dict.fromkeys((job.model, job.part, job.m) for job in jobs):
        here = [job for job in jobs if (job.model, job.part, job.m) == shape and job.key in rows]
        us = {job.how: rows[job.key]["us"] for job in here if rows[job.key]["us"]}
        if us:
            yield shape, us


def summary(jobs: list[Any], rows: dict[str, Row]) -> dict[str, list[float]]:
    """Return each ratio's values over the shapes that have all of them."""
    found = [ratios(us) for _, us in lines(jobs, rows)]
    whole = [values for values in found if None not in values]
    return dict(zip(RATIOS, map(list, zip(*whole, strict=True)), strict=False))  # type: ignore[arg-type]


def _cells(us: dict[str, float]) -> list[str]:
    times = [f"{us[how]:,.1f}" if how in us else "-" for how in HOW]
    return times + ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios(us)]


def checked(jobs: list[Any], rows: dict[str, Row]) -> None:
    """Print how many figures of each column are current, stale and missing."""
    for how in HOW:
        keys = {job.key for job in jobs if job.how == how}
        stale = [is_stale(rows[key]) for key in keys & rows.keys()]
        print(
            f"{how:8} {stale.count(False):3} current, {stale.count(True):3} stale, "
            f"{len(keys) - len(stale):3} missing"
        )


def markdown(jobs: list[Any], rows: dict[str, Row]) -> str:
    """Return the two tables of the page."""
    text = ["| over | mean | least | most | shapes |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, values in summary(jobs, rows).items():
        figures = (sum(values) / len(values), min(values), max(values))
        text.append(f"| {name} | {' | '.join(f'{v:.2f}x' for v in figures)} | {len(values)} |")
    text += ["", f"| model | part | tokens | {' | '.join((*HOW, *SHORT))} |",
             "| --- | --- |" + " ---: |" * (1 + len(HOW) + len(SHORT))]  # fmt: skip
    for (model, part, m), us in lines(jobs, rows):
        if None not in ratios(us):
            text.append(f"| {model} | {part} | {m:,} | {' | '.join(_cells(us))} |")
    return "\n".join(text)


def written(page: Path, jobs: list[Any], rows: dict[str, Row]) -> None:
    """Write the tables into a page, between its two marks."""
    before, _, rest = page.read_text("utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    tables = f"{MARKS[0]}\n\n{markdown(jobs, rows)}\n\n{MARKS[1]}"
    page.write_text(f"{before}{tables}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=Path("NeuronMM"))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--target", default="trn1")
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
    sizes = [int(m) for m in given.m.split(",")]
    jobs = jobs_of(file, given.target, given.models.split(","), given.parts.split(","), sizes)
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
