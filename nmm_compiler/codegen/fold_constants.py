"""Folds one NKI function: constants in, dead branches out, records gone, names and comments kept.

Statements are read in order with the known value of each name (`known_values.Value`). Constant
tests choose their branch, loops of one iteration become their body. Loops of more iterations stay
loops. Calls of helpers are recorded with the known values of their arguments, so that the helpers
can be folded next; others are written out (`templates`).

Records are replaced by their fields:

    part = Part(x, 0, 128)
    load(x_sb, part)              ->    load(x_sb, x, 0, 128)
    nisa.copy(part.src, y)        ->    nisa.copy(x, y)

The argument for a record is a record, None, or a constant with such fields. A record that is set in
a branch or a loop is known there only: its use behind it raises CodegenError.
"""

# ast names its visitor methods after node classes.
# ruff: noqa: N802, D102

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.known_values import Value, computed, divided, known, of_whole
from nmm_compiler.codegen.templates import NOTHING, Parameter, Template
from nmm_compiler.codegen.trees import (
    Block,
    Editor,
    assigned,
    assigned_names,
    bound,
    called,
    changed,
    name,
    parameter_names,
    parsed,
)
from nmm_compiler.errors import CodegenError
from nmm_compiler.records import Record

Environment = dict[str, Value]


class Made(ast.expr):
    """A new record, which no emitted file has: an expression, or a record again, for each field."""

    _fields = ()

    def __init__(self, fields: dict[str, ast.expr]) -> None:
        super().__init__()
        self.fields = fields


_UNSURE = Made({})
"""One of several records."""


_RULES: dict[Callable[..., Value], dict[Any, Callable[..., Any]]] = {
    of_whole: {
        ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Lt: operator.lt,
        ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, "min": min, "max": max,
    },
    divided: {ast.Mod: operator.mod, ast.FloorDiv: operator.floordiv},
    computed: {
        ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Not: operator.not_,
        ast.USub: operator.neg, "len": len,
    },
}  # fmt: skip
"""How the values of operands give that of a result -> operation -> the Python function."""


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


def _either(first: Any, second: Any) -> Any:
    """Return what is known of a name that is one or the other."""
    if first is second:
        return first
    records = isinstance(first, Made) or isinstance(second, Made)
    return _UNSURE if records else values.join([first, second])


_PLAIN: dict[str | None, Any] = {
    "scale": 1.0,
    "is_stationary_onezero": False,
    "is_moving_onezero": False,
}
"""The defaults of keywords of instructions, where they are not None."""


class Folder(Editor):
    """Folds the statements of one function: writes constants into them, simplifies around them."""

    def __init__(
        self,
        environment: Environment,
        template: Template = NOTHING,
        function: str = "",
        operands: Sequence[str] = (),
    ) -> None:
        """Take the known values of the parameters of a template's function, and the operands.

        Parameters are called as in an emitted file.
        """
        self.template, self.operands = template, operands
        self.environment: dict[str, Any] = {**environment}
        self.inline = {one for one, value in environment.items() if values.constant(value)[0]}
        self.given: dict[str, ast.expr] = {}
        self.sites: dict[ast.Call, Environment] = {}
        for one, kind in template.kinds.get(function, {}).items():
            if kind in template.records:
                self.environment[one] = self._parameter(template.parameters[function], kind, one)

    def _parameter(self, names: Mapping[Parameter, str], kind: str, *path: str) -> ast.expr:
        """Return a parameter that is a record, or a field of one."""
        if kind not in self.template.records:
            return self.visit_Name(name(names[path]))
        fields = self.template.records[kind].items()
        return Made({one: self._parameter(names, inner, *path, one) for one, inner in fields})

    def fold(self, statements: Block) -> Block:
        """Return the statements, folded; none of them after a `return`."""
        folded: Block = []
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

    def visit_Expr(self, statement: ast.Expr) -> Any:
        return self._written_out(statement.value) or self.generic_visit(statement)

    def visit_Assign(self, statement: ast.Assign) -> Any:
        target, value = assigned(statement)
        if not target:
            return self.generic_visit(statement)
        before = self._written_out(value)
        value = before.pop().value if before else self.visit(value)
        if isinstance(value, Made):
            self.environment[target] = value
            return before
        self.environment[target] = self.value(value)
        return [*before, changed(statement, value=value)]

    def _written_out(self, call: Any) -> list[Any]:
        """Return the statements of the helper that is called, none if it is written out nowhere."""
        helper = self.template.written_out.get(called(call))
        if helper is None:
            return []
        given, outer = self._given(call, parameter_names(helper)), self.given
        self.given = given
        folded = self.fold(helper.body[int(ast.get_docstring(helper) is not None) :])
        self.given = outer
        return folded

    def visit_If(self, statement: ast.If) -> Block:
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
            name: _either(after_body.get(name), after_else.get(name)) for name in names
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

    def visit_For(self, statement: ast.For) -> Block:
        assert isinstance(statement.target, ast.Name)
        target, iterator = statement.target.id, self.visit(statement.iter)
        fixed, several = values.constant(self.value(iterator))
        unrolled = fixed and (several == () or not has_literal(several))
        variable: Value = None
        if called(iterator) == "range":
            bounds = [self.value(arg) for arg in iterator.args]
            bounds = [known(0), *bounds] if len(bounds) == 1 else bounds
            variable, count = values.loop_values(*bounds)
            several = variable or ()
            unrolled = count == len(several) < 2
        folded: Block = []
        if unrolled:
            for one in several:
                self.inline.add(target)
                self.environment[target] = known(one)
                folded += self.fold(statement.body)
            return folded
        self.environment |= dict.fromkeys(assigned_names(statement.body))
        self.environment[target] = variable
        before = dict(self.environment)
        folded += self.fold(statement.body)
        for one, value in self.environment.items():
            if isinstance(value, Made):
                self.environment[one] = _either(before.get(one), value)
        return [changed(statement, iter=iterator, body=folded)]

    # Expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.given:
            return self.given[node.id]
        value = self.environment.get(node.id)
        if value is _UNSURE:
            raise CodegenError(
                f"the record {node.id} is set in a branch or a loop and used behind it; set it "
                "once, before, and choose its fields there"
            )
        if isinstance(value, Made):
            return value
        return (node.id in self.inline and literal(value)) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        record = self.visit(node.value)
        return self._field(record, node if record is node.value else changed(node, value=record))

    def _field(self, record: ast.expr, node: ast.Attribute) -> ast.expr:
        """Return the field that a node names, of a record that is its value."""
        if isinstance(record, Made):
            return record.fields[node.attr]
        return record if isinstance(record, ast.Constant) else literal(self.value(node)) or node

    def _leaves(self, node: ast.expr, kind: str) -> Iterator[ast.expr]:
        """Yield the arguments of an emitted file for an argument: one, or those of a record."""
        if kind not in self.template.records:
            yield node
            return
        for field, inner in self.template.records[kind].items():
            value = self._field(node, ast.Attribute(node, field, ast.Load()))
            yield from self._leaves(value, inner)

    def visit_Slice(self, node: ast.Slice) -> ast.Slice:
        updated: ast.Slice = self.generic_visit(node)
        if updated.step is not None and values.constant(self.value(updated.step)) == (True, 1):
            return changed(updated, step=None)
        return updated

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
        truth = values.truth(self.value(self.visit(node.test)))
        if truth is None:
            return self.generic_visit(node)
        return self.visit(node.body if truth else node.orelse)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = called(node)
        if function in self.template.records:
            return self._made(node, self.template.records[function])
        if function in self.template.functions:
            return self._call_of_helper(node, function)
        updated: ast.Call = self.generic_visit(node)
        if function == "getattr":
            module, attribute = updated.args
            fixed, plain = values.constant(self.value(attribute))
            return ast.Attribute(module, plain, ast.Load()) if fixed else updated
        if function == "others.get":
            _, tensor = values.constant(self.value(updated.args[0]))
            return parsed(tensor if tensor in self.operands else "None")
        if function.startswith("nisa."):
            plain = {one: known(_PLAIN.get(one.arg)) for one in updated.keywords}
            given = [one for one, value in plain.items() if self.value(one.value) != value]
            return changed(updated, keywords=given)
        return updated

    def _made(self, node: ast.Call, fields: Mapping[str, str]) -> Made:
        given = bound(node, [*fields])
        return Made({one: self.visit(given.get(one, parsed("None"))) for one in fields})

    def _call_of_helper(self, node: ast.Call, function: str) -> ast.Call:
        kinds, names = self.template.kinds[function], self.template.parameters[function]
        given = self._given(node, kinds)
        args = [leaf for one, kind in kinds.items() for leaf in self._leaves(given[one], kind)]
        made = changed(node, args=args)
        self.sites[made] = dict(zip(names.values(), map(self.value, args), strict=True))
        return made

    def _given(self, call: ast.Call, names: Collection[str]) -> dict[str, ast.expr]:
        """Return parameter -> argument of a call."""
        return dict(zip(names, map(self.visit, call.args), strict=True))

    def visit(self, node: Any) -> Any:
        """Return the edited node: an operation with a known result is that constant."""
        updated = super().visit(node)
        if isinstance(node, _OPERATIONS) or called(node) in ("min", "max", "len"):
            return literal(self.value(updated)) or updated
        return updated

    # Values

    def value(self, node: ast.AST) -> Value:
        """Return the value of `node`, None when it is unknown."""
        match node:
            case ast.Constant(plain):
                return known(plain)
            case ast.Name(one):
                value = self.environment.get(one)
                return None if isinstance(value, Made) else value
            case ast.Attribute(of, field):
                _, record = values.constant(self.value(of))
                has_field = isinstance(record, Record) and hasattr(record, field)
                return known(getattr(record, field)) if has_field else None
            case ast.Tuple(several):
                items = [values.constant(self.value(element)) for element in several]
                every = all(fixed for fixed, _ in items)
                return known(tuple(plain for _, plain in items)) if every else None
            case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
                return self._operation(type(sign), left, right)
            case ast.UnaryOp(sign, side):
                return self._operation(type(sign), side)
            case ast.Call(ast.Name(function), sides):
                return self._operation(function, *sides)
            case ast.BoolOp(sign, sides):  # known as a bool
                wins = isinstance(sign, ast.Or)
                truths = [values.truth(self.value(side)) for side in sides]
                if wins in truths:
                    return known(wins)
                return None if None in truths else known(not wins)
            case ast.IfExp(_, one, other):
                return values.join([self.value(one), self.value(other)])
            case ast.Subscript(of, place):
                fixed, items = values.constant(self.value(of))
                places = self.value(place)
                if fixed and places is not None and places <= set(range(len(items))):
                    return values.join([known(items[place]) for place in places])
        return None

    def _operation(self, sign: Any, *sides: ast.expr) -> Value:
        for how, functions in _RULES.items():
            if sign in functions:
                return how(functions[sign], *map(self.value, sides))
        return None
