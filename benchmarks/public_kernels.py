"""Run public NKI kernels from checkouts you have, and compare them with their own references.

    python benchmarks/public_kernels.py --samples nki-samples --library nki-library \
        --docs aws-neuron-sdk

Sources: aws-neuron/nki-samples, aws-neuron/nki-library and aws-neuron/aws-neuron-sdk on GitHub.
The sample kernels are checked against NumPy formulas here; the library's kernels run its own
integration tests: their inputs, their torch or NumPy references, their tolerances, with the
simulator in place of the device. A file passes when some cases passed and the others were skipped,
too slow or too large; "partly" names the worst of them.
`--dialect neuronxcc` runs NKI Beta 1 kernels instead, with the references that they come with
(beta1_kernels.py), from clones that --docs, --samples, --accelopt, --autocomp and --neuronmm name:
dinghongsong/NeuronMM, zhang677/AccelOpt, ucb-bar/autocomp and AWS's two.
`--outcomes FILE` keeps each case's outcome as soon as it is known: a run with the same file
continues there, in parts if need be (`--only`), and counts all that it holds of the files that it
is asked for. The exit code is 0 when at least 97 % of the cases that NKI 0.3 or newer can run are
right and each other one is explained in data/public_explained.toml.
"""

from __future__ import annotations

import collections
import functools
import logging
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import typer
from beta1_kernels import all_cases as beta1_cases
from public_examples import example_cases, mx_cases
from public_library import library_cases, library_modules
from public_outcomes import Case, Limits, OutcomeFile, run_apart
from rich.console import Console

DATA = Path(__file__).parent / "data"
_BAR = 0.97
"""The share of the cases that NKI 0.3 or newer can run that has to be right."""
_LARGE_IN_A_SIMULATOR = "4096", "5120", "8192", "16384", "32768", "36864"
"""Sizes in the names of cases that nki-library leaves out where its tests run in a simulator."""
_LEFT_OUT_IN_A_SIMULATOR = {
    "reason": "its name holds a size that the library's own runs in a simulator leave out "
    "(test/utils/simulation_setup.py)",
    "runs": False,
}
Row = dict[str, Any]


def verdict(rows: list[Row]) -> str:
    """Return pass, the outcome of a case that is not right, or that some are."""
    found = collections.Counter(row["outcome"] for row in rows)
    right = found.pop("pass", 0)
    harmless = ("skipped", "too slow", "too large")
    bad = [word for word in found if word not in harmless]
    worst = "wrong" if "wrong" in bad else next(iter([*bad, *found]), "pass")
    if right and not bad:
        return "pass"
    return f"partly: {worst}" if right else worst


def explain(console: Console, rows: Iterable[Row]) -> int:
    """Print how many cases are right, of those that run a kernel, and why each other one is not.

    Returns the exit code: 0 if the bar holds and every case that is not right has its reason.
    """
    right = runnable = counted = unexplained = 0
    known = tomllib.loads((DATA / "public_explained.toml").read_text(encoding="utf-8"))["explained"]
    for row in rows:
        if row["outcome"] in ("skipped", "too large"):
            continue
        counted += 1
        if row["outcome"] == "pass":
            right, runnable = right + 1, runnable + 1
            continue
        said = f"{row['name']} {row['case']} {row['text']}"
        why = next((one for one in known if one["says"] in said), None)
        if row["outcome"] == "too slow" and any(n in row["case"] for n in _LARGE_IN_A_SIMULATOR):
            why = _LEFT_OUT_IN_A_SIMULATOR
        unexplained += why is None
        why = why or {"reason": f"NOT EXPLAINED: {row['text']}", "runs": True}
        runnable += why["runs"]
        shown = f"{row['name']} {row['case']}: {row['outcome']}: {why['reason']}"
        console.print(shown, markup=False)
    console.print(
        f"{right} of {counted} cases right in the default mode ({right / max(counted, 1):.1%}); of "
        f"those that NKI 0.3 or newer can run {right} of {runnable} "
        f"({right / max(runnable, 1):.1%}, bar 97 %); {unexplained} not explained"
    )
    return int(right < _BAR * runnable or unexplained > 0)


Files = Iterator[tuple[str, Callable[[], Iterable[Case]]]]
"""(name, cases) of each file."""


def files_of(clones: dict[str, Path | None], every: bool, cases: int) -> Files:
    """Yield the kernels of nki-samples and of the documentation, each as a file of one case.

    Then the test files of nki-library, some or every one, with so many cases of each test.
    """
    for origin, folder in (("samples", "src/nki_samples/tutorials"), ("docs", "nki/examples")):
        if clone := clones[origin]:
            for name, run in (*example_cases(clone / folder), *mx_cases(clone / folder)):
                yield f"{origin}: {name}", functools.partial(list, [("", run)])
    if library := clones["library"]:
        tests = tomllib.loads((DATA / "nki_library_tests.toml").read_text())
        for file in tests["usual"] + (tests["further"] if every else []):
            yield (
                f"library: {file}",
                lambda file=file: library_cases(library_modules(library.resolve()), file, cases),
            )


def main(
    samples: Path | None = None,
    library: Path | None = None,
    docs: Path | None = None,
    accelopt: Path | None = None,
    autocomp: Path | None = None,
    neuronmm: Path | None = None,
    dialect: Literal["nki", "neuronxcc"] = "nki",
    only: str = "",
    all: bool = False,
    cases: int = 1,
    seconds: float = 0.0,
    file_seconds: float = 30.0,
    gib: int = 0,
    outcomes: Path | None = None,
    again: bool = False,
) -> None:
    """Run public kernels of the clones that are given.

    Only names that contain ONLY; ALL library tests known to run, CASES of each; a case for SECONDS
    of CPU time (6, Beta 1 100), a library file for FILE_SECONDS, a process with GIB of memory (6,
    Beta 1 14). OUTCOMES: the file that keeps them; AGAIN: run what was not right once more.
    """
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    console = Console(width=None if sys.stdout.isatty() else 160)
    clones = {"samples": samples, "library": library, "docs": docs, "accelopt": accelopt,
              "autocomp": autocomp, "neuronmm": neuronmm}  # fmt: skip
    if dialect == "neuronxcc":
        seconds = seconds or 100
        limits = Limits(seconds, 10 * seconds, gib or 14)
        found = beta1_cases(**clones)
        files = [(name, functools.partial(list, [("", run)])) for name, run in found]
    else:
        limits = Limits(seconds or 6, file_seconds, gib or 6)
        files = [*files_of(clones, all, cases)]
    if not files:
        raise typer.BadParameter("give the clones to run: --samples, --library, --docs, ...")
    with tempfile.TemporaryDirectory() as folder:
        kept = OutcomeFile(outcomes or Path(folder) / "outcomes.jsonl", again)
        rows: list[Row] = []
        for name, of_file in files:
            if only in name:
                run_apart(name, of_file, limits, kept)
                own = [row for row in kept.rows.values() if row["name"] == name]
                rows += own
                right = sum(row["outcome"] == "pass" for row in own)
                problem = next((row["text"] for row in own if row["outcome"] != "pass"), "")
                line = f"{verdict(own)}  {name}: {right} of {len(own)} cases right  {problem}"
                console.print(line, markup=False, highlight=False)
    tally = collections.Counter(row["outcome"] for row in rows)
    console.print("; ".join(f"{count} {word}" for word, count in tally.most_common()))
    sys.exit(explain(console, rows))


if __name__ == "__main__":
    typer.run(main)
