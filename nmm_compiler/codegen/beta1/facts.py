"""Where the tensors of an emitted file are (HBM or on chip), and which tiles matmuls sum into.

Beta 1 has one function per direction of a DMA, nl.load and nl.store, and sums into zeroed tiles
only. For the parameters of a helper, both follow from the arguments of its calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst

from nmm_compiler.codegen.beta1.expressions import Expression, elements, method, root, text
from nmm_compiler.codegen.trees import bound, called, nodes

Statement = cst.BaseStatement

HBM, CHIP, BOTH = "hbm", "chip", "both"
Functions = Mapping[str, cst.FunctionDef]


def keyword(call: cst.Call, name: str) -> Expression | None:
    """Return an argument by its keyword."""
    found = [a.value for a in call.args if a.keyword is not None and a.keyword.value == name]
    return found[0] if found else None


def parameters(function: cst.FunctionDef) -> list[str]:
    """Return the names of the parameters."""
    return [p.name.value for p in function.params.params]


def calls(tree: cst.CSTNode, functions: Functions) -> Iterator[tuple[str, list[Expression]]]:
    """Yield (helper, arguments in the order of its parameters) of the calls in a tree."""
    for node in nodes(tree):
        name = called(node)
        if name in functions:
            names = parameters(functions[name])
            given = bound(cst.ensure_type(node, cst.Call), names)
            yield name, [given[one] for one in names]


def _results(tree: cst.CSTNode, functions: Functions) -> Iterator[tuple[str, str]]:
    """Yield (name, helper) of `name = helper(...)` and of `name.append(helper(...))`."""
    for node in nodes(tree):
        name, value = None, None
        if isinstance(node, cst.Assign):
            name, value = root(node.targets[0].target), node.value
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            appends = node.func.attr.value == "append"
            name, value = root(node.func.value), node.args[0].value if appends else None
        helper = root(value.func) if isinstance(value, cst.Call) else None
        if name is not None and helper is not None and helper in functions:
            yield name, helper


def _returned(function: cst.FunctionDef) -> set[str]:
    """Return the names that a function returns."""
    values = [n.value for n in nodes(function.body) if isinstance(n, cst.Return)]
    return {name for value in values if value is not None and (name := root(value)) is not None}


class Facts:
    """Where the tensor of each name of each function is, and which are summed into."""

    def __init__(self, functions: Functions, kernel: str) -> None:
        self.functions = functions
        self._memory: dict[str, dict[str, str]] = defaultdict(dict)
        self._returned: dict[str, str] = {}
        self._summed: set[tuple[str, str]] = set()
        for name in parameters(functions[kernel]):
            self._memory[kernel][name] = HBM
        before: Any = None
        while before != (before := self._state()):
            for name, function in functions.items():
                self._read(name, function)

    def _state(self) -> tuple[Any, ...]:
        memory = tuple((f, n, m) for f, found in self._memory.items() for n, m in found.items())
        return memory, len(self._returned), len(self._summed)

    def memory(self, function: str, node: Expression) -> str | None:
        """Return HBM or CHIP of an expression; BOTH where callers differ, None for no tensor."""
        if isinstance(node, cst.Name):
            return self._memory[function].get(node.value)
        if isinstance(node, (cst.Tuple, cst.List)):
            return self._joined([self.memory(function, e.value) for e in node.elements])
        if isinstance(node, cst.IfExp):
            return self._joined([self.memory(function, part) for part in (node.body, node.orelse)])
        if isinstance(node, cst.Subscript):
            return self.memory(function, node.value)
        if not isinstance(node, cst.Call):
            return None
        full = called(node)
        if full == "nl.ndarray":
            buffer = keyword(node, "buffer")
            return HBM if buffer is not None and text(buffer).endswith("hbm") else CHIP
        if full in self._returned:
            return self._returned[full]
        return self.memory(function, node.func.value) if isinstance(node.func, cst.Attribute) else (
            None
        )  # fmt: skip

    def summed(self, function: str, name: str | None) -> bool:
        """Return whether matmuls add to what a name holds."""
        return name is not None and (function, name) in self._summed

    @staticmethod
    def _joined(found: Sequence[str | None]) -> str | None:
        distinct = {memory for memory in found if memory is not None}
        return BOTH if len(distinct) > 1 else next(iter(distinct), None)

    def _note(self, function: str, name: str | None, memory: str | None) -> None:
        if name is not None and memory is not None:
            known = self._memory[function].get(name)
            joined = self._joined([known, memory])
            assert joined is not None
            self._memory[function][name] = joined

    def _read(self, name: str, function: cst.FunctionDef) -> None:
        for node in nodes(function.body):
            if isinstance(node, cst.Assign):
                target = node.targets[0].target
                if isinstance(target, (cst.Name, cst.Subscript)):
                    self._note(name, root(target), self.memory(name, node.value))
                if isinstance(target, cst.Name) and self.summed(name, target.value):
                    self._summed.add((name, root(node.value) or ""))  # a view of a tile
            elif isinstance(node, cst.Return) and node.value is not None:
                memory = self.memory(name, node.value)
                if memory is not None:
                    self._returned[name] = memory
            elif isinstance(node, cst.Call):
                self._read_call(name, node)
        for made, helper in _results(function.body, self.functions):
            if (name, made) in self._summed:
                self._summed |= {
                    (helper, returned) for returned in _returned(self.functions[helper])
                }
        for helper, given in calls(function.body, self.functions):
            for parameter, value in zip(parameters(self.functions[helper]), given, strict=True):
                self._note(helper, parameter, self.memory(name, value))
                if (helper, parameter) in self._summed:
                    self._summed.add((name, root(value) or ""))

    def _read_call(self, name: str, node: cst.Call) -> None:
        full = called(node)
        if full.endswith(".append"):
            self._note(name, full.removesuffix(".append"), self.memory(name, node.args[0].value))
        elif full == "nisa.nc_matmul":
            adds, dst = keyword(node, "accumulate"), keyword(node, "dst")
            if adds is not None and not (isinstance(adds, cst.Name) and adds.value == "False"):
                self._summed.add((name, root(dst) or "" if dst is not None else ""))


def is_reshaped(node: Expression) -> bool:
    """Return whether an expression is a whole tensor in a shape of three dimensions or more.

    It is one in Beta 1 too; fewer dimensions are how the current dialect spells a row or a column.
    """
    found = method(node)
    if found is None or found[1] != "reshape" or not isinstance(found[0], cst.Name):
        return False
    return len(elements(found[2][0])) > 2


def is_new_tile(node: Expression) -> bool:
    """Return whether an expression makes a tile."""
    return called(node) == "nl.ndarray"


def names_of(body: Sequence[Statement], kind: Callable[[Expression], bool]) -> set[str]:
    """Return the names that are assigned expressions of a kind, `is_reshaped` or `is_new_tile`."""
    return {
        node.targets[0].target.value
        for node in nodes(*body)
        if isinstance(node, cst.Assign)
        and isinstance(node.targets[0].target, cst.Name)
        and kind(node.value)
    }
