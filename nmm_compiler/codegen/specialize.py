"""Turns a family's NKI function into one self-contained file for one spec and schedule.

In: a family's kernel.py, and values for its compile-time parameters, spec and schedule among them.
Out: source text that imports only nki. Fields of records become constants, branches on them fold
away, helpers are copied in with constant arguments written into them, unused code disappears,
comments stay. The same input always gives the same bytes. The tree is edited; no text is assembled
from strings.
"""

# ast names its visitor methods after node classes.
# ruff: noqa: N802

from __future__ import annotations

import ast
import functools
import graphlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.flatten_records import flatten_records, record_classes, write_out_helpers
from nmm_compiler.codegen.fold_constants import Call, Environment, Folder, assigned_names
from nmm_compiler.codegen.known_values import known
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.tidy import names_used, remove_unused, without_aliases, without_lists
from nmm_compiler.codegen.trees import (
    Editor,
    Inlined,
    called,
    changed,
    only_statement,
    parameter_names,
    read,
)


@functools.lru_cache(maxsize=32)
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    """Return the functions of a template file and of its neighbours, with records written out."""
    found, classes = _definitions(path)
    return flatten_records(write_out_helpers(found, classes), classes)


@functools.lru_cache(maxsize=32)
def _definitions(path: Path) -> tuple[dict[str, ast.FunctionDef], dict[str, Any]]:
    """Return the functions and the records of a template file, and those of its neighbours.

    Neighbours are the files that it imports from, `from ..pieces.project import ...`.
    """
    module = read(path.read_text(encoding="utf-8"))
    functions: dict[str, ast.FunctionDef] = {}
    classes: dict[str, Any] = {}
    for statement in module.body:
        if isinstance(statement, ast.ImportFrom) and statement.level and statement.module:
            folder = path.parents[statement.level - 1]
            neighbour = folder.joinpath(*statement.module.split(".")).with_suffix(".py")
            more, others = _definitions(neighbour)
            functions |= more
            classes |= others
    functions |= {one.name: one for one in module.body if isinstance(one, ast.FunctionDef)}
    return functions, classes | record_classes(module)


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
    made, calls = _fold_function(entry, environment, helpers, operands)
    bodies: dict[str, list[ast.stmt]] = {function: without_lists(made)}
    dropped: dict[str, set[str]] = {}
    for helper in _call_order(path):
        sites = [arguments for name, arguments in calls if name == helper]
        if not sites:
            continue
        given = _bind(functions[helper], sites)
        dropped[helper] = {key for key, value in given.items() if values.constant(value)[0]}
        bodies[helper], inner = _fold_function(functions[helper], given, helpers)
        calls += inner
    bodies = _without_leftovers(bodies, dropped, signatures)
    left = {name: [p for p in signatures[name] if p not in gone] for name, gone in dropped.items()}
    bodies = _without_forwarders(bodies, left)
    parts = [
        _with(functions[helper], helper, left[helper], bodies[helper])
        for helper in functions
        if helper in bodies and helper != function
    ]
    body = remove_unused(without_aliases(bodies[function]))
    kernel = _with(entry, name, operands, body)
    docstring = ast.Expr(ast.Constant("\n".join(header) + "\n"))
    needed = names_used([*parts, kernel]) | {"nki"}
    imports = [ast.Import([one]) for one in _IMPORTS if (one.asname or one.name) in needed]
    return printed(ast.Module([docstring, *imports, *parts, kernel], []))


def _fold_function(
    node: ast.FunctionDef,
    environment: Environment,
    signatures: dict[str, list[str]],
    operands: Sequence[str] = (),
) -> tuple[list[ast.stmt], list[Call]]:
    folder = Folder(dict(environment), signatures, operands)
    return without_aliases(folder.fold(node.body), parameter_names(node)), folder.calls


def _bind(node: ast.FunctionDef, sites: Sequence[Environment]) -> Environment:
    """Return, for each parameter that a helper never sets, the value that it has in every call."""
    names = set(parameter_names(node)) - assigned_names(node.body)
    return {name: values.join([site.get(name) for site in sites]) for name in names}


@functools.lru_cache(maxsize=32)
def _call_order(path: Path) -> list[str]:
    """Return a template's functions, every caller before what it calls."""
    functions = functions_of(path)
    called = {
        name: sorted(names_used([node]) & set(functions) - {name})
        for name, node in functions.items()
    }
    return list(graphlib.TopologicalSorter(called).static_order())[::-1]


def _without_leftovers(
    bodies: dict[str, list[ast.stmt]],
    dropped: dict[str, set[str]],
    signatures: dict[str, list[str]],
) -> dict[str, list[ast.stmt]]:
    """Return the bodies without unused names; adds unused parameters to `dropped`.

    bodies: every caller before what it calls.
    """
    prune, left = _Prune(dropped, signatures), dict(bodies)
    for name in reversed(bodies):
        left[name] = remove_unused(prune.visit_all(bodies[name]))
        if name in dropped:
            dropped[name] |= set(signatures[name]) - names_used(left[name])
    return left


def _with(
    node: ast.FunctionDef, name: str, parameters: Sequence[str], body: list[ast.stmt]
) -> ast.FunctionDef:
    """Return a function with another name, other parameters and another body."""
    taken = ast.arguments([], [ast.arg(one) for one in parameters], None, [], [], None, [])
    return changed(node, name=name, args=taken, body=body)


class _Prune(Editor):
    """Takes arguments that were written into a helper out of its calls."""

    def __init__(self, dropped: dict[str, set[str]], signatures: dict[str, list[str]]) -> None:
        self.dropped = dropped
        self.signatures = signatures

    def visit_Call(self, node: ast.Call) -> ast.Call:
        call: ast.Call = self.generic_visit(node)
        gone = self.dropped.get(called(call))
        if not gone:
            return call
        names = self.signatures[called(call)]
        args = [arg for place, arg in enumerate(call.args) if names[place] not in gone]
        keywords = [arg for arg in call.keywords if arg.arg not in gone]
        return changed(call, args=args, keywords=keywords)


def _without_forwarders(
    bodies: dict[str, list[ast.stmt]], parameters: dict[str, list[str]]
) -> dict[str, list[ast.stmt]]:
    """Return the bodies without helpers that only return an argument, or pass theirs to another.

    One whose other helper has the name of a variable anywhere stays.
    """
    variables = {name for names in parameters.values() for name in names}
    variables |= assigned_names(itertools.chain(*bodies.values()))
    passed_on = ((name, _forwarded(bodies[name])) for name in parameters)
    short = Inlined({
        name: (parameters[name], value) for name, value in passed_on
        if value is not None and called(value) not in variables
    })  # fmt: skip
    return {n: short.visit_all(body) for n, body in bodies.items() if n not in short.helpers}


def _forwarded(body: list[ast.stmt]) -> ast.expr | None:
    """Return the name that a helper returns, or its call with mere names, if that is all."""
    match only_statement(body):
        case ast.Return(ast.Name() as value):
            return value
        case ast.Expr(ast.Call(ast.Name(), args, []) as call):
            plain = (isinstance(arg, (ast.Name, ast.Constant)) for arg in args)
            return call if all(plain) else None
    return None


_IMPORTS = (
    ast.alias("nki"),
    ast.alias("nki.collectives", "ncc"),
    ast.alias("nki.isa", "nisa"),
    ast.alias("nki.language", "nl"),
)
