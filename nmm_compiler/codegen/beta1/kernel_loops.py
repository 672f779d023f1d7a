"""Rewrites two kinds of loops for Beta 1: loops on the device, and loops that make results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import Expression, integer, number, text
from nmm_compiler.codegen.fold_constants import BodyFolder
from nmm_compiler.codegen.trees import Names, assigned, called, nodes
from nmm_compiler.errors import no_beta1_form

Statement = cst.BaseStatement


def unrolled(body: Sequence[Statement]) -> list[Statement]:
    """Return a kernel's statements with loops that make tensors in shared HBM written out.

    Beta 1 makes them at the top level of a kernel only (err_shared_hbm_must_in_kernel_level).
    """
    folder = BodyFolder({}, {}, named=True)
    made: list[Statement] = []
    for statement in body:
        folded = folder.fold([statement])
        if not (isinstance(statement, cst.For) and "nl.shared_hbm" in text(statement)):
            made.append(statement)
            continue
        iterator: Any = folded[0]
        bounds = [number(arg.value) for arg in iterator.iter.args]
        if None in bounds:
            raise no_beta1_form(f"results made in a loop of {text(iterator.iter)}")
        for turn in range(*bounds):  # type: ignore[arg-type]
            once = [cst.Arg(integer(turn)), cst.Arg(integer(turn + 1))]
            lone = statement.with_changes(iter=statement.iter.with_changes(args=once))
            made += folder.fold([lone])
    return made


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
