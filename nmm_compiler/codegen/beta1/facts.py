"""Where the tensors of an emitted file are (HBM or on chip), and which tiles matmuls sum into.

Beta 1 has one function per direction of a DMA, nl.load and nl.store, and sums into zeroed tiles
only. For the parameters of a helper, both follow from the arguments of its calls.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from nmm_compiler.codegen.beta1.views import keyword
from nmm_compiler.codegen.printed import text
from nmm_compiler.codegen.trees import bound, called, nodes, parameter_names, root

HBM, CHIP, BOTH = "hbm", "chip", "both"
Functions = Mapping[str, ast.FunctionDef]
Place = tuple[str, str]
"""(function, a name in it), or (function, RESULT)."""
RESULT = "return"


def reached(places: set[Any], sources: Mapping[Any, set[Any]]) -> set[Any]:
    """Return the places, their sources, and so on."""
    found, left = set(places), list(places)
    while left:
        new = sources.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


class Facts:
    """Where the tensor of each name of each function is, and which are summed into.

    sources: of each place, those whose tensors it may hold, and memories in which it has new ones.
    summed: the places whose tensors matmuls add to.
    """

    def __init__(self, functions: Functions, kernel: str) -> None:
        self.functions = functions
        self.sources: dict[Place | str, set[Place | str]] = defaultdict(set)
        sums: set[Place | str] = set()
        for name in parameter_names(functions[kernel]):
            self.sources[kernel, name].add(HBM)
        for name, function in functions.items():
            for node in nodes(*function.body):
                self._read(name, node)
                adds = keyword(node, "accumulate")
                if adds is not None and text(adds) != "False":
                    sums |= self._held(name, keyword(node, "dst"))
        self.summed = reached(sums, self.sources)

    def _read(self, function: str, node: Any) -> None:
        """Note the places that a node gives tensors to."""
        if isinstance(node, ast.Assign):
            self.sources[function, root(node.targets[0])] |= self._held(function, node.value)
        elif isinstance(node, ast.Return):
            self.sources[function, RESULT] |= self._held(function, node.value)
        elif called(node).endswith(".append"):
            self.sources[function, root(node)] |= self._held(function, node.args[0])
        elif called(node) in self.functions:
            names = parameter_names(self.functions[called(node)])
            for name, value in bound(node, names).items():
                self.sources[called(node), name] |= self._held(function, value)

    def _held(self, function: str, node: Any) -> set[Place | str]:
        """Return the places, or the memory, of the tensors that an expression may be."""
        match node:
            case ast.Name():
                return {(function, node.id)}
            case ast.Tuple() | ast.List():
                return set().union(*(self._held(function, one) for one in node.elts))
            case ast.IfExp():
                return self._held(function, node.body) | self._held(function, node.orelse)
            case ast.Call() if is_new_tile(node):
                buffer = keyword(node, "buffer")
                return {HBM if buffer is not None and text(buffer).endswith("hbm") else CHIP}
            case ast.Call() if called(node) in self.functions:
                return {(called(node), RESULT)}
            case ast.Call():
                return self._held(function, node.func)
            case ast.Subscript() | ast.Attribute():
                return self._held(function, node.value)
        return set()

    def memory(self, function: str, node: ast.expr) -> str | None:
        """Return HBM or CHIP of an expression; BOTH where callers differ, None for no tensor."""
        found = reached(self._held(function, node), self.sources) & {HBM, CHIP}
        return BOTH if len(found) > 1 else next(iter(found), None)


def is_new_tile(node: ast.expr | None) -> bool:
    """Return whether an expression makes a tile."""
    return called(node) == "nl.ndarray"
