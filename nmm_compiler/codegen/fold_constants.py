"""Folds one NKI function: constants in, dead branches out, names and comments kept.

Statements are read in order with the known value of each name (`known_values.Value`). Constant
tests choose their branch, loops of one iteration become their body. Loops of more iterations stay
loops. Calls of helpers are recorded with the known values of their arguments, so that the helpers
can be folded next.
"""

# ast names its visitor methods after node classes.
# ruff: noqa: N802, D102

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.known_values import Value, computed, divided, known, of_whole
from nmm_compiler.codegen.trees import (
    Block,
    Editor,
    assigned,
    bound,
    called,
    changed,
    nodes,
    parameter_names,
    parsed,
)
from nmm_compiler.records import Record

Environment = dict[str, Value]
Call = tuple[str, Environment]
"""A call of a helper: its name, and the known value of each argument."""

_RULES: dict[type, tuple[Callable[..., Value], Callable[..., Any]]] = {
    ast.Add: (of_whole, operator.add), ast.Sub: (of_whole, operator.sub),
    ast.Mult: (of_whole, operator.mul), ast.Mod: (divided, operator.mod),
    ast.FloorDiv: (divided, operator.floordiv),
    ast.Lt: (of_whole, operator.lt), ast.LtE: (of_whole, operator.le),
    ast.Gt: (of_whole, operator.gt), ast.GtE: (of_whole, operator.ge),
    ast.Eq: (computed, operator.eq), ast.NotEq: (computed, operator.ne),
    ast.Not: (computed, operator.not_), ast.USub: (computed, operator.neg),
}  # fmt: skip
"""Operator -> how the values of its operands give that of the result, and the Python function."""


def has_literal(value: Any) -> bool:
    """Return whether a constant has a spelling: records, and tuples of them, have none."""
    if isinstance(value, tuple):
        return all(map(has_literal, value))
    return not isinstance(value, Record)


def literal(value: Value) -> ast.expr | None:
    """Return the expression that spells a constant, None for what is not known or has none."""
    fixed, plain = values.constant(value)
    return parsed(repr(plain)) if fixed and has_literal(plain) else None


_NEUTRAL: dict[type, tuple[int, bool]] = {
    ast.Add: (0, True), ast.Sub: (0, False), ast.Mult: (1, True), ast.FloorDiv: (1, False),
}  # fmt: skip
"""Operator -> the right operand that changes nothing, and whether a left one of it does not."""


_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Subscript)


def assigned_names(statements: Iterable[ast.AST]) -> set[str]:
    """Return the names that the statements bind."""
    bound = (node for node in nodes(*statements) if isinstance(node, ast.Name))
    return {node.id for node in bound if isinstance(node.ctx, ast.Store)}


class Folder(Editor):
    """Folds the statements of one function: writes constants into them, simplifies around them."""

    def __init__(
        self,
        environment: Environment,
        signatures: Mapping[str, list[str]] = MappingProxyType({}),
        operands: Sequence[str] = (),
    ) -> None:
        """Take the known values of the parameters, and the names of operands."""
        self.operands = operands
        self.environment = environment
        self.signatures = signatures
        self.inline = {name for name, value in environment.items() if values.constant(value)[0]}
        self.calls: list[Call] = []

    def fold(self, statements: Block) -> list[ast.stmt]:
        """Return the statements, folded; none of them after a `return`."""
        folded: list[ast.stmt] = []
        for statement in statements:
            made = self.visit(statement)
            folded += made if isinstance(made, list) else [made]
            if folded and isinstance(folded[-1], ast.Return):
                break
        return folded

    def visit_FunctionDef(self, statement: ast.FunctionDef) -> ast.stmt:
        """Fold the body of a loop on the device: its parameters are not known."""
        before = dict(self.environment)
        self.environment |= dict.fromkeys(parameter_names(statement))
        body = self.fold(statement.body)
        self.environment = before
        return changed(statement, body=body)

    def visit_AugAssign(self, statement: ast.AugAssign) -> None:
        raise AssertionError("templates write a = a + 1, which folds")

    def visit_Assign(self, statement: ast.Assign) -> Any:
        name, value = assigned(statement)
        if not name:
            return self.generic_visit(statement)
        value = self.visit(value)
        self.environment[name] = self.value(value)
        return changed(statement, value=value)

    def visit_If(self, statement: ast.If) -> list[ast.stmt]:
        test = self.visit(statement.test)
        truth = values.truth(self.value(test))
        if truth is not None:
            return self.fold(statement.body if truth else statement.orelse)
        before = dict(self.environment)
        body = self.fold(statement.body)
        after_body = self.environment
        self.environment = before | self._ruled_out(test)
        orelse = self.fold(statement.orelse)
        after_else = self.environment
        names = set(after_body) | set(after_else)
        self.environment = {
            name: values.join([after_body.get(name), after_else.get(name)]) for name in names
        }
        return [changed(statement, test=test, body=body, orelse=orelse)]

    def _ruled_out(self, test: ast.expr) -> Environment:
        """Return the known value of a name if `name == constant` is false."""
        match test:
            case ast.Compare(ast.Name(name), [ast.Eq()], [other]):
                fixed, plain = values.constant(self.value(other))
                value = self.environment.get(name)
                if fixed and value is not None and value != {plain} and not values.is_whole(plain):
                    return {name: value - {plain}}
        return {}

    def visit_For(self, statement: ast.For) -> list[ast.stmt]:
        assert isinstance(statement.target, ast.Name)
        name = statement.target.id
        fixed, records = values.constant(self.value(statement.iter))
        if fixed and (records == () or not has_literal(records)):
            return self._once_for_each(name, statement, records)
        iterator = self.visit(statement.iter)
        variable: Value = None
        count: int | None = None
        if called(iterator) == "range":
            bounds = [self.value(arg) for arg in iterator.args]
            bounds = [known(0), *bounds] if len(bounds) == 1 else bounds
            variable, count = values.loop_values(*bounds)
        if count == 0:
            return []
        fixed, plain = values.constant(variable)
        if count == 1 and fixed:
            return self._once_for_each(name, statement, [plain])
        self.environment |= dict.fromkeys(assigned_names(statement.body))
        self.environment[name] = variable
        folded = self.fold(statement.body)
        return [changed(statement, iter=iterator, body=folded)]

    def _once_for_each(
        self, name: str, statement: ast.For, constants: Sequence[Any]
    ) -> list[ast.stmt]:
        """Return the body of a loop over constants, once for each."""
        folded: list[ast.stmt] = []
        self.inline.add(name)
        for one in constants:
            self.environment[name] = known(one)
            folded += self.fold(statement.body)
        return folded

    # Expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        inline = node.id in self.inline
        return (inline and literal(self.value(node))) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return literal(self.value(node)) or self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        updated = self.generic_visit(node)
        neutral, commutes = _NEUTRAL.get(type(updated.op), (None, False))
        left, right = updated.left, updated.right
        for side, other in ((right, left), (left, right)):
            _, plain = values.constant(self.value(side))
            if values.is_whole(plain) and plain == neutral and (commutes or side is right):
                return other
        return updated

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        updated = self.generic_visit(node)
        absorbs = isinstance(updated.op, ast.Or)
        sides = [(one, values.truth(self.value(one))) for one in updated.values]
        left = [one for one, truth in sides if truth is not (not absorbs)]
        if len(left) > 1:
            return changed(updated, values=left)
        return left[0] if left else updated

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        test = self.visit(node.test)
        truth = values.truth(self.value(test))
        if truth is None:
            body, orelse = self.visit(node.body), self.visit(node.orelse)
            return changed(node, test=test, body=body, orelse=orelse)
        return self.visit(node.body if truth else node.orelse)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        updated: ast.Call = self.generic_visit(node)
        function = called(updated)
        if function == "getattr":
            module, attribute = updated.args
            fixed, plain = values.constant(self.value(attribute))
            return ast.Attribute(module, plain, ast.Load()) if fixed else updated
        if function == "others.get":
            _, tensor = values.constant(self.value(updated.args[0]))
            return parsed(tensor if tensor in self.operands else "None")
        names = self.signatures.get(function)
        if names is not None:
            given = bound(updated, names).items()
            self.calls.append((function, {n: self.value(value) for n, value in given}))
        return updated

    def visit(self, node: Any) -> Any:
        """Return the edited node: an operation with a known result is that constant."""
        updated = super().visit(node)
        if isinstance(node, _OPERATIONS) or called(node) in ("min", "max", "len"):
            return literal(self.value(updated)) or updated
        return updated

    # Values

    def value(self, node: ast.AST | None) -> Value:
        """Return the value of `node`, None when it is unknown."""
        match node:
            case ast.Constant():
                return known(node.value)
            case ast.Name():
                return self.environment.get(node.id)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Tuple():
                items = [values.constant(self.value(element)) for element in node.elts]
                every = all(fixed for fixed, _ in items)
                return known(tuple(plain for _, plain in items)) if every else None
            case ast.BinOp():
                return self._operation(node.op, node.left, node.right)
            case ast.UnaryOp():
                return self._operation(node.op, node.operand)
            case ast.Compare(ops=[sign], comparators=[right]):
                return self._operation(sign, node.left, right)
            case ast.BoolOp():
                return self._boolean(node)
            case ast.IfExp():
                return values.join([self.value(node.body), self.value(node.orelse)])
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                return self._subscript(node)
        return None

    def _attribute(self, node: ast.Attribute) -> Value:
        fixed, record = values.constant(self.value(node.value))
        if not (fixed and isinstance(record, Record)) or not hasattr(record, node.attr):
            return None
        return known(getattr(record, node.attr))

    def _operation(self, sign: ast.AST, *sides: ast.expr) -> Value:
        how, function = _RULES.get(type(sign), (None, None))
        return how(function, *map(self.value, sides)) if how else None

    def _boolean(self, node: ast.BoolOp) -> Value:
        """Return the value of `and` and `or`: they are known as a bool."""
        wins = isinstance(node.op, ast.Or)
        truths = [values.truth(self.value(side)) for side in node.values]
        if wins in truths:
            return known(wins)
        return None if None in truths else known(not wins)

    def _call(self, node: ast.Call) -> Value:
        given = [self.value(arg) for arg in node.args]
        if called(node) in ("min", "max"):
            return of_whole(min if called(node) == "min" else max, *given)
        return computed(len, *given) if called(node) == "len" else None

    def _subscript(self, node: ast.Subscript) -> Value:
        if isinstance(node.slice, (ast.Slice, ast.Tuple)):
            return None
        fixed, items = values.constant(self.value(node.value))
        places = self.value(node.slice)
        if not fixed or places is None or not places <= set(range(len(items))):
            return None
        return values.join([known(items[place]) for place in places])
