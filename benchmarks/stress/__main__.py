"""`make stress`: every area tries to break what is around the kernels, one after another.

An area is a file of this directory with `attempt(count, seed) -> Tally`. Each runs in a process of
its own, so that one that crashes is a failure of its own. Prints what was tried and what it came
to; the exit code is 1 when any attempt of any area was not right, or an area could not run.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.stress.tally import Tally

ROOT = Path(__file__).resolve().parents[2]
MINUTES_AN_AREA = 14.0
COUNTS = {
    "cache": 5000,
    "save": 200,
    "command_lines": 3000,
}
# Starts the area and writes its tally; nothing but that file counts, whatever it prints.
PROGRAM = """import dataclasses, importlib, json, pathlib, sys
area, count, seed, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
tally = importlib.import_module(area).attempt(count, seed)
out.write_text(json.dumps(dataclasses.asdict(tally)))
"""


def run_area(module: str, count: int, seed: int, seconds: float) -> Tally:
    """Run one area in a process; one that ends without a tally counts as one wrong attempt."""
    with tempfile.TemporaryDirectory(prefix="nmm-stress-") as name:
        out, log = Path(name) / "tally.json", Path(name) / "log"
        with log.open("w") as said:
            try:
                subprocess.run(
                    [sys.executable, "-c", PROGRAM, module, str(count), str(seed), str(out)],
                    cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False,
                    timeout=seconds, env={**os.environ, "PYTHONPATH": str(ROOT)},
                )  # fmt: skip
                why = "it ended without a tally"
            except subprocess.TimeoutExpired:
                why = f"it ran past {seconds:.0f} s"
        if out.is_file():
            return Tally(**json.loads(out.read_text()))
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        return Tally(attempts=1, wrong=1, examples=[f"{why}: {tail}"])


def table(tallies: dict[str, Tally], seconds: dict[str, float]) -> Table:
    """Return the table of counts, one row an area."""
    columns = ("attempts", "right", "wrong", "lost", "tracebacks")
    made = Table("area", *columns, "seconds", title="make stress")
    for area, tally in tallies.items():
        counts = [f"{getattr(tally, name):,}" for name in columns]
        style = "green" if tally.clean else "red"
        made.add_row(area, *counts, f"{seconds[area]:.0f}", style=style)
    sums = [sum(getattr(tally, name) for tally in tallies.values()) for name in columns]
    made.add_section()
    made.add_row("all", *(f"{count:,}" for count in sums), "")
    return made


def run(
    areas: dict[str, str],
    seed: int,
    scale: float,
    console: Console,
    minutes: float = MINUTES_AN_AREA,
) -> int:
    """Run one area after another; print the table and examples; return the exit code."""
    tallies: dict[str, Tally] = {}
    seconds: dict[str, float] = {}
    for area, module in areas.items():
        start = time.monotonic()
        count = max(1, round(COUNTS.get(area, 1) * scale))
        tallies[area] = run_area(module, count, seed, 60 * minutes)
        seconds[area] = time.monotonic() - start
        console.print(f"{area}: {tallies[area].right} of {tallies[area].attempts} right")
    console.print(table(tallies, seconds))
    for area, tally in tallies.items():
        for example in tally.examples[:10]:
            console.print(f"{area}: {example}", markup=False, highlight=False, soft_wrap=True)
    return 0 if tallies and all(t.clean and t.attempts for t in tallies.values()) else 1


def main(words: Sequence[str] | None = None) -> int:
    """Read the arguments, run, return the exit code."""
    areas = {name: f"benchmarks.stress.{name}" for name in COUNTS}
    parser = argparse.ArgumentParser(prog="make stress", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(areas), help="this area; repeat")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--scale", type=float, default=1.0, help="attempts, times this")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES_AN_AREA, help="an area may take, 14 by default"
    )
    given = parser.parse_args(words)
    console = Console()
    console.print(f"seed {given.seed}, scale {given.scale}", highlight=False)
    chosen = {name: areas[name] for name in (given.only or areas)}
    return run(chosen, given.seed, given.scale, console, given.minutes)


if __name__ == "__main__":
    sys.exit(main())
