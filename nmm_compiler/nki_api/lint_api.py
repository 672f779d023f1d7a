"""The rules about the NKI API: names must exist, and calls must fit their signatures.

Files of NKI Beta 1 (`import neuronxcc.nki`) have the rules for names and positions alone; their
stubs end in `**kwargs`, so that an unknown keyword is a warning (W117) there.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from collections.abc import Iterator

from nmm_compiler.errors import closest
from nmm_compiler.nki_api import table
from nmm_compiler.nki_api.api import MODULES, Api, Function, before, of_parameter
from nmm_compiler.nki_api.lint_names import Names
from nmm_compiler.simulator.isa.instruction import MEMBERS_OF


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


SAID = {
    "E101": "{0} has no {1!r} in NKI {2}{3}",
    "E102": "{} came with NKI {}; this is checked for {}",
    "E102 method": "tensors have {}() since NKI {}; this is checked for {}",
    "E103": "{} was removed in NKI {}; use {}",
    "W104": "{} is deprecated since NKI {}; use {}",
    "W105": "names behind a star import of {} are not checked",
    "W106": "{} is not among the names documented up to NKI {}{}",
    "E111": "{} has no {!r}{}",
    "E112": "{} needs {}",
    "E113": "{} got {!r} twice",
    "E114": "{} got {} positional arguments, takes {}",
    "E115": "{} lost {!r}; use {}",
    "E115 jit": "nki.jit refuses {!r} since NKI 0.3; use {}",
    "W115": "nki.jit ignores {!r} since NKI 0.3; use {}",
    "E116": "{}={!r}: name a member of {}",
    "E116 buffer": "buffer={0!r}: pass the object, nl.{0}",
    "W116": "{}={!r}: name a member of {}",
    "E117": "{} takes {!r} since NKI {}; checked for {}",
    "W117": "{} documents no {!r}{}",
    "E118": "{} does not compile for a device; use {}",
    "E118 matmul": "nl.matmul works on a device only with transpose_x=True",
    "E201": "{!r} is not in the NKI language; use {!r}",
    "E202": "keyword-only parameters ('*' before {!r}) are refused; drop the '*'",
    "E203": "try is not in the NKI language; test the condition before",
    "E204": "only nl.no_reorder() can be held by 'with' inside a kernel",
    "E205": "generators and coroutines are not in the NKI language; write a loop over a list",
    "W206": "{} is not described by the NKI language guide before 0.7; a loop or a named function "
    "is",
    "E207": "class {} inherits {}; it must inherit NKIObject alone, or Enum",
    "E208": "{} carries @nki.jit and is used inside a kernel; drop its decorator",
    "E209": "kernel arguments cannot be lists; {} the tuple for {}",
    "E210": "{} cannot be used inside a kernel; use nki.language, or pass the value in",
    "E211": "neuronxcc.nki is the API of NKI 0.1, refused in kernels since 0.4; import nki",
    "W211": "neuronxcc.nki is the API of NKI 0.1, refused in kernels since 0.4; import nki",
    "E212": "global {}: compiled kernels are cached by their arguments, so a kernel must not "
    "depend on or change outer state",
    "E214": "dict keys are strings inside a kernel, not {!r}",
    "E215": "'while' on a register is removed in NKI 0.7; use nl.while_loop(init, body)",
    "W215": "'while' on a register is deprecated since NKI 0.6; use nl.while_loop(init, body)",
    "E216": "nl.{} cannot stand inside nl.no_reorder()",
    "E217": "{} must return the register that continues nl.while_loop",
    "E217 value": "{} returns a value, and the body of nl.fori_loop must not",
    "E218": "the step of nl.{} must be a positive whole number",
    "E219": "{0} is a register in the body of nl.fori_loop: no Python arithmetic; pass it as "
    ".ap(..., scalar_offset={0})",
    "E220": "the variable of nl.fori_loop is no register in NKI 0.7 unless a bound is one, and "
    "nisa.register_store takes registers; pass a bound as nisa.register_alloc(n)",
    "E221": "{} changes from turn to turn in Python, and the body of a loop on the device is "
    "traced once; keep it in a register or a tile, or unroll with a Python for loop",
    "E301": "{} is not defined in this file",
    "E302": "{} is returned and lives in {}; allocate outputs with buffer=nl.shared_hbm",
    "E303": "{} of {} must be in {}, not {}",
    "E303 psum": "{1} cannot reach PSUM ({0}); go through SBUF with tensor_copy",
    "E304": "memset of an integer tile takes an integer, not {}",
    "E306": "{} of {} must be in {}, not {}",
    "E307": "{} partitions in {}, which has {}",
}
"""What each finding says; where a code has several sentences, a word behind it chooses."""


def at(node: ast.AST, said: str, *values: object) -> Finding:
    """Return a finding at the place of a syntax node; said: the sentence, filled with values."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    code = said.partition(" ")[0]
    return Finding(line, column + 1, f"NKI-{code}", SAID[said].format(*values))


def arguments(node: ast.Call, function: Function) -> dict[str, ast.expr]:
    """Return the arguments of a call by name, up to a starred one."""
    plain = itertools.takewhile(lambda value: not isinstance(value, ast.Starred), node.args)
    given = dict(zip(function.parameters, plain, strict=False))
    return given | {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}


def of_the_api(node: ast.AST, names: Names, api: Api) -> Iterator[Finding]:
    """E101 to E104, W106: names of nki; E111 to E115, E117, W117: arguments of calls.

    Not of Beta 1: E115, E116, E118, W115, W116: values of arguments; what is imported.
    """
    beta_1 = before(api.version, "0.3")
    match node:
        case ast.Attribute():
            yield from _member(node, names.resolve(node.value) or "", node.attr, api)
        case ast.Import() | ast.ImportFrom() if not beta_1:
            yield from _import(node, api)
        case ast.Call():
            path = names.resolve(node.func) or ""
            function = api.functions.get(path)
            if function is not None:
                yield from _passed(node, function, api)
                if not beta_1:
                    yield from _values(node, path, arguments(node, function))
            elif path == "nki.jit" and not beta_1:
                yield from _jit(node)


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
                yield at(node, "W105", node.module)
    if any(module.partition(".")[0] == "neuronxcc" for module in modules):
        yield at(node, "W211" if before(api.version, "0.4") else "E211")


def _member(node: ast.AST, owner: str, name: str, api: Api) -> Iterator[Finding]:
    if owner not in MODULES and owner not in api.members:
        return
    full = f"{owner}.{name}"
    if full in api.functions or full in api.values or name in api.members.get(owner, ()):
        since, instead = table.DEPRECATED.get(full, ("", ""))
        if since and not before(api.version, since):
            yield at(node, "W104", full, since, instead)
        return
    gone, instead = table.REMOVED.get(full, ("", ""))
    nearest = closest(name, api.names(owner))
    if gone and not before(api.version, gone):
        yield at(node, "E103", full, gone, instead)
    elif full in table.ADDED:
        yield at(node, "E102", full, table.ADDED[full], api.version)
    elif before(table.API_VERSION, api.version) and owner in MODULES:
        yield at(node, "W106", full, table.API_VERSION, nearest)
    else:
        yield at(node, "E101", owner, name, api.version, nearest)


def _values(node: ast.Call, path: str, given: dict[str, ast.expr]) -> Iterator[Finding]:
    for parameter, value in given.items():
        constant = value.value if isinstance(value, ast.Constant) else None
        if parameter in MEMBERS_OF and isinstance(constant, (str, int)):
            said = "W116" if isinstance(constant, str) else "E116"  # refused since 0.3
            yield at(value, said, parameter, constant, f"nki.isa.{MEMBERS_OF[parameter].__name__}")
        elif parameter == "buffer" and isinstance(constant, str):
            yield at(value, "E116 buffer", constant)
    if path in table.NOT_ON_DEVICE:
        yield at(node, "E118", path, table.NOT_ON_DEVICE[path])
    if path == "nki.language.matmul":
        turned = given.get("transpose_x", ast.Constant(False))
        if isinstance(turned, ast.Constant) and not turned.value:
            yield at(node, "E118 matmul")


def _jit(node: ast.Call) -> Iterator[Finding]:
    for keyword in node.keywords:
        instead = table.PARAMETER_REMOVED.get(("nki.jit", keyword.arg or ""))
        if instead:
            ignored = keyword.arg in table.JIT_IGNORED
            yield at(keyword, "W115" if ignored else "E115 jit", keyword.arg, instead)


def _passed(node: ast.Call, function: Function, api: Api) -> Iterator[Finding]:
    """E112 missing, E113 doubled, E114 superfluous arguments of a call, and unknown ones."""
    known = list(function.parameters)
    starred = any(isinstance(a, ast.Starred) for a in node.args)
    spread = any(k.arg is None for k in node.keywords)
    if not starred and len(node.args) > len(known):
        yield at(node.args[len(known)], "E114", function, len(node.args), len(known))
    given = set() if starred else set(known[: len(node.args)])
    for keyword in node.keywords:
        if keyword.arg in given:
            yield at(keyword, "E113", function, keyword.arg)
        elif keyword.arg is not None and keyword.arg not in known:
            yield _unknown_argument(keyword, keyword.arg, function, api)
        given.add(keyword.arg or "")
    missing = [n for n, text in function.parameters.items() if text is None and n not in given]
    if missing and not starred and not spread:
        yield at(node, "E112", function, ", ".join(map(repr, missing)))


def _unknown_argument(keyword: ast.keyword, name: str, function: Function, api: Api) -> Finding:
    """E111 unknown (W117: to a stub of Beta 1), E115 removed, E117 too young parameters."""
    nearest = closest(name, function.parameters)
    if before(api.version, "0.3"):
        return at(keyword, "W117", function, name, nearest)
    instead = of_parameter(table.PARAMETER_REMOVED, function, name)
    if instead is not None:
        return at(keyword, "E115", function.name, name, instead)
    since = of_parameter(table.PARAMETER_ADDED, function, name)
    if since is not None:
        return at(keyword, "E117", function.name, name, since, api.version)
    return at(keyword, "E111", function, name, nearest)
