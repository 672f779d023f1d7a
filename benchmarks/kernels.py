"""`make bench-kernels`: kernels against rooflines, against other ways, and against their bars.

Every figure is predicted by the simulator's timing model; nothing here is measured. kernel_rows.py
names the tables, their kernels and their bars. A run that was interrupted goes on where it ended,
and a second one simulates only what changed since. The exit code is 1 when a bar is missed.

    python benchmarks/kernels.py [--tables mlp,dense] [--targets trn2,trn3] [--models Llama-3.2-1B]
        [--m 1,512] [--limit 4] [--workers 2] [--json FILE] [--timings FILE]
    python benchmarks/kernels.py --against CHECKOUT ...     each kernel beside another version's
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from kernel_rows import TABLES
from kernel_timings import FILE, timings_of
from kernels_against import main_against
from model_sizes import MODELS
from rich.console import Console
from rich.table import Table

DEFAULT = ("mlp", "gated", "dense", "small", "fp8", "cliffs")
LONGEST = 80  # lines of a table that is shown whole


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel to judge as its table does."""

    table: str
    target: str
    name: str
    spec: Any


@dataclasses.dataclass(frozen=True)
class Line:
    """A kernel, its microseconds, its figures, and the bars that it misses."""

    table: str
    target: str
    name: str
    us: float
    figures: dict[str, float]
    missed: list[str]


def line_of(path: Path, job: Job) -> Line:
    """Return the line of a job."""
    timings = timings_of(path)
    us = timings.us(job.spec, job.target)
    figures, missed = TABLES[job.table].judge(job.spec, job.target, timings)
    return Line(job.table, job.target, job.name, us, figures, missed)


def jobs_of(given: argparse.Namespace) -> list[Job]:
    """Return the kernels that are asked for."""
    jobs: list[Job] = []
    for name in given.tables.split(","):
        sizes = tuple(map(int, given.m.split(","))) if given.m else TABLES[name].sizes
        for target in given.targets.split(","):
            named = list(TABLES[name].specs(given.models.split(","), sizes))[: given.limit]
            jobs += [Job(name, target, words or spec.short(), spec) for words, spec in named]
    return jobs


def show(console: Console, lines: list[Line]) -> int:
    """Print one table of one target; return how many bars are missed."""
    one, means = lines[0], TABLES[lines[0].table].means
    heads = list(dict.fromkeys(name for line in lines for name in line.figures))
    table = Table("kernel", title=f"{one.table} on {one.target}; predicted by the simulator")
    for head in ("us", *heads):
        table.add_column(head, justify="right")
    table.add_column("misses")
    shown = lines if len(lines) <= LONGEST else [line for line in lines if line.missed]
    for line in shown:
        cells = [f"{line.figures[head]:.2f}" if head in line.figures else "" for head in heads]
        table.add_row(line.name, f"{line.us:.1f}", *cells, "; ".join(line.missed))
    console.print(table)
    missed = sum(bool(line.missed) for line in lines)
    for head in heads:
        values = [line.figures[head] for line in lines if head in line.figures]
        mean, bar = statistics.mean(values), means.get(head, 0.0)
        missed += mean < bar
        wanted = f", at least {bar:g} in the mean{'' if mean >= bar else ': MISSED'}" * bool(bar)
        console.print(f"{head}: mean {mean:.3f}, {min(values):.3f} to {max(values):.3f}{wanted}")
    console.print(f"{one.table} on {one.target}: {missed} bars of {len(lines)} kernels missed")
    return missed


def main() -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", default=",".join(DEFAULT), help=", ".join(TABLES))
    parser.add_argument("--targets", default="trn2,trn3")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--m", help="token counts of the tables that have a choice")
    parser.add_argument("--limit", type=int, help="kernels of each table and target")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="the lines, in a file")
    parser.add_argument("--timings", type=Path, default=FILE, help="where times are kept")
    parser.add_argument("--against", help="a checkout of another version")
    given = parser.parse_args()
    unknown = set(given.tables.split(",")) - set(TABLES)
    if unknown:
        parser.error(f"no table is named {min(unknown)}; there are {', '.join(TABLES)}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    jobs = jobs_of(given)
    if given.against:
        return main_against(console, jobs, given.against, given.workers)
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        lines = list(pool.imap(partial(line_of, given.timings), jobs))
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.table, line.target), []).append(line)
    missed = sum(show(console, group) for group in groups.values())
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=1))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
