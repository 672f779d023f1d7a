"""Resolves names: imports, aliases and scopes of one kernel file, and its kernel code.

In: a parsed file. `Names.resolve(node)` returns "nki.isa.nc_matmul" for `nisa.nc_matmul`,
`isa.nc_matmul` after `from nki import isa`, or `mm` after `mm = nisa.nc_matmul`, and None for
anything a local name shadows. `Names.kernel_code` holds the functions that the NKI compiler reads:
those under @nki.jit, the functions that they call in the same file, and every function that calls
nki.isa or nki.language itself (a file of helpers has no kernel, but all of it is kernel code).
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
from collections import ChainMap
from collections.abc import Iterable, Iterator
from typing import TypeGuard

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (
    *_FUNCTIONS, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip
_MODULE_NAMES = ("__file__", "__path__", "__annotations__")
_NAMED = ("ExceptHandler", "MatchAs", "MatchStar", "TypeVar", "ParamSpec", "TypeVarTuple")


@dataclasses.dataclass
class Binding:
    """One place that gives a name its value.

    path: what an import names. value: what is assigned, if the name is the only target.
    """

    node: ast.AST
    path: str = ""
    value: ast.expr | None = None


@dataclasses.dataclass
class Scope:
    """What is known in a module, function, class, lambda or comprehension, innermost first."""

    node: ast.AST
    bindings: ChainMap[str, list[Binding]]
    outward: set[str] = dataclasses.field(default_factory=set)  # global and nonlocal names


class Names:
    """Resolves the names of one parsed file; see the module's docstring.

    imported: the full names of all imports.
    beta_1: the file imports `neuronxcc.nki`, and not `nki`. `neuronxcc.nki.typing` does not count:
        files of the current dialect import it for their annotations.
    kernel_nodes: the nodes of kernel code, without annotations and decorators.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.imported: list[str] = []
        self.scope_of: dict[ast.AST, Scope] = {}
        self.parent: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self._walk(tree, Scope(tree, ChainMap()))
        old = [m for m in self.imported if m.startswith("neuronxcc.nki") and "nki.typing" not in m]
        self.beta_1 = bool(old) and not any(m.partition(".")[0] == "nki" for m in self.imported)
        self.kernels = self._find_kernels()
        functions = (node for node in self.nodes if isinstance(node, _FUNCTIONS))
        self.kernel_code = self.reached([*self.kernels, *filter(self._calls_nki, functions)])
        self.kernel_nodes = [
            node for function in self.kernel_code for node in in_order(function, nested=True)
        ]

    def bindings(self, node: ast.AST | None, name: str | None = None) -> list[Binding]:
        """Return the bindings that a name's node, or a name at it, can refer to; else none."""
        if not isinstance(node, ast.Name):
            return []
        return self.scope_of[node].bindings.get(name or node.id, [])

    def resolve(self, node: ast.AST, depth: int = 0) -> str | None:
        """Return the full name of what an expression names, or None when it is not an import."""
        if isinstance(node, ast.Attribute):
            base = self.resolve(node.value, depth)
            return None if base is None else self._known_as(f"{base}.{node.attr}")
        bindings = self.bindings(node) if depth <= 8 else []
        paths = {binding.path for binding in bindings}
        if len(paths) == 1 and "" not in paths:
            return self._known_as(paths.pop())
        if len(bindings) == 1 and bindings[0].value is not None:
            return self.resolve(bindings[0].value, depth + 1)
        return None

    def _known_as(self, path: str) -> str:
        """Return the name under which something is documented."""
        path = path.removeprefix("neuronxcc.") if self.beta_1 else path
        return path.replace("nki.isa.constants", "nki.isa")

    def definition(self, node: ast.AST | None) -> FunctionNode | ast.ClassDef | None:
        """Return the function or class of this file that an expression names."""
        found = (binding.node for binding in self.bindings(node))
        return next((n for n in found if isinstance(n, (*_FUNCTIONS, ast.ClassDef))), None)

    def undefined(self, node: ast.Name) -> bool:
        """Return whether nothing in the file, nor a builtin, gives this name a value.

        After a star import, every name counts as defined.
        """
        known = hasattr(builtins, node.id) or node.id in _MODULE_NAMES
        return not (known or self.bindings(node) or self.bindings(node, "*"))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around `node`, innermost first."""
        while node in self.parent:
            node = self.parent[node]
            yield node

    def calls(self, node: ast.AST | None, path: str) -> TypeGuard[ast.Call]:
        """Return whether a node is a call of this full name."""
        return isinstance(node, ast.Call) and self.resolve(node.func) == path

    # Building

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        self.scope_of[node] = scope
        self.nodes.append(node)
        self._bind(node, scope)
        inner = scope
        if isinstance(node, _SCOPES):  # names of a class are not those of its functions
            around = scope.bindings
            around = around.parents if isinstance(scope.node, ast.ClassDef) else around
            inner = Scope(node, around.new_child())
        for child in ast.iter_child_nodes(node):
            if child._fields:  # one node stands for all `+`, or for all names that are read
                self.parent[child] = node
                self._walk(child, inner)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        name, value = None, None
        match node:
            case ast.Import() | ast.ImportFrom():
                self._bind_import(node, scope)
            case ast.Global() | ast.Nonlocal():
                scope.outward.update(node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = node.name
            case ast.arg():
                name = node.arg
            case ast.MatchMapping():
                name = node.rest
            case ast.Name(ctx=ast.Store() | ast.Del()):
                name, around = node.id, self.parent.get(node)
                if isinstance(around, ast.Assign) and around.targets == [node]:
                    value = around.value
            case _ if type(node).__name__ in _NAMED:
                name = getattr(node, "name")  # noqa: B009
        if name and name not in scope.outward:
            scope.bindings.maps[0].setdefault(name, []).append(Binding(node, "", value))

    def _bind_import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        package = ""
        if isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "") + "."
        for alias in node.names:
            self.imported.append(package + alias.name)
            path = alias.name if alias.asname or package else alias.name.partition(".")[0]
            known = Binding(node, package + path)
            scope.bindings.maps[0].setdefault(alias.asname or path, []).append(known)

    def _find_kernels(self) -> list[FunctionNode]:
        """Return the functions under @nki.jit, called or not, and those that nki.jit is given."""
        kernels: list[ast.AST | None] = []
        for node in self.nodes:
            made = map(called_in, getattr(node, "decorator_list", ()))
            if "nki.jit" in map(self.resolve, made):
                kernels.append(node)
            elif self.calls(node, "nki.jit") and node.args:
                kernels.append(self.definition(node.args[0]))
        return [k for k in dict.fromkeys(kernels) if isinstance(k, _FUNCTIONS)]

    def _calls_nki(self, function: ast.AST) -> bool:
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        paths = (self.resolve(call.func) or "" for call in calls)
        return any(path.startswith(("nki.isa.", "nki.language.")) for path in paths)

    def reached(self, roots: Iterable[ast.AST | None]) -> dict[ast.AST, None]:
        """Return functions, and those of the file that they name, and so on."""
        todo = list(roots)
        seen: dict[ast.AST, None] = {}
        for function in todo:  # which grows
            if function is not None and function not in seen:
                seen[function] = None
                todo += [self.definition(node) for node in ast.walk(function) if is_read(node)]
        return seen


def called_in(node: ast.expr) -> ast.expr:
    """Return what a call calls; another expression as it is."""
    return node.func if isinstance(node, ast.Call) else node


def is_read(node: ast.AST) -> bool:
    """Return whether a node is a name that is read."""
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def in_order(node: ast.AST, nested: bool = False) -> list[ast.AST]:
    """Return the nodes of a statement as they are evaluated: values before what is assigned.

    Annotations and decorators are left out; so are functions and classes in it, unless nested.
    """
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)) and not nested:
        return []
    fields = {field: getattr(node, field) for field in node._fields}
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        fields = {"value": node.value, **fields}
    made: list[ast.AST] = []
    for field, value in fields.items():
        if field not in ("decorator_list", "annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and child._fields:
                    made += in_order(child, nested)
    return [*made, node]
