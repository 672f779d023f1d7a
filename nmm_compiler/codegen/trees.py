"""Reads and edits the syntax trees of templates and of emitted files.

The trees are Python's own, `ast`, with comments as statements, each a name that is its text. No
tree is changed: an edit returns another one, which shares all that did not change.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import operator
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

Block = list[ast.stmt]
Node = TypeVar("Node", bound=ast.AST)
_FOR_A_FORMATTER = "# fmt: skip"


def read(source: str) -> ast.Module:
    """Return the tree of a source with its comments, but for those for a formatter.

    A comment stands before the statement that it is in, or at whose end it is.
    """
    tree = ast.parse(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string for t in tokens if t.type == tokenize.COMMENT}
    left = {line: text for line, text in comments.items() if text != _FOR_A_FORMATTER}
    return changed(tree, body=_commented(tree.body, left))


def _commented(body: Block, left: dict[int, str]) -> Block:
    """Return a block with the comments up to its end, taken out of those that are left."""
    made: Block = []
    statement: Any
    for statement in body:
        parts = (getattr(statement, field, None) for field in ("test", "iter", "value"))
        head = next(filter(None, parts), None)
        last = head.end_lineno if head else statement.lineno
        before = [left.pop(line) for line in list(left) if line <= last]
        made += [*(ast.Expr(name(text)) for text in before), statement]
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.For, ast.If)):
            statement.body = _commented(statement.body, left)
        if isinstance(statement, (ast.For, ast.If)):
            statement.orelse = _commented(statement.orelse, left)
    return made


def changed(node: Node, **fields: Any) -> Node:
    """Return a node with other fields."""
    made = type(node).__new__(type(node))
    vars(made).update(vars(node), **fields)
    return made


class TreeEditor(ast.NodeVisitor):
    """Edits a tree: a method `visit_<Kind>(node)` returns the replacement of a node.

    It calls `generic_visit` for the node with its parts edited. In a sequence the replacement may
    be None, which removes the node, or a list.
    """

    def generic_visit(self, node: Any) -> Any:
        """Return the node with its parts edited, the same one if nothing changes."""
        changes = {}
        for field in _parts(node.__class__):
            before = getattr(node, field)
            if isinstance(before, list):
                after: Any = self.visit_all(before)
            elif isinstance(before, ast.AST) and not isinstance(before, ast.Constant):
                after = self.visit(before)
            else:
                continue
            if after is not before:
                changes[field] = after
        return changed(node, **changes) if changes else node

    def visit_all(self, before: Any) -> Any:
        """Return a sequence of nodes edited, the same one if nothing changes."""
        made: list[Any] = []
        for node in before:
            after = node if isinstance(node, ast.Constant) else self.visit(node)
            made += after if isinstance(after, list) else [after]
        if len(made) == len(before) and all(map(operator.is_, made, before)):
            return before
        return [node for node in made if node is not None]


@functools.cache
def _parts(kind: Any) -> tuple[str, ...]:
    """Return the fields of a kind of node that may hold code."""
    return tuple(field for field in kind._fields if field not in _NO_CODE)


_NO_CODE = ("ctx", "op", "ops", "id", "attr", "arg", "kind")


class NameWriter(TreeEditor):
    """Writes expressions for names that are read."""

    def __init__(self, given: Mapping[str, ast.expr]) -> None:
        self.given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: D102  (ast's name)
        return self.given.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


class Inlined(TreeEditor):
    """Writes what helpers return in place of their calls.

    helpers: name -> (its parameters, the expression that it returns).
    """

    def __init__(self, helpers: Mapping[str, tuple[Sequence[str], ast.expr]]) -> None:
        self.helpers = helpers

    def visit_Call(self, node: ast.Call) -> Any:  # noqa: D102  (ast's name)
        call = self.generic_visit(node)
        if called(call) not in self.helpers:
            return call
        parameters, value = self.helpers[called(call)]
        return self.visit(NameWriter(bound(call, parameters)).visit(value))


def name(text: str) -> ast.Name:
    """Return a name that is read."""
    return ast.Name(text, ast.Load())


def assign(target: str, value: ast.expr) -> ast.Assign:
    """Return `target = value`."""
    return ast.Assign([ast.Name(target, ast.Store())], value)


def nodes(*trees: ast.AST) -> Iterator[Any]:
    """Yield the nodes of the trees, in any order."""
    left: list[Any] = [*trees]
    while left:
        node = left.pop()
        if isinstance(node, list):
            left += node
        elif hasattr(node, "_fields"):
            yield node
            left += [getattr(node, field) for field in _parts(node.__class__)]


def bound_names(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that the statements bind, each as often as they do."""
    return itertools.chain.from_iterable(_names_in(one)[ast.Store] for one in statements)


def names_used(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names that the trees read."""
    return {*itertools.chain.from_iterable(_names_in(one)[ast.Load] for one in trees)}


@functools.lru_cache(maxsize=8192)  # no tree is changed
def _names_in(tree: ast.AST) -> dict[type, list[str]]:
    """Return the names in a tree by their use: those that it reads, those that it binds."""
    made: dict[type, list[str]] = {ast.Load: [], ast.Store: []}
    for node in nodes(tree):
        if isinstance(node, ast.Name):
            made[type(node.ctx)].append(node.id)
        elif isinstance(node, ast.arg):
            made[ast.Store].append(node.arg)
    return made


def assigned(statement: Any) -> tuple[str, Any]:
    """Return (name, value) of `name = value`, ("", None) for another statement."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return (target.id, statement.value) if isinstance(target, ast.Name) else ("", None)


def called(node: Any) -> str:
    """Return the dotted name of what a call calls, "" for another node.

    Of `x[0].select(0, i).reshape(s)` it is x.select.reshape.
    """
    return _dotted(node.func) if isinstance(node, ast.Call) else ""


def _dotted(node: Any) -> str:
    match node:
        case ast.Name(text):
            return text
        case ast.Attribute(of, field):
            return f"{_dotted(of)}.{field}"
        case ast.Subscript(of) | ast.Call(of):
            return _dotted(of)
    return ""


def root(node: Any) -> str:
    """Return the name that an expression's subscripts, attributes and methods start from, or ""."""
    return _dotted(node).partition(".")[0]


def new_list(statement: Any) -> str:
    """Return the name that a statement gives to an empty list, "" for another one."""
    target, value = assigned(statement)
    return target if isinstance(value, ast.List) and not value.elts else ""


def appended(statement: Any) -> tuple[str, Any]:
    """Return (list, value) of `list.append(value)`, ("", None) for another statement."""
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(owner), "append"), [value])):
            return owner, value
    return "", None


def parameter_names(function: ast.FunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    return [parameter.arg for parameter in function.args.args]


def without_docstring(body: Block) -> Block:
    """Return the statements of a function but its docstring and its comments."""
    return [one for one in body if not isinstance(one, ast.Expr) or isinstance(one.value, ast.Call)]


def only_statement(body: Block) -> Any:
    """Return the statement that is all of a function's body, its docstring aside."""
    left = without_docstring(body)
    return left[0] if len(left) == 1 else None


@functools.lru_cache(maxsize=1024)
def parsed(source: str) -> ast.expr:
    """Return a piece of source as an expression."""
    return ast.parse(source, mode="eval").body


def bound(call: Any, parameters: Sequence[str]) -> dict[str, ast.expr]:
    """Return parameter -> argument of a call."""
    named = {arg.arg: arg.value for arg in call.keywords}
    return dict(zip(parameters, call.args, strict=False)) | named
