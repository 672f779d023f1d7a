"""Breaks one place of the package at a time, by rule, and runs the tests that have to notice.

    python tests/mutants/run_mutants.py --room cache [--count 20] [--seed 0] [--seconds 1800]

Four rules make mutants: a comparison is flipped, a number is changed, the operands of a product,
difference or quotient are swapped, a statement is dropped. Of all places of the rooms a seed
chooses some. Each is tried in a copy of the repository, against the tests of its room, those first
that name its file. A mutant is killed when a test fails or runs on without an end. Some survivors
compute the same: the exit code is 1 if fewer than `--least` of the mutants are killed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "nmm_compiler"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "out", "build", "dist", "*.egg-info")
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot,
}  # fmt: skip
FLIPPED |= {new: old for old, new in FLIPPED.items()}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.Pow)


@dataclass(frozen=True)
class Mutant:
    """One mutation of a file: bytes `start` to `end` become `new`."""

    rule: str
    line: int
    start: int
    end: int
    new: str

    def changed(self, text: bytes) -> bytes:
        return text[: self.start] + self.new.encode() + text[self.end :]


def broken(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return the rule that breaks a node, and what takes its place."""
    match node:
        case ast.Compare(ops=[op]):
            flipped = ast.Compare(node.left, [FLIPPED[type(op)]()], node.comparators)
            return "comparison flipped", flipped
        case ast.BinOp(op=op) if isinstance(op, ORDERED):
            return "operands swapped", ast.BinOp(node.right, op, node.left)
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return "number changed", ast.Constant(2 * node.value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue():
            return "statement dropped", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "statement dropped", ast.Pass()
    return None


def code_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: no annotation, and no formatted text, which has no positions."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from code_nodes(child)


def mutants_of(text: bytes) -> list[Mutant]:
    """Return every mutation of a file, in the order of its lines."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in code_nodes(ast.parse(text)):
        change = broken(node)
        if change is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            mutants.append(Mutant(change[0], node.lineno, start, end, ast.unparse(change[1])))
    return sorted(mutants, key=lambda mutant: mutant.start)


def chosen(rooms: list[str], count: int, seed: int) -> list[tuple[Path, Mutant]]:
    """Return some mutations of the files of rooms, each with the path of its file."""
    files = [path for room in rooms for path in sorted((ROOT / PACKAGE / room).rglob("*.py"))]
    every = [(path, mutant) for path in files for mutant in mutants_of(path.read_bytes())]
    return random.Random(seed).sample(every, min(count, len(every)))


def tests_of(file: Path) -> list[str]:
    """Return the test files of a file's room, those that name its module first."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    paths = sorted((ROOT / "tests" / parts[1]).rglob("test_*.py"))
    paths.sort(key=lambda path: ".".join(parts) not in path.read_text("utf-8"))
    return [str(path.relative_to(ROOT)) for path in paths]


def run_tests(root: Path, tests: list[str], workers: int, seconds: float) -> tuple[bool, str]:
    """Return whether tests pass in a copy, and what pytest said last."""
    settings = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", f"-n{workers}", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, *tests], cwd=root, env=os.environ | settings, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        lines = process.communicate(timeout=seconds)[0].splitlines()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return False, f"no end after {seconds:.0f} s"
    words = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines or [""]
    return process.returncode == 0, words[-1]


def main(arguments: list[str] | None = None) -> int:
    """Try mutations until the count or the time is over; return 1 if too many survive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", action="append", required=True, help="a folder of the package")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1800, help="no mutant begins after them")
    parser.add_argument("--least", type=float, default=0.7, help="share that has to be killed")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    tried, survivors = 0, []
    with tempfile.TemporaryDirectory(prefix="nmm_mutants_") as directory:
        root = Path(shutil.copytree(ROOT, Path(directory) / "copy", ignore=NOT_COPIED))
        limits = {}
        for room in asked.room:
            passed, words = run_tests(root, [f"tests/{room}"], asked.workers, asked.seconds)
            if not passed:
                parser.error(f"tests/{room} fails without any mutation: {words}")
            limits[room] = 60 + 3 * (time.monotonic() - begun)
        for path, mutant in chosen(asked.room, asked.count, asked.seed):
            if time.monotonic() - begun > asked.seconds:
                break
            file = path.relative_to(ROOT)
            text = path.read_bytes()
            (root / file).write_bytes(mutant.changed(text))
            passed, words = run_tests(root, tests_of(path), asked.workers, limits[file.parts[1]])
            (root / file).write_bytes(text)
            old = " ".join(text[mutant.start : mutant.end].decode().split())
            said = f"{file}:{mutant.line}: {mutant.rule}: {old} -> {mutant.new}"
            print(f"SURVIVED {said}" if passed else f"killed   {said}  {words}", flush=True)
            tried += 1
            survivors += [said] if passed else []
    killed = tried - len(survivors)
    print(f"{killed} of {tried} killed in {time.monotonic() - begun:.0f} s", *survivors, sep="\n")
    return 1 if killed < asked.least * tried else 0


if __name__ == "__main__":
    sys.exit(main())
