"""Resolves names: imports, aliases and scopes of one kernel file, and its kernel code.

In: a parsed file. `Names.resolve(node)` returns "nki.isa.nc_matmul" for `nisa.nc_matmul`,
`isa.nc_matmul` after `from nki import isa`, or `mm` after `mm = nisa.nc_matmul`, and None for
anything a local name shadows. `Names.kernel_code` holds the functions that the NKI compiler reads:
those under @nki.jit, the functions that they call in the same file, and every function that calls
nki.isa or nki.language itself (a file of helpers has no kernel, but all of it is kernel code).

A rule of the lint yields a `Finding` at a node.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
from collections.abc import Iterator, Sequence

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_MODULE_NAMES = ("__file__", "__path__", "__annotations__")
_TYPE_PARAMETERS = ("TypeVar", "ParamSpec", "TypeVarTuple")  # syntax of Python 3.12
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Modules whose full name differs from where their contents are documented.
_SAME_AS = {"nki.isa.constants": "nki.isa"}


@dataclasses.dataclass
class Binding:
    """One place that gives a name its value: an import (with its path), or a node."""

    kind: str  # "import", "alias", "function", "class", "other"
    node: ast.AST
    path: str = ""


@dataclasses.dataclass
class Scope:
    """The names bound directly in a module, function, class, lambda or comprehension."""

    node: ast.AST
    parent: Scope | None
    bindings: dict[str, list[Binding]] = dataclasses.field(default_factory=dict)
    outward: set[str] = dataclasses.field(default_factory=set)  # global and nonlocal names

    def bind(self, name: str, binding: Binding) -> None:
        """Add a binding of `name`."""
        self.bindings.setdefault(name, []).append(binding)


class Names:
    """Resolves the names of one parsed file; see the module's docstring.

    package: a prefix that names are known without, such as "neuronxcc.".
    """

    def __init__(self, tree: ast.Module, package: str = "") -> None:
        self.tree, self.package = tree, package
        self.scope_of: dict[ast.AST, Scope] = {}
        self.parent: dict[ast.AST, ast.AST] = {}
        self.module = Scope(tree, None)
        self._walk(tree, self.module)
        self.kernels = self._find_kernels()
        self.kernel_code = self._find_kernel_code()

    def lookup(self, name: str, scope: Scope) -> list[Binding]:
        """Return the bindings that `name` can refer to in `scope`; empty when it is unbound."""
        here: Scope | None = scope
        while here is not None:
            skip = isinstance(here.node, ast.ClassDef) and here is not scope
            if not skip and name in here.bindings and name not in here.outward:
                return here.bindings[name]
            here = here.parent
        return []

    def resolve(self, node: ast.AST, depth: int = 0) -> str | None:
        """Return the full name of what an expression names, or None when it is not an import."""
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value, depth)
            if base is None:
                return None
            return self._known_as(f"{base}.{node.attr}")
        if not isinstance(node, ast.Name) or depth > 8:
            return None
        bindings = self.lookup(node.id, self.scope_of[node])
        if not bindings:
            return None
        if all(b.kind == "import" for b in bindings):
            paths = {b.path for b in bindings}
            return paths.pop() if len(paths) == 1 else None
        only = bindings[0]
        if len(bindings) == 1 and only.kind == "alias" and isinstance(only.node, ast.Assign):
            return self.resolve(only.node.value, depth + 1)
        return None

    def _known_as(self, path: str) -> str:
        path = path.removeprefix(self.package)
        return _SAME_AS.get(path, path)

    def definition(self, node: ast.AST) -> FunctionNode | ast.ClassDef | None:
        """Return the function or class of this file that an expression names."""
        if not isinstance(node, ast.Name):
            return None
        for binding in self.lookup(node.id, self.scope_of[node]):
            if isinstance(binding.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                return binding.node
        return None

    def undefined(self, node: ast.Name) -> bool:
        """Return whether nothing in the file, nor a builtin, gives this name a value.

        After a star import, every name counts as defined.
        """
        known = hasattr(builtins, node.id) or node.id in _MODULE_NAMES
        scope = self.scope_of[node]
        return not (known or self.lookup(node.id, scope) or self.lookup("*", scope))

    def kernel_nodes(self) -> Sequence[ast.AST]:
        """Return every node of kernel code once, without annotations and decorators."""
        return self._kernel_nodes

    @functools.cached_property
    def _kernel_nodes(self) -> list[ast.AST]:
        found: list[ast.AST] = []
        for function in self.kernel_code:
            if not any(around in self.kernel_code for around in self.above(function)):
                found += _evaluated(function)
        return found

    def entry_kernels(self) -> list[FunctionNode]:
        """Return the kernels that no other kernel code of this file uses."""
        used = {
            self.definition(node)
            for node in self.kernel_nodes()
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        return [kernel for kernel in self.kernels if kernel not in used]

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around `node`, innermost first."""
        while node in self.parent:
            node = self.parent[node]
            yield node

    def function_around(self, node: ast.AST) -> FunctionNode | None:
        """Return the innermost function that holds `node`."""
        for around in self.above(node):
            if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return around
        return None

    def is_jit(self, decorator: ast.expr) -> bool:
        """Return whether a decorator is nki.jit, called or not."""
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        return self.resolve(target) == "nki.jit"

    # -- building -----------------------------------------------------------------------------

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        self.scope_of[node] = scope
        self._bind(node, scope)
        inner = scope
        if isinstance(node, (*_SCOPES, *_COMPREHENSIONS)) and not isinstance(node, ast.Module):
            inner = Scope(node, scope)
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            # Decorators, defaults and annotations belong to the scope around a definition.
            outside = field in ("decorator_list", "returns", "bases", "keywords")
            for child in children:
                if isinstance(child, ast.AST):
                    self.parent[child] = node
                    if field == "args" and isinstance(child, ast.arguments):
                        self._walk_arguments(child, scope, inner)
                    else:
                        self._walk(child, scope if outside else inner)

    def _walk_arguments(self, arguments: ast.arguments, outer: Scope, inner: Scope) -> None:
        self.scope_of[arguments] = inner
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        given += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        for argument in given:
            self.parent[argument] = arguments
            self.scope_of[argument] = inner
            inner.bind(argument.arg, Binding("other", argument))
            if argument.annotation is not None:
                self.parent[argument.annotation] = argument
                self._walk(argument.annotation, outer)
        for default in [*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)]:
            self.parent[default] = arguments
            self._walk(default, outer)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                name = alias.asname or path
                scope.bind(name, Binding("import", node, self._known_as(path)))
        elif isinstance(node, ast.ImportFrom):
            module = self._known_as("." * node.level + (node.module or ""))
            for alias in node.names:
                path = self._known_as(f"{module}.{alias.name}")
                scope.bind(alias.asname or alias.name, Binding("import", node, path))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            scope.bind(node.name, Binding("function", node))
        elif isinstance(node, ast.ClassDef):
            scope.bind(node.name, Binding("class", node))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            scope.outward.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            around = self.parent.get(node)
            alias_of = isinstance(around, ast.Assign) and around.targets == [node]
            kind = "alias" if alias_of else "other"
            scope.bind(node.id, Binding(kind, around if alias_of and around else node))
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            scope.bind(node.name, Binding("other", node))
        elif isinstance(node, ast.MatchMapping) and node.rest:
            scope.bind(node.rest, Binding("other", node))
        elif type(node).__name__ in _TYPE_PARAMETERS:
            scope.bind(getattr(node, "name"), Binding("other", node))  # noqa: B009

    def _functions(self) -> list[FunctionNode]:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [n for n in ast.walk(self.tree) if isinstance(n, kinds)]

    def _find_kernels(self) -> list[FunctionNode]:
        kernels = [f for f in self._functions() if any(map(self.is_jit, f.decorator_list))]
        for node in ast.walk(self.tree):
            called = isinstance(node, ast.Call) and self.resolve(node.func) == "nki.jit"
            if called and isinstance(node, ast.Call) and node.args:
                wrapped = self.definition(node.args[0])
                if isinstance(wrapped, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    kernels.append(wrapped)
        return list(dict.fromkeys(kernels))

    def _calls_nki(self, function: FunctionNode) -> bool:
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                path = self.resolve(node.func) or ""
                if path.startswith(("nki.isa.", "nki.language.")):
                    return True
        return False

    def _find_kernel_code(self) -> list[ast.AST]:
        todo: list[ast.AST] = [*self.kernels]
        todo += [f for f in self._functions() if self._calls_nki(f)]
        seen: dict[ast.AST, None] = {}
        while todo:
            function = todo.pop(0)
            if function in seen:
                continue
            seen[function] = None
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                    called = self.definition(node)
                    if called is not None:
                        todo.append(called)
        return list(seen)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _evaluated(child)


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
    """Return a finding at the place of a syntax node."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    return Finding(line, column + 1, code, message)
