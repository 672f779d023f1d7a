"""The rules that make mutants, and a run over a toy package whose tests miss one of them."""

import ast
from pathlib import Path

import run_mutants

FILE = b'''"""Adds 1."""
def f(x: "list[1 - 2]", y=True):
    x.n = y  # \xc3\xa9 is two bytes
    if x < 3 or y is None: g(f"{x - 1}")
    return (x - y
            - 4) * 0.5
'''


def test_each_rule_changes_what_it_names():
    mutants = run_mutants.mutants_of(FILE)
    found = [(m.rule, FILE[m.start : m.end].decode(), m.new) for m in mutants]
    assert found == [
        ("statement dropped", "x.n = y", "pass"),
        ("comparison flipped", "x < 3", "x >= 3"),
        ("number changed", "3", "7"),
        ("comparison flipped", "y is None", "y is not None"),
        ("statement dropped", 'g(f"{x - 1}")', "pass"),
        ("operands swapped", "x - y\n            - 4", "4 - (x - y)"),
        ("operands swapped", "x - y", "y - x"),
        ("number changed", "4", "9"),
        ("number changed", "0.5", "2.0"),
    ]


def test_a_mutant_is_python_and_another_program():
    text = (Path(run_mutants.ROOT) / "nmm_compiler" / "records.py").read_bytes()
    mutants = run_mutants.mutants_of(text)
    assert len(mutants) > 10
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.changed(text))) != ast.dump(ast.parse(text)), mutant


def test_survivors_are_named_and_too_many_are_a_failure(tmp_path, monkeypatch, capsys):
    room, tests = tmp_path / "nmm_compiler" / "room", tmp_path / "tests" / "room"
    room.mkdir(parents=True)
    tests.mkdir(parents=True)
    (tmp_path / "nmm_compiler" / "__init__.py").touch()
    (room / "a.py").write_text("def f(x):\n    return x > 5\n")
    (tests / "test_a.py").write_text(
        "from nmm_compiler.room.a import f\n\n\ndef test_f():\n    assert f(99) and not f(0)\n"
    )
    monkeypatch.setattr(run_mutants, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # two seconds a start
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist")
    assert run_mutants.main(["--room", "room", "--workers", "0", "--least", "0.6"]) == 1
    said = capsys.readouterr().out
    assert "killed   nmm_compiler/room/a.py:2: comparison flipped: x > 5 -> x <= 5" in said
    assert said.splitlines()[-1] == "nmm_compiler/room/a.py:2: number changed: 5 -> 11"
