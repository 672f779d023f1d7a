"""Builds and reads small expressions: index arithmetic, calls, names."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from nmm_compiler.codegen.fold_constants import Folder
from nmm_compiler.codegen.printed import text
from nmm_compiler.codegen.trees import Names, parsed


def same(a: ast.expr, b: ast.expr) -> bool:
    """Return whether two expressions are spelled alike."""
    return a is b or text(a) == text(b)


def number(node: ast.AST | None) -> int | None:
    """Return the value of a literal integer, else None."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def plus(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a + b."""
    return _folded(ast.BinOp(a, ast.Add(), b))


def times(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a * b."""
    return _folded(ast.BinOp(a, ast.Mult(), b))


def minus(a: ast.expr, b: ast.expr) -> ast.expr:
    """Return a - b, or what is left of a where it is spelled b + something."""
    if isinstance(a, ast.BinOp) and isinstance(a.op, ast.Add) and same(a.left, b):
        return a.right
    return _folded(ast.BinOp(a, ast.Sub(), b))


def _folded(operation: ast.BinOp) -> Any:
    return Folder({}).visit(operation)


def subscript(value: ast.expr, indices: Sequence[ast.expr]) -> ast.Subscript:
    """Return value[indices]."""
    one = len(indices) == 1
    index = indices[0] if one else ast.Tuple([*indices], ast.Load())
    return ast.Subscript(value, index, ast.Load())


def indices_of(node: ast.Subscript) -> list[ast.expr]:
    """Return the slices and indices of a subscript."""
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def quoted(source: str, /, **given: ast.expr) -> Any:
    """Return a piece of source as an expression, with expressions in place of names."""
    return Names(given).visit(parsed(source))


def method(node: ast.AST | None) -> tuple[ast.expr, str, list[ast.expr]] | None:
    """Return (receiver, name, arguments) of `receiver.name(arguments)`, else None."""
    match node:
        case ast.Call(ast.Attribute(receiver, name), arguments):
            return receiver, name, arguments
    return None


def elements(node: ast.expr) -> list[ast.expr]:
    """Return the elements of a literal tuple."""
    assert isinstance(node, ast.Tuple), f"{text(node)} is not spelled as a tuple"
    return node.elts


def keyword(node: object, name: str) -> ast.expr | None:
    """Return an argument of a call by its keyword, None where there is none."""
    given = node.keywords if isinstance(node, ast.Call) else ()
    return next((one.value for one in given if one.arg == name), None)
