"""Removes assignments that nothing reads, and blocks that are empty without them."""

# libcst names its visitor methods after node classes; a name says what each does.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.tidy import with_comments

_PURE_CALLS = ("min", "max", "len")


class _Names(cst.CSTVisitor):
    """Collects the names that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        if not isinstance(node.target, cst.Name):
            node.target.visit(self)
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)


def names_used(nodes: Sequence[cst.CSTNode]) -> set[str]:
    """Return the names that the nodes read."""
    collector = _Names()
    for node in nodes:
        node.visit(collector)
    return collector.names


def remove_unused(statements: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Return the statements without assignments of values that nothing reads."""
    while True:
        used = names_used(statements)
        sweeper = _Sweep(used)
        statements = with_comments([s.visit(sweeper) for s in statements], statements)
        if not sweeper.removed:
            return statements


class _Sweep(cst.CSTTransformer):
    """Removes one round of dead assignments and of blocks that became empty."""

    def __init__(self, used: set[str]) -> None:
        super().__init__()
        self.used = used
        self.removed = False

    def leave_SimpleStatementLine(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Any:
        small = original.body[0]
        if (
            isinstance(small, cst.Assign)
            and isinstance(small.targets[0].target, cst.Name)
            and small.targets[0].target.value not in self.used
            and _is_pure(small.value)
        ):
            self.removed = True
            return cst.RemoveFromParent()
        return updated

    def leave_For(self, original: cst.For, updated: cst.For) -> Any:
        if not updated.body.body:
            self.removed = True
            return cst.RemoveFromParent()
        return updated

    def leave_If(self, original: cst.If, updated: cst.If) -> Any:
        if not updated.body.body and updated.orelse is None:
            self.removed = True
            return cst.RemoveFromParent()
        return updated


def _is_pure(node: cst.BaseExpression) -> bool:
    finder = _Impure()
    node.visit(finder)
    return not finder.found


class _Impure(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def visit_Call(self, node: cst.Call) -> None:
        function = node.func
        if isinstance(function, cst.Name) and function.value in _PURE_CALLS:
            return
        if isinstance(function, cst.Attribute):
            allocation = (
                isinstance(function.value, cst.Name)
                and function.value.value == "nl"
                and function.attr.value == "ndarray"
            )
            view = function.attr.value in ("reshape", "reshape_dim", "permute")
            if allocation or view:
                return
        self.found = True
