"""Removes assignments that nothing reads."""

# libcst names its visitor methods after node classes; a name says what each does.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.tidy import with_comments
from nmm_compiler.codegen.trees import Editor, assigned, called, nodes

_PURE_CALLS = ("min", "max", "len", "nl.ndarray")


def names_used(trees: Sequence[cst.CSTNode]) -> set[str]:
    """Return the names that the trees read."""
    return {node.value for node in nodes(*trees, into=_read) if type(node) is cst.Name}


def _read(node: cst.CSTNode) -> Sequence[cst.CSTNode] | None:
    """Return nothing to follow in bound names: parameters, and assigned names."""
    kind = type(node)
    bound = kind is cst.AssignTarget and type(getattr(node, "target")) is cst.Name  # noqa: B009
    return () if bound or kind is cst.Param else None


def remove_unused(statements: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Return the statements without assignments of values that nothing reads."""
    while True:
        used = names_used(statements)
        sweeper = _Sweep(used)
        statements = with_comments([sweeper.edit(s) for s in statements], statements)
        if not sweeper.removed:
            return statements


class _Sweep(Editor):
    """Removes one round of assignments that nothing reads."""

    def __init__(self, used: set[str]) -> None:
        self.used = used
        self.removed = False

    def leave_SimpleStatementLine(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Any:
        name, value = assigned(original)
        if name and name not in self.used and _is_pure(value):
            self.removed = True
            return cst.RemoveFromParent()
        return updated


def _is_pure(node: cst.BaseExpression) -> bool:
    """Return whether every call is one of a function, or an allocation, without effects."""
    return all(called(call) in _PURE_CALLS for call in nodes(node) if isinstance(call, cst.Call))
