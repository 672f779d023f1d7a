"""Prints syntax trees as source: as `ast.unparse` does, in lines of at most 100 columns.

A line that is too long has what is between its last brackets on a line of its own, or each part of
that on one.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any

from nmm_compiler.codegen.trees import Block, Comment, Editor, changed

WIDTH = 100


def printed(tree: ast.Module) -> str:
    """Return the source of a file."""
    plain = ast.fix_missing_locations(_Plain().visit(tree))
    lines = ast.unparse(plain).split("\n")
    return "".join(f"{part}\n" for line in lines for part in _laid_out(line))


class _Plain(Editor):
    """Makes a tree one that `ast.unparse` prints: comments are names, no block is empty."""

    def visit_Comment(self, node: Comment) -> ast.stmt:  # noqa: N802  (named as its node)
        return ast.Expr(node.value)

    def generic_visit(self, node: Any) -> Any:
        """Return the node edited, no comment behind the last statement of its block."""
        if isinstance(node, (ast.FunctionDef, ast.For, ast.If)):
            node = changed(node, body=_ended(node.body) or [ast.Pass()])
        if isinstance(node, ast.If):
            node = changed(node, orelse=_ended(node.orelse))
        return super().generic_visit(node)


def _ended(body: Block) -> Block:
    """Return a block without the comments behind its last statement."""
    left = list(body)
    while left and isinstance(left[-1], Comment):
        left.pop()
    return left


def _laid_out(line: str) -> list[str]:
    """Return a line, or several if it is too long."""
    pairs = [] if line.lstrip().startswith("#") else list(_brackets(line))
    if len(line) <= WIDTH or not pairs:
        return [line]
    start, commas, stop = pairs[-1]
    indent = " " * (len(line) - len(line.lstrip()))
    inner = [f"{indent}    {line[start:stop]}"]
    if len(inner[0]) > WIDTH:
        places = [start - 1, *commas, stop]
        parts = [line[a + 1 : b].strip() for a, b in itertools.pairwise(places)]
        comma = "," if commas else ""
        inner = [one for part in parts for one in _laid_out(f"{indent}    {part}{comma}")]
    return [*_laid_out(line[:start]), *inner, f"{indent}{line[stop:]}"]


def _brackets(line: str) -> Iterator[tuple[int, list[int], int]]:
    """Yield (start, commas, end) of what is between each outer pair of brackets of a line."""
    opened: list[int] = []
    commas: list[int] = []
    for place, sign in enumerate(line):
        if sign in "([{":
            opened.append(place + 1)
        elif sign in ")]}" and opened:
            start = opened.pop()
            if not opened:
                yield start, commas, place
                commas = []
        elif sign == "," and len(opened) == 1:
            commas.append(place)
