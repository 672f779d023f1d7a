"""Activations and norms that are spelled out as several operations, recognized numerically.

x * sigmoid(x), 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), x / (1 + exp(-x)),
x * rsqrt(mean(x ** 2) + eps), (x - mean(x)) / sqrt(var(x) + eps): the spelling does not matter.
Where expressions of one value are combined, the result is evaluated in float64 on a small tensor
and compared with the known functions. Only expressions with a function of `_BENT` in them are
tried, and only products and quotients can end one, so that a graph without any costs nothing.

`norm_around` adds the weight, the bias and the casts that belong to such a norm:

    x * rsqrt(mean(x ** 2) + eps) * w             Llama, in float32, cast back before the weight
    (x.float() * rsqrt(...) * (1 + w)).to(x)      Gemma, whose weight is stored less one

The last operation of the whole expression gets the form Norm, whose value is the input of it all;
the operations before it are its helpers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node, map_arg
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Cast,
    Key,
    Norm,
    Scale,
    View,
    owner_of,
)
from nmm_compiler.passes.graph.torch_names import applied, target_name

_POINTS = (-6.0, -2.5, -1.0, -0.3, 0.2, 0.7, 1.5, 4.0)
# Spellings truncate constants (0.7978845608); gelu and its tanh form differ by 1e-4 and more.
_SAME = 1e-7
_LARGEST = 24
_LARGEST_RANK = 8
_LARGEST_EPS = 0.1

_BENT = frozenset({"tanh", "sigmoid", "erf", "exp", "softplus", "rsqrt", "sqrt", "pow"})
_ENDS = frozenset({"mul", "div"})
_CARRIES = _ENDS | {"add", "sub", "neg", "rsub", "reciprocal"}
_SUMS = frozenset({"mean", "var"})
_STEPS = _BENT | _CARRIES | _SUMS | {"square"}

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": functional.mish,
}
_NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "rms": functional.rms_norm,
    "layer": functional.layer_norm,
}


def spelled_out(c: Canonical, node: Node, name: str) -> Activation | Norm | None:
    """Record a node; return the activation or norm that ends there, if one does."""
    carries = name in _CARRIES and any(n in c.bent for n in node.all_input_nodes)
    if name not in _BENT and not carries:
        return None
    c.bent.add(node)
    return _read(c, node) if name in _ENDS else None


def _read(c: Canonical, end: Node) -> Activation | Norm | None:
    """Try each value that several steps read as the argument of the expression."""
    rank = len(c.sizes(end))
    if not 0 < rank <= _LARGEST_RANK:
        return None
    readers: dict[View, list[Node]] = {}
    steps = [end]
    for node in steps:
        for operand in node.all_input_nodes:
            value = c.views[operand]
            readers.setdefault(value, []).append(operand)
            step = _step(c, value)
            if step is not None and step not in steps and len(steps) < _LARGEST:
                steps.append(step)
    for root, reads in readers.items():
        if len(reads) < 2 or views.shape_of(root[1]) != c.shape(end):
            continue
        inner: set[Node] = set()
        try:
            recognized = _recognized(c, end, reads[0], inner)
        except (ArithmeticError, ValueError, TypeError, RuntimeError):
            continue  # other arguments, or no function of small tensors
        if recognized is not None:
            c.bent.discard(end)
            c.helpers[end] = frozenset(inner - {end})
            return recognized
    return None


def _step(c: Canonical, value: View) -> Node | None:
    """Return the operation that makes a value; None for one that no expression has."""
    base, dims = value
    if not isinstance(base, Node) or dims != c.whole(base):
        return None
    known = target_name(base) in _STEPS or isinstance(c.forms.get(base), Cast)
    plain = known and base.op in ("call_function", "call_method")
    return base if plain and base not in c.effects.writers else None


def _recognized(c: Canonical, end: Node, root: Node, steps: set[Node]) -> Activation | Norm | None:
    """Return the form of what the operations from a value to the end compute; None for no known
    function. Adds the operations to `steps`."""
    x, known = _known(len(c.sizes(end)))
    with _disable_current_modes():
        result = _evaluated(c, end, root, x, steps)
        alike = c.dtype(root) == c.dtype(end) and _SUMS.isdisjoint(map(target_name, steps))
        for name, wanted in known.items() if alike else ():
            if _is_same(result, wanted):
                return Activation(root, name)
        given = {
            n for step in steps for n in (*step.args, *step.kwargs.values()) if type(n) is float
        }
        for eps in given:
            for kind in _NORMS if 0.0 < eps < _LARGEST_EPS else ():
                if _is_same(result, _known_norm(len(x.shape), kind, eps)):
                    return Norm(root, kind, None, eps=eps)
    return None


def _evaluated(
    c: Canonical, end: Node, root: Node, x: torch.Tensor, steps: set[Node]
) -> torch.Tensor:
    """Return what the operations from a value to the end make of x in its place; ValueError where
    they read another value.

    Steps compute in one dtype; casts to it from a narrower one are none.
    """
    shape, dtype = c.sizes(end), c.dtype(end)
    values = {c.views[root]: x}

    def operand(node: Key) -> torch.Tensor:
        value = c.views[node]
        if value not in values:
            step = _step(c, value)
            if step is None:
                raise ValueError(f"{node} is another argument")
            values[value] = compute(step)
            steps.update(n for n in c.through(node) if isinstance(n, Node))
        return values[value]

    def compute(step: Node) -> torch.Tensor:
        if c.shape(step) not in (shape, (*shape[:-1], 1)) or c.dtype(step) != dtype:
            raise ValueError(f"{step} has another shape or dtype")
        steps.add(step)
        form = c.forms.get(step)
        if isinstance(form, Cast):
            narrow: Any = c.dtype(form.value)
            if not narrow.is_floating_point or narrow.itemsize >= form.dtype.itemsize:
                raise ValueError(f"{step} rounds")
            return operand(form.value)
        named = {name: value for name, value in step.kwargs.items() if name != "dtype"}
        return applied(step, *map_arg((step.args, named), operand))

    if _step(c, (end, views.identity(shape))) is None:
        raise ValueError(f"{end} writes")
    return compute(end)


@functools.cache
def _known(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return an argument of a rank, no row like another, and the activations of it."""
    rows = math.prod((2,) * (rank - 1))
    scales = torch.tensor([(1.0 + i / 16) * 1e-3 ** (i % 2) for i in range(rows)])
    points = torch.tensor(_POINTS, dtype=torch.float64)
    x = (scales[:, None] * points).reshape(*(2,) * (rank - 1), len(_POINTS))
    return x, {name: function(x) for name, function in _ACTIVATIONS.items()}


@functools.lru_cache(32)
def _known_norm(rank: int, kind: str, eps: float) -> torch.Tensor:
    return _NORMS[kind](_known(rank)[0], (len(_POINTS),), eps=eps)


def _is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=_SAME, atol=_SAME)


def norm_around(c: Canonical, node: Node, name: str, form: Any) -> Norm | None:
    """Return the norm that ends at a node, with its helpers noted; None where none does.

    form: of the node alone: a cast, or a norm times a weight, or plus a bias.
    """
    orders: Any = ()
    if isinstance(form, Cast):
        orders = ((form.value, None),)
    elif name in ("mul", "add") and isinstance(form, (Scale, Add)):
        orders = form.orders
    for value, vector in orders:
        base = c.base(value)[0]
        norm = c.forms[base]
        if not isinstance(norm, Norm) or not c.is_whole(value):
            continue
        nodes = {owner_of(key) for key in (base, *c.through(value))} | c.helpers.get(base, set())
        if vector is None:
            wider = _narrowed(c, norm, form.dtype, nodes)
        else:
            wider = _with_vector(c, node, form, norm, vector)
        if wider is not None and c.shape(value) == c.shape(node):
            c.helpers[node] = frozenset(nodes - {node})
            return wider
    return None


def _narrowed(c: Canonical, norm: Norm, dtype: torch.dtype, nodes: set[Node]) -> Norm | None:
    """Return the norm that a cast returns to the dtype of the input of a wider computation."""
    if c.dtype(norm.value) == dtype:
        return norm  # it was widened by the product with the wider root
    wide = c.base(norm.value)[0]
    up = c.forms[wide]
    if not isinstance(up, Cast) or c.dtype(up.value) != dtype or not c.is_whole(norm.value):
        return None
    nodes |= {owner_of(key) for key in (wide, *c.through(norm.value))}
    return dataclasses.replace(norm, value=up.value)


def _with_vector(
    c: Canonical, node: Node, form: Scale | Add, norm: Norm, vector: Key
) -> Norm | None:
    """Return a norm with a weight or a bias along the last dimension; either may be cast, and a
    weight stored less one."""
    base, dims = c.base(vector)
    along = views.expand(dims, c.sizes(node))
    if along is None or along[-1:] != c.whole(base) or c.dtype(vector) != c.dtype(node):
        return None
    own, offset = c.forms[base], 0.0
    if isinstance(own, Add) and isinstance(own.b, float) and own.alpha == own.beta == 1.0:
        offset, base = own.b, c.base(own.a)[0]
        own = c.forms[base]
    if isinstance(own, Cast):
        base = c.base(own.value)[0]
    if not c.is_constant(base) or len(c.sizes(base)) != 1 or norm.bias is not None:
        return None
    if isinstance(form, Scale):
        weighted = dataclasses.replace(norm, weight=base, offset=offset)
        return weighted if norm.weight is None else None
    plain = norm.kind == "layer" and not offset
    return dataclasses.replace(norm, bias=base) if plain else None
