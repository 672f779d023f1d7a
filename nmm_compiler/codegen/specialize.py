"""Turns a family's NKI function into one self-contained file for one spec and schedule.

In: a family's kernel.py, and values for its compile-time parameters, spec and schedule among them.
Out: source text that imports only nki. Fields of records become constants, branches on them fold
away, helpers are copied in with constant arguments written into them, unused code disappears,
comments stay. The same input always gives the same bytes. The tree is edited; no text is assembled
from strings.
"""

# libcst names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node_or_raise

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.flatten_records import flatten_records, record_classes, write_out_helpers
from nmm_compiler.codegen.fold_constants import (
    BodyFolder,
    Call,
    Environment,
    Statement,
    assigned_names,
)
from nmm_compiler.codegen.known_values import known
from nmm_compiler.codegen.tidy import (
    ShortCalls,
    names_used,
    remove_unused,
    without_aliases,
    without_lists,
)
from nmm_compiler.codegen.trees import (
    Editor,
    Inlined,
    called,
    only_statement,
    parameter_names,
    small,
)


@functools.lru_cache(maxsize=32)
def _parse(path: Path) -> cst.Module:
    """Return the tree of a template, without comments for the formatter."""
    return cst.parse_module(path.read_text(encoding="utf-8").replace("  # fmt: skip", ""))


def _neighbours(path: Path) -> list[Path]:
    """Return the files that a template imports from, `from ..pieces.project import ...`."""
    found = []
    for statement in _parse(path).body:
        line = small(statement)
        if isinstance(line, cst.ImportFrom) and line.relative and line.module is not None:
            folder = path.parents[len(line.relative) - 1]
            names = get_full_name_for_node_or_raise(line.module).split(".")
            found.append(folder.joinpath(*names).with_suffix(".py"))
    return found


@functools.lru_cache(maxsize=32)
def functions_of(path: Path) -> dict[str, cst.FunctionDef]:
    """Return the functions of a template file and of its neighbours, with records written out."""
    found, classes = _definitions(path)
    return flatten_records(write_out_helpers(found, classes), classes)


def _definitions(path: Path) -> tuple[dict[str, cst.FunctionDef], dict[str, Any]]:
    """Return the functions and the records of a template file, and those of its neighbours."""
    found: dict[str, cst.FunctionDef] = {}
    classes: dict[str, Any] = {}
    for neighbour in _neighbours(path):
        more, others = _definitions(neighbour)
        found |= more
        classes |= others
    for statement in _parse(path).body:
        if isinstance(statement, cst.FunctionDef):
            found[statement.name.value] = statement
    return found, classes | record_classes(_parse(path))


def specialize(
    path: Path,
    function: str,
    parameters: Mapping[str, Any],
    *,
    name: str,
    header: Sequence[str],
    operands: Sequence[str],
) -> str:
    """Return the source of `function` of template `path`, called `name`, for these parameters.

    parameters: the records. operands: the tensors there are, in order; the function may take some
    as `**others`. header: lines of the file's docstring. Raises TypeError for a parameter that the
    function lacks.
    """
    functions = functions_of(path)
    entry = functions[function]
    signatures = {key: parameter_names(node) for key, node in functions.items()}
    unknown = set(parameters) - set(signatures[function])
    if unknown:
        raise TypeError(f"{path.name}: {function} has no parameters {sorted(unknown)}")
    helpers = {key: node for key, node in signatures.items() if key != function}
    environment: Environment = {key: known(value) for key, value in parameters.items()}
    made, calls = _fold_function(entry, environment, helpers, named=True, operands=operands)
    made = without_lists(made)
    bodies: dict[str, list[Statement]] = {}
    dropped: dict[str, set[str]] = {}
    for helper in _call_order(path, function):
        sites = [arguments for name, arguments in calls if name == helper]
        if not sites:
            continue
        given = _bind(functions[helper], sites)
        dropped[helper] = {key for key, value in given.items() if values.constant(value)[0]}
        bodies[helper], inner = _fold_function(functions[helper], given, helpers, named=False)
        calls += inner
    bodies = {function: made, **bodies}
    bodies = _without_leftovers(bodies, dropped, signatures)
    left = {name: [p for p in signatures[name] if p not in gone] for name, gone in dropped.items()}
    bodies = _without_forwarders(bodies, left)
    parts: list[Any] = [
        _helper(functions[helper], bodies[helper], dropped[helper])
        for helper in functions
        if helper in bodies and helper != function
    ]
    body = remove_unused(without_aliases(bodies[function]))
    kernel = entry.with_changes(
        name=cst.Name(name),
        params=cst.Parameters([cst.Param(cst.Name(tensor)) for tensor in operands]),
        whitespace_before_params=cst.SimpleWhitespace(""),
        body=entry.body.with_changes(body=body),
        leading_lines=[cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)],
    )
    docstring = cst.SimpleStatementLine(
        body=[cst.Expr(cst.SimpleString('"""' + "\n".join(header) + '\n"""'))]
    )
    needed = names_used([*parts, kernel]) | {"nki"}
    module = cst.Module(body=[docstring, *_imports(needed), *parts, kernel])
    code: str = ShortCalls().edit(module).code
    return code


def _fold_function(
    node: cst.FunctionDef,
    environment: Environment,
    signatures: dict[str, list[str]],
    *,
    named: bool,
    operands: Sequence[str] = (),
) -> tuple[list[Statement], list[Call]]:
    folder = BodyFolder(dict(environment), signatures, named=named, operands=operands)
    statements = folder.fold(list(node.body.body))  # type: ignore[arg-type]
    return without_aliases(statements), folder.calls


def _bind(node: cst.FunctionDef, sites: Sequence[Environment]) -> Environment:
    """Return, for each parameter of a helper, the value that is the same in every call."""
    return {name: values.join([site.get(name) for site in sites]) for name in parameter_names(node)}


@functools.lru_cache(maxsize=32)
def _call_order(path: Path, entry: str) -> list[str]:
    """Return a template's helpers that `entry` reaches, every caller before what it calls."""
    functions = functions_of(path)
    called = {
        name: sorted(names_used([node]) & set(functions) - {name})
        for name, node in functions.items()
    }
    order: list[str] = []

    def visit(name: str) -> None:
        for callee in called[name]:
            if callee not in order:
                visit(callee)
        order.append(name)

    visit(entry)
    return [name for name in reversed(order) if name != entry]


def _without_leftovers(
    bodies: dict[str, list[Statement]],
    dropped: dict[str, set[str]],
    signatures: dict[str, list[str]],
) -> dict[str, list[Statement]]:
    """Return the bodies without unused names; adds unused parameters to `dropped`."""
    bodies = dict(bodies)
    used: dict[str, set[str]] = {}
    changed: set[str] = set()
    while True:
        prune = _Prune(dropped, signatures)
        for name, body in bodies.items():
            if name not in used or changed & used[name]:
                bodies[name] = remove_unused(prune.edit_all(body))
                used[name] = names_used(bodies[name])
        unread = {
            name: set(signatures[name]) - dropped[name] - used[name]
            for name in bodies
            if name in dropped
        }
        changed = {name for name, names in unread.items() if names}
        if not changed:
            return bodies
        # what is left of a call holds only the arguments that were not dropped yet
        signatures = {
            name: [p for p in names if p not in dropped.get(name, ())]
            for name, names in signatures.items()
        }
        dropped.update({name: dropped[name] | names for name, names in unread.items()})


def _helper(
    node: cst.FunctionDef, statements: list[Statement], dropped: set[str]
) -> cst.FunctionDef:
    parameters = [
        p.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        for p in node.params.params
        if p.name.value not in dropped
    ]
    return node.with_changes(
        params=node.params.with_changes(params=parameters),
        whitespace_before_params=cst.SimpleWhitespace(""),
        body=node.body.with_changes(body=statements),
        leading_lines=[cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)],
    )


class _Prune(Editor):
    """Takes arguments that were written into a helper out of its calls."""

    def __init__(self, dropped: dict[str, set[str]], signatures: dict[str, list[str]]) -> None:
        self.dropped = dropped
        self.signatures = signatures

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        if called(updated) not in self.dropped:
            return updated
        names, gone = self.signatures[called(updated)], self.dropped[called(updated)]
        kept = [
            arg
            for place, arg in enumerate(updated.args)
            if (arg.keyword.value if arg.keyword else names[place]) not in gone
        ]
        return _on_one_line(updated, kept)


def _on_one_line(call: cst.Call, arguments: Sequence[cst.Arg]) -> cst.Call:
    plain = cst.SimpleWhitespace("")
    laid = [
        arg.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=plain)
        for arg in arguments
    ]
    return call.with_changes(args=laid, whitespace_before_args=plain)


def _without_forwarders(
    bodies: dict[str, list[Statement]], parameters: dict[str, list[str]]
) -> dict[str, list[Statement]]:
    """Return the bodies without helpers that only return an argument, or pass theirs to another.

    Such a helper stays if one that calls it has a name of its own for that other helper.
    """
    for name in list(bodies):
        inner = _forwarded(bodies[name]) if name in parameters else None
        hidden = called(inner) and any(
            called(inner) in {*parameters.get(key, ()), *assigned_names(body)}
            for key, body in bodies.items()
            if name in names_used(body)
        )
        if inner is not None and not hidden:
            write = Inlined({name: (parameters[name], inner)})
            del bodies[name]
            bodies = {key: list(write.edit_all(body)) for key, body in bodies.items()}
    return bodies


def _forwarded(body: list[Statement]) -> cst.BaseExpression | None:
    """Return the name that a helper returns, or its call with mere names, if that is all."""
    only = only_statement(body)
    if isinstance(only, cst.Return) and isinstance(only.value, cst.Name):
        return only.value
    call = only.value if isinstance(only, cst.Expr) else None
    if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Name):
        return None
    plain = (cst.Name, cst.Integer, cst.SimpleString)
    bare = all(a.keyword is None and isinstance(a.value, plain) for a in call.args)
    return _on_one_line(call, call.args) if bare else None


_IMPORTS = {
    "nki": "import nki",
    "ncc": "import nki.collectives as ncc",
    "nisa": "import nki.isa as nisa",
    "nl": "import nki.language as nl",
}


def _imports(needed: set[str]) -> list[Any]:
    lines = [cst.parse_statement(text) for alias, text in _IMPORTS.items() if alias in needed]
    return [lines[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)]), *lines[1:]]
