"""Names tensors without a name after the variable that the kernel's line assigns to."""

from __future__ import annotations

import ast
import functools
import linecache


def assigned_name(file: str, line: int) -> str:
    """Return the target of the assignment on a line of a kernel's file, or an empty string.

    `tile = nl.ndarray(...)` gives "tile", `tiles[i] = ...` and `tiles.append(...)` give "tiles".
    """
    return _names("".join(linecache.getlines(file)) if file else "").get(line, "")


@functools.lru_cache(32)
def _names(text: str) -> dict[int, str]:
    """Return line -> name for the lines of the statements that assign one; the innermost wins."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # not Python source: a cell of a notebook with magic lines, say
        return {}
    names: dict[int, str] = {}
    for node in ast.walk(tree):  # outer statements come before inner ones
        match node:
            case (
                ast.Assign(targets=[target])
                | ast.AnnAssign(target=target)
                | ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="append")))
            ):
                while isinstance(target, ast.Subscript):
                    target = target.value
                if isinstance(target, (ast.Name, ast.Attribute)):
                    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                    names.update(dict.fromkeys(lines, ast.unparse(target)))
    return names
