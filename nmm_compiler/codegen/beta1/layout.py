"""Breaks and joins lines of statements whose length the translation changed."""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import text
from nmm_compiler.codegen.tidy import WIDTH, ShortCalls, on_one_line


def laid_out(module: cst.Module) -> cst.Module:
    """Return a file whose statements take one line where they fit, else one per argument."""
    made: cst.Module = _Spread().edit(module)
    return made


class _Spread(ShortCalls):
    """Puts the arguments of a call that is too long for a line on lines of their own, too."""

    def leave_SimpleStatementLine(self, original: Any, updated: Any) -> Any:
        updated = super().leave_SimpleStatementLine(original, updated)
        small = updated.body[0]
        if not isinstance(small, (cst.Assign, cst.AugAssign, cst.Expr)):
            return updated
        if not isinstance(small.value, (cst.Call, cst.ListComp)):
            return updated
        joined: Any = on_one_line(small)  # type: ignore[arg-type]
        if 4 * self.depth + len(text(joined)) <= WIDTH:
            return updated.with_changes(body=[joined])
        spread = _spread(joined.value, self.depth)
        return updated.with_changes(body=[joined.with_changes(value=spread)])


def _spread(call: Any, depth: int, nested: int = 0) -> Any:
    """Return a call with a line for each argument, a list comprehension with one for its `for`.

    depth: of the statement. nested: how many such calls it is in.
    """
    spaces = ["    " * (nested + more) for more in (1, 0)]
    inner, outer = (
        cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(s)) for s in spaces
    )
    if isinstance(call, cst.ListComp):
        return call.with_changes(
            lbracket=cst.LeftSquareBracket(whitespace_after=inner),
            for_in=call.for_in.with_changes(whitespace_before=inner),
            rbracket=cst.RightSquareBracket(whitespace_before=outer),
        )
    last = len(call.args) - 1
    room = WIDTH - 4 * (depth + nested + 1) - 1
    args = [
        arg.with_changes(
            value=_spread(arg.value, depth, nested + 1)
            if isinstance(arg.value, cst.Call) and len(text(arg)) > room
            else arg.value,
            comma=cst.Comma(whitespace_after=outer if place == last else inner),
        )
        for place, arg in enumerate(call.args)
    ]
    return call.with_changes(args=args, whitespace_before_args=inner)
