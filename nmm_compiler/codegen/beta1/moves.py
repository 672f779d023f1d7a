"""Writes out helpers that are one DMA, so that every load and store indexes its tensor itself.

`store(out[0:128, 0:512], tile)` -> `nl.store(out[0:128, 0:512], value=tile)`, and
`load_vector(row, bias[0:1, 0:300])` -> `row[...] = nl.load(bias[0:1, 0:300], dtype=row.dtype)`. The
documentation of Beta 1 indexes a tensor in HBM only in the `nl.load` or `nl.store` that moves it,
and interpreters of that dialect look for the indices there.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import root
from nmm_compiler.codegen.beta1.facts import Functions, parameters
from nmm_compiler.codegen.trees import Editor, Names, bound, called, only_statement


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
        given = bound(cst.ensure_type(updated.value, cst.Call), parameters(helper))
        move: Any = _lone_move(helper)
        if isinstance(move, cst.Expr):
            return Names(given).edit(move)
        # the tile may be given by its indices already; its dtype is that of the tensor
        whole = move.targets[0].target
        tile = given[whole.value.value]
        target = tile if isinstance(tile, cst.Subscript) else Names(given).edit(whole)
        named = {**given, whole.value.value: cst.Name(root(tile) or "")}
        return cst.Assign([cst.AssignTarget(target)], Names(named).edit(move.value))
