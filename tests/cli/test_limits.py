"""`nmm simulate` and `nmm lint` on files that loop, fill the memory, end or crash their process."""

import os
import signal
import time

import pytest

from benchmarks.stress import hostile_files
from nmm_compiler.cli.kernel_arguments import arguments_of
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.errors import NmmError, ResourceLimitError, ShapeError, WorkerEndedError
from nmm_compiler.nki_api.lint import lint_source


def limited(work, seconds=20.0, gigabytes=1.0):
    return run_limited(work, what="k.py", seconds=seconds, gigabytes=gigabytes)


def forever():
    while True:
        pass


def fill():
    held = []
    while True:
        held.append(bytearray(1 << 24))


def refuse():
    raise ShapeError("no \x1b[2J shape \ud800")


def test_what_ends_well_is_returned():
    assert limited(lambda: [["output", 3], 1.5, None]) == [["output", 3], 1.5, None]
    assert limited(lambda: "x" * 3_000_000) == "x" * 3_000_000  # more than a pipe holds


def test_time_is_up_at_the_limit():
    started = time.monotonic()
    with pytest.raises(ResourceLimitError, match=r"k.py ran longer than --time-limit=0.2 seconds"):
        limited(forever, seconds=0.2)
    assert time.monotonic() - started < 10


def test_memory_ends_at_the_limit():
    with pytest.raises(ResourceLimitError, match=r"more memory than --memory-limit=0.25 GiB"):
        limited(fill, gigabytes=0.25)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_limits_are_above_0(limit):
    with pytest.raises(ResourceLimitError, match="must be above 0"):
        limited(forever, seconds=limit)


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "for want of memory"),
        (lambda: os.closerange(3, 4096), "ended the process"),
    ],
)
def test_an_ended_process_is_one_error(end, shown):
    with pytest.raises(WorkerEndedError, match=shown):
        limited(end)


def test_errors_come_over_as_one_printable_line():
    with pytest.raises(NmmError, match=r"^no \?\[2J shape \?$"):
        limited(refuse)
    with pytest.raises(NmmError, match=r"a fault in nmm_compiler .* ZeroDivisionError.*report"):
        limited(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("before", "again", "after"),
    [("x = ", "(", ""), ("x = 1", " + 1", ""), ("x = a", ".b", ""), ("x = ", "not ", "1")],
)
def test_deep_nesting_is_one_finding(before, again, after):
    for times in (400, 3000, 100_000):
        found = lint_source(f"y = 1\n{before}{again * times}{after}\n")
        assert [f.code for f in found] in (["NKI-E001"], [])
    assert found[0].line in (1, 2)


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (["a=1", "a=2"], "given twice"),
        (["a=8x8:object"], "no dtype of NKI"),
        (["a=99999999x99999999:float32"], "more than a TiB"),
        (["a=" + "9" * 5000 + "x2:float32"], "not like 128x512"),
    ],
)
def test_arguments_that_cannot_be_made(texts, shown):
    with pytest.raises(ShapeError, match=shown):
        arguments_of(texts, 0, data=True)


def test_timing_mode_makes_no_data():
    (array,) = arguments_of(["a=99999999x99999999:float32"], 0, data=False).values()
    assert array.shape == (99999999, 99999999)


@pytest.mark.parametrize("names", [("hard exit", "exit", "parentheses")])
def test_the_commands_refuse_hostile_files(monkeypatch, names):
    chosen = [case for case in hostile_files.cases() if case.name in names]
    monkeypatch.setattr(hostile_files, "cases", lambda: chosen)
    tally = hostile_files.attempt(4, 0)
    assert tally.clean, tally.examples
    assert tally.attempts == 4


@pytest.mark.long
def test_every_hostile_file():
    tally = hostile_files.attempt(len(hostile_files.cases()), 1)
    assert tally.clean, tally.examples
