"""Prints syntax trees as source: as `ast.unparse` does, in lines of at most 100 columns.

A line that is too long has what is between its last brackets on a line of its own, or each part of
that on one.
"""

from __future__ import annotations

import ast
import itertools
from typing import Any

from nmm_compiler.codegen.trees import Block, TreeEditor, changed, root

WIDTH = 100


def printed(tree: ast.Module) -> str:
    """Return the source of a file."""
    plain = ast.fix_missing_locations(_Plain().visit(tree))
    lines = ast.unparse(plain).split("\n")
    return "".join(f"{part}\n" for line in lines for part in _laid_out(line))


class _Plain(TreeEditor):
    """Makes a tree one that `ast.unparse` prints: no block is empty."""

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
    while left and root(getattr(left[-1], "value", None)).startswith("#"):
        left.pop()
    return left


def _laid_out(line: str) -> list[str]:
    """Return a line, or several if it is too long."""
    depths = list(itertools.accumulate((sign in "([{") - (sign in ")]}") for sign in line))
    outer = [i + 1 for i, depth in enumerate(depths) if depth == 1 and line[i] in "([{"]
    closed = [start for start in outer if 0 in depths[start:]]
    if len(line) <= WIDTH or not closed or line.lstrip().startswith("#"):
        return [line]
    start = closed[-1]
    stop = depths.index(0, start)
    indent = " " * (len(line) - len(line.lstrip()))
    inner = [f"{indent}    {line[start:stop]}"]
    if len(inner[0]) > WIDTH:
        commas = [i for i in range(start, stop) if line[i] == "," and depths[i] == 1]
        places = [start - 1, *commas, stop]
        parts = [line[a + 1 : b].strip() for a, b in itertools.pairwise(places)]
        comma = "," if commas else ""
        inner = [one for part in parts for one in _laid_out(f"{indent}    {part}{comma}")]
    return [*_laid_out(line[:start]), *inner, f"{indent}{line[stop:]}"]
