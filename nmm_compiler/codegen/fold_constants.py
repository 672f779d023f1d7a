"""Folds one NKI function: constants in, dead branches out, names and comments kept.

Statements are read in order with the known value of each name (`known_values.Value`). Constant
tests choose their branch, loops of one iteration become their body, constants that are assigned
inside loops are written where they are used. Loops of more iterations stay loops. Calls of helpers
are recorded with the known values of their arguments, so that the helpers can be folded next.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802, D102

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.known_values import Value, computed, divided, known, of_whole
from nmm_compiler.codegen.tidy import on_one_line
from nmm_compiler.codegen.trees import (
    Editor,
    assigned,
    bound,
    called,
    nodes,
    parameter_names,
    parsed,
    with_comments,
)
from nmm_compiler.records import Record

Statement = cst.BaseStatement
Environment = dict[str, Value]
Call = tuple[str, Environment]
"""A call of a helper: its name, and the known value of each argument."""

_RULES: dict[type, tuple[Callable[..., Value], Callable[..., Any]]] = {
    cst.Add: (of_whole, operator.add), cst.Subtract: (of_whole, operator.sub),
    cst.Multiply: (of_whole, operator.mul), cst.Modulo: (divided, operator.mod),
    cst.FloorDivide: (divided, operator.floordiv),
    cst.LessThan: (of_whole, operator.lt), cst.LessThanEqual: (of_whole, operator.le),
    cst.GreaterThan: (of_whole, operator.gt),
    cst.GreaterThanEqual: (of_whole, operator.ge),
    cst.Equal: (computed, operator.eq), cst.NotEqual: (computed, operator.ne),
    cst.Not: (computed, operator.not_), cst.Minus: (computed, operator.neg),
}  # fmt: skip
"""Operator -> how the values of its operands give that of the result, and the Python function."""


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
            return known({"True": True, "False": False, "None": None}[node.value])
        return self.environment.get(node.value)

    def _attribute(self, node: cst.Attribute) -> Value:
        fixed, record = values.constant(self.value(node.value))
        if not (fixed and isinstance(record, Record)) or not hasattr(record, node.attr.value):
            return None
        return known(getattr(record, node.attr.value))

    def _tuple(self, node: cst.Tuple) -> Value:
        items = [values.constant(self.value(element.value)) for element in node.elements]
        return known(tuple(plain for _, plain in items)) if all(f for f, _ in items) else None

    def _integer(self, node: cst.Integer | cst.Float | cst.SimpleString) -> Value:
        return known(node.evaluated_value)

    _float = _simplestring = _integer

    def _operation(self, sign: cst.CSTNode, *sides: cst.BaseExpression) -> Value:
        how, function = _RULES.get(type(sign), (None, None))
        return how(function, *map(self.value, sides)) if how else None

    def _binaryoperation(self, node: cst.BinaryOperation) -> Value:
        return self._operation(node.operator, node.left, node.right)

    def _unaryoperation(self, node: cst.UnaryOperation) -> Value:
        return self._operation(node.operator, node.expression)

    def _booleanoperation(self, node: cst.BooleanOperation) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        wins = isinstance(node.operator, cst.Or)
        for side in (left, right):
            if values.truth(side) is wins:
                return known(wins)
        if values.truth(left) is not None and values.truth(right) is not None:
            return known(not wins)
        return None

    def _comparison(self, node: cst.Comparison) -> Value:
        if len(node.comparisons) != 1:
            return None
        target = node.comparisons[0]
        return self._operation(target.operator, node.left, target.comparator)

    def _ifexp(self, node: cst.IfExp) -> Value:
        truth = values.truth(self.value(node.test))
        if truth is None:
            return values.join([self.value(node.body), self.value(node.orelse)])
        return self.value(node.body if truth else node.orelse)

    def _call(self, node: cst.Call) -> Value:
        given = [self.value(arg.value) for arg in node.args]
        if called(node) in ("min", "max"):
            return of_whole(min if called(node) == "min" else max, *given)
        return computed(len, *given) if called(node) == "len" else None

    def _subscript(self, node: cst.Subscript) -> Value:
        index = node.slice[0].slice
        if len(node.slice) != 1 or not isinstance(index, cst.Index):
            return None
        fixed, items = values.constant(self.value(node.value))
        places = self.value(index.value)
        if not fixed or places is None or not places <= set(range(len(items))):
            return None
        return values.join([known(items[place]) for place in places])


def has_literal(value: Any) -> bool:
    """Return whether a constant has a spelling: records, and tuples of them, have none."""
    if isinstance(value, tuple):
        return all(map(has_literal, value))
    return not isinstance(value, Record)


def literal(value: Value) -> cst.BaseExpression | None:
    """Return the expression that spells a constant, None for what is not known or has none."""
    fixed, plain = values.constant(value)
    return parsed(repr(plain).replace("'", '"')) if fixed and has_literal(plain) else None


_NEUTRAL: dict[type, tuple[int, bool]] = {
    cst.Add: (0, True), cst.Subtract: (0, False),
    cst.Multiply: (1, True), cst.FloorDivide: (1, False),
}  # fmt: skip
"""Operator -> the right operand that changes nothing, and whether a left one of it does not."""


class ExpressionFolder(Editor):
    """Writes constants into an expression of a function and simplifies around them."""

    def __init__(self, function: BodyFolder) -> None:
        self.function = function
        self.evaluator = Evaluator(function.environment)

    def leave_Name(self, original: cst.Name, updated: cst.Name) -> cst.BaseExpression:
        if original.value in self.function.lost:
            raise TypeError(
                f"template: {original.value!r} is a constant in a loop that a branch or an inner "
                "loop sets anew; give it a value in every branch, or another name"
            )
        inline = original.value in self.function.inline
        return (inline and literal(self.evaluator.value(original))) or updated

    def leave_BinaryOperation(
        self, original: cst.BinaryOperation, updated: cst.BinaryOperation
    ) -> cst.BaseExpression:
        neutral, commutes = _NEUTRAL.get(type(updated.operator), (None, False))
        left, right = updated.left, updated.right
        for side, other in ((right, left), (left, right)):
            _, plain = values.constant(self.evaluator.value(side))
            if values.is_whole(plain) and plain == neutral and (commutes or side is right):
                return _in_place_of(updated, other)
        return updated

    def leave_Slice(self, original: cst.Slice, updated: cst.Slice) -> cst.Slice:
        """Write 0:128, and 8 * i : 8 * i + 8 with spaces."""
        simple = (cst.Name, cst.Integer, type(None))
        if isinstance(updated.lower, simple) and isinstance(updated.upper, simple):
            return updated.with_changes(first_colon=cst.Colon())
        return updated

    def leave_BooleanOperation(
        self, original: cst.BooleanOperation, updated: cst.BooleanOperation
    ) -> cst.BaseExpression:
        absorbs = isinstance(updated.operator, cst.Or)
        for side, other in ((updated.left, updated.right), (updated.right, updated.left)):
            if values.truth(self.evaluator.value(side)) is (not absorbs):
                return _in_place_of(updated, other)
        return updated

    def leave_IfExp(self, original: cst.IfExp, updated: cst.IfExp) -> cst.BaseExpression:
        truth = values.truth(self.evaluator.value(updated.test))
        if truth is None:
            return updated
        return _in_place_of(updated, updated.body if truth else updated.orelse)

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if called(updated) == "getattr":
            module, name = (arg.value for arg in updated.args)
            fixed, plain = values.constant(self.evaluator.value(name))
            return cst.Attribute(module, cst.Name(plain)) if fixed else updated
        if called(updated) == "others.get":
            _, name = values.constant(self.evaluator.value(updated.args[0].value))
            return cst.Name(name if name in self.function.operands else "None")
        return updated

    def edit(self, node: Any) -> Any:
        """Return the edited node: an operation with a known result is that constant."""
        if type(node) is cst.Attribute:
            found = literal(self.evaluator.value(node))
            return found or node.with_changes(value=self.edit(node.value))
        updated = super().edit(node)
        if type(node) in _OPERATIONS or called(node) in ("min", "max", "len"):
            return literal(self.evaluator.value(updated)) or updated
        return updated


_OPERATIONS = {
    cst.BinaryOperation, cst.UnaryOperation, cst.Comparison, cst.BooleanOperation, cst.Subscript,
}  # fmt: skip


def _bare(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return a whole expression without the parentheses around it, on one line."""
    return on_one_line(node.with_changes(lpar=[], rpar=[])) if node.lpar else node


def _in_place_of(node: cst.BaseExpression, part: cst.BaseExpression) -> cst.BaseExpression:
    """Return `part` with the parentheses that held `node`."""
    atom = isinstance(part, (cst.Name, cst.Integer, cst.Call, cst.Subscript, cst.Attribute))
    if node.lpar and not part.lpar and not atom:
        return part.with_changes(lpar=node.lpar, rpar=node.rpar)
    return part


def assigned_names(statements: Iterable[cst.CSTNode]) -> set[str]:
    """Return the names that the statements bind."""
    binding = (cst.AssignTarget, cst.For)
    targets = (node.target for node in nodes(*statements) if isinstance(node, binding))
    return {target.value for target in targets if isinstance(target, cst.Name)}


def _returns(statement: Statement) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[-1], cst.Return
    )


class BodyFolder:
    """Folds the statements of one function."""

    def __init__(
        self,
        environment: Environment,
        signatures: dict[str, list[str]],
        *,
        named: bool,
        operands: Sequence[str] = (),
    ) -> None:
        """Take the known values of the parameters, and the names of operands.

        named: constants assigned outside loops keep their names (in helpers they are written out).
        """
        self.operands = operands
        self.environment = environment
        self.signatures = signatures
        self.inline = {name for name, value in environment.items() if values.constant(value)[0]}
        # constants whose assignment is written out, and that a branch or a loop then sets anew
        self.lost: frozenset[str] = frozenset()
        self.calls: list[Call] = []
        self.loops = 0 if named else 1
        self.branches = 0

    def fold(self, statements: Sequence[Statement]) -> list[Statement]:
        """Return the statements, folded; none of them after a `return`."""
        folded: list[Statement] = []
        for statement in statements:
            folded.extend(self._statement(statement))
            if folded and _returns(folded[-1]):
                break
        return folded

    def _statement(self, statement: Any) -> list[Statement]:
        fold = getattr(self, f"_{type(statement).__name__.lower()}", None)
        return fold(statement) if fold else [statement]

    def _value(self, node: cst.BaseExpression) -> Value:
        return Evaluator(self.environment).value(node)

    def _functiondef(self, statement: cst.FunctionDef) -> list[Statement]:
        """Fold the body of a loop on the device: its parameters are not known."""
        before, inlined = dict(self.environment), set(self.inline)
        for name in parameter_names(statement):
            self.environment[name] = None
            self.inline.discard(name)
        body = self.fold(list(statement.body.body))  # type: ignore[arg-type]
        self.environment, self.inline = before, inlined
        return [statement.with_changes(body=statement.body.with_changes(body=body))]

    def _expression(self, node: Any) -> Any:
        folded = ExpressionFolder(self).edit(node)
        self._note_calls(folded)
        return folded

    def _note_calls(self, node: cst.CSTNode) -> None:
        for call in nodes(node):
            names = self.signatures.get(called(call))
            if names is not None:
                given = bound(cst.ensure_type(call, cst.Call), names).items()
                self.calls.append((called(call), {n: self._value(value) for n, value in given}))

    def _simplestatementline(self, statement: cst.SimpleStatementLine) -> list[Statement]:
        small: Any = statement.body[0]
        name, value = assigned(statement)
        if name:
            value = self._expression(value)
            self.inline.discard(name)
            self.lost -= {name}
            self.environment[name] = self._value(value)
            fixed, plain = values.constant(self.environment[name])
            if fixed and self.loops and not self.branches and isinstance(plain, (int, str, bool)):
                self.inline.add(name)
                return []
            return [statement.with_changes(body=[small.with_changes(value=value)])]
        assert not isinstance(small, cst.AugAssign), "templates write a = a + 1, which folds"
        return [statement.with_changes(body=[self._expression(small)])]

    def _if(self, statement: cst.If) -> list[Statement]:
        test = _bare(self._expression(statement.test))
        truth = values.truth(self._value(test))
        if truth is not None:
            part: Any = statement if truth else statement.orelse
            if part is None or part is statement or isinstance(part, cst.Else):
                return self._spliced([] if part is None else part.body.body, statement)
            return self._spliced([part], statement)  # elif
        before, inlined, lost = dict(self.environment), set(self.inline), self.lost
        self.branches += 1
        body = self.fold(statement.body.body)  # type: ignore[arg-type]
        after_body, inlined_body, lost_body = self.environment, self.inline, self.lost
        self.environment = {**before, **self._ruled_out(test, before)}
        self.inline, self.lost = set(inlined), lost
        orelse = statement.orelse
        if isinstance(orelse, cst.Else):
            rest = self.fold(orelse.body.body)  # type: ignore[arg-type]
            orelse = orelse.with_changes(body=cst.IndentedBlock(body=rest))
        elif isinstance(orelse, cst.If):
            rest = self._if(orelse)
            if len(rest) == 1 and isinstance(rest[0], cst.If):
                orelse = rest[0].with_changes(leading_lines=())
            else:
                orelse = cst.Else(body=cst.IndentedBlock(body=rest))
        after_else = self.environment
        self.branches -= 1
        # set in one branch, and in the other still the constant that has no assignment
        one_sided = (inlined_body ^ self.inline) & inlined
        self.inline &= inlined_body
        self.lost |= lost_body | one_sided
        names = set(after_body) | set(after_else)
        self.environment = {
            name: values.join([after_body.get(name), after_else.get(name)]) for name in names
        }
        block = statement.body.with_changes(body=body)
        return [statement.with_changes(test=test, body=block, orelse=orelse)]

    @staticmethod
    def _ruled_out(test: cst.BaseExpression, before: Environment) -> Environment:
        """Return the known value of a name if `name == constant` is false."""
        if not (isinstance(test, cst.Comparison) and isinstance(test.left, cst.Name)):
            return {}
        target = test.comparisons[0]
        fixed, plain = values.constant(Evaluator(before).value(target.comparator))
        if len(test.comparisons) != 1 or not isinstance(target.operator, cst.Equal) or not fixed:
            return {}
        value = before.get(test.left.value)
        if value is None or value == {plain} or values.is_whole(plain):
            return {}
        return {test.left.value: value - {plain}}

    def _for(self, statement: cst.For) -> list[Statement]:
        assert isinstance(statement.target, cst.Name)
        name = statement.target.value
        fixed, records = values.constant(self._value(statement.iter))
        if fixed and (records == () or not has_literal(records)):
            return self._once_for_each(statement, records)
        iterator = self._expression(statement.iter)
        variable: Value = None
        count: int | None = None
        if isinstance(iterator, cst.Call) and isinstance(iterator.func, cst.Name):
            bounds = [self._value(arg.value) for arg in iterator.args]
            if iterator.func.value == "range":
                bounds = [known(0), *bounds] if len(bounds) == 1 else bounds
                variable, count = values.loop_values(*bounds)
        if count == 0:
            return []
        body = list(statement.body.body)
        fixed, plain = values.constant(variable)
        if count == 1 and fixed:
            self.environment[name] = known(plain)
            self.inline.add(name)
            self.lost -= {name}
            return self._spliced(body, statement)
        for other in assigned_names(body):
            if other in self.environment:
                self.environment[other] = None
                self.lost |= {other} & self.inline
                self.inline.discard(other)
        self.environment[name] = variable
        self.inline.discard(name)
        self.lost -= {name}
        self.loops += 1
        folded = self.fold(body)  # type: ignore[arg-type]
        self.loops -= 1
        block = statement.body.with_changes(body=folded)
        return [statement.with_changes(iter=iterator, body=block)]

    def _once_for_each(self, statement: cst.For, records: Sequence[Record]) -> list[Statement]:
        """Return the body of a loop over records, once for each."""
        assert isinstance(statement.target, cst.Name)
        folded: list[Statement] = []
        self.loops += 1
        for record in records:
            self.environment[statement.target.value] = known(record)
            body = statement.body.body
            folded += self.fold(body) if folded else self._spliced(body, statement)  # type: ignore[arg-type]
        self.loops -= 1
        return folded

    def _spliced(self, statements: Sequence[Any], removed: Statement) -> list[Statement]:
        """Return the statements, folded, behind the comment of the one that they replace."""
        folded = self.fold(statements)
        return with_comments([None, *folded], [removed, *folded])
