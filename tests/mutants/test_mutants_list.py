"""The list of mutations stays true: every snippet and test is there, each changes one line."""

import ast
from collections import Counter

import pytest
from run_mutants import ROOT, Mutant, read_list

MUTANTS = read_list()


def test_there_are_many_and_each_has_its_name():
    assert len(MUTANTS) >= 60
    assert [name for name, count in Counter(m.name for m in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_changes_one_line_of_one_file_and_names_tests_that_exist(mutant):
    text = mutant.file().read_text()
    changed = mutant.changed(text)
    lines = list(zip(text.splitlines(), changed.splitlines(), strict=True))
    assert sum(old != new for old, new in lines) == 1
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(changed))  # and it is still Python
    for node_id in mutant.node_ids():
        file, _, name = node_id.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name.partition("[")[0] in {
            n.name for n in tree.body if isinstance(n, ast.FunctionDef)
        }
    assert mutant.breaks.endswith(".")


def test_a_snippet_that_is_not_there_or_there_twice_is_refused():
    for old in ("no such line anywhere", "import torch"):
        mutant = Mutant("x", "passes", old, "", ("test_strides.py::test_x",), "Nothing.")
        with pytest.raises(ValueError, match="it has to occur once"):
            mutant.file()
