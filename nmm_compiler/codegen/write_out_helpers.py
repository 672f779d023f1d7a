"""Writes helpers out where they are called: those that return a record, or take the operands.

    def norm_of_x(gain, size) -> Norm:
        gain_sb = feature_columns(gain, size)      norm = norm_of_x(g, 512)
        return Norm("rms", gain_sb)
      ->
                                                   gain_sb = feature_columns(g, 512)
                                                   norm = Norm("rms", gain_sb)

Emitted files have no records, and their kernels take operands by name. A helper returns a record if
its return annotation names a class of the template's files; it takes the operands if a parameter is
called `others`. Arguments replace parameters. Locals keep their names, so the caller needs other
names. A call is a statement of its own, or the whole value that a name gets; `return` is the
helper's last statement.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import libcst as cst

from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.trees import Editor, Names, called, nodes, small
from nmm_compiler.errors import CodegenError


def write_out_helpers(
    functions: Mapping[str, cst.FunctionDef], classes: Collection[str]
) -> dict[str, cst.FunctionDef]:
    """Return the other functions, with such helpers written out.

    Raises CodegenError where the caller has a name that the helper assigns, where an argument that
    the helper assigns is no name, and for arguments that are not passed by position.
    """
    helpers = {name: node for name, node in functions.items() if _is_written_out(node, classes)}
    return {
        name: _WriteOut(node, helpers).edit(node)
        for name, node in functions.items()
        if name not in helpers
    }


def _is_written_out(node: cst.FunctionDef, classes: Collection[str]) -> bool:
    record = getattr(node.returns.annotation, "value", "") if node.returns else ""
    return record in classes or any(p.name.value == "others" for p in node.params.params)


class _WriteOut(Editor):
    """Replaces the calls in one function by the helpers' statements."""

    def __init__(self, caller: cst.FunctionDef, helpers: Mapping[str, cst.FunctionDef]) -> None:
        self.caller, self.helpers = caller.name.value, helpers
        self.taken = {node.value for node in nodes(caller) if isinstance(node, cst.Name)}

    def leave_IndentedBlock(
        self, original: cst.IndentedBlock, updated: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        made: list[Any] = []
        for statement in updated.body:
            made += self._statements(statement)
        return updated.with_changes(body=made)

    def _statements(self, statement: Any) -> list[Any]:
        """Return what stands for a statement: itself, or those of the helper that it calls."""
        line = small(statement)
        call = getattr(line, "value", None)
        helper = self.helpers.get(called(call))
        if helper is None:
            return [statement]
        block = self.edit(Names(self._arguments(helper, call)).edit(helper.body))
        first, *made = block.body  # the docstring is first
        assert isinstance(first.body[0], cst.Expr), f"{helper.name.value} has no docstring"
        if isinstance(line, cst.Assign):
            made[-1] = made[-1].with_changes(body=[line.with_changes(value=made[-1].body[0].value)])
        lines = [*statement.leading_lines, *made[0].leading_lines]
        return [made[0].with_changes(leading_lines=lines), *made[1:]]

    def _arguments(self, helper: cst.FunctionDef, call: Any) -> dict[str, cst.BaseExpression]:
        """Return parameter -> argument."""
        name = helper.name.value
        names = [parameter.name.value for parameter in helper.params.params]
        if len(call.args) != len(names) or any(arg.keyword for arg in call.args):
            raise CodegenError(
                f"{self.caller} calls {name} with {len(call.args)} arguments; pass all "
                f"{len(names)} by position"
            )
        given = dict(zip(names, (arg.value for arg in call.args), strict=True))
        assigned = assigned_names(helper.body.body)
        both = sorted(assigned - set(names) & self.taken)
        if both:
            raise CodegenError(f"{self.caller} has names that {name} assigns: {both}; rename them")
        for one in assigned & set(names):
            if not isinstance(given[one], cst.Name):
                raise CodegenError(f"{name} assigns {one}; pass it a name from {self.caller}")
        return given
