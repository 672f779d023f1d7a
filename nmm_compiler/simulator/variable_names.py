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
        if not isinstance(node, ast.stmt):
            continue
        target: ast.expr | None = None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and function.attr == "append":
                target = function.value
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, (ast.Name, ast.Attribute)):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                names[line] = ast.unparse(target)
    return names
