"""Rewrites whole statements for Beta 1: short helpers, loops, lists of tiles.

Beta 1 makes results at the top level of a kernel only (err_shared_hbm_must_in_kernel_level), and
does not let it use a tile outside of the loop or the `if` that allocates it
(err_local_variable_used_out_of_scope). Its documentation indexes a tensor in HBM only in the
`nl.load` or `nl.store` that moves it, and interpreters of that dialect look for the indices there:

    store(out[0:128, 0:512], tile)          nl.store(out[0:128, 0:512], value=tile)
    load_vector(row, bias[0:1, 0:300])      row[...] = nl.load(bias[0:1, 0:300], dtype=row.dtype)
"""

from __future__ import annotations

import ast
from typing import Any

from nmm_compiler.codegen.beta1.expressions import method, number
from nmm_compiler.codegen.beta1.views import METHODS
from nmm_compiler.codegen.trees import (
    Block,
    appended,
    assign,
    called,
    changed,
    name,
    new_list,
    nodes,
    only_statement,
    parameter_names,
    parsed,
    without_docstring,
)


def all_of_it(function: ast.FunctionDef) -> ast.expr | None:
    """Return what stands for a call of a helper, None where a helper stays.

    A helper that is one DMA, or the view of an argument, is written out. One that stores a loop's
    variable in SBUF stands for the variable: Beta 1 needs no such copy.
    """
    names = {called(node) for node in nodes(function)} - {""}
    if names == {"nl.ndarray", "nisa.register_store"}:
        return name(parameter_names(function)[0])
    only = only_statement(function.body)
    value: Any = getattr(only, "value", None)
    if called(value) == "nisa.dma_copy":  # without its queue, which is the compiler's choice
        ends = [end for end in value.keywords if end.arg in ("dst", "src")]
        plain = all(isinstance(end.value, (ast.Name, ast.Subscript)) for end in ends)
        return ast.Call(value.func, [], ends) if plain else None
    found = method(value) if isinstance(only, ast.Return) else None
    return value if found is not None and found[1] in METHODS else None


def unrolled(iterator: Any) -> Any:
    """Return what a loop is over, unrolled where Beta 1 compiles it, as in the current dialect.

    Beta 1 takes Python's `range` as sequential_range, whose variable is no number.
    """
    if called(iterator) != "range":
        return iterator
    args = iterator.args
    if len(args) == 2 and number(args[0]) == 0:
        args = args[1:]
    return changed(iterator, func=parsed("nl.static_range"), args=args)


def with_lists(body: Block) -> list[ast.stmt]:
    """Return a block in which a list that one statement fills is made by that statement.

    `t = []` and a loop of `t.append(e)` become `t = [e for ...]`; one `t.append(e)`, `t = [e]`.
    """
    empty = {new_list(s): s for s in body if new_list(s)}
    made: list[ast.stmt] = []
    for statement in body:
        loop = statement if isinstance(statement, ast.For) else None
        filled = [appended(s) for s in (without_docstring(loop.body) if loop else [statement])]
        names = [one for one, _ in filled if one in empty]
        whole = len(names) == len(set(names)) == len(filled)
        if not whole or any(_fills(body, one) > 1 for one in names):
            made.append(statement)
            continue
        made = [s for s in made if all(s is not empty[one] for one in names)]
        for one, element in filled:
            value: ast.expr = ast.List([element], ast.Load())
            if loop is not None:
                over = changed(loop.iter, func=parsed("nl.static_range"))
                value = ast.ListComp(element, [ast.comprehension(loop.target, over, [], 0)])
            made.append(assign(one, value))
    return made


def _fills(body: Block, filled: str) -> int:
    """Return how many statements append to a list, wherever they are in a block."""
    return sum(called(node) == f"{filled}.append" for node in nodes(*body))
