"""Tidies a folded function: removes what nothing reads, aliases, and lists of known length.

Folding leaves `pitch = tokens` where a choice was folded.
"""

# ast names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from typing import Any

from nmm_compiler.codegen.trees import (
    Block,
    Editor,
    Names,
    appended,
    assign,
    assigned,
    bound_names,
    called,
    changed,
    name,
    names_used,
    new_list,
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
    written: Block = Names(now).visit_all(statements)
    return written if len(now) in (0, len(aliases)) else without_aliases(written, parameters)


def without_lists(statements: Block) -> Block:
    """Return the statements with a name for each element of lists of known length.

    Such a list is filled where it begins, not in a branch or a loop, and is read by known places.
    """
    made = list(statements)
    for place, statement in enumerate(made):
        if isinstance(statement, (ast.If, ast.For, ast.FunctionDef)):
            made[place] = changed(statement, body=without_lists(statement.body))
    for filled in filter(None, map(new_list, statements)):
        made = _named_elements(filled, made)
    return made


def _named_elements(filled: str, statements: Block) -> Block:
    """Return the statements with names for the elements of one list, unchanged if it needs one."""
    count = sum(appended(statement)[0] == filled for statement in statements)
    names = [filled] if count == 1 else [f"{filled}{i}" for i in range(count)]
    elements, unused = _Elements(filled, names), iter(names)
    made: Block = []
    for statement in statements:
        owner, added = appended(statement)
        if owner == filled:
            made.append(assign(next(unused), elements.visit(added)))
        elif new_list(statement) != filled:
            made.append(elements.visit(statement))
    return statements if elements.left else made


class _Elements(Editor):
    """Writes names for elements of a list; `left` if it is read in another way."""

    def __init__(self, filled: str, names: list[str]) -> None:
        self.filled, self.names, self.left = filled, names, False

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """Return the name that stands for t[0]."""
        match node:
            case ast.Subscript(ast.Name(self.filled), ast.Constant(int(place))):
                return name(self.names[place])
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        """Return a tuple of all elements for tuple(t)."""
        match node:
            case ast.Call(ast.Name("tuple"), [ast.Name(self.filled)]):
                return ast.Tuple([name(one) for one in self.names], ast.Load())
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        self.left = self.left or node.id == self.filled
        return node


class _Used(Editor):
    """Removes the assignments of values without effects to other names than these."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        target, value = assigned(node)
        return None if target and target not in self.names and _is_pure(value) else node


_PURE_CALLS = ("min", "max", "len", "nl.ndarray")


def remove_unused(statements: Block) -> Block:
    """Return the statements without assignments of values that nothing reads."""
    left: Block = _Used(names_used(statements)).visit_all(statements)
    return statements if left is statements else remove_unused(left)


def _is_pure(node: ast.expr) -> bool:
    """Return whether every call is one of a function, or an allocation, without effects."""
    return all(called(call) in _PURE_CALLS for call in nodes(node) if isinstance(call, ast.Call))
