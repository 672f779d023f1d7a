"""Folds one NKI function: constants in, dead branches out, records gone, names and comments kept.

Statements are read in order with the known value of each name (`known_values.Value`). Constant
tests choose their branch, loops of one iteration become their body. Loops of more iterations stay
loops. Calls of helpers are recorded with the known values of their arguments, so that the helpers
can be folded next; others are written out (`templates`).

Records are replaced by their fields:

    part = Part(x, 0, 128)
    load(x_sb, part)              ->    load(x_sb, x, 0, 128)
    nisa.copy(part.src, y)        ->    nisa.copy(x, y)

So are lists with an element for each item of a constant, by names without the plural's s:

    outs = [None for each in spec.results]
    outs[2] = load(x)             ->    out2 = load(x)

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
    NameWriter,
    TreeEditor,
    assign,
    assigned,
    bound,
    bound_names,
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
    """A new record, which no emitted file has: an expression, or a record again, for each field.

    A list with an element for each linear, say, is one too: its fields are places.
    """

    _fields = ()

    def __init__(self, fields: dict[Any, ast.expr]) -> None:
        super().__init__()
        self.fields = fields


_UNSURE = Made({})
"""One of several records."""


_RULES: dict[Any, tuple[Callable[..., Value], Callable[..., Any]]] = {
    ast.Add: (of_whole, operator.add), ast.Sub: (of_whole, operator.sub),
    ast.Mult: (of_whole, operator.mul), ast.Lt: (of_whole, operator.lt),
    ast.LtE: (of_whole, operator.le), ast.Gt: (of_whole, operator.gt),
    ast.GtE: (of_whole, operator.ge), "min": (of_whole, min), "max": (of_whole, max),
    ast.Mod: (divided, operator.mod), ast.FloorDiv: (divided, operator.floordiv),
    ast.Eq: (computed, operator.eq), ast.NotEq: (computed, operator.ne),
    ast.Not: (computed, operator.not_), ast.USub: (computed, operator.neg), "len": (computed, len),
}  # fmt: skip
"""Operation -> how the values of operands give that of a result, and the Python function."""


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


_MAY_BE_KNOWN = (
    ast.Name, ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Subscript,
)  # fmt: skip


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


class Folder(TreeEditor):
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
        self.sites: dict[ast.Call, Environment] = {}
        for one, kind in template.kinds.get(function, {}).items():
            if kind in template.records:
                self.environment[one] = self._parameter(template.parameters[function], kind, one)

    def _parameter(self, names: Mapping[Parameter, str], kind: str, *path: str) -> ast.expr:
        """Return a parameter that is a record, or a field of one."""
        if kind not in self.template.records:
            return self.visit(name(names[path]))
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
        body, _ = self._apart(statement.body, dict.fromkeys(parameter_names(statement)))
        return changed(statement, body=body)

    def _apart(self, statements: Block, more: Mapping[str, Any]) -> tuple[Block, Environment]:
        """Return statements that may not run, folded, and what is known behind them.

        more: what is known before them alone.
        """
        before, self.environment = self.environment, {**self.environment, **more}
        folded, after = self.fold(statements), self.environment
        self.environment = before
        return folded, after

    def _join(self, one: Environment, other: Environment) -> None:
        """Know from now on what holds in either case."""
        names = set(one) | set(other)
        self.environment = {name: _either(one.get(name), other.get(name)) for name in names}

    def visit_AugAssign(self, statement: ast.AugAssign) -> None:
        raise AssertionError("templates write a = a + 1, which folds")

    def visit_Expr(self, statement: ast.Expr) -> Any:
        return self._written_out(statement.value) or self.generic_visit(statement)

    def visit_Assign(self, statement: ast.Assign) -> Any:
        target, value = assigned(statement)
        if not target:
            element = self.visit(statement.targets[0])
            if isinstance(element, ast.Name):
                return self.visit_Assign(assign(element.id, statement.value))
            self.environment |= dict.fromkeys(bound_names([statement]))
            return self.generic_visit(statement)
        before = self._written_out(value)
        value = before.pop().value if before else self._elements(target, value) or self.visit(value)
        if isinstance(value, Made):
            self.environment[target] = value
            return before
        self.environment[target] = self.value(value)
        return [*before, changed(statement, value=value)]

    def _elements(self, target: str, value: ast.expr) -> Made | None:
        """Return names for the elements of a list that is [None for each in items] at first."""
        match value:
            case ast.ListComp(ast.Constant(None), [ast.comprehension(_, items)]):
                count, one = len(values.constant(self.value(items))[1]), target.removesuffix("s")
                names = [f"{one}{i}" for i in range(count)] if count > 1 else [one]
                self.environment |= dict.fromkeys(names, known(None))
                return Made(dict(enumerate(map(name, names))))
        return None

    def _written_out(self, call: Any) -> list[Any]:
        """Return the statements of the helper that is called, none if it is written out nowhere."""
        helper = self.template.written_out.get(called(call))
        if helper is None:
            return []
        given = NameWriter(self._given(call, parameter_names(helper)))
        return self.fold(given.visit_all(helper.body[int(ast.get_docstring(helper) is not None) :]))

    def visit_If(self, statement: ast.If) -> Block:
        test = self.visit(statement.test)
        truth = values.truth(self.value(test))
        if truth is not None:
            return self.fold(statement.body if truth else statement.orelse)
        body, behind_body = self._apart(statement.body, {})
        orelse, behind_else = self._apart(statement.orelse, self._ruled_out(test))
        self._join(behind_body, behind_else)
        return [changed(statement, test=test, body=body, orelse=orelse)]

    def _ruled_out(self, test: ast.expr) -> Environment:
        """Return the known value of a name if `name == "text"` is false."""
        match test:
            case ast.Compare(ast.Name(name) as side, [ast.Eq()], [ast.Constant(str(plain))]):
                value = self.value(side)
                return {name: value and value - {plain}}
        return {}

    def visit_For(self, statement: ast.For) -> Block:
        assert isinstance(statement.target, ast.Name)
        target, iterator = statement.target.id, self.visit(statement.iter)
        fixed, several = values.constant(self.value(iterator))
        unrolled = fixed and (several == () or not has_literal(several))
        variable: Value = None
        if called(iterator) == "range":
            bounds = [self.value(arg) for arg in iterator.args]
            variable, count = values.loop_values(*bounds)
            several = variable or ()
            unrolled = count == len(several) < 2
        if unrolled:
            folded: Block = []
            for one in several:
                self.environment[target] = known(one)
                folded += self.fold(statement.body)
            return folded
        unknown = dict.fromkeys(bound_names(statement.body))
        body, behind = self._apart(statement.body, {**unknown, target: variable})
        self._join(self.environment, behind)
        return [changed(statement, iter=iterator, body=body)]

    # Expressions

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self.environment.get(node.id)
        if value is _UNSURE:
            raise CodegenError(
                f"the record {node.id} is set in a branch or a loop and used behind it; set it "
                "once, before, and choose its fields there"
            )
        return value if isinstance(value, Made) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        record = self.visit(node.value)
        if isinstance(record, Made):
            return record.fields[node.attr]
        if isinstance(record, ast.Constant):  # None, of which every field is None
            return record
        return node if record is node.value else changed(node, value=record)

    def _leaves(self, node: ast.expr, kind: str) -> Iterator[ast.expr]:
        """Yield the arguments of an emitted file for an argument: one, or those of a record."""
        if kind not in self.template.records:
            yield node
            return
        for field, inner in self.template.records[kind].items():
            yield from self._leaves(self.visit(ast.Attribute(node, field, ast.Load())), inner)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        updated: ast.Subscript = self.generic_visit(node)
        if isinstance(updated.value, Made):
            _, place = values.constant(self.value(updated.slice))
            return changed(updated.value.fields[place], ctx=node.ctx)
        return updated

    def visit_Slice(self, node: ast.Slice) -> ast.Slice:
        updated: ast.Slice = self.generic_visit(node)
        if updated.step is not None and values.constant(self.value(updated.step)) == (True, 1):
            return changed(updated, step=None)
        return updated

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        updated = self.generic_visit(node)
        neutral, commutes = _NEUTRAL.get(type(updated.op), (None, False))
        match updated.left, updated.right:
            case other, ast.Constant(int(plain)) if plain == neutral:
                return other
            case ast.Constant(int(plain)), other if plain == neutral and commutes:
                return other
            case ast.Constant(0), ast.Name() if isinstance(updated.op, ast.Mult):
                return updated.left
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
            fields = self.template.records[function]
            given = bound(node, [*fields])
            return Made({one: self.visit(given.get(one, parsed("None"))) for one in fields})
        if function in self.template.functions:
            return self._call_of_helper(node, function)
        updated: ast.Call = self.generic_visit(node)
        match updated:
            case ast.Call(ast.Name("tuple"), [Made() as several]):
                return ast.Tuple([*several.fields.values()], ast.Load())
            case ast.Call(ast.Name("getattr"), [module, ast.Constant(str(attribute))]):
                return ast.Attribute(module, attribute, ast.Load())
            case ast.Call(ast.Attribute(ast.Name("others"), "get"), [ast.Constant(tensor)]):
                return parsed(tensor if tensor in self.operands else "None")
            case ast.Call(ast.Attribute(ast.Name("nisa")), _, keywords):
                needed = [
                    one for one in keywords if self.value(one.value) != known(_PLAIN.get(one.arg))
                ]
                return changed(updated, keywords=needed)
        return updated

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
        """Return the edited node: what has a known value is that constant."""
        updated = super().visit(node)
        if isinstance(node, _MAY_BE_KNOWN) or called(node) in ("min", "max", "len"):
            return literal(self.value(updated)) or updated
        return updated

    # Values

    def value(self, node: ast.AST) -> Value:
        """Return the value of `node`, None when it is unknown."""
        match node:
            case ast.Constant(plain):
                return known(plain)
            case ast.Name(one, ast.Load()):
                return self.environment.get(one)
            case ast.Attribute(of, field):
                _, record = values.constant(self.value(of))
                has_field = isinstance(record, Record) and hasattr(record, field)
                return known(getattr(record, field)) if has_field else None
            case ast.Tuple(several):
                return computed(lambda *each: each, *map(self.value, several))
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
        if sign not in _RULES:
            return None
        how, function = _RULES[sign]
        return how(function, *map(self.value, sides))
