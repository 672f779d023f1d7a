"""Builds and reads small expressions: index arithmetic, calls, names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import libcst as cst

from nmm_compiler.codegen.trees import parsed as parsed
from nmm_compiler.codegen.trees import root as root
from nmm_compiler.codegen.trees import text as text

Expression = cst.BaseExpression


def same(a: Expression, b: Expression) -> bool:
    """Return whether two expressions are spelled alike, but for white space."""
    return a is b or text(a).replace(" ", "") == text(b).replace(" ", "")


def number(node: Expression) -> int | None:
    """Return the value of a literal integer, else None."""
    return int(node.value) if isinstance(node, cst.Integer) else None


def integer(value: int) -> cst.Integer:
    """Return a literal integer of at least 0."""
    return cst.Integer(str(value))


def plus(a: Expression, b: Expression) -> Expression:
    """Return a + b."""
    return _combined(a, cst.Add(), b, operator.add, 0)


def times(a: Expression, b: Expression) -> Expression:
    """Return a * b."""
    return _combined(a, cst.Multiply(), b, operator.mul, 1)


def _combined(
    a: Expression, sign: cst.BaseBinaryOp, b: Expression,
    function: Callable[[int, int], int], neutral: int,
) -> Expression:  # fmt: skip
    """Return an operation on a and b, folded. neutral: the number that changes nothing."""
    left, right = number(a), number(b)
    if left is not None and right is not None:
        return integer(function(left, right))
    if neutral in (left, right):
        return b if left == neutral else a
    part = bare if isinstance(sign, cst.Add) else _factor
    return cst.BinaryOperation(part(a), sign, part(b))


def minus(a: Expression, b: Expression) -> Expression:
    """Return a - b, or what is left of a where it is spelled b + something."""
    left, right = number(a), number(b)
    if right == 0:
        return a
    if left is not None and right is not None and left >= right:
        return integer(left - right)
    if isinstance(a, cst.BinaryOperation) and isinstance(a.operator, cst.Add) and same(a.left, b):
        return a.right
    return cst.BinaryOperation(bare(a), cst.Subtract(), _factor(b))


def bare(node: Expression) -> Expression:
    """Return an expression without parentheses around it."""
    return node.with_changes(lpar=[], rpar=[]) if node.lpar else node


def _factor(node: Expression) -> Expression:
    """Return an expression as one that binds tighter than a product."""
    if isinstance(node, (cst.BinaryOperation, cst.UnaryOperation)) and not node.lpar:
        return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return node


def subscript(value: Expression, indices: Sequence[cst.BaseSlice]) -> cst.Subscript:
    """Return value[indices]."""
    return cst.Subscript(value, [cst.SubscriptElement(index) for index in indices])


def span(start: Expression, stop: Expression) -> cst.Slice:
    """Return start:stop, with spaces where a side is more than a name."""
    simple = all(isinstance(side, (cst.Name, cst.Integer)) for side in (start, stop))
    space = cst.SimpleWhitespace("" if simple else " ")
    colon = cst.Colon(whitespace_before=space, whitespace_after=space)
    return cst.Slice(start, stop, first_colon=colon)


def method(node: Expression) -> tuple[Expression, str, list[Expression]] | None:
    """Return (receiver, name, arguments) of `receiver.name(arguments)`, else None."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        return node.func.value, node.func.attr.value, [arg.value for arg in node.args]
    return None


def elements(node: Expression) -> list[Expression]:
    """Return the elements of a literal tuple."""
    assert isinstance(node, cst.Tuple), f"{text(node)} is not spelled as a tuple"
    return [element.value for element in node.elements]
