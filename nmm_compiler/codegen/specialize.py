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
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node_or_raise

from nmm_compiler.codegen import known_values as values
from nmm_compiler.codegen.flatten_records import flatten_records, record_classes
from nmm_compiler.codegen.fold_constants import (
    BodyFolder,
    Call,
    Environment,
    Statement,
    assigned_names,
)
from nmm_compiler.codegen.known_values import Value, known
from nmm_compiler.codegen.tidy import ShortCalls, without_aliases, without_lists
from nmm_compiler.codegen.trees import Editor
from nmm_compiler.codegen.unused import names_used, remove_unused
from nmm_compiler.codegen.write_out_helpers import write_out_helpers


@functools.lru_cache(maxsize=32)
def _parse(path: Path) -> cst.Module:
    """Return the tree of a template, without comments for the formatter."""
    return cst.parse_module(path.read_text(encoding="utf-8").replace("  # fmt: skip", ""))


def _neighbours(path: Path) -> list[Path]:
    """Return the files that a template imports from, `from ..pieces.project import ...`."""
    found = []
    for statement in _parse(path).body:
        if isinstance(statement, cst.SimpleStatementLine):
            small = statement.body[0]
            if isinstance(small, cst.ImportFrom) and small.relative and small.module is not None:
                folder = path.parents[len(small.relative) - 1]
                names = get_full_name_for_node_or_raise(small.module).split(".")
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
    signatures = {key: _parameter_names(node) for key, node in functions.items()}
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
        sites = [call for call in calls if call.helper == helper]
        if not sites:
            continue
        bound = _bind(functions[helper], sites)
        dropped[helper] = {key for key, value in bound.items() if values.constant(value)[0]}
        bodies[helper], inner = _fold_function(functions[helper], bound, helpers, named=False)
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
    needed = names_used([*parts, kernel])
    module = cst.Module(body=[docstring, *_imports(needed), *parts, kernel])
    code: str = ShortCalls().edit(module).code
    return code


def _parameter_names(node: cst.FunctionDef) -> list[str]:
    return [p.name.value for p in node.params.params]


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


def _bind(node: cst.FunctionDef, sites: Sequence[Call]) -> Environment:
    """Return, for each parameter of a helper, the value that is the same in every call."""
    bound: Environment = {}
    for parameter in node.params.params:
        name = parameter.name.value
        found: list[Value] = [site.arguments.get(name) for site in sites]
        bound[name] = values.join(found) if all(v is not None for v in found) else None
    return bound


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


def _has_docstring(body: list[Statement]) -> bool:
    first = body[0] if body else None
    return (
        isinstance(first, cst.SimpleStatementLine)
        and isinstance(first.body[0], cst.Expr)
        and isinstance(first.body[0].value, cst.SimpleString)
    )


def _without_leftovers(
    bodies: dict[str, list[Statement]],
    dropped: dict[str, set[str]],
    signatures: dict[str, list[str]],
) -> dict[str, list[Statement]]:
    """Return the bodies without unused names; adds unused parameters to `dropped`."""
    swept: dict[str, list[Statement]] = {}
    used: dict[str, set[str]] = {}
    while True:
        prune = _Prune(dropped, signatures)
        for name, body in bodies.items():
            pruned = [prune.edit(s) for s in body]
            if name not in swept or any(map(operator.is_not, pruned, swept[name])):
                swept[name] = remove_unused(pruned)
                used[name] = names_used(swept[name])
        bodies = dict(swept)
        unread = {
            name: set(signatures[name]) - dropped[name] - used[name]
            for name in bodies
            if name in dropped
        }
        if not any(unread.values()):
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
        if not (isinstance(updated.func, cst.Name) and updated.func.value in self.dropped):
            return updated
        names = self.signatures[updated.func.value]
        gone = self.dropped[updated.func.value]
        kept = [
            arg
            for place, arg in enumerate(updated.args)
            if (arg.keyword.value if arg.keyword else names[place]) not in gone
        ]
        return _on_one_line(updated, kept)


def _on_one_line(call: cst.Call, arguments: Sequence[cst.Arg]) -> cst.Call:
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    last = len(arguments) - 1
    laid = [
        arg.with_changes(
            comma=cst.MaybeSentinel.DEFAULT if place == last else comma,
            whitespace_after_arg=cst.SimpleWhitespace(""),
        )
        for place, arg in enumerate(arguments)
    ]
    return call.with_changes(args=laid, whitespace_before_args=cst.SimpleWhitespace(""))


def _without_forwarders(
    bodies: dict[str, list[Statement]], parameters: dict[str, list[str]]
) -> dict[str, list[Statement]]:
    """Return the bodies without helpers that only pass their arguments on to another helper.

    Such a helper stays if one that calls it has a name of its own for that other helper.
    """
    for name in list(bodies):
        same = _returned_parameter(bodies[name], parameters.get(name))
        if same is not None:
            unwrap = _Unwrap(name, same)
            del bodies[name]
            bodies = {key: [unwrap.edit(s) for s in body] for key, body in bodies.items()}
            continue
        inner = _forwards_to(bodies[name], parameters.get(name))
        hidden = inner is not None and any(
            _called(inner) in {*parameters.get(key, ()), *assigned_names(body)}
            for key, body in bodies.items()
            if name in names_used(body)
        )
        if inner is not None and not hidden:
            forward = _Forward(name, parameters[name], inner)
            del bodies[name]
            bodies = {key: [forward.edit(s) for s in body] for key, body in bodies.items()}
    return bodies


def _forwards_to(body: list[Statement], parameters: list[str] | None) -> cst.Call | None:
    """Return the one call that is all of a helper's body, its arguments being mere names."""
    if parameters is None:
        return None
    calls = body[int(_has_docstring(body)) :]
    if len(calls) != 1 or not isinstance(calls[0], cst.SimpleStatementLine):
        return None
    small = calls[0].body[0]
    if not (isinstance(small, cst.Expr) and isinstance(small.value, cst.Call)):
        return None
    call = small.value
    plain = all(isinstance(a.value, (cst.Name, cst.Integer, cst.SimpleString)) for a in call.args)
    named = all(a.keyword is None for a in call.args)
    return call if isinstance(call.func, cst.Name) and plain and named else None


def _returned_parameter(body: list[Statement], parameters: list[str] | None) -> int | None:
    """Return the place of the parameter whose return is all of a helper's body."""
    left = body[int(_has_docstring(body)) :]
    if parameters is None or len(left) != 1 or not isinstance(left[0], cst.SimpleStatementLine):
        return None
    small = left[0].body[0]
    value = small.value if isinstance(small, cst.Return) else None
    return parameters.index(value.value) if isinstance(value, cst.Name) else None


class _Unwrap(Editor):
    """Writes the argument that a helper returns in place of its calls."""

    def __init__(self, name: str, place: int) -> None:
        self.name, self.place = name, place

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if isinstance(updated.func, cst.Name) and updated.func.value == self.name:
            return updated.args[self.place].value
        return updated


def _called(call: cst.Call) -> str:
    assert isinstance(call.func, cst.Name)
    return call.func.value


class _Forward(Editor):
    """Replaces calls of a forwarder by the call that it makes."""

    def __init__(self, name: str, parameters: list[str], inner: cst.Call) -> None:
        self.name, self.parameters, self.inner = name, parameters, inner

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        if not (isinstance(updated.func, cst.Name) and updated.func.value == self.name):
            return updated
        given = {
            (arg.keyword.value if arg.keyword else self.parameters[place]): arg.value
            for place, arg in enumerate(updated.args)
        }
        arguments = [
            arg.with_changes(value=given.get(arg.value.value, arg.value))
            if isinstance(arg.value, cst.Name)
            else arg
            for arg in self.inner.args
        ]
        return _on_one_line(updated.with_changes(func=self.inner.func), arguments)


def _imports(needed: set[str]) -> list[cst.SimpleStatementLine]:
    lines: list[cst.SimpleStatementLine] = []
    for alias, text in (
        ("nki", "import nki"),
        ("ncc", "import nki.collectives as ncc"),
        ("nisa", "import nki.isa as nisa"),
        ("nl", "import nki.language as nl"),
    ):
        if alias in needed or alias == "nki":
            line = cst.parse_statement(text)
            assert isinstance(line, cst.SimpleStatementLine)
            if not lines:
                line = line.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
            lines.append(line)
    return lines
