"""Allocates tiles in the scope that uses them: list comprehensions, conditional shapes.

Beta 1 does not let a kernel use a tile outside of the loop or the `if` that allocates it
(err_local_variable_used_out_of_scope).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import Expression, parsed, text
from nmm_compiler.codegen.trees import appended, called, new_list, nodes, small

Statement = cst.BaseStatement


def with_lists(body: Sequence[Statement]) -> list[Statement]:
    """Return a block in which a list that one statement fills is made by that statement.

    `t = []` and a loop of `t.append(e)` become `t = [e for ...]`; one `t.append(e)`, `t = [e]`.
    """
    empty = {name: s for s in body if (name := new_list(s))}
    made: list[Any] = []
    statement: Any
    for statement in body:
        loop: Any = statement if isinstance(statement, cst.For) else None
        filled = [appended(s) for s in (loop.body.body if loop else [statement])]
        names = [name for name, _ in filled if name in empty]
        whole = len(names) == len(set(names)) == len(filled)
        if not whole or any(_fills(body, name) > 1 for name in names):
            made.append(statement)
            continue
        made = [s for s in made if all(s is not empty[name] for name in names)]
        for place, (name, element) in enumerate(filled):
            value: Expression = cst.List([cst.Element(element)])
            if loop is not None:
                iterator = loop.iter.with_changes(func=parsed("nl.static_range"))
                value = cst.ListComp(element, cst.CompFor(loop.target, iterator))
            assign = cst.Assign([cst.AssignTarget(cst.Name(name))], value)
            lines = () if place else statement.leading_lines
            made.append(cst.SimpleStatementLine([assign], leading_lines=lines))
    return made


def _fills(body: Sequence[Statement], name: str) -> int:
    """Return how many statements append to a list, wherever they are in a block."""
    return sum(called(node) == f"{name}.append" for node in nodes(*body))


def chosen_tile(test: Expression, body: Any, other: Any) -> Any:
    """Return one tile of a shape that `test` chooses, for an `if` that makes one in each branch."""
    made: list[Any] = []
    for block in (body, other):
        only = small(block.body[0]) if len(block.body) == 1 else None
        if not isinstance(only, cst.Assign) or called(only.value) not in ("nl.ndarray", "nl.zeros"):
            return None
        made.append(only)
    one, two = made
    shapes = [one.value.args[0] for one in made]
    two_as_one = two.value.with_changes(args=[shapes[0], *two.value.args[1:]])
    if text(one.with_changes(value=two_as_one)) != text(one):
        return None
    shape = cst.IfExp(test=test, body=shapes[0].value, orelse=shapes[1].value)
    arguments = [shapes[0].with_changes(value=shape), *one.value.args[1:]]
    call = one.value.with_changes(args=arguments)
    return cst.SimpleStatementLine([one.with_changes(value=call)])
