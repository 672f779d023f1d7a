"""`make bench-kernels`: MLP shapes of six models against the roofline and against other kernels.

Every figure is predicted by the simulator's timing model; nothing here is measured. Per shape and
target: latency, roofline (the larger of TensorE time and the time of the minimal HBM traffic),
their ratio, HBM bytes over the minimum, MFU and MBU, DMA time over TensorE time, instructions, how
much longer it takes when x arrives m x k and must be turned, and how many times longer it takes
with

    (a) one dense matmul, blocked as in AWS's tutorial
    (b) two of those, the intermediate through HBM
    (c) NeuronMM's algorithm

all in kernels_nki/. A second table has the gated MLP: gate and up in one kernel, and the whole MLP,
against one lowrank kernel for each of its projections. Kernel start and stop, which a linked graph
does not pay, is printed apart. The bars are at the end; exit code 1 when one is missed.

With --dtype float8_e4m3: the same shapes in fp8 against bf16 (kernel_formats.py).
With --against CHECKOUT: each kernel beside that of another version (kernels_against.py).
With --families shared: q, k and v of one x as one kernel, against three (kernels_shared.py).
Two physical cores against one are `make bench-cores` (kernels_two_cores.py).

Beside these rows, `mlp`, there are others, each with bars: `dense`, `small`, `fp8`, `gated` and
`search` (kernel_parts.py) and `cliffs` (kernel_cliffs.py). --rows names those to run, by default
all of them. Times and rows are kept under a digest of what decides them (kernel_timings.py): a run
that was interrupted goes on, and a second one takes what did not change.

Usage: python benchmarks/kernels.py [--rows mlp,dense,small,fp8,gated,search,cliffs]
       [--targets trn2,trn3] [--models Llama-3.2-1B] [--m 1,512] [--parts up,down,gated,mlp]
       [--workers 2] [--json FILE] [--timings FILE] [--dtype float8_e4m3] [--against CHECKOUT]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from kernel_cliffs import SHAPES, run_cliffs
from kernel_formats import main_formats
from kernel_parts import SPECS, run_parts
from kernel_rows import (
    BUILD_BAR,
    BYTES_BAR,
    DMA_BAR,
    GATED,
    LOWRANK,
    MODELS,
    RATIO,
    SHORT_US,
    TOKENS,
    Job,
    Row,
    measured,
)
from kernel_timings import FILE
from kernels_against import main_against
from kernels_shared import main_shared
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nmm_compiler.targets import get


def show(console: Console, rows: list[Row], target: str, others: dict[str, str]) -> None:
    """Print the table of one target; others: key in Row.others_us -> heading."""
    chip = get(target)
    family = "lowrank" if rows[0].job.part in LOWRANK else "gated MLP"
    table = Table(
        title=f"{family} on {chip}, bf16, ratio {RATIO}, x passed as k x m; predicted by the "
        f"simulator; kernel start and stop ({1e6 * chip.kernel_start_stop_seconds:.0f} us) apart"
    )
    table.add_column("model", no_wrap=True)
    table.add_column("part")
    for name in ("m", "us", "roofline", "ratio", "HBM x min", "MFU", "MBU", "DMA/TensorE", "instr",
                 "x turned", *others.values()):  # fmt: skip
        table.add_column(name, justify="right")
    table.add_column("misses")
    for row in rows:
        table.add_row(
            row.job.model, row.job.part, str(row.job.m), f"{row.latency_us:.1f}",
            f"{row.roofline_us:.1f}", f"{row.ratio:.3f}", f"{row.bytes_over_minimal:.2f}",
            f"{100 * row.mfu:.0f} %", f"{100 * row.mbu:.0f} %", f"{row.dma_over_tensor:.2f}",
            f"{row.instructions:,}", f"{100 * (row.turned_us / row.latency_us - 1):+.0f} %",
            *(f"{row.over(name):.2f}x" for name in others), "; ".join(row.misses),
        )  # fmt: skip
    console.print(table)


@dataclass(frozen=True)
class Bar:
    """One bar: what it asks, the worst value there is, whether it holds, rows that miss it."""

    name: str
    wanted: str
    value: str
    good: bool
    missed: str = ""


def bars(rows: list[Row]) -> list[Bar]:
    """Return the bars of one target."""
    made: list[Bar] = []

    def each(name: str, wanted: str, values: list[float], limit: float, least: bool) -> None:
        if not values:
            return
        bad = sum(v < limit if least else v > limit for v in values)
        worst = min(values) if least else max(values)
        mean = sum(values) / len(values)
        value = f"{'least' if least else 'most'} {worst:.3f}, mean {mean:.3f}"
        made.append(Bar(name, wanted, value, not bad, f"{bad} of {len(values)}"))

    for parts, name in ((LOWRANK, "lowrank"), (GATED, "gated")):
        mine = [row for row in rows if row.job.part in parts]
        few = [row for row in mine if row.job.m < 512]
        large = [row.ratio for row in mine if row.job.m >= 512]
        long, short = (
            [row.ratio for row in few if (row.roofline_us >= SHORT_US) == wide]
            for wide in (True, False)
        )
        each(f"{name} roofline, m >= 512", ">= 0.90", large, 0.90, True)
        each(f"{name} roofline, m <= 128, {SHORT_US} us", ">= 0.85", long, 0.85, True)
        each(f"{name} roofline, m <= 128, below", ">= 0.80", short, 0.80, True)  # as `small`
        traffic = [row.bytes_over_minimal for row in mine if row.reads_once]
        each(
            f"{name} HBM bytes, m <= 1024 (mlp: 512)", f"<= {BYTES_BAR}", traffic, BYTES_BAR, False
        )
        dma = [row.dma_over_tensor for row in mine if not row.reads_once]
        each(f"{name} DMA/TensorE, above that", f"<= {DMA_BAR}", dma, DMA_BAR, False)
        turned = [float(row.transposes) for row in mine]
        each(f"{name} transposes, x as k x m", "0", turned, 0.0, False)
    mine = [row for row in rows if row.job.part in LOWRANK]
    if mine:
        over = {name: [row.over(name) for row in mine] for name in mine[0].others_us}
        for name, mean, extreme in (
            ("dense", 1.35, 2.22),
            ("two", 0.0, 0.0),
            ("NeuronMM", 1.15, 1.0),
        ):
            values = over[name]
            average, most, least = sum(values) / len(values), max(values), min(values)
            good = average >= mean and (least >= extreme if name == "NeuronMM" else most >= extreme)
            wanted = {"dense": "mean 1.35x, best 2.22x", "NeuronMM": "mean 1.15x, least 1.00x"}
            value = f"mean {average:.2f}x, best {most:.2f}x, least {least:.2f}x"
            made.append(Bar(f"over {name}", wanted.get(name, ""), value, good))
        seconds = [row.build_seconds for row in mine if row.job.m > 1]
        each("cold build, CPU s, m > 1", f"<= {BUILD_BAR:.0f}", seconds, BUILD_BAR, False)
    return made


def summary(console: Console, rows: list[Row]) -> bool:
    """Print every bar of every target; return whether all hold. trn1's are for reading only."""
    good = True
    for target in dict.fromkeys(row.job.target for row in rows):
        held = bars([row for row in rows if row.job.target == target])
        table = Table(title=f"bars on {target}" + (" (not binding)" if target == "trn1" else ""))
        for name in ("bar", "wanted", "value", "rows that miss", ""):
            table.add_column(name)
        for bar in held:
            table.add_row(bar.name, bar.wanted, bar.value, bar.missed, "ok" if bar.good else "MISS")
        console.print(table)
        if target != "trn1":
            good &= all(bar.good for bar in held)
    return good


def run(jobs: list[Job], workers: int, console: Console, path: Path) -> list[Row]:
    """Measure the jobs in several processes, the longest first; return the rows in order."""
    largest_first = sorted(jobs, key=lambda job: -job.m * MODELS[job.model][0])
    context = multiprocessing.get_context("spawn")
    rows: list[Row] = []
    with Progress(console=console) as progress, context.Pool(workers) as pool:
        task = progress.add_task("kernels", total=len(jobs))
        for row in pool.imap_unordered(partial(measured, path), largest_first):
            rows.append(row)
            progress.advance(task)
            if not console.is_terminal and len(rows) % 20 == 0:
                console.print(f"{len(rows)} of {len(jobs)} shapes")
    return sorted(rows, key=lambda row: jobs.index(row.job))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ("mlp", *SPECS, "cliffs")
    parser.add_argument("--rows", default=",".join(names))
    parser.add_argument("--targets", help="trn2,trn3; mlp rows take trn1 too, without bars")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--m", default=",".join(map(str, TOKENS)))
    parser.add_argument("--parts", default=",".join((*LOWRANK, *GATED)))
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", choices=("bfloat16", "float8_e4m3"), default="bfloat16")
    parser.add_argument("--families", choices=("lowrank", "shared"), default="lowrank")
    parser.add_argument("--against", help="a checkout of another version")
    parser.add_argument("--timings", type=Path, default=FILE)
    given = parser.parse_args()
    if unknown := set(given.rows.split(",")) - set(names):
        parser.error(
            f"no rows are named {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    console = Console(width=None if sys.stdout.isatty() else 190)
    if given.against:
        return main_against(console, given)
    if given.families == "shared":
        return main_shared(console, given)
    if given.dtype == "float8_e4m3":
        return main_formats(console, given)
    targets = (given.targets or "trn2,trn3").split(",")
    wanted = given.rows.split(",")
    good = True
    if "mlp" in wanted:
        good &= main_mlp(console, given, targets)
    lines = [name for name in SPECS if name in wanted]
    if lines:
        good &= run_parts(console, lines, targets, given.workers, given.timings)
    if "cliffs" in wanted:
        good &= run_cliffs(
            console, list(SHAPES), targets, every=False, workers=given.workers, path=given.timings
        )
    return 0 if good else 1


def main_mlp(console: Console, given: argparse.Namespace, targets: list[str]) -> bool:
    """Print the tables of the models' MLPs; return whether the bars hold."""
    parts, sizes = given.parts.split(","), [int(m) for m in given.m.split(",")]
    jobs = [
        Job(target, model, part, m)
        for target in targets
        for model in given.models.split(",")
        for part in parts
        for m in sizes
    ]
    rows = run(jobs, given.workers, console, given.timings)
    for target in targets:
        mine = [row for row in rows if row.job.target == target]
        lowrank = [row for row in mine if row.job.part in LOWRANK]
        gated = [row for row in mine if row.job.part in GATED]
        if lowrank:
            heads = {"dense": "(a) dense", "two": "(b) two", "NeuronMM": "(c) NeuronMM"}
            show(console, lowrank, target, heads)
        if gated:
            show(console, gated, target, {"separate": "separate"})
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return summary(console, rows)


if __name__ == "__main__":
    sys.exit(main())
