"""Rewrites whole statements for Beta 1: loops on the device, lists of tiles, lone DMAs.

Beta 1 makes results at the top level of a kernel only (err_shared_hbm_must_in_kernel_level), and
does not let it use a tile outside of the loop or the `if` that allocates it
(err_local_variable_used_out_of_scope). Its documentation indexes a tensor in HBM only in the
`nl.load` or `nl.store` that moves it, and interpreters of that dialect look for the indices there:

    store(out[0:128, 0:512], tile)          nl.store(out[0:128, 0:512], value=tile)
    load_vector(row, bias[0:1, 0:300])      row[...] = nl.load(bias[0:1, 0:300], dtype=row.dtype)
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import Expression, parsed, root
from nmm_compiler.codegen.beta1.facts import Functions
from nmm_compiler.codegen.trees import (
    Editor,
    Names,
    appended,
    assigned,
    bound,
    called,
    new_list,
    nodes,
    only_statement,
    parameter_names,
)

Statement = cst.BaseStatement


def is_counter(function: cst.FunctionDef) -> bool:
    """Return whether a function stores a loop's variable in SBUF. Beta 1 needs no such copy."""
    names = {called(node) for node in nodes(function)} - {""}
    return names == {"nl.ndarray", "nisa.register_store"}


def without_counters(statements: Iterable[Any], counters: set[str]) -> list[Statement]:
    """Return the body of a device loop with the loop's variable for its copies in SBUF."""
    made: list[Statement] = []
    renamed: dict[str, Expression] = {}
    for statement in statements:
        name, call = assigned(statement)
        if called(call) in counters:
            renamed[name] = call.args[0].value
        else:
            made.append(Names(renamed).edit(statement))
    return made


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


def with_moves(functions: Functions) -> dict[str, cst.FunctionDef]:
    """Return the functions with the helpers that are one DMA written out in the others."""
    moves = {name: f for name, f in functions.items() if _lone_move(f) is not None}
    edit = _WrittenOut(moves).edit
    return {name: edit(f) for name, f in functions.items() if name not in moves}


def _lone_move(function: cst.FunctionDef) -> cst.Expr | cst.Assign | None:
    """Return the store, or the load into a whole parameter, that is all a function does."""
    only = only_statement(function.body.body)
    if isinstance(only, cst.Expr):
        return only if called(only.value) == "nl.store" else None
    if not isinstance(only, cst.Assign) or called(only.value) != "nl.load":
        return None
    whole = only.targets[0].target
    named = isinstance(whole, cst.Subscript) and isinstance(whole.value, cst.Name)
    return only if named else None


class _WrittenOut(Editor):
    """Replaces calls of the helpers by their loads and stores."""

    def __init__(self, moves: Functions) -> None:
        self.moves = moves

    def leave_Expr(self, original: cst.Expr, updated: cst.Expr) -> Any:
        helper = self.moves.get(called(updated.value))
        if helper is None:
            return updated
        given = bound(cst.ensure_type(updated.value, cst.Call), parameter_names(helper))
        move: Any = _lone_move(helper)
        if isinstance(move, cst.Expr):
            return Names(given).edit(move)
        # the tile may be given by its indices already; its dtype is that of the tensor
        whole = move.targets[0].target
        tile = given[whole.value.value]
        target = tile if isinstance(tile, cst.Subscript) else Names(given).edit(whole)
        named = {**given, whole.value.value: cst.Name(root(tile) or "")}
        return cst.Assign([cst.AssignTarget(target)], Names(named).edit(move.value))
