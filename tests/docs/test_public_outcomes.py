"""The count of public kernels: outcomes kept in a file, and the cases that end their process."""

import io
import os
import sys
from pathlib import Path

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
    return list(public.run_cases("name", found, 10.0, lambda text: None, kept))[-1]


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
        yield from public.run_cases(
            "name", found, 10.0, lambda text: None, public.OutcomeFile(path, False)
        )

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
