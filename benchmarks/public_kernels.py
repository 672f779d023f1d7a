"""Run public NKI kernels from checkouts you have, and compare them with their own references.

    python benchmarks/public_kernels.py --samples nki-samples --library nki-library \
        --docs aws-neuron-sdk

Sources: aws-neuron/nki-samples, aws-neuron/nki-library and aws-neuron/aws-neuron-sdk on GitHub.
The sample kernels are checked against NumPy formulas here; the library's kernels run its own
integration tests: their inputs, their torch or NumPy references, their tolerances, with the
simulator in place of the device. Per kernel: pass, wrong, unsupported, refused (a strict rule),
too slow, too large, or failed (in the kernel's or the test's own code). A kernel passes when some
cases passed and the others were skipped, too slow or too large; "partly" names the worst of them.
`--dialect neuronxcc` runs NKI Beta 1 kernels instead, with the references that they come with
(beta1_kernels.py), from clones that --docs, --samples, --accelopt, --autocomp and --neuronmm name:
dinghongsong/NeuronMM, zhang677/AccelOpt, ucb-bar/autocomp and AWS's two.
Each library test file runs in a process of its own with limits of time and memory: cumsum, rope,
max, rmsnorm_quant, router_topk, topk, qkv, mlp, output_projection, attention_cte and _tkg, rmsnorm
and layernorm; the rest with --all.
`--outcomes FILE` keeps each case's outcome in a file of JSON lines as soon as it is known: a run
with the same file continues there, in parts if need be (`--only`), and counts all that the file
holds of the cases it is asked for. `--again` runs those that were not right once more.
The exit code is 0 when at least 97 % of the cases that NKI 0.3 or newer can run are right and each
other one is explained.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import logging
import math
import multiprocessing
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from beta1_kernels import all_cases as beta1_cases
from public_examples import example_cases, matmul_cases, mx_cases
from public_library import (
    FURTHER_LIBRARY_TESTS,
    LIBRARY_TESTS,
    library_cases,
    library_modules,
    without_rules,
)
from public_outcomes import (
    EXPLAINED,
    EXPLAINED_BETA_1,
    LARGE_IN_A_SIMULATOR,
    LEFT_OUT_IN_A_SIMULATOR,
    STOPPED,
    OutcomeFile,
    classify,
    timed,
)
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_WAIT = 20
"""How many times its CPU time a process may take where other work runs beside it."""
_BAR = 0.97
"""The share of the cases that NKI 0.3 or newer can run that has to be right."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel's row of the table."""

    name: str
    result: str
    good: int
    count: int
    seconds: float
    problem: str
    others: tuple[tuple[str, str, str], ...] = ()
    """(case, outcome, text) of those that were not right, the one that runs among them."""

    @property
    def not_reached(self) -> int:
        """How many cases were not begun when the limits of their process ended it."""
        return self.count - self.good - len(self.others)


def run_cases(
    name: str, cases: list[tuple[str, Callable[[], Any]]], seconds: float, kept: OutcomeFile
) -> Iterator[Row]:
    """Run the cases, each for at most `seconds`; yield the row as it stands around each."""
    good, worst, problem, start = 0, "pass", "", time.perf_counter()
    others: list[tuple[str, str, str]] = []

    def row(*now: tuple[str, str, str]) -> Row:
        passed = good and worst in ("pass", "skipped", "too slow", "too large")
        verdict = "pass" if passed else f"partly: {worst}" if good else worst
        return Row(name, verdict if cases else "no cases", good, len(cases),
                   time.perf_counter() - start, problem, (*others, *now))  # fmt: skip

    if not cases:
        yield row()
    for label, run in cases:
        known = kept.known(name, label, seconds)
        if known is None:
            kept.keep(name, label, STOPPED, seconds)  # counts if the case ends the process
            yield row((label, *STOPPED))
            gc.collect()  # tracebacks hold the arrays of cases that failed
            known = run_case(label, run, seconds)
            kept.keep(name, label, known, seconds)
        outcome, text = known
        if outcome != "pass" and (
            worst in ("pass", "skipped", "too slow", "too large")
            or (outcome == "wrong" and worst != "wrong")
        ):
            worst, problem = outcome, text
        if outcome == "pass":
            good += 1
        else:
            others.append((label, outcome, text))
        yield row()


def run_case(label: str, run: Callable[[], Any], seconds: float) -> tuple[str, str]:
    """Return (outcome, text) of one case."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the kernels' own prints
            timed(seconds, run)
        return "pass", ""
    except BaseException as error:  # a table of what goes wrong
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = classify(error)
        text = f"{label}: {type(error).__name__}: {error}"[:400]
    if outcome == "refused":
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = without_rules(seconds, run)
    return outcome, text


def apart(
    name: str, gib: int, limit: float, rows: Callable[[], Iterator[Row]]
) -> Row:  # fmt: skip
    """Return the last of `rows()`, run in a process with limits on memory and CPU time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
        seconds = math.ceil(limit)  # a fork begins at none
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        try:
            for row in rows():
                sender.send(row)
        except Exception as error:  # the checkout's own files
            sender.send(Row(name, classify(error), 0, 0, 0.0, f"{type(error).__name__}: {error}"))
        sender.send(None)

    process = context.Process(target=child)
    start = time.perf_counter()
    process.start()
    sender.close()
    row, why = Row(name, "too slow", 0, 0, 0.0, ""), f"no CPU time within {_WAIT * limit:.0f} s"
    try:
        while receiver.poll(max(start + _WAIT * limit - time.perf_counter(), 0)):
            message = receiver.recv()
            if message is None:
                why = ""
                break
            row = message
    except EOFError:
        process.join()
        why = f"the process ended with code {process.exitcode} (memory limit {gib} GiB?)"
        if process.exitcode == -signal.SIGXCPU:
            why = f"stopped after {limit:.0f} s of CPU time"
    if process.is_alive() and why:
        process.kill()
    process.join()
    if why:
        problem = "; ".join(p for p in (row.problem, why) if p)
        row = dataclasses.replace(row, seconds=time.perf_counter() - start, problem=problem)
    return row


def explain(console: Console, rows: list[Row]) -> int:
    """Print how many cases are right, of those that run a kernel, and why each other one is not.

    Returns the exit code: 0 if the bar holds and every case that is not right has its reason.
    """
    right = runnable = counted = sum(row.good for row in rows)
    unexplained = 0
    for row in rows:
        if row.not_reached:
            console.print(f"{row.name}: {row.not_reached} cases not reached: {row.problem}")
            counted, runnable = counted + row.not_reached, runnable + row.not_reached
        for case, outcome, text in row.others:
            if outcome in ("skipped", "too large"):
                continue
            found = [e[1:] for e in EXPLAINED if e[0] in f"{row.name} {case} {text}"]
            if outcome == "too slow" and any(size in case for size in LARGE_IN_A_SIMULATOR):
                found = [LEFT_OUT_IN_A_SIMULATOR]
            reason, runs = found[0] if found else (f"NOT EXPLAINED: {text}", True)
            unexplained += not found
            counted, runnable = counted + 1, runnable + runs
            console.print(f"{row.name} {case}: {outcome}: {reason}", markup=False)
    console.print(
        f"{right} of {counted} cases right in the default mode ({right / max(counted, 1):.1%}); of "
        f"those that NKI 0.3 or newer can run {right} of {runnable} "
        f"({right / max(runnable, 1):.1%}, bar 97 %); {unexplained} not explained"
    )
    return int(right < _BAR * runnable or unexplained > 0)


def explain_beta_1(console: Console, rows: list[Row]) -> None:
    """Print how many kernels load, are right, wrong, refused and not run to their end, and why."""
    counts = collections.Counter(row.result for row in rows)
    ruled = 0
    for row in rows:
        stopped = [("", row.result, row.problem)] if row.result != "pass" else []
        for _, outcome, text in row.others or stopped:
            reasons = [e[1] for e in EXPLAINED_BETA_1 if e[0] in f"{row.name} {text}"]
            ruled += outcome in ("refused", "unsupported") and bool(reasons)
            reason = reasons[0] if reasons else f"NOT EXPLAINED: {text}"
            console.print(f"{row.name}: {outcome}: {reason}", markup=False)
    refused = counts["refused"] + counts["unsupported"]
    loads = len(rows) - counts["failed"] - counts["syntax error in the checkout"]
    console.print(
        f"{len(rows)} kernels: {loads} load, {counts['pass']} right, {counts['wrong']} wrong, "
        f"{refused} refused, {ruled} of them by a rule of SDK 2.26, "
        f"{counts['too slow'] + counts['too large']} not run to their end"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=Path, help="checkout of aws-neuron/nki-samples")
    parser.add_argument("--library", type=Path, help="checkout of aws-neuron/nki-library")
    parser.add_argument("--docs", type=Path, help="checkout of aws-neuron/aws-neuron-sdk")
    parser.add_argument("--dialect", choices=("nki", "neuronxcc"), default="nki")
    parser.add_argument("--accelopt", type=Path, help="clone of zhang677/AccelOpt (neuronxcc)")
    parser.add_argument("--autocomp", type=Path, help="clone of ucb-bar/autocomp (neuronxcc)")
    parser.add_argument("--neuronmm", type=Path, help="clone of dinghongsong/NeuronMM (neuronxcc)")
    parser.add_argument("--only", default="", help="run names that contain this")
    parser.add_argument("--all", action="store_true", help="all library tests known to run")
    parser.add_argument("--cases", type=int, default=1, help="cases per library test")
    parser.add_argument("--seconds", type=float, help="CPU seconds of one case: 6, Beta 1 100")
    parser.add_argument("--file-seconds", type=float, default=30, help="of one library test file")
    parser.add_argument("--gib", type=int, help="memory limit of each process: 6, Beta 1 14")
    parser.add_argument("--outcomes", type=Path, help="file that keeps the cases' outcomes")
    parser.add_argument("--again", action="store_true", help="run what was not right again")
    options = parser.parse_args()
    beta1 = options.dialect == "neuronxcc"
    options.seconds = options.seconds or (100 if beta1 else 6)
    options.gib = options.gib or (14 if beta1 else 6)
    clones = [options.docs, options.samples, options.accelopt, options.autocomp, options.neuronmm]
    if not (any(clones) if beta1 else options.samples or options.library or options.docs):
        parser.error("give the clones to run: --samples, --library, --docs, ... (see --help)")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    console = Console(width=None if sys.stdout.isatty() else 160)
    kept = OutcomeFile(options.outcomes, options.again)

    rows: list[Row] = []
    folders: list[tuple[str, Path]] = []
    if beta1:
        for name, run in beta1_cases(*clones):
            if options.only in name:
                alone = functools.partial(run_cases, name, [("", run)], options.seconds, kept)
                rows.append(apart(name, options.gib, 10 * options.seconds, alone))
                console.print(rows[-1].result, rows[-1].name, f"{rows[-1].seconds:.1f} s")
    elif options.samples:
        folders.append(("samples", options.samples / "src" / "nki_samples" / "tutorials"))
    if options.docs and not beta1:
        folders.append(("docs", options.docs / "nki" / "examples"))
    for origin, folder in folders:
        for name, run in itertools.chain(
            matmul_cases(folder), example_cases(folder), mx_cases(folder)
        ):
            if options.only in name:
                *_, row = run_cases(f"{origin}: {name}", [("", run)], options.seconds, kept)
                rows.append(row)
    if options.library and not beta1:
        library = options.library.resolve()
        for file in LIBRARY_TESTS + (FURTHER_LIBRARY_TESTS if options.all else []):
            if options.only not in file:
                continue
            name = f"library: {file}"

            def cases(file: str = file, name: str = name) -> Iterator[Row]:
                with contextlib.redirect_stdout(io.StringIO()):  # loggers keep the one they find
                    found = list(library_cases(library_modules(library), file, options.cases))
                yield from run_cases(name, found, options.seconds, kept)

            rows.append(apart(name, options.gib, options.file_seconds, cases))
    table = Table(title="Public kernels in the simulator (strict)")
    for column in ("kernel", "result", "cases passed", "seconds", "first problem"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row.name, row.result, f"{row.good} of {row.count}" if row.count else "",
            f"{row.seconds:.1f}", escape(row.problem),
        )  # fmt: skip
    console.print(table)
    tally = collections.Counter(row.result.partition(",")[0] for row in rows)
    console.print("; ".join(f"{count} {result}" for result, count in tally.most_common()))
    if options.outcomes:
        console.print(OutcomeFile(options.outcomes, False).origin())
    if beta1:
        explain_beta_1(console, rows)
        return 0
    return explain(console, rows)


if __name__ == "__main__":
    sys.exit(main())
