"""Runs cases of public kernels under limits, and keeps each outcome in a file of rows.

An outcome is pass, wrong, unsupported, refused (a strict rule), failed (in the kernel's or the
test's own code), skipped, too slow, too large or not reached. A process has all cases of one file,
so that one which takes too much ends itself alone; what it has found is in the file.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import multiprocessing
import resource
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from row_file import RowFile

from nmm_compiler.errors import KernelFailedError, NmmError, UnsupportedInstructionError

Case = tuple[str, Callable[[], Any]]
"""The label of a case among those of its file, and what runs it."""
Found = tuple[str, str]
"""An outcome, and what the case said."""
STOPPED = "too slow", "the process ended while the case ran, by its limit of time or memory"
NOT_REACHED = "not reached", "its process ended while another case ran"
_WAIT = 20
"""How many times its CPU time a process may take where other work runs beside it."""


@dataclass(frozen=True)
class Limits:
    """CPU seconds of a case and of the process that has all cases of a file, and its memory."""

    seconds: float
    process_seconds: float
    gib: int


class OutcomeFile(RowFile):
    """Outcomes of cases in a file of JSON lines, each written as soon as it is known."""

    def __init__(self, path: Path | None, again: bool = False) -> None:
        """Read what the file holds. again: what was not right counts as unknown."""
        super().__init__(path, "name", "case")
        if again:
            good = ("pass", "skipped")
            self.rows = {key: row for key, row in self.rows.items() if row["outcome"] in good}

    def knows(self, name: str, case: str, seconds: float) -> bool:
        """Return whether the outcome of a case is known, as far as `seconds` let it run."""
        row = self.rows.get((name, case), {"outcome": NOT_REACHED[0]})
        slow = row["outcome"] == "too slow" and row["seconds"] < seconds
        return not slow and row["outcome"] != NOT_REACHED[0]

    def keep(self, name: str, case: str, found: Found, seconds: float) -> None:
        """Keep the outcome of a case, and its limit of CPU seconds."""
        outcome, text = found
        self.add({"name": name, "case": case, "outcome": outcome, "text": text, "seconds": seconds})


class TooSlowError(BaseException):
    """A case ran longer than its time limit."""


class WrongError(Exception):
    """Values, shapes or number of outputs differ from the reference."""


_OUTCOMES: tuple[tuple[type[BaseException], str], ...] = (
    (WrongError, "wrong"), (TooSlowError, "too slow"), (MemoryError, "too large"),
    (pytest.skip.Exception, "skipped"), (UnsupportedInstructionError, "unsupported"),
    (SyntaxError, "syntax error in the checkout"), (KernelFailedError, "failed"),
    (NmmError, "refused"),
)  # fmt: skip
"""The first class that an error has."""


def classify(error: BaseException) -> str:
    """Return the outcome of a case that raised."""
    cause = error.__cause__
    if isinstance(cause, MemoryError) or "DefaultCPUAllocator" in f"{error}{cause}":
        return "too large"
    if isinstance(error, KernelFailedError) and isinstance(cause, TooSlowError):
        return "too slow"  # the limit of time struck inside of the kernel
    if isinstance(error, KernelFailedError) and isinstance(cause, ImportError):
        return "unsupported"
    return next((word for kind, word in _OUTCOMES if isinstance(error, kind)), "failed")


def outcome(label: str, run: Callable[[], Any], seconds: float) -> Found:
    """Run a case for at most `seconds` of CPU time, whatever else runs; return what it came to."""

    def stop(*_: Any) -> None:
        raise TooSlowError(f"longer than {seconds:.0f} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the kernels' own prints
            run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the table says what goes wrong
        return classify(error), f"{label}: {type(error).__name__}: {error}"[:400]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return "pass", ""


def run_cases(name: str, cases: Iterable[Case], seconds: float, kept: OutcomeFile) -> None:
    """Run the cases whose outcome is not known; keep each as soon as it is."""
    waiting = [(label, run) for label, run in cases if not kept.knows(name, label, seconds)]
    for label, _ in waiting:
        kept.keep(name, label, NOT_REACHED, seconds)
    for label, run in waiting:
        kept.keep(name, label, STOPPED, seconds)  # counts if the case ends the process
        gc.collect()  # tracebacks hold the arrays of cases that failed
        kept.keep(name, label, outcome(label, run, seconds), seconds)


def run_apart(
    name: str, cases: Callable[[], Iterable[Case]], limits: Limits, kept: OutcomeFile
) -> None:
    """Run the cases of a file in a process with limits on memory and CPU time."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limits.gib << 30, limits.gib << 30))
        most = math.ceil(limits.process_seconds)  # a fork begins at none
        resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
        found: list[Case] = []

        def load() -> None:
            found.extend(cases())
            if not found:
                pytest.skip("no cases")

        loaded = outcome("", load, limits.process_seconds)
        if loaded[0] != "pass":  # the checkout's own files
            kept.keep(name, "", loaded, limits.seconds)
        run_cases(name, found, limits.seconds, kept)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(_WAIT * limits.process_seconds)
    process.kill()
    process.join()
    kept.read()
