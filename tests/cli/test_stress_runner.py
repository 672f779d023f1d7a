"""`make stress` as a program: an area that is not clean, or cannot run, ends it with 1."""

from __future__ import annotations

import importlib
import io

import pytest
from rich.console import Console

from benchmarks.stress import __main__ as stress

TALLY = "from benchmarks.stress.tally import Tally\n\n\ndef attempt(count, seed):\n    "
RIGHT = "return Tally(attempts=count, right=count)\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs areas of these bodies; it returns (exit code, what was said)."""
    program = f"import sys\nsys.path.append({str(tmp_path)!r})\n{stress.PROGRAM}"
    monkeypatch.setattr(stress, "PROGRAM", program)

    def run_areas(**bodies):
        for name, body in bodies.items():
            (tmp_path / f"toy_{name}.py").write_text(TALLY + body)
        said = io.StringIO()
        areas = {name: f"toy_{name}" for name in bodies}
        code = stress.run(areas, 3, 1.0, Console(file=said, width=120))
        return code, said.getvalue()

    return run_areas


def test_areas_that_are_right_end_with_0(run):
    code, said = run(cache=RIGHT, save=RIGHT)
    assert code == 0, said
    assert "5,200" in said  # the counts of both areas, added


@pytest.mark.parametrize(
    ("body", "example"),
    [
        ("return Tally(count, count - 1, wrong=1, examples=['served a lie'])\n", "served a lie"),
        ("return Tally(count, count, lost=1, examples=['gone'])\n", "gone"),
        ("return Tally(count, count, tracebacks=1, examples=['ouch'])\n", "ouch"),
        ("return Tally(count, count - 1)\n", "save"),
        ("return Tally()\n", "save"),
        ("raise ValueError('broken area')\n", "broken area"),
        ("import os; os._exit(0)\n", "without a tally"),
    ],
)
def test_an_area_that_is_not_clean_ends_with_1(run, body, example):
    code, said = run(save=body)
    assert code == 1
    assert example in said


def test_an_area_that_hangs_is_wrong(tmp_path):
    tally = stress.run_area("time", 1, 1, seconds=0.01)
    assert tally.wrong == 1
    assert "past" in tally.examples[0]


def test_no_areas_are_not_a_success():
    assert stress.run({}, 0, 1.0, Console(file=io.StringIO())) == 1


def test_each_area_is_a_module_with_attempts():
    for area in stress.COUNTS:
        assert callable(importlib.import_module(f"benchmarks.stress.{area}").attempt)
