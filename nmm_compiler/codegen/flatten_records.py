"""Replaces records by their fields: helpers of templates take records, those of emitted files
fields.

    def load(dst, part: Part, how): ... part.rows ...    load(x_sb, Part(x, 0, 128, m0, 64), how)
      ->
    def load(dst, src, row, rows, column, columns, how): ... rows ...    load(x_sb, x, 0, 128, ...)

A parameter is a record if its annotation names a class of the template's files. A field may be a
record again. The argument for a record is a record parameter, a field of one, a new record, None,
or a constant of the schedule. A record that is set in a branch or a loop is known there only: its
use behind it raises CodegenError. An argument has its field's name where that is free in the
function, else with the parameter's name, or the record's, before it.

Before that, `write_out_helpers` writes out helpers that return a record, or take the operands:

    def norm_of_x(gain, size) -> Norm:
        gain_sb = feature_columns(gain, size)      norm = norm_of_x(g, 512)
        return Norm("rms", gain_sb)
      ->
                                                   gain_sb = feature_columns(g, 512)
                                                   norm = Norm("rms", gain_sb)

A helper takes the operands if a parameter is called `others`. Arguments replace parameters. Locals
keep their names, so the caller needs other names. A call is a statement of its own, or the whole
value that a name gets; `return` is the helper's last statement.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.trees import (
    Editor,
    Names,
    assigned,
    bound,
    called,
    nodes,
    parameter_names,
    small,
)
from nmm_compiler.errors import CodegenError

Classes = Mapping[str, Sequence[tuple[str, str]]]
"""Class -> (field, its class if it is a record, else "")."""
Leaves = dict[tuple[str, ...], cst.BaseExpression]
"""Path of a field -> the expression that replaces it."""


def record_classes(module: cst.Module) -> dict[str, list[tuple[str, str]]]:
    """Return the classes of a module, each with its annotated fields."""
    found: dict[str, list[tuple[str, str]]] = {}
    for statement in module.body:
        if isinstance(statement, cst.ClassDef):
            found[statement.name.value] = [
                (line.target.value, getattr(line.annotation.annotation, "value", ""))
                for line in map(small, statement.body.body)
                if isinstance(line, cst.AnnAssign) and isinstance(line.target, cst.Name)
            ]
    return found


def flatten_records(
    functions: Mapping[str, cst.FunctionDef], classes: Classes
) -> dict[str, cst.FunctionDef]:
    """Return the functions without records."""
    signatures = {name: _signature(node, classes) for name, node in functions.items()}
    return {
        name: _flat_function(node, signatures, classes) if classes else node
        for name, node in functions.items()
    }


def _signature(node: cst.FunctionDef, classes: Classes) -> list[tuple[str, str]]:
    """Return (parameter, its class if it is a record, else "")."""
    made = []
    for p in node.params.params:
        kind = getattr(p.annotation.annotation, "value", "") if p.annotation else ""
        made.append((p.name.value, kind if kind in classes else ""))
    return made


def _paths(kind: str, classes: Classes) -> Iterator[tuple[str, ...]]:
    for field, inner in classes[kind]:
        if inner in classes:
            yield from ((field, *path) for path in _paths(inner, classes))
        else:
            yield (field,)


def _flat_function(
    node: cst.FunctionDef, signatures: dict[str, list[tuple[str, str]]], classes: Classes
) -> cst.FunctionDef:
    own = signatures[node.name.value]
    leaves = [(p, *path) for p, kind in own if kind for path in _paths(kind, classes)]
    found = {name.value for name in nodes(node) if isinstance(name, cst.Name)}
    taken = found - {leaf[0] for leaf in leaves}
    records: dict[str, Leaves] = {leaf[0]: {} for leaf in leaves}
    for leaf in leaves:
        records[leaf[0]][leaf[1:]] = cst.Name(_name(leaf, leaves, taken))
    flat: list[cst.Param] = []
    for p in node.params.params:
        fields = records.get(p.name.value, {})
        flat += [cst.Param(cst.ensure_type(leaf, cst.Name)) for leaf in fields.values()]
        flat += [] if fields else [p.with_changes(annotation=None)]
    changed = node.with_changes(params=node.params.with_changes(params=flat))
    flattened: cst.FunctionDef = _Flatten(records, signatures, classes).edit(changed)
    return flattened


def _name(leaf: tuple[str, ...], every: Sequence[tuple[str, ...]], taken: set[str]) -> str:
    """Return the first unused name of a field."""
    for place, name in enumerate(_names(leaf)):
        if name not in taken and [_names(other)[place] for other in every].count(name) == 1:
            return name
    raise CodegenError(f"{'.'.join(leaf)} has no name of its own; rename the parameter")


def _names(leaf: tuple[str, ...]) -> tuple[str, ...]:
    """Return a field's name: alone, with the parameter's, with its record's."""
    return leaf[-1], f"{leaf[0]}_{leaf[-1]}", "_".join(leaf[-2:])


class _Flatten(Editor):
    """Rewrites one function: fields become names, and arguments that are records their fields."""

    def __init__(
        self,
        records: dict[str, Leaves],
        signatures: dict[str, list[tuple[str, str]]],
        classes: Classes,
    ) -> None:
        self.records, self.signatures, self.classes = dict(records), signatures, classes
        self.outer: list[dict[str, Leaves]] = []  # the records before each block that is open
        self.unsure: set[str] = set()

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        return False  # look up the whole chain at once, from its outer end

    def leave_Attribute(
        self, original: cst.Attribute, updated: cst.Attribute
    ) -> cst.BaseExpression:
        root, path = _chain(original)
        self._check_sure(root)
        held = self.records.get(root, {})
        for length in range(len(path), 0, -1):
            value: Any = held.get(path[:length])
            if value is not None:
                for attribute in path[length:]:
                    value = cst.Attribute(value, cst.Name(attribute))
                return value
        if held:
            return original  # a record in a record: its receiver takes its fields
        return original.with_changes(value=self.edit(original.value))

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        """Note `a = Record(...)`; its fields are written where they are used."""
        name, value = assigned(node)
        kind = _made_class(value, self.classes)
        if kind:
            self.records[name] = self.leaves(value, kind)
            self.unsure.discard(name)

    def leave_SimpleStatementLine(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Any:
        made = _made_class(assigned(original)[1], self.classes)
        return cst.RemoveFromParent() if made else updated

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        """Remember the records before the block."""
        self.outer.append(dict(self.records))

    def leave_IndentedBlock(
        self, original: cst.IndentedBlock, updated: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        before_block = self.outer.pop()
        changed = {n for n, made in self.records.items() if before_block.get(n) is not made}
        self.records, self.unsure = before_block, self.unsure | changed
        return updated

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        name = called(original)
        signature = self.signatures.get(name, ())
        if not any(kind for _, kind in signature):
            return updated
        if any(arg.keyword is not None for arg in original.args):
            raise CodegenError(f"a call of {name} has keywords; pass its records by position")
        flat: list[cst.Arg] = []
        for place, (before, after) in enumerate(zip(original.args, updated.args, strict=True)):
            kind = signature[place][1]
            if kind:
                values = self.leaves(before.value, kind).values()
                flat += [cst.Arg(value) for value in values]
            else:
                flat.append(cst.Arg(after.value))
        return updated.with_changes(args=flat, whitespace_before_args=cst.SimpleWhitespace(""))

    def leaves(self, node: cst.BaseExpression, kind: str) -> Leaves:
        """Return the expression for each field of a record argument."""
        if isinstance(node, cst.Call) and _made_class(node, self.classes) == kind:
            return self._made(node, kind)
        paths = list(_paths(kind, self.classes))
        if isinstance(node, cst.Name) and node.value == "None":
            return dict.fromkeys(paths, node)
        root, before = _chain(node)
        self._check_sure(root)
        if root in self.records:
            return {path: self.records[root][(*before, *path)] for path in paths}
        made: Leaves = {}
        for path in paths:
            value: Any = node
            for field in path:
                value = cst.Attribute(value, cst.Name(field))
            made[path] = value
        return made

    def _made(self, node: cst.Call, kind: str) -> Leaves:
        fields = self.classes[kind]
        given = bound(node, [field for field, _ in fields])
        made: Leaves = {}
        for field, inner in fields:
            value = given.pop(field, cst.Name("None"))
            if inner in self.classes:
                nested = self.leaves(value, inner)
                made |= {(field, *path): leaf for path, leaf in nested.items()}
            else:
                made[(field,)] = self.edit(value)
        if given:
            raise CodegenError(f"{kind} has no fields {sorted(given)}; it has {dict(fields)}")
        return made

    def _check_sure(self, name: str) -> None:
        """Raise CodegenError for a record that only a branch or a loop sets."""
        if name in self.unsure:
            raise CodegenError(
                f"the record {name} is set in a branch or a loop and used behind it; set it once, "
                "before, and choose its fields there"
            )


def _made_class(node: Any, classes: Classes) -> str:
    """Return the class of a new record, "" for anything else."""
    return called(node) if called(node) in classes else ""


def _chain(node: cst.BaseExpression) -> tuple[str, tuple[str, ...]]:
    """Return (name, fields) of `name.field.field`; name is "" for anything else."""
    fields: list[str] = []
    while isinstance(node, cst.Attribute):
        fields.append(node.attr.value)
        node = node.value
    return (node.value if isinstance(node, cst.Name) else ""), tuple(reversed(fields))


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
    return record in classes or "others" in parameter_names(node)


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
        names = parameter_names(helper)
        if len(call.args) != len(names) or any(arg.keyword for arg in call.args):
            raise CodegenError(
                f"{self.caller} calls {name} with {len(call.args)} arguments; pass all "
                f"{len(names)} by position"
            )
        given = dict(zip(names, (arg.value for arg in call.args), strict=True))
        sets = assigned_names(helper.body.body)
        both = sorted(sets - set(names) & self.taken)
        if both:
            raise CodegenError(f"{self.caller} has names that {name} assigns: {both}; rename them")
        for one in sets & set(names):
            if not isinstance(given[one], cst.Name):
                raise CodegenError(f"{name} assigns {one}; pass it a name from {self.caller}")
        return given
