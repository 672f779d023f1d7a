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
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmm_compiler.codegen.fold_constants import Environment, Folder
from nmm_compiler.codegen.known_values import constant, join, known
from nmm_compiler.codegen.printed import printed
from nmm_compiler.codegen.templates import Template, template
from nmm_compiler.codegen.tidy import remove_unused, without_aliases
from nmm_compiler.codegen.trees import (
    Block,
    Inlined,
    TreeEditor,
    bound_names,
    called,
    changed,
    names_used,
    nodes,
    only_statement,
)


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
    as `**others`. header: lines of the file's docstring.
    """
    read = template(path)
    entry = read.functions[function]
    given: Environment = {key: known(value) for key, value in parameters.items()}
    body, sites = _folded(read, function, given, operands)
    bodies, left = {function: body}, dict[str, list[str]]()
    for helper in read.call_order:
        of_helper = [values for name, values in sites if name == helper]
        if of_helper:
            given = _joined(read.functions[helper], of_helper)
            bodies[helper], more = _folded(read, helper, given)
            left[helper] = [one for one in of_helper[0] if not constant(given.get(one))[0]]
            sites += more
    short = _Shortened(read, left)
    bodies = {one: short.finished(one, body) for one, body in reversed(bodies.items())}
    inlined = Inlined(_passed_on(bodies, left))
    bodies = {one: inlined.visit_all(body) for one, body in bodies.items()}
    parts = [
        _with(read.functions[n], n, left[n], bodies[n])
        for n in read.functions
        if n in left and n not in inlined.helpers
    ]
    kernel = _with(entry, name, operands, remove_unused(without_aliases(bodies[function])))
    docstring = ast.Expr(ast.Constant("\n".join(header) + "\n"))
    needed = names_used([*parts, kernel]) | {"nki"}
    imports = [ast.Import([one]) for one in _IMPORTS if (one.asname or one.name) in needed]
    return printed(ast.Module([docstring, *imports, *parts, kernel], []))


def _folded(
    read: Template, function: str, given: Environment, operands: Sequence[str] = ()
) -> tuple[Block, list[tuple[str, Environment]]]:
    """Return the body of a function, and the values of the arguments in each call of a helper."""
    folder = Folder(given, read, function, operands)
    folded = folder.fold(read.functions[function].body)
    sites = [(called(one), folder.sites[one]) for one in nodes(*folded) if one in folder.sites]
    return remove_unused(without_aliases(folded, read.parameters[function].values())), sites


def _joined(node: ast.FunctionDef, sites: Sequence[Environment]) -> Environment:
    """Return, for each parameter that a helper never sets, the value that it has in every call."""
    names = sites[0].keys() - bound_names(node.body)
    return {name: join([site[name] for site in sites]) for name in names}


def _with(
    node: ast.FunctionDef, name: str, parameters: Sequence[str], body: Block
) -> ast.FunctionDef:
    """Return a function with another name, other parameters and another body."""
    taken = ast.arguments([], [ast.arg(one) for one in parameters], None, [], [], None, [])
    return changed(node, name=name, args=taken, body=body)


class _Shortened(TreeEditor):
    """Shortens the calls of helpers by arguments that these do not read.

    left: the parameters of each helper without a known value, of which those that it reads stay.
    """

    def __init__(self, read: Template, left: dict[str, list[str]]) -> None:
        self.read, self.left = read, left

    def finished(self, helper: str, body: Block) -> Block:
        """Return the body of a function; what it calls is finished before."""
        made = remove_unused(self.visit_all(body))
        if helper in self.left:
            used = names_used(made)
            self.left[helper] = [one for one in self.left[helper] if one in used]
        return made

    def visit_Call(self, node: ast.Call) -> Any:
        call: ast.Call = self.generic_visit(node)
        if called(call) not in self.left:
            return call
        given = dict(zip(self.read.parameters[called(call)].values(), call.args, strict=True))
        return changed(call, args=[given[one] for one in self.left[called(call)]])


def _passed_on(
    bodies: Mapping[str, Block], left: Mapping[str, list[str]]
) -> dict[str, tuple[Sequence[str], ast.expr]]:
    """Return helpers that only return an argument, or pass theirs to another: what they return.

    One whose other helper has the name of a variable anywhere is none.
    """
    variables = {*bound_names(itertools.chain(*bodies.values()))}.union(*left.values())
    values = ((one, _forwarded(bodies[one])) for one in left)
    return {
        one: (left[one], value)
        for one, value in values
        if value is not None and called(value) not in variables
    }


def _forwarded(body: Block) -> ast.expr | None:
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
