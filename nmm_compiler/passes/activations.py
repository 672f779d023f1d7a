"""Activations that a model spells out, told by what they compute.

x * sigmoid(x), 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), x / (1 + exp(-x)): how
a function is written does not matter. Where elementwise operations of one value meet again, the
expression is evaluated in float64 at a few points and compared with the functions known by name.
Only expressions with tanh, sigmoid, erf, exp or softplus in them are tried, and only products and
quotients can end one, so that a graph without any costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from nmm_compiler.passes import views
from nmm_compiler.passes.forms import Activation, Key
from nmm_compiler.passes.spellings import target_name

if TYPE_CHECKING:
    from nmm_compiler.passes.canonicalize import Canonical

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
    """What a sweep over a graph has seen of expressions that may be activations."""

    def __init__(self, c: Canonical) -> None:
        self._c = c
        self._bent: set[fx.Node] = set()
        # The activation that a node is an inner step of.
        self.part_of: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node, name: str) -> Activation | None:
        """Note a node; return the activation that ends there, if one does."""
        if name in _BENT:
            self._bent.add(node)
            return None
        if name not in _CARRIES or not any(n in self._bent for n in node.all_input_nodes):
            return None
        self._bent.add(node)
        return self._read(node) if name in _ENDS else None

    def _read(self, end: fx.Node) -> Activation | None:
        readers: dict[Key, int] = {}
        order: list[fx.Node] = []
        queue = [end]
        while queue:
            node = queue.pop()
            if node in order:
                continue
            order.append(node)
            if len(order) > _LARGEST:
                break
            for operand in node.all_input_nodes:
                base = self._base(operand)
                if base is None:
                    continue
                readers[base] = readers.get(base, 0) + 1
                if isinstance(base, fx.Node) and self._step(base) is not None:
                    queue.append(base)
        for root in (key for key, count in readers.items() if count > 1 and key is not end):
            inside: set[fx.Node] = set()
            values = self._evaluate(end, root, inside)
            name = None if values is None else _named(values)
            if name is not None:
                self._c.helpers[end] = frozenset(inside - {end})
                self._bent.discard(end)
                for node in inside - {end}:
                    self.part_of[node] = end
                return Activation(self._entrance(end, root, inside), name)
        return None

    def _base(self, node: fx.Node) -> Key | None:
        """Return what a value is, unless it is rearranged."""
        c = self._c
        if node not in c.views:
            return None
        base, dims = c.base(node)
        return base if dims == views.identity(c.shape(base) or ()) else None

    def _step(self, node: fx.Node) -> str | None:
        name = target_name(node)
        plain = not node.kwargs or set(node.kwargs) <= {"exponent"}
        known = name in _UNARY or name in _BINARY
        return name if known and plain and node not in self._c.effects.writers else None

    def _evaluate(self, node: fx.Node, root: Key, inside: set[fx.Node]) -> Sequence[float] | None:
        """Return the values of an expression at the points of `root`; None when it is none."""
        memo: dict[Key, Sequence[float] | None] = {root: _POINTS}
        c = self._c
        shape, dtype = c.shape(root), c.dtype(root)

        def value(argument: Any) -> Sequence[float] | None:
            if isinstance(argument, (int, float)):
                return (float(argument),) * len(_POINTS)
            base = self._base(argument) if isinstance(argument, fx.Node) else None
            if base is None:
                return None
            if base not in memo:
                memo[base] = None if not isinstance(base, fx.Node) else compute(base)
            if memo[base] is not None and base is not root:
                inside.update(self._c.through(argument))
            return memo[base]

        def compute(step: fx.Node) -> Sequence[float] | None:
            name = self._step(step)
            if name is None or c.shape(step) != shape or c.dtype(step) != dtype:
                return None
            operands = [value(a) for a in (*step.args, *step.kwargs.values())]
            count = 1 if name in _UNARY else 2
            if len(operands) != count or any(o is None for o in operands):
                return None
            inside.add(step)
            function: Any = _UNARY.get(name) or _BINARY[name]
            try:
                return [function(*at) for at in zip(*operands, strict=True)]  # type: ignore[arg-type]
            except (ArithmeticError, ValueError):
                return None

        result = compute(node)
        return result if result is None or all(isinstance(v, float) for v in result) else None

    def _entrance(self, end: fx.Node, root: Key, inside: set[fx.Node]) -> Key:
        """Return the value, as some step reads it, that the expression is a function of."""
        for node in inside:
            for operand in node.all_input_nodes:
                if operand not in inside and self._base(operand) is root:
                    return operand
        return root


def _named(values: Sequence[float]) -> str | None:
    for name, wanted in _FINGERPRINTS.items():
        pairs = zip(values, wanted, strict=True)
        if all(abs(a - b) <= _SAME * (1.0 + abs(b)) for a, b in pairs):
            return name
    return None
