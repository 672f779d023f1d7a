"""Allocates tiles in the scope that uses them: list comprehensions, conditional shapes.

Beta 1 does not let a kernel use a tile outside of the loop or the `if` that allocates it
(err_local_variable_used_out_of_scope).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from nmm_compiler.codegen.beta1.expressions import Expression, parsed, text
from nmm_compiler.codegen.trees import nodes

Statement = cst.BaseStatement


def with_lists(body: Sequence[Statement]) -> list[Statement]:
    """Return a block in which a list that one statement fills is made by that statement.

    `t = []` and a loop of `t.append(e)` become `t = [e for ...]`; one `t.append(e)`, `t = [e]`.
    """
    empty = {name: s for s in body if (name := _empty_list(s)) is not None}
    made: list[Any] = []
    statement: Any
    for statement in body:
        loop: Any = statement if isinstance(statement, cst.For) else None
        filled = [_appended(s) for s in (loop.body.body if loop else [statement])]
        names = [found[0] for found in filled if found is not None and found[0] in empty]
        whole = len(names) == len(set(names)) == len(filled)
        if not whole or any(_fills(body, name) > 1 for name in names):
            made.append(statement)
            continue
        made = [s for s in made if all(s is not empty[name] for name in names)]
        pairs = [pair for pair in filled if pair is not None]
        for place, (name, element) in enumerate(pairs):
            value: Expression = cst.List([cst.Element(element)])
            if loop is not None:
                iterator = loop.iter.with_changes(func=parsed("nl.static_range"))
                value = cst.ListComp(element, cst.CompFor(loop.target, iterator))
            assign = cst.Assign([cst.AssignTarget(cst.Name(name))], value)
            lines = () if place else statement.leading_lines
            made.append(cst.SimpleStatementLine([assign], leading_lines=lines))
    return made


def _empty_list(statement: Any) -> str | None:
    """Return the name that a statement makes an empty list."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(small, cst.Assign) and isinstance(small.value, cst.List):
        target = small.targets[0].target
        if isinstance(target, cst.Name) and not small.value.elements:
            return target.value
    return None


def _appended(statement: Any) -> tuple[str, Expression] | None:
    """Return (list, element) of `list.append(element)`, None for another statement."""
    small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
        name, dot, called = (get_full_name_for_node(small.value.func) or "").partition(".")
        if dot and called == "append":
            return name, small.value.args[0].value
    return None


def _fills(body: Sequence[Statement], name: str) -> int:
    """Return how many statements append to a list, wherever they are in a block."""
    appended = f"{name}.append"
    return sum(
        isinstance(node, cst.Call) and get_full_name_for_node(node.func) == appended
        for node in nodes(*body)
    )


def chosen_tile(test: Expression, body: Any, other: Any) -> Any:
    """Return one tile of a shape that `test` chooses, for an `if` that makes one in each branch."""
    made: list[Any] = []
    for block in (body, other):
        only = block.body[0] if len(block.body) == 1 else None
        small = only.body[0] if isinstance(only, cst.SimpleStatementLine) else None
        if not isinstance(small, cst.Assign) or not isinstance(small.value, cst.Call):
            return None
        if text(small.value.func) not in ("nl.ndarray", "nl.zeros"):
            return None
        made.append(small)
    one, two = made
    shapes = [small.value.args[0] for small in made]
    two_as_one = two.value.with_changes(args=[shapes[0], *two.value.args[1:]])
    if text(one.with_changes(value=two_as_one)) != text(one):
        return None
    shape = cst.IfExp(test=test, body=shapes[0].value, orelse=shapes[1].value)
    arguments = [shapes[0].with_changes(value=shape), *one.value.args[1:]]
    call = one.value.with_changes(args=arguments)
    return cst.SimpleStatementLine([one.with_changes(value=call)])
