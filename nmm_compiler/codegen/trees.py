"""Reads and edits the syntax trees of templates.

libcst's own visitors build every node again, with white space and brackets. These visit only code,
and keep each part of a tree that an edit does not change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

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
        visit, leave, fields = _methods(editor, kind)
        updated = node
        if visit is None or visit(self, node) is not False:
            changes = {}
            for name in fields:
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
        """Return a sequence of nodes edited, without those that are removed but for comments."""
        after = [self.edit(node) for node in before]
        if all(new is old for new, old in zip(after, before, strict=True)):
            return before
        return with_comments(after, before)


@functools.cache
def _methods(editor: Any, kind: type[cst.CSTNode]) -> tuple[Any, Any, tuple[str, ...]]:
    """Return an editor's methods for a kind of node, None for one that it lacks; its fields."""
    visit, leave = (getattr(editor, f"{when}_{kind.__name__}", None) for when in ("visit", "leave"))
    return visit, leave, _fields(kind, editor.spelling)


def with_comments(made: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """Return the nodes that remain; the comment of a removed statement moves to the next."""
    left: list[Any] = []
    waiting: list[cst.EmptyLine] = []
    for new, old in zip(made, before, strict=True):
        if not isinstance(new, cst.CSTNode):
            lines = getattr(old, "leading_lines", ())
            waiting += lines if any(line.comment for line in lines) else []
            continue
        if waiting:
            lines = [*waiting, *getattr(new, "leading_lines")]  # noqa: B009
            new, waiting = new.with_changes(leading_lines=lines), []
        left.append(new)
    return left


class Names(Editor):
    """Writes expressions for names."""

    def __init__(self, given: Mapping[str, cst.BaseExpression]) -> None:
        self.given = given

    def leave_Name(  # noqa: D102, N802  (libcst's name)
        self, original: cst.Name, updated: cst.Name
    ) -> cst.BaseExpression:
        return self.given.get(original.value, updated)


def small(statement: Any) -> Any:
    """Return the first small statement of a line, None for a block."""
    return statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None


def assigned(statement: Any) -> tuple[str, Any]:
    """Return (name, value) of `name = value`, ("", None) for another statement."""
    line = small(statement)
    target = line.targets[0].target if isinstance(line, cst.Assign) else None
    return (target.value, line.value) if isinstance(target, cst.Name) else ("", None)


def called(node: Any) -> str:
    """Return the dotted name of what a call calls, "" for another node."""
    return (get_full_name_for_node(node.func) or "") if isinstance(node, cst.Call) else ""


def root(node: cst.BaseExpression) -> str | None:
    """Return the name that subscripts, attributes and methods of an expression start from."""
    while not isinstance(node, cst.Name):
        if isinstance(node, (cst.Subscript, cst.Attribute)):
            node = node.value
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            node = node.func.value
        else:
            return None
    return node.value


def new_list(statement: Any) -> str:
    """Return the name that a statement gives to an empty list, "" for another one."""
    name, value = assigned(statement)
    return name if isinstance(value, cst.List) and not value.elements else ""


def appended(statement: Any) -> tuple[str, Any]:
    """Return (list, value) of `list.append(value)`, ("", None) for another statement."""
    line = small(statement)
    call: Any = line.value if isinstance(line, cst.Expr) else None
    owner, method = getattr(getattr(call, "func", None), "value", None), called(call)
    if isinstance(owner, cst.Name) and method == f"{owner.value}.append":
        return owner.value, call.args[0].value
    return "", None


def parameter_names(function: cst.FunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    return [p.name.value for p in function.params.params]


def only_statement(body: Sequence[Any]) -> Any:
    """Return the small statement that is all of a function's body, its docstring aside."""
    first = small(body[0]) if body else None
    documented = isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString)
    left = body[int(documented) :]
    return small(left[0]) if len(left) == 1 else None


@functools.lru_cache(maxsize=1024)
def parsed(source: str) -> cst.BaseExpression:
    """Return a piece of source as an expression."""
    return cst.parse_expression(source)


_EMPTY = cst.Module(body=[])


def text(node: cst.CSTNode) -> str:
    """Return the source of a node."""
    return _EMPTY.code_for_node(node)


def bound(call: cst.Call, parameters: Sequence[str]) -> dict[str, cst.BaseExpression]:
    """Return parameter -> argument of a call."""
    return {
        (arg.keyword.value if arg.keyword else parameters[place]): arg.value
        for place, arg in enumerate(call.args)
    }


class Inlined(Editor):
    """Writes what helpers return in place of their calls.

    helpers: name -> (its parameters, the expression that it returns).
    """

    def __init__(self, helpers: Mapping[str, tuple[Sequence[str], cst.BaseExpression]]) -> None:
        self.helpers = helpers

    def leave_Call(  # noqa: D102, N802  (libcst's name)
        self, original: cst.Call, updated: cst.Call
    ) -> cst.BaseExpression:
        if called(updated) not in self.helpers:
            return updated
        parameters, value = self.helpers[called(updated)]
        made: cst.BaseExpression = self.edit(Names(bound(updated, parameters)).edit(value))
        return made
