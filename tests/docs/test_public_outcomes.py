"""The count of public kernels: outcomes kept in a file, and the cases that end their process."""

import io
import os
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from nmm_compiler.errors import KernelArgumentError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def public():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import public_kernels

        yield public_kernels
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def library(public):
    import public_library

    return public_library


ACCURACY = types.SimpleNamespace(absolute_accuracy=0.5, relative_accuracy=0.25)


def compared(library, monkeypatch, at_once, output, wanted):
    """Return what the comparison of two float32 lists says, "" if they agree."""
    monkeypatch.setattr(library, "_COMPARED_AT_ONCE", at_once)
    wanted = np.asarray(wanted, np.float32)
    try:
        library.Case.compare("y", np.asarray(output, np.float32), wanted, wanted, ACCURACY)
    except library.WrongError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_outputs_are_compared_alike_in_parts(library, monkeypatch, at_once):
    """The bound comes from the largest finite value of the whole reference: 0.5 + 0.25 * 8."""
    inf, nan = np.inf, np.nan
    wanted = [8.0, 0.0, inf, nan, -1.0]
    assert not compared(library, monkeypatch, at_once, [8.0, 2.5, inf, nan, -3.5], wanted)
    found = compared(library, monkeypatch, at_once, [8.0, 2.625, inf, 1.0, -1.0], wanted)
    assert found == "y differs by 2.62, allowed 2.5 (2 of 5 elements)"


def test_a_kernel_does_not_change_what_the_reference_is_computed_from(library):
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


def rows_of(public, found, path, again=False):
    kept = public.OutcomeFile(path, again)
    return list(public.run_cases("name", found, 10.0, kept))[-1]


def test_a_run_continues_where_another_ended(public, tmp_path):
    path, ran = tmp_path / "outcomes.jsonl", []
    found = cases(ran, good, bad, good)
    assert (rows_of(public, found[:2], path).good, ran) == (1, [0, 1])
    row = rows_of(public, found, path)
    assert (row.good, row.result, ran) == (2, "partly: failed", [0, 1, 2])
    rows_of(public, found, path, again=True)
    assert ran == [0, 1, 2, 1]
    assert (
        public.OutcomeFile(path, False)
        .origin()
        .endswith("3 of 3 outcomes are of this simulator's text")
    )


def test_a_case_that_ends_its_process_and_those_behind_it_are_not_right(public, tmp_path):
    path, ran = tmp_path / "outcomes.jsonl", []
    found = cases(ran, good, lambda: os._exit(3), good)

    def rows():
        yield from public.run_cases("name", found, 10.0, public.OutcomeFile(path, False))

    row = public.apart("name", 64, 60.0, rows)
    assert (row.good, row.count, row.not_reached) == (1, 3, 1)
    assert [outcome for _, outcome, _ in row.others] == ["too slow"]
    text = io.StringIO()
    assert public.explain(Console(file=text, width=200), [row]) == 1
    assert "1 of 3 cases right" in text.getvalue()
    row = rows_of(public, found, path)  # the one that ended its process is not run once more
    assert (row.good, row.not_reached, ran) == (2, 0, [2])


@pytest.mark.parametrize(("wrong", "code"), [(3, 0), (4, 1)])
def test_the_exit_code_is_the_bar_of_97_percent(public, wrong, code):
    other = ("case", "too slow", "TooSlowError: longer than 6 s of CPU time")
    row = public.Row("name", "pass", 100, 100 + wrong, 1.0, "", (other,) * wrong)
    assert public.explain(Console(file=io.StringIO()), [row]) == code


def test_a_case_without_a_reason_fails_whatever_the_share(public):
    row = public.Row("name", "pass", 100, 101, 1.0, "", (("case", "wrong", "nobody knows"),))
    text = io.StringIO()
    assert public.explain(Console(file=text, width=200), [row]) == 1
    assert "1 not explained" in text.getvalue()


def test_the_page_says_what_the_kept_outcomes_count(public):
    outcomes = public.OutcomeFile(BENCHMARKS / "data" / "public_outcomes.jsonl", False).rows
    rows = []
    for name in dict.fromkeys(name for name, _ in outcomes):
        found = [(case, row) for (n, case), row in outcomes.items() if n == name]
        others = [(case, r["outcome"], r["text"]) for case, r in found if r["outcome"] != "pass"]
        good = len(found) - len(others)
        rows.append(public.Row(name, "", good, len(found), 0.0, "", tuple(others)))
    text = io.StringIO()
    public.explain(Console(file=text, width=4000), rows)
    assert "; 0 not explained" in text.getvalue()
    counts = re.search(r"can run (\d+) of (\d+) \(([\d.]+)%", text.getvalue())
    assert counts is not None
    right, runnable, share = counts.groups()
    page = " ".join((BENCHMARKS.parent / "docs" / "simulator.md").read_text("utf-8").split())
    assert f"{right} of {runnable} that NKI 0.3 or newer can run are right ({share} %)" in page


def test_a_module_that_does_not_load_is_a_case_that_fails(public, tmp_path):
    """The others of its folder run all the same."""
    from beta1_kernels import sample_cases

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
    found = dict(sample_cases(tmp_path))
    assert list(found) == ["samples: test_bad", "samples: numerics"]
    found["samples: numerics"]()
    with pytest.raises(KernelArgumentError, match="mode 'fast'"):
        found["samples: test_bad"]()
