"""Tidies a folded function: removes what nothing reads, and aliases.

Folding leaves `pitch = tokens` where a choice was folded.
"""

# ast names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

from nmm_compiler.codegen.trees import (
    Block,
    NameWriter,
    TreeEditor,
    assigned,
    bound_names,
    called,
    names_used,
    nodes,
    root,
)


def without_aliases(statements: Block, parameters: Iterable[str] = ()) -> Block:
    """Return the statements with `b` read for `a` where the only assignment of `a` is `a = b`.

    b is a name or `name.attribute` that is itself assigned at most once. Parameters of the function
    are assigned where it is called.
    """
    counts = Counter([*parameters, *bound_names(statements)])
    plain = {
        alias: value
        for alias, value in map(assigned, nodes(*statements))
        if isinstance(value.value if isinstance(value, ast.Attribute) else value, ast.Name)
    }
    aliases = {
        alias: value
        for alias, value in plain.items()
        if counts[alias] == 1 and counts[root(value)] <= 1
    }
    # an alias of an alias is one in the next round
    now = {alias: value for alias, value in aliases.items() if root(value) not in aliases}
    written: Block = NameWriter(now).visit_all(statements) if now else statements
    return written if len(now) in (0, len(aliases)) else without_aliases(written, parameters)


class _Used(TreeEditor):
    """Removes the assignments of values without effects to other names than these."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        target, value = assigned(node)
        calls = (call for call in nodes(value) if isinstance(call, ast.Call))
        unused = target and target not in self.names
        return None if unused and all(called(call) in _PURE_CALLS for call in calls) else node


_PURE_CALLS = ("min", "max", "len", "nl.ndarray")


def remove_unused(statements: Block) -> Block:
    """Return the statements without assignments of values that nothing reads."""
    left: Block = _Used(names_used(statements)).visit_all(statements)
    return statements if left is statements else remove_unused(left)
