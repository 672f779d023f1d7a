"""House rules that ruff has no rule for: what no file of the package may contain."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "nmm_compiler"
FORBIDDEN_NAMES = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}


def _attribute(node):
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def faults_of(file, text):
    """Yield `file:line: what, and the way out` for each rule that a file breaks."""
    tree = ast.parse(text, file)
    lines = text.splitlines()
    if Path(file).name in FORBIDDEN_NAMES:
        yield f"{file}:1: a file named so collects strangers; name it after its one idea"
    for node in ast.walk(tree):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler):
            yield from _handler_faults(node, where, lines)
        elif isinstance(node, ast.Call) and _attribute(node.func) in ("np.load", "numpy.load"):
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if given.get("allow_pickle", "False") != "False":
                yield f"{where}: np.load with pickle permitted"
        elif isinstance(node, ast.Compare) and not file.startswith("targets/"):
            for side in map(ast.unparse, (node.left, *node.comparators)):
                if re.search(r"\.generation\b|\b(target|hardware)\.name\b", side):
                    yield f"{where}: {side} is compared; make the difference a field of targets"


def _handler_faults(node, where, lines):
    names = {_attribute(part) for part in ast.walk(node.type or node)}
    if names & {"Exception", "BaseException"}:
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        kept = any(  # to be raised later, in another thread
            isinstance(inner, ast.Assign) and _attribute(inner.value) == (node.name or "-")
            for inner in ast.walk(node)
        )
        around = lines[node.lineno - 2 : node.body[0].lineno]
        if not (raises or kept) and not any("#" in line for line in around):
            yield (
                f"{where}: except {ast.unparse(node.type)} without a reason; name the exceptions, "
                "or say in a comment on the line why all of them, and warn"
            )


def test_the_package_keeps_the_house_rules():
    faults = [
        fault
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in faults_of(path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8"))
    ]
    assert not faults, f"{len(faults)} fault(s):\n" + "\n".join(faults)


DOC = '"""What it is."""\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DOC + "try:\n    x = 1\nexcept Exception:\n    x = 2\n", "without a reason"),
        (
            DOC + "try:\n    x = 1\nexcept (OSError, Exception) as e:\n    x = 2\n",
            "without a reason",
        ),
        (DOC + "import numpy as np\nx = np.load('a', allow_pickle=True)\n", "pickle"),
        (DOC + "x = 1 if target.name == 'trn2' else 2\n", "a field of targets"),
    ],
)
def test_the_rules_find(text, said):
    faults = list(faults_of("room/file.py", text))
    assert len(faults) == 1, faults
    assert said in faults[0]
    assert faults[0].startswith("room/file.py:")
