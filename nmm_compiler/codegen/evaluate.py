"""Computes the known value of an expression from the known values of names.

A field of a known record is known too.
"""

from __future__ import annotations

import libcst as cst

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.known_values import Fixed, Span, Value, known
from nmm_compiler.codegen.trees import called
from nmm_compiler.records import Record

Environment = dict[str, Value]

_CALLS = {
    "min": values.smallest,
    "max": values.largest,
    "len": lambda given: values.length(given[0]),
}


class Evaluator:
    """The known values of expressions in one environment."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment

    def value(self, node: cst.BaseExpression) -> Value:
        """Return the value of `node`, None when it is unknown."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        return method(node) if method else None

    def _name(self, node: cst.Name) -> Value:
        if node.value in ("True", "False", "None"):
            return Fixed({"True": True, "False": False, "None": None}[node.value])
        return self.environment.get(node.value)

    def _attribute(self, node: cst.Attribute) -> Value:
        fixed, record = values.constant(self.value(node.value))
        if not (fixed and isinstance(record, Record)) or not hasattr(record, node.attr.value):
            return None
        return known(getattr(record, node.attr.value))

    def _tuple(self, node: cst.Tuple) -> Value:
        items = [values.constant(self.value(element.value)) for element in node.elements]
        return Fixed(tuple(plain for _, plain in items)) if all(f for f, _ in items) else None

    def _integer(self, node: cst.Integer) -> Value:
        return known(int(node.value, 0))

    def _float(self, node: cst.Float) -> Value:
        return Fixed(float(node.value))

    def _simplestring(self, node: cst.SimpleString) -> Value:
        return Fixed(node.evaluated_value)

    def _binaryoperation(self, node: cst.BinaryOperation) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        rule = values.ARITHMETIC.get(type(node.operator).__name__)
        if rule and isinstance(left, Span) and isinstance(right, Span):
            return rule(left, right)
        return None

    def _unaryoperation(self, node: cst.UnaryOperation) -> Value:
        inner = self.value(node.expression)
        if isinstance(node.operator, cst.Not):
            truth = values.truth(inner)
            return None if truth is None else Fixed(not truth)
        if isinstance(node.operator, cst.Minus):
            if isinstance(inner, Span):
                return Span(-inner.hi, -inner.lo, inner.step)
            if isinstance(inner, Fixed) and isinstance(inner.value, float):
                return Fixed(-inner.value)
        return None

    def _booleanoperation(self, node: cst.BooleanOperation) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        wins = isinstance(node.operator, cst.Or)
        for side in (left, right):
            if values.truth(side) is wins:
                return Fixed(wins)
        if values.truth(left) is not None and values.truth(right) is not None:
            return Fixed(not wins)
        return None

    def _comparison(self, node: cst.Comparison) -> Value:
        if len(node.comparisons) != 1:
            return None
        target = node.comparisons[0]
        operator = type(target.operator).__name__
        return values.compare(operator, self.value(node.left), self.value(target.comparator))

    def _ifexp(self, node: cst.IfExp) -> Value:
        truth = values.truth(self.value(node.test))
        if truth is None:
            return values.join([self.value(node.body), self.value(node.orelse)])
        return self.value(node.body if truth else node.orelse)

    def _call(self, node: cst.Call) -> Value:
        rule = _CALLS.get(called(node))
        return rule([self.value(arg.value) for arg in node.args]) if rule else None

    def _subscript(self, node: cst.Subscript) -> Value:
        index = node.slice[0].slice
        if len(node.slice) != 1 or not isinstance(index, cst.Index):
            return None
        return values.item(self.value(node.value), self.value(index.value))
