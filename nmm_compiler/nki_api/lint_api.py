"""The rules about the NKI API: names must exist, and calls must fit their signatures.

Files of NKI Beta 1 (`import neuronxcc.nki`) have the rules for names and positions alone; their
stubs end in `**kwargs`, so that an unknown keyword is a warning (W117) there.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from nmm_compiler.errors import closest
from nmm_compiler.nki_api import table
from nmm_compiler.nki_api.api import MODULES, Api, Function, before, of_parameter
from nmm_compiler.nki_api.lint_names import Names


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """Where (1-based line and column) and what: a code of docs/lint.md and a sentence.

    Codes with an E are refused by the NKI compiler or fail on a device; codes with a W work
    today and are deprecated or undocumented.
    """

    line: int
    column: int
    code: str
    message: str

    @property
    def is_error(self) -> bool:
        """Whether the kernel will not compile or not run on a device."""
        return "-E" in self.code

    def __str__(self) -> str:
        return f"{self.line}:{self.column} {self.code} {self.message}"


def at(node: ast.AST, code: str, message: str) -> Finding:
    """Return a finding at the place of a syntax node; code: without NKI-."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    return Finding(line, column + 1, f"NKI-{code}", message)


def arguments(node: ast.Call, function: Function) -> dict[str, ast.expr]:
    """Return the arguments of a call by name, up to a starred one."""
    given: dict[str, ast.expr] = {}
    for name, value in zip(function.parameters, node.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        given[name] = value
    return given | {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}


def of_names(node: ast.AST, names: Names, api: Api) -> Iterator[Finding]:
    """E101 to E104, W106: names of nki; E111 to E115, E117, W117: arguments of calls."""
    match node:
        case ast.Attribute():
            yield from _member(node, names.resolve(node.value) or "", node.attr, api)
        case ast.Call():
            function = api.functions.get(names.resolve(node.func) or "")
            if function is not None:
                for keyword in node.keywords:
                    if keyword.arg is not None and keyword.arg not in function.parameters:
                        yield _unknown_argument(keyword, keyword.arg, function, api)
                yield from _positions(node, function)


def of_values(node: ast.AST, names: Names, api: Api) -> Iterator[Finding]:
    """E115, E116, E118, W115, W116: values of arguments; what is imported."""
    match node:
        case ast.Import() | ast.ImportFrom():
            yield from _import(node, api)
        case ast.Call():
            path = names.resolve(node.func) or ""
            if path == "nki.jit":
                yield from _jit(node)
            function = api.functions.get(path)
            if function is not None:
                yield from _values(node, path, arguments(node, function))


def _import(node: ast.Import | ast.ImportFrom, api: Api) -> Iterator[Finding]:
    """The names of an import from nki; W105 for a star; E211, W211 for one of neuronxcc."""
    modules = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""] if not node.level else []
        owner = "nki.isa" if node.module == "nki.isa.constants" else node.module or ""
        for alias in node.names if modules else ():
            if alias.name != "*":
                yield from _member(alias, owner, alias.name, api)
            elif owner.partition(".")[0] == "nki":
                text = f"names behind a star import of {node.module} are not checked"
                yield at(node, "W105", text)
    if any(module.partition(".")[0] == "neuronxcc" for module in modules):
        text = "neuronxcc.nki is the API of NKI 0.1, refused in kernels since 0.4; import nki"
        yield at(node, "W211" if before(api.version, "0.4") else "E211", text)


def _member(node: ast.AST, owner: str, name: str, api: Api) -> Iterator[Finding]:
    if owner not in MODULES and owner not in api.members:
        return
    full = f"{owner}.{name}"
    if full in api.functions or full in api.values or name in api.members.get(owner, ()):
        since, instead = table.DEPRECATED.get(full, ("", ""))
        if since and not before(api.version, since):
            yield at(node, "W104", f"{full} is deprecated since NKI {since}; use {instead}")
        return
    gone, instead = table.REMOVED.get(full, ("", ""))
    if gone and not before(api.version, gone):
        yield at(node, "E103", f"{full} was removed in NKI {gone}; use {instead}")
    elif full in table.ADDED:
        text = f"{full} came with NKI {table.ADDED[full]}; this is checked for {api.version}"
        yield at(node, "E102", text)
    elif before(table.API_VERSION, api.version) and owner in MODULES:
        text = f"{full} is not among the names documented up to NKI {table.API_VERSION}"
        yield at(node, "W106", text + closest(name, api.names(owner)))
    else:
        text = f"{owner} has no {name!r} in NKI {api.version}{closest(name, api.names(owner))}"
        yield at(node, "E101", text)


def _values(node: ast.Call, path: str, given: dict[str, ast.expr]) -> Iterator[Finding]:
    for parameter, value in given.items():
        yield from _member_argument(parameter, value)
    if path in table.NOT_ON_DEVICE:
        text = f"{path} does not compile for a device; use {table.NOT_ON_DEVICE[path]}"
        yield at(node, "E118", text)
    if path == "nki.language.matmul":
        turned = given.get("transpose_x", ast.Constant(False))
        if isinstance(turned, ast.Constant) and not turned.value:
            yield at(node, "E118", "nl.matmul works on a device only with transpose_x=True")


def _jit(node: ast.Call) -> Iterator[Finding]:
    for keyword in node.keywords:
        instead = table.PARAMETER_REMOVED.get(("nki.jit", keyword.arg or ""))
        if instead:
            ignored = keyword.arg in table.JIT_IGNORED
            verb = "ignores" if ignored else "refuses"
            text = f"nki.jit {verb} {keyword.arg!r} since NKI 0.3; use {instead}"
            yield at(keyword, "W115" if ignored else "E115", text)


def _positions(node: ast.Call, function: Function) -> Iterator[Finding]:
    """E112 missing, E113 doubled, E114 superfluous arguments of a call."""
    known = list(function.parameters)
    starred = any(isinstance(a, ast.Starred) for a in node.args)
    spread = any(k.arg is None for k in node.keywords)
    if not starred and len(node.args) > len(known):
        text = f"{function} got {len(node.args)} positional arguments, takes {len(known)}"
        yield at(node.args[len(known)], "E114", text)
    given = set() if starred else set(known[: len(node.args)])
    for keyword in node.keywords:
        if keyword.arg in given:
            yield at(keyword, "E113", f"{function} got {keyword.arg!r} twice")
        given.add(keyword.arg or "")
    missing = [n for n, text in function.parameters.items() if text is None and n not in given]
    if missing and not starred and not spread:
        yield at(node, "E112", f"{function} needs {', '.join(map(repr, missing))}")


def _unknown_argument(keyword: ast.keyword, name: str, function: Function, api: Api) -> Finding:
    """E111 unknown (W117: to a stub of Beta 1), E115 removed, E117 too young parameters."""
    nearest = closest(name, function.parameters)
    if before(api.version, "0.3"):
        return at(keyword, "W117", f"{function} documents no {name!r}{nearest}")
    instead = of_parameter(table.PARAMETER_REMOVED, function, name)
    if instead is not None:
        return at(keyword, "E115", f"{function.name} lost {name!r}; use {instead}")
    since = of_parameter(table.PARAMETER_ADDED, function, name)
    if since is not None:
        text = f"{function.name} takes {name!r} since NKI {since}; checked for {api.version}"
        return at(keyword, "E117", text)
    return at(keyword, "E111", f"{function} has no {name!r}{nearest}")


def _member_argument(parameter: str, value: ast.expr) -> Iterator[Finding]:
    """E116, W116: a number or a text where an enumeration has a member."""
    given = value.value if isinstance(value, ast.Constant) else None
    enum = table.ENUM_PARAMETERS.get(parameter)
    if enum is not None and isinstance(given, (int, str)):
        # Integers are refused since 0.3; strings are not documented.
        code = "W116" if isinstance(given, str) else "E116"
        yield at(value, code, f"{parameter}={given!r}: name a member of {enum}")
    elif parameter == "buffer" and isinstance(given, str):
        yield at(value, "E116", f"buffer={given!r}: pass the object, nl.{given}")


def is_beta_1(tree: ast.Module) -> bool:
    """Return whether a file imports `neuronxcc.nki`, and not `nki`.

    `neuronxcc.nki.typing` does not count: files of the current dialect import it for their
    annotations.
    """
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    old = {m for m in modules if m.startswith("neuronxcc.nki") and "nki.typing" not in m}
    return bool(old) and not any(m.partition(".")[0] == "nki" for m in modules)
