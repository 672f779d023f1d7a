"""Digests of what decides a figure: the same for remarks, others for what code does."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import what_decides


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package, for tests to change."""
    copy = tmp_path_factory.mktemp("copy") / "nmm_compiler"
    shutil.copytree(what_decides.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def edit(package):
    """A function that adds a line to a file of the copy, until the test ends."""
    before = {}

    def forget():
        for one in (what_decides.simulator, what_decides.chosen_by, what_decides.templates):
            one.cache_clear()

    def add(name, line):
        file = package / name
        before.setdefault(file, file.read_text("utf-8"))
        file.write_text(f"{before[file]}\n{line}\n", "utf-8")
        forget()

    yield add
    for file, text in before.items():
        file.write_text(text, "utf-8")
    forget()


def all_of(package):
    families = ("lowrank", "matmul", "gated_mlp", "attention")
    found = {f"{one} chosen": what_decides.chosen_by(one, package) for one in families}
    found |= {f"{one} template": what_decides.templates(one, package) for one in families}
    found["simulator"] = what_decides.simulator(False, package)
    found["beta 1"] = what_decides.simulator(True, package)
    return found


LOWRANK = {"lowrank chosen", "lowrank template"}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("kernels/lowrank/kernel.py", {"lowrank template"}),
        ("kernels/lowrank/schedule.py", LOWRANK),
        ("kernels/lowrank/op.py", set()),
        ("kernels/matmul/kernel.py", {"matmul template"}),
        ("kernels/pieces/product_in_sbuf.py", {"lowrank template", "gated_mlp template"}),
        ("kernels/pieces/attention_decode.py", {"attention template"}),
        ("kernels/error_bounds.py", set()),
        ("codegen/tune.py", set()),
        ("simulator/beta1/moves.py", {"beta 1"}),
        ("simulator/timing/costs.py", {"simulator", "beta 1"}),
        ("simulator/timing/advice.py", set()),
    ],
)
def test_a_file_decides_what_it_is_part_of(package, edit, name, others):
    edit(name, "")
    before = all_of(package)
    edit(name, "# a remark")
    assert all_of(package) == before
    edit(name, "CHANGED = 1")
    after = all_of(package)
    assert {one for one in before if before[one] != after[one]} == others


def test_a_change_of_how_all_are_ranked_changes_all_families(package, edit):
    before = all_of(package)
    edit("codegen/cost.py", "CHANGED = 1")
    after = all_of(package)
    assert {one for one in before if before[one] == after[one]} == {"simulator", "beta 1"}


def test_files_left_out_are_there():
    assert all((what_decides.PACKAGE / name).is_file() for name in what_decides.LEFT_OUT)


def test_meaning_is_without_remarks_and_layout():
    one = 'def f(x):\n    """Says."""\n    # why\n    return (x +\n        1)\n'
    assert what_decides.meaning(one) == what_decides.meaning("def f(x): return x + 1")
    assert what_decides.meaning(one) != what_decides.meaning("def f(x): return x + 2")
    assert what_decides.meaning("x: int = 1") != what_decides.meaning("x: str = 1")
    assert what_decides.meaning("x = 1") != what_decides.meaning("x = '1'")


def test_a_foreign_kernel_counts_with_what_it_calls(tmp_path):
    file = tmp_path / "theirs.py"
    text = "TILE = 128\n\ndef f(): return TILE\n\ndef g(): return f()\n\ndef h(): return 1\n"
    file.write_text(text)
    g, h = (what_decides.foreign(file, name) for name in "gh")
    file.write_text(text.replace("128", "512"))
    assert what_decides.foreign(file, "g") != g
    assert what_decides.foreign(file, "h") == h
