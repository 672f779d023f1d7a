"""Chooses the iterator of Beta 1 for each loop.

    affine_range       the variable only occurs in indices, and iterations are independent, except
                       that matmuls may sum into the same tile
    sequential_range   the variable only occurs in indices
    static_range       the body needs the variable as a number: in sizes, min(), lists, `if`

Beta 1 takes Python's `range` in a kernel as sequential_range, whose variable is not a number.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import method, minus, number, parsed, root, text
from nmm_compiler.codegen.beta1.facts import Functions, calls
from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.tidy import names_used
from nmm_compiler.codegen.trees import Editor, called, nodes

_NUMBERS = ("min", "max", "range", "len", "nl.arange", "nl.static_range", "nl.affine_range")
_SHAPES = ("nl.ndarray", "nl.zeros")


def with_iterators(functions: Functions) -> dict[str, cst.FunctionDef]:
    """Return the functions with an iterator of Beta 1 in the place of each `range`."""
    needed = _numbers_needed(functions)
    return {
        name: _Iterators(function, needed[name], functions).edit(function)
        for name, function in functions.items()
    }


def _numbers_needed(functions: Functions) -> dict[str, set[str]]:
    """Return the names in each function that have to be numbers while the kernel is traced."""
    needed: dict[str, set[str]] = {name: set() for name in functions}
    while True:
        before = {name: set(found) for name, found in needed.items()}
        for name, function in functions.items():
            needed[name] |= _needed_in(function, needed[name])
            for helper, given in calls(function.body, functions):
                for parameter in needed[helper] & set(given):
                    needed[name] |= names_used([given[parameter]])
        if needed == before:
            return needed


def _needed_in(function: cst.FunctionDef, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in nodes(function.body):
        for part in _number_parts(node):
            found |= names_used([part])
    while True:
        more = {
            name
            for node in nodes(function.body)
            if isinstance(node, cst.Assign)
            and isinstance(node.targets[0].target, cst.Name)
            and node.targets[0].target.value in found | known
            for name in names_used([node.value])
        }
        if more <= found:
            return found
        found |= more


def _number_parts(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the parts of a node that have to be numbers."""
    if isinstance(node, (cst.If, cst.IfExp)):
        yield node.test
    elif isinstance(node, cst.Comparison):
        yield node
    elif isinstance(node, cst.BinaryOperation):
        constant = number(node.left) is not None or number(node.right) is not None
        affine = isinstance(node.operator, (cst.Add, cst.Subtract))
        if not affine and not (isinstance(node.operator, cst.Multiply) and constant):
            yield node
    elif isinstance(node, cst.Subscript):
        if _of_list(node):
            yield node.slice[0].slice
    elif isinstance(node, cst.Call):
        full = called(node)
        if full in _NUMBERS:
            yield from (argument.value for argument in node.args)
        elif full in _SHAPES or full.endswith((".reshape", ".broadcast_to")):
            yield node.args[0].value


class _Iterators(Editor):
    """Writes iterators, of inner loops first."""

    def __init__(self, function: cst.FunctionDef, needed: set[str], functions: Functions) -> None:
        self.needed, self.functions = needed, functions
        self.live = dict(_live(function.body.body, set()))

    def leave_For(self, original: cst.For, updated: cst.For) -> cst.For:
        call: Any = updated.iter
        if called(call) != "range":
            return updated
        args = call.args
        if len(args) == 2 and number(args[0].value) == 0:
            args = args[1:]
        iterator = parsed(f"nl.{self._kind(original)}")
        return updated.with_changes(iter=call.with_changes(func=iterator, args=args))

    def _kind(self, loop: cst.For) -> str:
        assert isinstance(loop.target, cst.Name)
        if loop.target.value in self.needed or self._keeps(loop):
            return "static_range"
        return "affine_range" if self._independent(loop) else "sequential_range"

    def _keeps(self, loop: cst.For) -> bool:
        """Return whether the body changes lists, or names that are read after an iteration."""
        made = set()
        for small in _small_statements(loop.body):
            target = small.targets[0].target if isinstance(small, cst.Assign) else None
            if isinstance(target, cst.Name):
                made.add(target.value)
            elif (target is not None and _of_list(target)) or (
                isinstance(small, cst.Expr) and ".append(" in text(small)
            ):
                return True
        return bool(made & self.live[loop])

    def _independent(self, loop: cst.For) -> bool:
        """Return whether no iteration writes what another one writes, except by summing."""
        assert isinstance(loop.target, cst.Name)
        steps = {loop.target.value: 1}
        own: set[str | None] = set()
        written: set[str | None] = set()
        read: set[str | None] = set()
        for small in _small_statements(loop.body):
            if any(True for _ in calls(small, self.functions)):
                return False  # a helper may write its arguments
            target: Any = small.target if isinstance(small, cst.AugAssign) else None
            if isinstance(small, cst.Assign):
                target = small.targets[0].target
            if isinstance(target, cst.Name):
                if _of_other_shape(small.value) and root(small.value) not in own:
                    return False  # the name is a tensor that other iterations have too
                own.add(target.value)
                step = _step(small.value, steps)
                if step:
                    steps[target.value] = step
            elif isinstance(small, cst.Assign):
                if root(target) not in own and not _apart(target, steps):
                    return False
                written.add(root(target))
            elif isinstance(small, cst.AugAssign):
                written.add(root(target))
            elif isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
                stored = called(small.value) == "nl.store"
                if not (stored and _apart(small.value.args[0].value, steps)):
                    return False
                read |= names_used([small.value])
                continue
            else:
                return False
            read |= names_used([small.value])
        return not (written - own) & read


def _small_statements(body: Any) -> Iterator[Any]:
    """Yield the small statements of a block and of the blocks in it, in order."""
    for statement in body.body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body
        else:
            yield from _small_statements(statement.body)
        other = getattr(statement, "orelse", None)
        while other is not None:  # elif ..., else
            yield from _small_statements(other.body)
            other = getattr(other, "orelse", None)


def _step(node: Any, steps: dict[str, int]) -> int | None:
    """Return the change of an affine expression per iteration; None if it is not affine."""
    if isinstance(node, cst.Integer):
        return 0
    if isinstance(node, cst.Name):
        return steps.get(node.value, 0)
    if not isinstance(node, cst.BinaryOperation):
        return None
    left, right = _step(node.left, steps), _step(node.right, steps)
    if left is None or right is None:
        return None
    if isinstance(node.operator, cst.Add):
        return left + right
    if isinstance(node.operator, cst.Subtract):
        return left - right
    factor = number(node.left) if left == 0 else number(node.right)
    if isinstance(node.operator, cst.Multiply) and factor is not None:
        return factor * (left or right)
    return None if left or right else 0


def _apart(target: Any, steps: dict[str, int]) -> bool:
    """Return whether iterations write disjoint parts: t[i, :] or t[:, 8 * i : 8 * i + 8]."""
    if not isinstance(target, cst.Subscript):
        return False
    for element in target.slice:
        index: Any = element.slice
        if isinstance(index, cst.Index):
            if _step(index.value, steps):
                return True
        elif index.lower is not None and index.upper is not None and index.step is None:
            step, size = _step(index.lower, steps), number(minus(index.upper, index.lower))
            if step and size is not None and size <= abs(step):
                return True
    return False


def _of_list(node: Any) -> bool:
    """Return whether a subscript chooses one element: of a list or a tuple, not of a tensor."""
    if not isinstance(node, cst.Subscript) or len(node.slice) > 1:
        return False
    index = node.slice[0].slice
    return isinstance(index, cst.Index) and not isinstance(index.value, cst.Ellipsis)


def _of_other_shape(node: Any) -> bool:
    found = method(node)
    return found is not None and found[1] == "reshape"


def read_first(body: Sequence[Any]) -> set[str]:
    """Return the names that statements may read before they assign them."""
    read: set[str] = set()
    assigned: set[str] = set()
    for statement in body:
        if isinstance(statement, cst.For):
            inner = read_first(statement.body.body) - {statement.target.value}  # type: ignore[attr-defined]
            read |= (names_used([statement.iter]) | inner) - assigned
        elif isinstance(statement, (cst.If, cst.Else)):
            test = names_used([statement.test]) if isinstance(statement, cst.If) else set()
            other = [statement.orelse] if isinstance(statement, cst.If) and statement.orelse else []
            read |= (test | read_first(statement.body.body) | read_first(other)) - assigned
        else:
            read |= names_used([statement]) - assigned
            assigned |= assigned_names([statement])
    return read


def _live(body: Sequence[Any], after: set[str]) -> Iterator[tuple[cst.For, set[str]]]:
    """Yield each loop with the names that are read after one of its iterations."""
    for place, statement in enumerate(body):
        following = after | read_first(body[place + 1 :])
        if isinstance(statement, cst.For):
            following |= read_first(statement.body.body)
            yield statement, following
        if isinstance(statement, (cst.For, cst.If, cst.Else)):
            yield from _live(statement.body.body, following)
        if isinstance(statement, cst.If) and statement.orelse is not None:
            yield from _live([statement.orelse], following)
