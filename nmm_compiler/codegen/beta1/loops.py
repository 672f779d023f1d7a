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

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import (
    integer,
    method,
    minus,
    number,
    parsed,
    root,
    subscript,
)
from nmm_compiler.codegen.beta1.facts import Functions, Place, calls, reached
from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.tidy import names_used
from nmm_compiler.codegen.trees import Editor, called, nodes

_NUMBERS = ("min", "max", "range", "len", "nl.arange", "nl.static_range", "nl.affine_range")
_SHAPES = ("nl.ndarray", "nl.zeros")


def with_iterators(functions: Functions) -> dict[str, cst.FunctionDef]:
    """Return the functions with an iterator of Beta 1 in the place of each `range`."""
    needed = _numbers_needed(functions)
    return {
        name: _Iterators(name, function, needed, functions).edit(function)
        for name, function in functions.items()
    }


def _numbers_needed(functions: Functions) -> set[Place]:
    """Return the names in each function that have to be numbers while the kernel is traced."""
    sources: dict[Place, set[Place]] = defaultdict(set)
    needed: set[Place] = set()
    for name, function in functions.items():
        for node in nodes(function.body):
            needed |= {(name, one) for one in names_used(list(_number_parts(node)))}
            target = node.targets[0].target if isinstance(node, cst.Assign) else None
            if isinstance(target, cst.Name):
                used = names_used([node.value])  # type: ignore[attr-defined]
                sources[name, target.value] |= {(name, one) for one in used}
        for helper, given in calls(function.body, functions):
            for parameter, value in given.items():
                sources[helper, parameter] |= {(name, one) for one in names_used([value])}
    return reached(needed, sources)


def _number_parts(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the parts of a node that have to be numbers."""
    match node:
        case cst.If() | cst.IfExp():
            yield node.test
        case cst.Comparison():
            yield node
        case cst.BinaryOperation():
            constant = number(node.left) is not None or number(node.right) is not None
            affine = isinstance(node.operator, (cst.Add, cst.Subtract))
            if not affine and not (isinstance(node.operator, cst.Multiply) and constant):
                yield node
        case cst.Subscript() if _of_list(node):
            yield node.slice[0].slice
        case cst.Call() if called(node) in _NUMBERS:
            yield from (argument.value for argument in node.args)
        case cst.Call() if called(node).endswith((*_SHAPES, ".reshape", ".broadcast_to")):
            yield node.args[0].value


class _Iterators(Editor):
    """Writes iterators, of inner loops first."""

    def __init__(
        self, name: str, function: cst.FunctionDef, needed: set[Place], functions: Functions
    ) -> None:
        self.name, self.needed, self.functions = name, needed, functions
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
        if (self.name, loop.target.value) in self.needed or self._keeps(loop):
            return "static_range"
        return "affine_range" if self._independent(loop) else "sequential_range"

    def _keeps(self, loop: cst.For) -> bool:
        """Return whether the body changes lists, or names that are read after an iteration."""
        targets = list(map(_target, _small_statements(loop.body)))
        made = {target.value for target in targets if isinstance(target, cst.Name)}
        return any(map(_of_list, targets)) or bool(made & self.live[loop])

    def _independent(self, loop: cst.For) -> bool:
        """Return whether no iteration writes what another one writes, except by summing."""
        assert isinstance(loop.target, cst.Name)
        steps = {loop.target.value: 1}
        own: set[str | None] = set()
        written: set[str | None] = set()
        read: set[str | None] = set()
        for small in _small_statements(loop.body):
            target, stored = _target(small), isinstance(small, cst.Expr)
            if target is None or any(True for _ in calls(small, self.functions)):
                return False  # a helper may write its arguments
            if isinstance(target, cst.Name):
                if _of_other_shape(small.value) and root(small.value) not in own:
                    return False  # the name is a tensor that other iterations have too
                own.add(target.value)
                steps[target.value] = _step(small.value, steps) or 0
            shared = isinstance(small, cst.Assign) and root(target) not in own
            if (stored or shared) and not _apart(target, steps):
                return False
            written |= set() if stored else {root(target)}
            read |= names_used([small.value])
        return not (written - own) & read


def _target(small: Any) -> Any:
    """Return what a small statement writes: its target, or that of nl.store or of an append."""
    if isinstance(small, cst.Assign):
        return small.targets[0].target
    if isinstance(small, cst.AugAssign):
        return small.target
    call: Any = getattr(small, "value", None)
    if called(call) == "nl.store":
        return call.args[0].value
    return subscript(call, [cst.Index(integer(0))]) if called(call).endswith(".append") else None


def _small_statements(node: Any) -> Iterator[Any]:
    """Yield the small statements of a block and of the blocks in it, in order."""
    if isinstance(node, cst.BaseSmallStatement):
        yield node
    elif node is not None:
        body = node.body
        inner = [body, getattr(node, "orelse", None)] if isinstance(body, cst.CSTNode) else body
        for part in inner:
            yield from _small_statements(part)


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
