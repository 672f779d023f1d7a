"""`make bench-kernels`: kernels against rooflines, against other ways, and against their bars.

Every figure is predicted by the simulator's timing model; nothing here is measured. kernel_rows.py
names the tables, their kernels and their bars. A run that was interrupted goes on where it ended,
and a second one simulates only what changed since. The exit code is 1 when a bar is missed.

    python benchmarks/kernels.py [--tables mlp,dense] [--targets trn2,trn3] [--models Llama-3.2-1B]
        [--m 1,512] [--only TEXT] [--limit 4] [--workers 2] [--timings FILE]
    python benchmarks/kernels.py --against CHECKOUT ...     each kernel beside another version's
    python benchmarks/kernels.py --tables attention --checkout nki-library
    python benchmarks/kernels.py --tables neuronmm --targets trn1 --checkout NeuronMM
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from kernel_rows import JUDGES
from kernel_specs import MODELS, facts, listed
from kernel_timings import FILE, latency_us, timings_of
from rich.console import Console
from rich.table import Table

import nmm_compiler
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.options import Options
from nmm_compiler.simulator.run import ArraySpec

DEFAULT = ("mlp", "gated", "dense", "small", "fp8", "cliffs")
LONGEST = 80  # lines of a table that is shown whole


@dataclasses.dataclass(frozen=True)
class Job:
    """A kernel to judge as its table does."""

    table: str
    target: str
    name: str
    spec: Any


def line_of(path: Path, checkout: Path | None, job: Job) -> dict[str, Any]:
    """Return a job with the microseconds of its kernel, its figures, and the bars it misses."""
    timings = timings_of(job.target, path, checkout)
    figures, missed = JUDGES[job.table](job.spec, timings)
    named = {"table": job.table, "target": job.target, "name": job.name}
    return {**named, "us": timings.us(job.spec), "figures": figures, "missed": missed}


def show(console: Console, lines: list[dict[str, Any]]) -> int:
    """Print one table of one target; return how many bars are missed."""
    title, means = f"{lines[0]['table']} on {lines[0]['target']}", facts(lines[0]["table"])["means"]
    heads = list(dict.fromkeys(name for line in lines for name in line["figures"]))
    table = Table("kernel", title=f"{title}; predicted by the simulator")
    for head in ("us", *heads):
        table.add_column(head, justify="right")
    table.add_column("misses")
    for line in lines if len(lines) <= LONGEST else [line for line in lines if line["missed"]]:
        figures = [line["figures"].get(head, "") for head in heads]
        cells = [one if isinstance(one, str) else f"{one:.2f}" for one in figures]
        table.add_row(line["name"], f"{line['us']:.1f}", *cells, "; ".join(line["missed"]))
    console.print(table)
    missed = sum(bool(line["missed"]) for line in lines)
    for head in heads:
        values = [line["figures"][head] for line in lines if head in line["figures"]]
        if isinstance(values[0], str):
            continue
        mean, bar = statistics.mean(values), means.get(head, 0.0)
        missed += mean < bar
        wanted = f", at least {bar:g} in the mean{'' if mean >= bar else ': MISSED'}" * bool(bar)
        console.print(f"{head}: mean {mean:.3f}, {min(values):.3f} to {max(values):.3f}{wanted}")
    console.print(f"{title}: {missed} bars of {len(lines)} kernels missed")
    return missed


LONGER = 1.005
# Reads a spec a line, writes its kernel, and answers with the version's folder and the function.
_BUILDER = """
import json, sys
import nmm_compiler
from nmm_compiler.kernels import FAMILIES
for line in sys.stdin:
    family, fields, target, path = json.loads(line)
    kernel = nmm_compiler.build_kernel(FAMILIES[family].spec_class(**fields), target)
    with open(path, "w", encoding="utf-8") as file:
        file.write(kernel.source)
    print(nmm_compiler.__file__, kernel.name, sep="\\t")
"""


def beside(console: Console, jobs: Sequence[Job], checkout: Path, workers: int) -> int:
    """Print each kernel's time beside that of another version's; return the exit code.

    The other version builds its kernels in a process of its own that imports it from its checkout;
    its text is then simulated here like today's, so that a change of the timing model counts for
    neither. 1 when a kernel of today takes more than 0.5 % longer.
    """
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        paths = [os.path.join(folder, f"kernel_{index}.py") for index in range(len(jobs))]
        asked = [json.dumps([job.spec.family, _fields(job.spec), job.target, path])
                 for job, path in zip(jobs, paths, strict=True)]  # fmt: skip
        built = subprocess.run(  # -c looks for modules in its folder first
            [sys.executable, "-c", _BUILDER], input="\n".join(asked), stdout=subprocess.PIPE,
            text=True, check=True, cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "NMM_CACHE": "off"},
        ).stdout.splitlines()  # fmt: skip
        versions, names = zip(*(line.split("\t") for line in built), strict=True)
        assert nmm_compiler.__file__ not in versions, "both versions are this one"
        kernels = [f"{path}:{name}" for path, name in zip(paths, names, strict=True)]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            times = pool.imap(_both, zip(jobs, kernels, strict=True))
            for job, (then, now) in zip(jobs, times, strict=True):
                ratios.append(now / then)
                console.print(
                    f"{job.target}  {job.name:40} {then:10.1f} us then  {now:10.1f} us now  "
                    f"{ratios[-1]:.3f}x",
                    highlight=False,
                )
    console.print(
        f"geometric mean {statistics.geometric_mean(ratios):.3f}x, worst {max(ratios):.3f}x; "
        f"{sum(one > LONGER for one in ratios)} of {len(jobs)} kernels take more than "
        f"{LONGER:.3f}x as long"
    )
    return int(max(ratios) > LONGER)


def _fields(spec: Any) -> dict[str, Any]:
    """Return the fields that a spec of another version needs: those that are not the default."""
    plain = {field.name: field.default for field in dataclasses.fields(spec)}
    return {name: getattr(spec, name) for name in plain if getattr(spec, name) != plain[name]}


def _both(asked: tuple[Any, str]) -> tuple[float, float]:
    """Return the microseconds of the other version's kernel and of today's."""
    job, kernel = asked
    arrays = [ArraySpec(t.shape, t.dtype) for t in job.spec.inputs()]
    now = build_kernel(job.spec, job.target, options=Options(cache="off")).profile()
    return latency_us(kernel, *arrays, target=job.target), now.latency_us


def main(
    tables: str = ",".join(DEFAULT),
    targets: str = "trn2,trn3",
    models: str = ",".join(MODELS),
    m: str = "",
    only: str = "",
    limit: int | None = None,
    workers: int = min(2, os.cpu_count() or 1),
    timings: Path = FILE,
    checkout: Path | None = None,
    against: Path | None = None,
) -> None:
    """Judge kernels by the simulator.

    M: token counts; only kernels whose name contains ONLY, at most LIMIT of each table and target;
    TIMINGS: where times are kept; CHECKOUT: a clone with the kernels of others that a table has;
    AGAINST: a checkout of another version of this project.
    """
    unknown = set(tables.split(",")) - set(JUDGES)
    if unknown:
        raise typer.BadParameter(f"no table is named {min(unknown)}; there are {', '.join(JUDGES)}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    sizes = [int(count) for count in m.split(",") if count]
    jobs = []
    for table in tables.split(","):
        for target in targets.split(","):
            known = facts(table)
            named = listed(known["kernels_of"], sizes or known["sizes"], models.split(","))
            chosen = [Job(table, target, name, spec) for name, spec in named if only in name]
            jobs += chosen[:limit]
    if against:
        sys.exit(beside(console, jobs, against, workers))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        lines = list(pool.imap(partial(line_of, timings, checkout), jobs))
    groups = itertools.groupby(lines, lambda line: (line["table"], line["target"]))
    missed = sum(show(console, list(group)) for _, group in groups)
    sys.exit(missed > 0)


if __name__ == "__main__":
    typer.run(main)
