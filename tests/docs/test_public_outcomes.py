"""The count of public kernels: outcomes kept in a file, and the cases that end their process."""

import gc
import io
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nmm_compiler.errors import KernelArgumentError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import beta1_kernels
import public_kernels as public
import public_library as library
import public_outcomes as outcomes


@pytest.fixture(autouse=True)
def what_others_left_is_not_collected():
    """Each case collects garbage, which takes seconds in a process that has loaded torch."""
    gc.freeze()
    yield
    gc.unfreeze()


ACCURACY = types.SimpleNamespace(absolute_accuracy=0.5, relative_accuracy=0.25)


def compared(monkeypatch, at_once, output, wanted):
    """Return what the comparison of two float32 lists says, "" if they agree."""
    monkeypatch.setattr(library, "_COMPARED_AT_ONCE", at_once)
    wanted = np.asarray(wanted, np.float32)
    try:
        library.Orchestrator.compare("y", np.asarray(output, np.float32), wanted, wanted, ACCURACY)
    except library.WrongError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_outputs_are_compared_alike_in_parts(monkeypatch, at_once):
    """The bound comes from the largest finite value of the whole reference: 0.5 + 0.25 * 8."""
    inf, nan = np.inf, np.nan
    wanted = [8.0, 0.0, inf, nan, -1.0]
    assert not compared(monkeypatch, at_once, [8.0, 2.5, inf, nan, -3.5], wanted)
    found = compared(monkeypatch, at_once, [8.0, 2.625, inf, 1.0, -1.0], wanted)
    assert found == "y differs by 2.62, allowed 2.5 (2 of 5 elements)"


def test_a_kernel_does_not_change_what_the_reference_is_computed_from():
    """One view for one array, so that the kernel sees that two arguments are the same."""
    given = np.zeros((2, 3), np.float32)
    views = library.without_write_back({"a": given, "b": given, "c": 7})
    assert views["a"] is views["b"] is not given
    assert np.shares_memory(views["a"], given)
    assert not views["a"].flags.writeable
    assert given.flags.writeable
    assert views["c"] == 7


def cases(ran, *endings):
    """Return a case for each ending, which notes its number in `ran` and then calls the ending."""

    def run(number, ending):
        ran.append(number)
        ending()

    return [(f"case{i}", lambda i=i, e=e: run(i, e)) for i, e in enumerate(endings)]


def good():
    """End well."""


def bad():
    raise ValueError("no")


def outcomes_of(found, path, again=False):
    """Run cases with a kept file; return their outcomes in order."""
    kept = outcomes.OutcomeFile(path, again)
    outcomes.run_cases("name", found, 10.0, kept)
    return [row["outcome"] for row in kept.rows.values()]


def test_a_run_continues_where_another_ended(tmp_path):
    path, ran = tmp_path / "outcomes.jsonl", []
    found = cases(ran, good, bad, good)
    assert (outcomes_of(found[:2], path), ran) == (["pass", "failed"], [0, 1])
    assert (outcomes_of(found, path), ran) == (["pass", "failed", "pass"], [0, 1, 2])
    kept = outcomes.OutcomeFile(path)
    assert public.verdict(list(kept.rows.values())) == "partly: failed"
    outcomes_of(found, path, again=True)
    assert ran == [0, 1, 2, 1]


def test_a_case_that_ends_its_process_and_those_behind_it_are_not_right(tmp_path):
    kept, ran = outcomes.OutcomeFile(tmp_path / "outcomes.jsonl"), []
    found = cases(ran, good, lambda: os._exit(3), good)
    outcomes.run_apart("name", lambda: found, outcomes.Limits(10.0, 60.0, 64), kept)
    rows = list(kept.rows.values())
    assert [row["outcome"] for row in rows] == ["pass", "too slow", "not reached"]
    text = io.StringIO()
    assert public.explain(Console(file=text, width=200), rows) == 1
    assert "1 of 3 cases right" in text.getvalue()
    outcomes.run_cases("name", found, 10.0, kept)  # the one that ended its process is not run again
    assert ([row["outcome"] for row in kept.rows.values()][2], ran) == ("pass", [2])


def rows_with(*others):
    """Return the rows of 100 cases that are right, and of others with (outcome, text)."""
    found = [("pass", "")] * 100 + list(others)
    return [{"name": "name", "case": "case", "outcome": o, "text": t} for o, t in found]


SLOW = "too slow", "TooSlowError: longer than 6 s of CPU time"


@pytest.mark.parametrize(
    ("others", "code", "unexplained"),
    [([SLOW] * 3, 0, 0), ([SLOW] * 4, 1, 0), ([("wrong", "nobody knows")], 1, 1)],
)
def test_the_exit_code_is_the_bar_of_97_percent_and_of_reasons(others, code, unexplained):
    text = io.StringIO()
    assert public.explain(Console(file=text, width=200), rows_with(*others)) == code
    assert f"{unexplained} not explained" in text.getvalue()


def test_every_kept_outcome_is_right_or_explained():
    rows = outcomes.OutcomeFile(
        Path(public.__file__).parent / "data" / "public_outcomes.jsonl"
    ).rows
    text = io.StringIO()
    public.explain(Console(file=text, width=4000), rows.values())
    assert "; 0 not explained" in text.getvalue()


def test_a_module_that_does_not_load_is_a_case_that_fails(tmp_path):
    """The others of its folder run all the same."""
    units = tmp_path / "test" / "unit"
    units.mkdir(parents=True)
    text = """
import neuronxcc.nki as nki

@nki.jit(mode={mode!r})
def kernel(a):
    return a

class TestKernel:
    def test_numerics(self, simulation_only):
        assert simulation_only
"""
    for name, mode in (("test_bad", "fast"), ("test_good", "trace")):
        (units / f"{name}.py").write_text(text.format(mode=mode), "utf-8")
    found = dict(beta1_kernels.sample_cases(tmp_path))
    assert list(found) == ["samples: test_bad", "samples: numerics"]
    found["samples: numerics"]()
    with pytest.raises(KernelArgumentError, match="mode 'fast'"):
        found["samples: test_bad"]()
