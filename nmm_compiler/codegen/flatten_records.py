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

# ast names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from nmm_compiler.codegen.fold_constants import assigned_names
from nmm_compiler.codegen.trees import (
    Editor,
    Names,
    assigned,
    bound,
    called,
    changed,
    name,
    nodes,
    parameter_names,
    parsed,
)
from nmm_compiler.errors import CodegenError

Classes = Mapping[str, Sequence[tuple[str, str]]]
"""Class -> (field, its class if it is a record, else "")."""
Leaves = dict[tuple[str, ...], ast.expr]
"""Path of a field -> the expression that replaces it."""


def record_classes(module: ast.Module) -> dict[str, list[tuple[str, str]]]:
    """Return the classes of a module, each with its annotated fields."""
    found: dict[str, list[tuple[str, str]]] = {}
    for statement in module.body:
        if isinstance(statement, ast.ClassDef):
            found[statement.name] = [
                (field.target.id, getattr(field.annotation, "id", ""))
                for field in statement.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ]
    return found


def flatten_records(
    functions: Mapping[str, ast.FunctionDef], classes: Classes
) -> dict[str, ast.FunctionDef]:
    """Return the functions without records."""
    signatures = {name: _signature(node, classes) for name, node in functions.items()}
    return {name: _flat_function(node, signatures, classes) for name, node in functions.items()}


def _signature(node: ast.FunctionDef, classes: Classes) -> list[tuple[str, str]]:
    """Return (parameter, its class if it is a record, else "")."""
    kinds = [(p.arg, getattr(p.annotation, "id", "")) for p in node.args.args]
    return [(parameter, kind if kind in classes else "") for parameter, kind in kinds]


def _paths(kind: str, classes: Classes) -> Iterator[tuple[str, ...]]:
    for field, inner in classes[kind]:
        if inner in classes:
            yield from ((field, *path) for path in _paths(inner, classes))
        else:
            yield (field,)


def _flat_function(
    node: ast.FunctionDef, signatures: dict[str, list[tuple[str, str]]], classes: Classes
) -> ast.FunctionDef:
    own = signatures[node.name]
    leaves = [(p, *path) for p, kind in own if kind for path in _paths(kind, classes)]
    found = {one.id for one in nodes(node) if isinstance(one, ast.Name)}
    taken = (found | set(parameter_names(node))) - {leaf[0] for leaf in leaves}
    records: dict[str, Leaves] = {leaf[0]: {} for leaf in leaves}
    flat: list[ast.arg] = []
    for parameter, kind in own:
        flat += [] if kind else [ast.arg(parameter)]
        for leaf in (leaf for leaf in leaves if leaf[0] == parameter):
            field = _name(leaf, leaves, taken)
            records[parameter][leaf[1:]] = name(field)
            flat.append(ast.arg(field))
    taking = changed(node, args=changed(node.args, args=flat))
    return cast(ast.FunctionDef, _Flatten(records, signatures, classes).generic_visit(taking))


def _name(leaf: tuple[str, ...], every: Sequence[tuple[str, ...]], taken: set[str]) -> str:
    """Return the first unused name of a field."""
    for place, one in enumerate(_names(leaf)):
        if one not in taken and [_names(other)[place] for other in every].count(one) == 1:
            return one
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
        self.unsure: set[str] = set()

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        """Look up the whole chain at once, from its outer end."""
        root, path = _chain(node)
        self._check_sure(root)
        held = self.records.get(root, {})
        for length in range(len(path), 0, -1):
            value = held.get(path[:length])
            if value is not None:
                return _field(value, path[length:])
        # a record in a record: its receiver takes its fields
        return node if held else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Note `a = Record(...)`; its fields are written where they are used."""
        target, value = assigned(node)
        kind = _made_class(value, self.classes)
        if not kind:
            return self.generic_visit(node)
        self.records[target] = self.leaves(value, kind)
        self.unsure.discard(target)
        return None

    def visit_all(self, before: Any) -> Any:
        """Return nodes edited; the records that a block sets are unknown behind it."""
        records = dict(self.records)
        edited = super().visit_all(before)
        set_here = {n for n, made in self.records.items() if records.get(n) is not made}
        self.records, self.unsure = records, self.unsure | set_here
        return edited

    def visit_Call(self, node: ast.Call) -> Any:
        function = called(node)
        signature = self.signatures.get(function, ())
        updated = self.generic_visit(node)
        if not any(kind for _, kind in signature):
            return updated
        if node.keywords:
            raise CodegenError(f"a call of {function} has keywords; pass its records by position")
        flat: list[ast.expr] = []
        for (_, kind), before, after in zip(signature, node.args, updated.args, strict=False):
            flat += self.leaves(before, kind).values() if kind else [after]
        return changed(updated, args=flat)

    def leaves(self, node: ast.expr, kind: str) -> Leaves:
        """Return the expression for each field of a record argument."""
        if _made_class(node, self.classes) == kind:
            return self._made(node, kind)
        paths = list(_paths(kind, self.classes))
        if isinstance(node, ast.Constant):
            return dict.fromkeys(paths, node)
        root, before = _chain(node)
        self._check_sure(root)
        if root in self.records:
            return {path: self.records[root][(*before, *path)] for path in paths}
        return {path: _field(node, path) for path in paths}

    def _made(self, node: ast.expr, kind: str) -> Leaves:
        fields = self.classes[kind]
        given = bound(node, [field for field, _ in fields])
        made: Leaves = {}
        for field, inner in fields:
            value = given.pop(field, parsed("None"))
            if inner in self.classes:
                nested = self.leaves(value, inner)
                made |= {(field, *path): leaf for path, leaf in nested.items()}
            else:
                made[(field,)] = self.visit(value)
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


def _made_class(node: Any, classes: Collection[str]) -> str:
    """Return the class of a new record, "" for anything else."""
    return called(node) if called(node) in classes else ""


def _chain(node: ast.expr) -> tuple[str, tuple[str, ...]]:
    """Return (name, fields) of `name.field.field`; name is "" for anything else."""
    fields: list[str] = []
    while isinstance(node, ast.Attribute):
        fields.append(node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), tuple(reversed(fields))


def _field(value: ast.expr, path: Sequence[str]) -> ast.expr:
    """Return value.field.field."""
    for field in path:
        value = ast.Attribute(value, field, ast.Load())
    return value


def write_out_helpers(
    functions: Mapping[str, ast.FunctionDef], classes: Collection[str]
) -> dict[str, ast.FunctionDef]:
    """Return the other functions, with such helpers written out.

    Raises CodegenError where the caller has a name that the helper assigns, where an argument that
    the helper assigns is no name, and for arguments that are not passed by position.
    """
    helpers = {name: node for name, node in functions.items() if _is_written_out(node, classes)}
    return {
        name: _WriteOut(node, helpers).visit(node)
        for name, node in functions.items()
        if name not in helpers
    }


def _is_written_out(node: ast.FunctionDef, classes: Collection[str]) -> bool:
    return getattr(node.returns, "id", "") in classes or "others" in parameter_names(node)


class _WriteOut(Editor):
    """Replaces the calls in one function by the helpers' statements."""

    def __init__(self, caller: ast.FunctionDef, helpers: Mapping[str, ast.FunctionDef]) -> None:
        self.caller, self.helpers = caller.name, helpers
        names = {node.id for node in nodes(caller) if isinstance(node, ast.Name)}
        self.taken = names | set(parameter_names(caller))

    def visit(self, node: Any) -> Any:
        """Return a statement, or the helper's for one that is a call of it or names its result."""
        call = getattr(node, "value", None) if isinstance(node, ast.stmt) else None
        helper = self.helpers.get(called(call))
        if helper is None:
            return self.generic_visit(node)
        given = self._arguments(helper, call)
        body = helper.body[int(ast.get_docstring(helper) is not None) :]
        made = list(self.visit_all(Names(given).visit_all(body)))
        if isinstance(node, ast.Assign):
            made[-1] = changed(node, value=made[-1].value)
        return made

    def _arguments(self, helper: ast.FunctionDef, call: Any) -> dict[str, ast.expr]:
        """Return parameter -> argument."""
        names = parameter_names(helper)
        if len(call.args) != len(names) or call.keywords:
            given = len(call.args) + len(call.keywords)
            raise CodegenError(
                f"{self.caller} calls {helper.name} with {given} arguments; pass all "
                f"{len(names)} by position"
            )
        values = dict(zip(names, call.args, strict=True))
        sets = assigned_names(helper.body)
        both = sorted(sets - set(names) & self.taken)
        if both:
            raise CodegenError(
                f"{self.caller} has names that {helper.name} assigns: {both}; rename them"
            )
        for one in sets & set(names):
            if not isinstance(values[one], ast.Name):
                raise CodegenError(
                    f"{helper.name} assigns {one}; pass it a name from {self.caller}"
                )
        return values
