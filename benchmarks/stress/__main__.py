"""`make stress`: every area tries to break what is around the kernels, one after another.

An area is a file of this directory with `attempts(count, seed)`, which yields a verdict for each
attempt: what it came to, and an example where that is not right.

    right       the result was exact, or the fault was refused with one clear line
    wrong       a wrong result was served in silence
    lost        something that was stored before is gone or unusable
    tracebacks  a Python traceback reached the user

Each area runs in a process of its own, so that one that crashes is a failure of its own. Prints
what was tried and what it came to; the exit code is 1 when any attempt of any area was not right,
or an area could not run.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.stress.processes import Verdict, verdicts_of

MINUTES_AN_AREA = 14.0
COUNTS = {
    "cache": 5000,
    "save": 200,
    "command_lines": 3000,
}
OUTCOMES = ("right", "wrong", "lost", "tracebacks")


def run_area(module: str, count: int, seed: int, seconds: float) -> list[Verdict]:
    """Run one area in a process; one that does not come to its end is one wrong attempt more."""
    verdicts, why = verdicts_of(module, "attempts", (count, seed), seconds)
    return verdicts + [("wrong", why)] * bool(why)


def run(
    areas: dict[str, str],
    seed: int,
    scale: float,
    console: Console,
    minutes: float = MINUTES_AN_AREA,
) -> int:
    """Run one area after another; print the table and examples; return the exit code."""
    table = Table("area", "attempts", *OUTCOMES, "seconds", title="make stress")
    total: Counter[str] = Counter()
    clean, examples = bool(areas), []
    for area, module in areas.items():
        start = time.monotonic()
        count = max(1, round(COUNTS.get(area, 1) * scale))
        verdicts = run_area(module, count, seed, 60 * minutes)
        counts = Counter(outcome for outcome, _ in verdicts)
        right = counts["right"] == len(verdicts) > 0
        cells = [f"{number:,}" for number in (len(verdicts), *map(counts.__getitem__, OUTCOMES))]
        table.add_row(
            area, *cells, f"{time.monotonic() - start:.0f}", style="green" if right else "red"
        )
        clean, total = clean and right, total + counts
        examples += [f"{area}: {text}" for outcome, text in verdicts if outcome != "right"][:10]
        console.print(f"{area}: {counts['right']} of {len(verdicts)} right")
    table.add_section()
    table.add_row("all", f"{total.total():,}", *(f"{total[name]:,}" for name in OUTCOMES), "")
    console.print(table)
    for example in examples:
        console.print(example, markup=False, highlight=False, soft_wrap=True)
    return int(not clean)


def main(
    only: Annotated[list[str], typer.Option(help=", ".join(COUNTS))] = list(COUNTS),  # noqa: B006
    seed: int | None = None,
    scale: Annotated[float, typer.Option(help="attempts, times this")] = 1.0,
    minutes: Annotated[float, typer.Option(help="an area may take")] = MINUTES_AN_AREA,
) -> None:
    """Try to break the cache, saves and the command line."""
    console = Console()
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    console.print(f"seed {seed}, scale {scale}", highlight=False)
    areas = {name: f"benchmarks.stress.{name}" for name in COUNTS if name in only}
    sys.exit(run(areas, seed, scale, console, minutes))


if __name__ == "__main__":
    typer.run(main)
