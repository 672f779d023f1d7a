"""Writes out helpers that are one `nl.store`, so that every store indexes its tensor itself.

`store(out[0:128, 0:512], tile)` -> `nl.store(out[0:128, 0:512], value=tile)`. The documentation of
Beta 1 indexes a tensor in HBM only in the `nl.load` or `nl.store` that moves it, and interpreters
of that dialect look for the indices there.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from nmm_compiler.codegen.beta1.facts import Functions, arguments, parameters
from nmm_compiler.codegen.beta1.views import Names
from nmm_compiler.codegen.trees import Editor


def with_stores(functions: Functions) -> dict[str, cst.FunctionDef]:
    """Return the functions with the helpers that are one `nl.store` written out in the others."""
    stores = {name: f for name, f in functions.items() if _lone_store(f) is not None}
    edit = _WrittenOut(stores).edit
    return {name: edit(f) for name, f in functions.items() if name not in stores}


def _lone_store(function: cst.FunctionDef) -> cst.Call | None:
    """Return the `nl.store` of parameters that is all a function does, else None."""
    statements = function.body.body[int(function.get_docstring() is not None) :]
    only: Any = statements[0] if len(statements) == 1 else None
    small = only.body[0] if isinstance(only, cst.SimpleStatementLine) else None
    call = small.value if isinstance(small, cst.Expr) else None
    if isinstance(call, cst.Call) and get_full_name_for_node(call.func) == "nl.store":
        return call
    return None


class _WrittenOut(Editor):
    """Replaces calls of the helpers by their stores."""

    def __init__(self, stores: Functions) -> None:
        self.stores = stores

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> Any:
        helper = self.stores.get(get_full_name_for_node(updated.func) or "")
        if helper is None:
            return updated
        given = dict(zip(parameters(helper), arguments(updated, helper), strict=True))
        return Names(given).edit(_lone_store(helper))
