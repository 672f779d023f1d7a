"""The remedies of all refusals of the passes, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from nmm_compiler.passes import pipeline

ROOM = Path(pipeline.__file__).parent


def _texts(value: ast.expr, tree: ast.Module) -> Iterator[str]:
    """Yield the texts that an expression may be; "{}" stands for a computed part."""
    if isinstance(value, ast.Constant):
        yield from [value.value] if isinstance(value.value, str) else []
    elif isinstance(value, ast.JoinedStr):
        yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in value.values)
    elif isinstance(value, ast.IfExp):
        yield from (*_texts(value.body, tree), *_texts(value.orelse, tree))
    elif isinstance(value, ast.BinOp):
        yield from _texts(value.left, tree)
        if isinstance(value.left, ast.Constant):
            yield from _texts(value.right, tree)
    elif isinstance(value, ast.Tuple):
        yield from _texts(value.elts[-1], tree)
    elif isinstance(value, ast.Name):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == value.id for t in node.targets
            ):
                yield from _texts(node.value, tree)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == value.func.id:
                for end in ast.walk(node):
                    if isinstance(end, ast.Return) and end.value is not None:
                        yield from _texts(end.value, tree)


def remedies() -> set[str]:
    """Return every remedy that a refusal of the passes may have."""
    found: set[str] = set()
    for file in ROOM.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            name = getattr(getattr(node, "func", None), "id", "")
            if name in ("Refusal", "Declined") and isinstance(node, ast.Call):
                place = 3 if name == "Refusal" else 4
                given = [k.value for k in node.keywords if k.arg == "remedy"]
                given += [*node.args[place : place + 1]]
                found.update(text for one in given for text in _texts(one, tree))
    return found
