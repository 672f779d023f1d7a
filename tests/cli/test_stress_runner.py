"""`make stress` as a program: an area that is not clean, or cannot run, ends it with 1."""

import io

import pytest
from rich.console import Console

from benchmarks.stress import __main__ as stress, processes

ATTEMPTS = "def attempts(count, seed):\n    "
RIGHT = "return [('right', '')] * count\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs areas of these bodies; it returns (exit code, what was said)."""
    program = f"import sys\nsys.path.append({str(tmp_path)!r})\n{processes.PROGRAM}"
    monkeypatch.setattr(processes, "PROGRAM", program)

    def run_areas(**bodies):
        for name, body in bodies.items():
            (tmp_path / f"toy_{name}.py").write_text(ATTEMPTS + body)
        said = io.StringIO()
        areas = {name: f"toy_{name}" for name in bodies}
        code = stress.run(areas, 3, 1.0, Console(file=said, width=120))
        return code, said.getvalue()

    return run_areas


@pytest.mark.parametrize(
    ("body", "example"),
    [
        (RIGHT, "5,200"),  # the counts of both areas, added
        ("return [('right', ''), ('wrong', 'served a lie')]\n", "served a lie"),
        ("return [('right', ''), ('lost', 'gone')]\n", "gone"),
        ("return [('right', ''), ('tracebacks', 'ouch')]\n", "ouch"),
        ("return []\n", "save"),
        ("raise ValueError('broken area')\n", "broken area"),
        ("import os; os._exit(0)\n", "it ended before its last attempt"),
    ],
)
def test_only_areas_that_are_clean_end_with_0(run, body, example):
    code, said = run(cache=RIGHT, save=body)
    assert (code, example in said) == (int(body != RIGHT), True), said


def test_an_area_that_hangs_is_wrong(tmp_path):
    ((outcome, example),) = stress.run_area("time", 1, 1, seconds=0.01)
    assert outcome == "wrong"
    assert "past" in example


def test_no_areas_are_not_a_success():
    assert stress.run({}, 0, 1.0, Console(file=io.StringIO())) == 1
