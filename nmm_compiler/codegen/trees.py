"""Reads and edits the syntax trees of templates.

libcst's own visitors build every node again, with white space and brackets. These visit only code,
and keep each part of a tree that an edit does not change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import libcst as cst

# Fields that hold no code to run: white space, brackets, operators, names of attributes.
_SPELLING = {
    "annotation", "attr", "comma", "dot", "equal", "first_colon", "footer", "header", "keyword",
    "lbracket", "leading_lines", "lines_after_decorators", "lpar", "operator", "rbracket", "rpar",
    "second_colon", "semicolon", "trailing_whitespace",
}  # fmt: skip


@functools.cache
def _fields(kind: type[cst.CSTNode], spelling: bool) -> tuple[str, ...]:
    """Return the fields of a kind of node that may hold nodes."""
    names = (field.name for field in dataclasses.fields(kind))
    return tuple(
        name
        for name in names
        if spelling or not (name in _SPELLING or name.startswith("whitespace_"))
    )


class _Nodes(dict[type, bool]):
    """Says of each type whether its values are nodes; isinstance is slow for these classes."""

    def __missing__(self, kind: type) -> bool:
        return self.setdefault(kind, issubclass(kind, cst.CSTNode))


_IS_NODE = _Nodes()


def nodes(
    *trees: cst.CSTNode, into: Callable[[cst.CSTNode], Sequence[cst.CSTNode] | None] | None = None
) -> Iterator[cst.CSTNode]:
    """Yield the nodes of the trees that are code, in any order.

    into: node -> the nodes below it to follow, None for all of them.
    """
    left = list(trees)
    while left:
        node = left.pop()
        yield node
        chosen = None if into is None else into(node)
        if chosen is not None:
            left.extend(chosen)
            continue
        for name in _fields(type(node), False):
            value = getattr(node, name)
            if isinstance(value, (list, tuple)):
                left.extend(value)
            elif _IS_NODE[type(value)]:
                left.append(value)


class Editor:
    """Edits a tree, from its leaves to its root.

    A method `leave_<Kind>(original, updated)` returns the replacement of a node; a method
    `visit_<Kind>(node)` returns False where the parts of a node are not edited.
    """

    spelling = False  # whether white space and brackets are edited too

    def edit(self, node: Any) -> Any:
        """Return the edited node, the same one if nothing changes."""
        kind: type[cst.CSTNode] = type(node)
        editor: Any = type(self)
        visit, leave = _methods(editor, kind)
        updated = node
        if visit is None or visit(self, node) is not False:
            changes = {}
            for name in _fields(kind, self.spelling):
                before = getattr(node, name)
                if isinstance(before, (list, tuple)):
                    after = self.edit_all(before)
                elif _IS_NODE[type(before)]:
                    after = self.edit(before)
                else:
                    continue
                if after is not before:
                    changes[name] = after
            if changes:
                updated = node.with_changes(**changes)
        return updated if leave is None else leave(self, node, updated)

    def edit_all(self, before: Any) -> Any:
        """Return a sequence of nodes edited, without those that are removed."""
        after = [self.edit(node) for node in before]
        if all(new is old for new, old in zip(after, before, strict=True)):
            return before
        return [node for node in after if isinstance(node, cst.CSTNode)]


@functools.cache
def _methods(editor: Any, kind: type[cst.CSTNode]) -> tuple[Any, Any]:
    """Return the methods of an editor for a kind of node, None for one that it lacks."""
    name = kind.__name__
    return getattr(editor, f"visit_{name}", None), getattr(editor, f"leave_{name}", None)
