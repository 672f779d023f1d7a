"""House rules that ruff has no rule for: what no file of the package may contain."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parent.parent
PACKAGE = TREE / "nmm_compiler"
ROOMS = ("nmm_compiler", "tests", "benchmarks", "docs", "examples")

FORBIDDEN_NAMES = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}


def _attribute(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


def faults_of(file: str, text: str) -> Iterator[str]:
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


def _handler_faults(node: ast.ExceptHandler, where: str, lines: list[str]) -> Iterator[str]:
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


# Files that comments name and that are not ours: of a user, of AWS's libraries.
NAMED_ELSEWHERE = {
    "a.py", "add.py", "b.py", "file.py", "my_kernel.py", "name.py", "mlp.py", "qkv_cte.py",
    "rope.py", "gate_up_projection_mx_shard_H.py", "output_projection_cte_parameters.py",
    "output_projection_tkg.py", "test_speedup.py",
}  # fmt: skip
NAMED_FILE = re.compile(r"(?<![\w/.<>*{-])((?:[\w-]+/)*[a-z_]\w*\.(?:py|md|toml))\b(?![/*<{])")


def ends_of_paths(files: list[str]) -> set[str]:
    """Return each file's path, and each end of it: a comment may leave out the folders above."""
    parts = [file.split("/") for file in files]
    return {"/".join(path[first:]) for path in parts for first in range(len(path))}


def lost_files(file: str, text: str, ends: set[str]) -> Iterator[str]:
    """Yield `file:line: name` of each file that a comment or a docstring names and nobody has."""
    known = ends | NAMED_ELSEWHERE
    if known.issuperset(NAMED_FILE.findall(text)):
        return  # which takes a hundredth of reading its tokens
    said = [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(ast.parse(text, file)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            said.append((getattr(node, "lineno", 1), ast.get_docstring(node) or ""))
    for line, words in said:
        for name in NAMED_FILE.findall(words):
            if name not in known:
                yield f"{file}:{line}: {name}"


def test_files_that_comments_name_exist():
    paths = [path for room in ROOMS for path in (TREE / room).rglob("*.*")] + list(TREE.glob("*.*"))
    files = [path.relative_to(TREE).as_posix() for path in paths]
    ends = ends_of_paths(files)
    faults = [
        fault
        for file in files
        if file.endswith(".py")
        for fault in lost_files(file, (TREE / file).read_text("utf-8"), ends)
    ]
    assert not faults, "named and not there:\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("# see room/a.py\n", []),
        ("# see a.py, other/a.py\n", ["f.py:1: other/a.py"]),
        ('def f():\n    """What b.md says of top/room/a.py."""\n', ["f.py:1: b.md"]),
        ("# FILE.py, <name>.py, room/*.py and x/{family}.py stand for any\n", []),
        ("x = 'gone.py'\n", []),
    ],
)
def test_a_lost_file_is_found(text, lost):
    assert list(lost_files("f.py", text, ends_of_paths(["top/room/a.py"]))) == lost


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
    ],
)
def test_the_rules_find(text, said):
    faults = list(faults_of("room/file.py", text))
    assert len(faults) == 1, faults
    assert said in faults[0]
    assert faults[0].startswith("room/file.py:")
