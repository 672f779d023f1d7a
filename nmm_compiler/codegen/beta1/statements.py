"""Rewrites whole statements for Beta 1: short helpers, loops, lists of tiles.

Beta 1 makes results at the top level of a kernel only (err_shared_hbm_must_in_kernel_level), and
does not let it use a tile outside of the loop or the `if` that allocates it
(err_local_variable_used_out_of_scope). Its documentation indexes a tensor in HBM only in the
`nl.load` or `nl.store` that moves it, and interpreters of that dialect look for the indices there:

    store(out[0:128, 0:512], tile)          nl.store(out[0:128, 0:512], value=tile)
    load_vector(row, bias[0:1, 0:300])      row[...] = nl.load(bias[0:1, 0:300], dtype=row.dtype)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import Expression, method, number, parsed
from nmm_compiler.codegen.beta1.views import METHODS
from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.tidy import names_used
from nmm_compiler.codegen.trees import (
    appended,
    called,
    new_list,
    nodes,
    only_statement,
    parameter_names,
)

Statement = cst.BaseStatement


def all_of_it(function: cst.FunctionDef) -> Expression | None:
    """Return what stands for a call of a helper, None where a helper stays.

    A helper that is one DMA, or the view of an argument, is written out. One that stores a loop's
    variable in SBUF stands for the variable: Beta 1 needs no such copy.
    """
    names = {called(node) for node in nodes(function)} - {""}
    if names == {"nl.ndarray", "nisa.register_store"}:
        return cst.Name(parameter_names(function)[0])
    only = only_statement(function.body.body)
    value: Any = getattr(only, "value", None)
    if called(value) == "nisa.dma_copy":  # without its queue, which is the compiler's choice
        ends = [arg for arg in value.args if arg.keyword and arg.keyword.value in ("dst", "src")]
        plain = all(isinstance(end.value, (cst.Name, cst.Subscript)) for end in ends)
        return cst.ensure_type(value, cst.Call).with_changes(args=ends) if plain else None
    found = method(value) if isinstance(only, cst.Return) else None
    return value if found is not None and found[1] in METHODS else None


def unrolled(loop: cst.For) -> cst.For:
    """Return a loop that is unrolled where Beta 1 compiles it, as the current dialect does it.

    Beta 1 takes Python's `range` as sequential_range, whose variable is no number.
    """
    call = cst.ensure_type(loop.iter, cst.Call)
    if called(call) != "range":
        return loop
    args = call.args
    if len(args) == 2 and number(args[0].value) == 0:
        args = args[1:]
    return loop.with_changes(iter=call.with_changes(func=parsed("nl.static_range"), args=args))


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
