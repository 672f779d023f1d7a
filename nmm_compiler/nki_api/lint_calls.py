"""The rules about the NKI API: names must exist, and calls must fit their signatures.

Each rule is a generator of findings over one file's `Names`; `lint.py` lists them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nmm_compiler.errors import closest
from nmm_compiler.nki_api import table
from nmm_compiler.nki_api.api import MODULES, Api, Function, before
from nmm_compiler.nki_api.lint_names import Finding, Names, at


def check_names(names: Names, api: Api) -> Iterator[Finding]:
    """E101 unknown, E102 too young, E103 removed, W104 deprecated names of nki; W105, W106."""
    for node in ast.walk(names.tree):
        if isinstance(node, ast.Attribute):
            owner = names.resolve(node.value)
            if owner is not None:
                yield from _check_member(node, owner, node.attr, api)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            owner = "nki.isa" if node.module == "nki.isa.constants" else node.module
            for alias in node.names:
                if alias.name == "*":
                    if node.module.partition(".")[0] == "nki":
                        text = f"names behind a star import of {node.module} are not checked"
                        yield at(node, "NKI-W105", text)
                else:
                    yield from _check_member(alias, owner, alias.name, api)


def _check_member(node: ast.AST, owner: str, name: str, api: Api) -> Iterator[Finding]:
    if owner not in MODULES and owner not in api.members:
        return
    full = f"{owner}.{name}"
    if full in api.functions or full in api.values or name in api.members.get(owner, ()):
        if full in table.DEPRECATED:
            since, instead = table.DEPRECATED[full]
            if not before(api.version, since):
                text = f"{full} is deprecated since NKI {since}; use {instead}"
                yield at(node, "NKI-W104", text)
    elif full in table.REMOVED and not before(api.version, table.REMOVED[full][0]):
        gone, instead = table.REMOVED[full]
        yield at(node, "NKI-E103", f"{full} was removed in NKI {gone}; use {instead}")
    elif full in table.ADDED:
        text = f"{full} came with NKI {table.ADDED[full]}; this is checked for {api.version}"
        yield at(node, "NKI-E102", text)
    elif before(table.API_VERSION, api.version) and owner in MODULES:
        text = (
            f"{full} is not among the names documented up to NKI {table.API_VERSION}"
            f"{closest(name, api.names(owner))}"
        )
        yield at(node, "NKI-W106", text)
    else:
        text = f"{owner} has no {name!r} in NKI {api.version}{closest(name, api.names(owner))}"
        yield at(node, "NKI-E101", text)


def check_calls(names: Names, api: Api) -> Iterator[Finding]:
    """E111-E117, W115, W116: arguments of calls; E118: functions no device has."""
    for node in ast.walk(names.tree):
        if not isinstance(node, ast.Call):
            continue
        path = names.resolve(node.func)
        if path == "nki.jit":
            yield from _check_jit(node)
        elif path is not None and path in api.functions:
            function = api.functions[path]
            yield from _check_arguments(node, function, api)
            yield from _check_enums(node, function)
            if path in table.NOT_ON_DEVICE:
                text = f"{path} does not compile for a device; use {table.NOT_ON_DEVICE[path]}"
                yield at(node, "NKI-E118", text)
            if path == "nki.language.matmul" and not _is_true(_argument(node, function, 2)):
                text = "nl.matmul works on a device only with transpose_x=True"
                yield at(node, "NKI-E118", text)


def check_methods(names: Names, api: Api) -> Iterator[Finding]:
    """E102: methods of tensors that are younger than the version, in kernel code.

    Types are not known here, so a method of that name in a class of the file, or a function of an
    imported module, gives no finding.
    """
    own = {
        method.name
        for kind in ast.walk(names.tree)
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef)
    }
    for node in names.kernel_nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        method = node.func.attr
        since = table.TENSOR_METHODS_ADDED.get(method, "0.3")
        if before(api.version, since) and method not in own and not names.resolve(node.func):
            text = f"tensors have {method}() since NKI {since}; this is checked for {api.version}"
            yield at(node, "NKI-E102", text)


def _check_jit(node: ast.Call) -> Iterator[Finding]:
    for keyword in node.keywords:
        instead = table.PARAMETER_REMOVED.get(("nki.jit", keyword.arg or ""))
        if instead:
            ignored = keyword.arg in table.JIT_IGNORED
            verb = "ignores" if ignored else "refuses"
            text = f"nki.jit {verb} {keyword.arg!r} since NKI 0.3; use {instead}"
            yield at(keyword, "NKI-W115" if ignored else "NKI-E115", text)


def _check_arguments(node: ast.Call, function: Function, api: Api) -> Iterator[Finding]:
    known = [p.name for p in function.parameters]
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            yield _unknown_argument(keyword, function, known, api)
    yield from fits_positions(node, function)


def fits_positions(node: ast.Call, function: Function) -> Iterator[Finding]:
    """E112 missing, E113 doubled, E114 superfluous arguments of a call."""
    known = [p.name for p in function.parameters]
    starred = any(isinstance(a, ast.Starred) for a in node.args)
    spread = any(k.arg is None for k in node.keywords)
    if not starred and len(node.args) > len(known):
        text = f"{function} got {len(node.args)} positional arguments, takes {len(known)}"
        yield at(node.args[len(known)], "NKI-E114", text)
    given = set() if starred else set(known[: len(node.args)])
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg in known:
            if keyword.arg in given:
                text = f"{function} got {keyword.arg!r} twice"
                yield at(keyword, "NKI-E113", text)
            given.add(keyword.arg)
    missing = [p.name for p in function.parameters if p.default is None and p.name not in given]
    if missing and not starred and not spread:
        text = f"{function} needs {', '.join(map(repr, missing))}"
        yield at(node, "NKI-E112", text)


def _unknown_argument(
    keyword: ast.keyword, function: Function, known: list[str], api: Api
) -> Finding:
    name = str(keyword.arg)
    instead = table.PARAMETER_REMOVED.get((function.name, name))
    if instead is None and function.name.startswith("nki.isa."):
        instead = table.ISA_PARAMETER_REMOVED.get(name)
    if instead is not None:
        return at(keyword, "NKI-E115", f"{function.name} lost {name!r}; use {instead}")
    since = table.PARAMETER_ADDED.get((function.name, name))
    if since is None and function.name.startswith("nki.collectives.") and name == "name":
        since = table.COLLECTIVE_NAME_ADDED
    if since is not None:
        text = f"{function.name} takes {name!r} since NKI {since}; checked for {api.version}"
        return at(keyword, "NKI-E117", text)
    return at(keyword, "NKI-E111", f"{function} has no {name!r}{closest(name, known)}")


def _check_enums(node: ast.Call, function: Function) -> Iterator[Finding]:
    for parameter, value in _pairs(node, function):
        if not isinstance(value, ast.Constant):
            continue
        enum = table.ENUM_PARAMETERS.get(parameter)
        if enum is not None and isinstance(value.value, (int, str)):
            # Integers are refused since 0.3; strings are not documented.
            code = "NKI-W116" if isinstance(value.value, str) else "NKI-E116"
            yield at(value, code, f"{parameter}={value.value!r}: name a member of {enum}")
        elif parameter == "buffer" and isinstance(value.value, str):
            text = f"buffer={value.value!r}: pass the object, nl.{value.value}"
            yield at(value, "NKI-E116", text)


def _pairs(node: ast.Call, function: Function) -> Iterator[tuple[str, ast.expr]]:
    for parameter, value in zip(function.parameters, node.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        yield parameter.name, value
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value


def _argument(node: ast.Call, function: Function, position: int) -> ast.expr | None:
    wanted = function.parameters[position].name
    return dict(_pairs(node, function)).get(wanted)


def _is_true(node: ast.expr | None) -> bool:
    """Return whether an argument is, or may be (any expression but a constant), true."""
    if node is None:
        return False
    return bool(node.value) if isinstance(node, ast.Constant) else True
