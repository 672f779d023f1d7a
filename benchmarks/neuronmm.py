"""`make bench-neuronmm`: the paper's own kernels, unmodified, against dense kernels and ours.

For the projections of six models at 1 to 4,096 tokens on trn1, simulated latency in us of

    shipped   NeuronMM's kernel with the block sizes that its authors choose by token count
    tuned     the same, the best of a grid of block sizes
    tutorial  AWS's fully optimized matmul (as NeuronMM's file has it), the best of a grid, dense
    dense     this project's strongest dense kernel
    ours      this project's low-rank kernel

up (the gate projection has its shape) and down run `fused_three_mm_XTUV`, gated (gate and up in
one) `fused_mlp_up_T`; dense kernels then run once per weight. Their kernels' loads are charged
with --loads, "reused" unless told: the faster of two bounds (docs/simulator.md). Nothing is
measured, and nothing but time is simulated.

Above 1,024 tokens only the five block sizes that are best at 1,024 are timed (dense: 2,048). No
block holds more tokens than that: with more of them a kernel repeats its loop over blocks of
tokens. This is an argument, not a proof: a sixth could win by what its first loads cost.

The kernels come from a clone of github.com/dinghongsong/NeuronMM, ./NeuronMM unless --checkout says
otherwise. Results go to --results line by line; a run that is interrupted continues there. A change
of the code that a figure depends on makes it anew.

Usage: python benchmarks/neuronmm.py [--checkout DIR] [--models Llama-3.2-1B] [--m 1,512]
       [--parts up,down,gated] [--workers 2] [--target trn1] [--loads as_written]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
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
PARTS = ("up", "down", "gated")
TOKENS = (1, 128, 512, 2048, 4096)
SHORTLIST = 5
# Tokens of the largest block in each grid: more of them repeat the outermost loop.
LARGEST_BLOCK = {
    "fused_three_mm_XTUV": 1024, "fused_mlp_up_T": 1024, "nki_matmul_fully_optimized_": 2048,
}  # fmt: skip
THEIR_ROOMS = ("simulator", "targets")
OWN_ROOMS = (*THEIR_ROOMS, "kernels", "codegen")
CLONE = "git clone https://github.com/dinghongsong/NeuronMM"
NAMES = ("M_tiles_in_block", "r_tiles_in_block", "K_tiles_in_block", "N_tiles_in_block")
GRIDS = {
    "fused_three_mm_XTUV": ((4, 8, 16), (2, 4), (1, 4, 8), (1, 4)),
    "fused_mlp_up_T": ((4, 8), (2, 4), (1, 2), (1, 4, 8)),
}
TUTORIAL_NAMES = ("TILES_IN_BLOCK_M", "TILES_IN_BLOCK_N", "TILES_IN_BLOCK_K")
TUTORIAL_GRID = ((4, 16), (1, 2, 4), (4, 8, 16))


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
    def key(self) -> str:
        """What a result belongs to: the job, and the code, theirs and ours, that it runs."""
        mine = self.how in ("ours", "dense")
        made_by = [code_digests()[room] for room in (OWN_ROOMS if mine else THEIR_ROOMS)]
        theirs = b"" if mine else Path(self.file).read_bytes()
        text = hashlib.sha256("".join(made_by).encode() + theirs).hexdigest()[:12]
        return "/".join(map(str, (text, self.target, self.loads, self.model, self.part, self.m,
                                  self.how)))  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(input features, rank, output features)."""
        hidden, intermediate = MODELS[self.model]
        k, n = (intermediate, hidden) if self.part == "down" else (hidden, intermediate)
        return k, rank(k, n), n


def measure(job: Job) -> dict[str, Any]:
    """Return the job's key, its latency in us, and the block sizes or schedule that gave it."""
    k, r, n = job.sizes
    m, gated = job.m, job.part == "gated"
    if job.how in ("ours", "dense"):
        spec: Any = LowRankSpec(m=m, k=k, r=r, n=n, x_layout="col")
        if gated:
            spec = GatedMLPUpSpec(m=m, k=k, r=r, n=n, x_layout="row", out_layout="col")
        if job.how == "dense":
            spec = MatmulSpec(m=m, k=k, n=n, x_layout="col")
        kernel = build_kernel(spec, job.target, options=Options(cache="off"))
        times = 2 if gated and job.how == "dense" else 1
        return _result(job, times * kernel.profile().latency_us, kernel.schedule.short())
    if job.how == "tutorial":
        name, names, grid = "nki_matmul_fully_optimized_", TUTORIAL_NAMES, TUTORIAL_GRID
        times = 2 if gated else 1
    else:
        name, names, times = "fused_mlp_up_T" if gated else "fused_three_mm_XTUV", NAMES, 1
        grid = GRIDS[name]
    blocks = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*grid)]
    if job.how != "tutorial":
        shipped = getattr(load_file(Path(job.file)), f"get_{name}_params")(m)
        blocks = [shipped, *blocks] if job.how == "tuned" else [shipped]
    blocks = _distinct(blocks, m)
    largest = LARGEST_BLOCK[name]
    if m > largest and len(blocks) > SHORTLIST:
        ranked = _timed(job, name, _shapes(job, largest), blocks)
        blocks = [given for _, given in ranked[:SHORTLIST]]
    ranked = _timed(job, name, _shapes(job, m), blocks)
    if not ranked:
        return _result(job, None, "no block sizes run")
    latency, best = ranked[0]
    return _result(job, times * latency, ", ".join(f"{v}" for v in best.values()))


def _shapes(job: Job, m: int) -> list[tuple[int, int]]:
    """Return the shapes of the operands of somebody else's kernel, for m tokens."""
    k, r, n = job.sizes
    if job.how == "tutorial":
        return [(k, m), (k, n)]
    if job.part == "gated":
        return [(m, k), (k, r), (r, n), (k, r), (r, n)]
    return [(k, m), (k, r), (r, n)]


def _timed(
    job: Job, name: str, shapes: list[tuple[int, int]], blocks: list[dict[str, int]]
) -> list[tuple[float, dict[str, int]]]:
    """Return (latency, block sizes), the fastest first, of those that SBUF holds."""
    found = [(_latency(job, name, shapes, given), given) for given in blocks]
    return sorted(((us, b) for us, b in found if us is not None), key=lambda pair: pair[0])


def _distinct(blocks: list[dict[str, int]], m: int) -> list[dict[str, int]]:
    """Return block sizes without those that few tokens make the same."""
    seen: dict[tuple[int, ...], dict[str, int]] = {}
    most = max(1, m // 128)
    for given in blocks:
        key = tuple(
            min(v, most) if name in ("K_tiles_in_block", "TILES_IN_BLOCK_M") else v
            for name, v in given.items()
        )
        seen.setdefault(key, given)
    return list(seen.values())


def _latency(
    job: Job, name: str, shapes: list[tuple[int, int]], blocks: dict[str, int]
) -> float | None:
    """Return the simulated latency; None when SBUF does not hold the blocks."""
    arrays = [ArraySpec(shape, "bfloat16") for shape in shapes]
    try:
        run = simulate(
            f"{job.file}:{name}", *arrays, target=job.target, mode="timing", loads=job.loads,
            named=blocks,
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
    todo = sorted((j for j in jobs if j.key not in known), key=lambda j: (j.m, j.how == "tuned"))
    with (
        multiprocessing.get_context("spawn").Pool(workers) as pool,
        results.open("a", encoding="utf-8") as file,
    ):
        for done, row in enumerate(pool.imap_unordered(measure, todo), 1):
            known[row["key"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{done} of {len(todo)}: {row['key']} {row['us']} us ({row['what']})", flush=True)
    return known


def show(console: Console, jobs: list[Job], known: dict[str, dict[str, Any]]) -> None:
    """Print a row per shape, then the ratios."""
    table = Table(title="predicted by the simulator, microseconds; ratios: over ours")
    for name in ("model", "part", "m", *HOW, "shipped", "tuned", "tutorial", "dense"):
        table.add_column(name, justify="left" if name in ("model", "part") else "right")
    ratios: dict[str, list[float]] = {how: [] for how in HOW[:-1]}
    shapes = dict.fromkeys((j.model, j.part, j.m) for j in jobs)
    for shape in shapes:
        us = {
            j.how: known[j.key]["us"] for j in jobs
            if (j.model, j.part, j.m) == shape and j.key in known
        }  # fmt: skip
        over = {}
        for how in HOW[:-1]:
            if us.get(how) and us.get("ours"):
                over[how] = us[how] / us["ours"]
                ratios[how].append(over[how])
        table.add_row(
            *map(str, shape), *(f"{us[how]:.1f}" if us.get(how) else "-" for how in HOW),
            *(f"{over[how]:.2f}x" if how in over else "-" for how in HOW[:-1]),
        )  # fmt: skip
    console.print(table)
    for how, values in ratios.items():
        if values:
            mean = sum(values) / len(values)
            console.print(
                f"over {how}: mean {mean:.2f}x, least {min(values):.2f}x, most {max(values):.2f}x "
                f"({len(values)} shapes)"
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
