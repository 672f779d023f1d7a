"""Activations that are spelled out as several operations, recognized numerically.

x * sigmoid(x), 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), x / (1 + exp(-x)): the
spelling does not matter. Where two elementwise expressions of one value are combined, the result is
evaluated in float64 at a few points and compared with the known functions. Only expressions with
tanh, sigmoid, erf, exp or softplus in them are tried, and only products and quotients can end one,
so that a graph without any costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Activation, Canonical, View
from nmm_compiler.passes.graph.torch_names import target_name

_POINTS = (-6.0, -2.5, -1.0, -0.3, 0.2, 0.7, 1.5, 4.0)
# Spellings truncate constants (0.7978845608); gelu and its tanh form differ by 1e-4 and more.
_SAME = 1e-7
_LARGEST = 16

_BENT = frozenset({"tanh", "sigmoid", "erf", "exp", "softplus"})
_ENDS = frozenset({"mul", "div"})
_CARRIES = _ENDS | {"add", "sub", "neg", "rsub", "reciprocal"}


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


_UNARY: dict[str, Callable[[float], float]] = {
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "erf": math.erf,
    "exp": math.exp,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "neg": lambda x: -x,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
}
_BINARY: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: b - a,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
}
_KNOWN: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + math.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "mish": lambda x: x * math.tanh(math.log1p(math.exp(x))),
}
_FINGERPRINTS = {name: [f(x) for x in _POINTS] for name, f in _KNOWN.items()}


class Spelled:
    """The expressions of a graph so far that may be activations."""

    def __init__(self, c: Canonical) -> None:
        self._c = c
        self._bent: set[fx.Node] = set()

    def visit(self, node: fx.Node, name: str) -> Activation | None:
        """Record a node; return the activation that ends there, if one does."""
        if name in _BENT:
            self._bent.add(node)
            return None
        if name not in _CARRIES or not any(n in self._bent for n in node.all_input_nodes):
            return None
        self._bent.add(node)
        return self._read(node) if name in _ENDS else None

    def _read(self, end: fx.Node) -> Activation | None:
        """Try each value that several steps read as the argument of the expression."""
        readers: dict[View, int] = {}
        order: list[fx.Node] = []
        queue = [end]
        while queue and len(order) < _LARGEST:
            node = queue.pop()
            if node in order:
                continue
            order.append(node)
            for operand in node.all_input_nodes:
                value = self._c.views.get(operand)
                if value is None:
                    continue
                readers[value] = readers.get(value, 0) + 1
                step = self._step(value)
                if step is not None:
                    queue.append(step)
        for root in (value for value, count in readers.items() if count > 1):
            steps: set[fx.Node] = set()
            values = self._evaluate(end, root, steps)
            name = None if values is None else _named(values)
            if name is None:
                continue
            inner = steps - {end}
            self._bent.discard(end)
            self._c.part_of.update(dict.fromkeys(inner, end))
            self._c.helpers[end] = frozenset(inner)
            read = (n for step in steps for n in step.all_input_nodes)
            return Activation(next(n for n in read if self._c.views.get(n) == root), name)
        return None

    def _step(self, value: View) -> fx.Node | None:
        """Return the elementwise operation that makes a value; None for any other operation."""
        base, dims = value
        if not isinstance(base, fx.Node) or dims != views.identity(self._c.shape(base) or ()):
            return None
        name = target_name(base)
        known = name in _UNARY or name in _BINARY
        plain = known and set(base.kwargs) <= {"exponent"} and base.op.startswith("call")
        return base if plain and base not in self._c.effects.writers else None

    def _evaluate(self, end: fx.Node, root: View, steps: set[fx.Node]) -> list[float] | None:
        """Return the values of an expression at the points of `root`; None when it has other
        arguments."""
        c = self._c
        shape, dtype = views.shape_of(root[1]), c.dtype(root[0])
        memo: dict[View, list[float] | None] = {root: list(_POINTS)}

        def operand(argument: Any) -> list[float] | None:
            if isinstance(argument, (int, float)):
                return [float(argument)] * len(_POINTS)
            value = c.views.get(argument) if isinstance(argument, fx.Node) else None
            if value is None:
                return None
            if value not in memo:
                step = self._step(value)
                memo[value] = None if step is None else compute(step)
                steps.update(n for n in c.through(argument) if isinstance(n, fx.Node))
            return memo[value]

        def compute(step: fx.Node) -> list[float] | None:
            if c.shape(step) != shape or c.dtype(step) != dtype:
                return None
            steps.add(step)
            name = target_name(step) or ""
            given = [operand(a) for a in (*step.args, *step.kwargs.values())]
            numbers = [g for g in given if g is not None]
            if len(numbers) != len(given) or len(given) != (1 if name in _UNARY else 2):
                return None
            function: Callable[..., Any] = _UNARY.get(name) or _BINARY[name]
            try:
                found = [function(*at) for at in zip(*numbers, strict=True)]
            except (ArithmeticError, ValueError):
                return None
            return found if all(isinstance(v, float) for v in found) else None

        return compute(end)


def _named(values: Sequence[float]) -> str | None:
    for name, wanted in _FINGERPRINTS.items():
        pairs = zip(values, wanted, strict=True)
        if all(abs(a - b) <= _SAME * (1.0 + abs(b)) for a, b in pairs):
            return name
    return None
