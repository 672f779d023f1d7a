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
from torch import fx
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Cast,
    Form,
    Key,
    Norm,
    Scale,
    View,
    owner_of,
)
from nmm_compiler.passes.graph.torch_names import target_name

_POINTS = (-6.0, -2.5, -1.0, -0.3, 0.2, 0.7, 1.5, 4.0)
# Spellings truncate constants (0.7978845608); gelu and its tanh form differ by 1e-4 and more.
_SAME = 1e-7
_LARGEST = 24
_LARGEST_RANK = 8
_LARGEST_EPS = 0.1

_BENT = frozenset({"tanh", "sigmoid", "erf", "exp", "softplus", "rsqrt", "sqrt", "pow"})
_ENDS = frozenset({"mul", "div"})
_CARRIES = _ENDS | {"add", "sub", "neg", "rsub", "reciprocal"}
_STEPS = _BENT | _CARRIES | {"square", "mean", "var"}

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


def spelled_out(c: Canonical, node: fx.Node, name: str) -> Activation | Norm | None:
    """Record a node; return the activation or norm that ends there, if one does."""
    carries = name in _CARRIES and any(n in c.bent for n in node.all_input_nodes)
    if name not in _BENT and not carries:
        return None
    c.bent.add(node)
    return _read(c, node) if name in _ENDS else None


def _read(c: Canonical, end: fx.Node) -> Activation | Norm | None:
    """Try each value that several steps read as the argument of the expression."""
    readers: dict[View, list[fx.Node]] = {}
    steps = [end]
    for node in steps:
        for operand in node.all_input_nodes:
            value = c.views.get(operand)
            if value is None:
                continue
            readers.setdefault(value, []).append(operand)
            step = _step(c, value)
            if step is not None and step not in steps and len(steps) < _LARGEST:
                steps.append(step)
    for root, reads in readers.items():
        if len(reads) < 2 or views.shape_of(root[1]) != c.shape(end):
            continue
        inner: set[fx.Node] = set()
        form = _form(c, end, reads[0], inner)
        if form is not None:
            inner.discard(end)
            c.bent.discard(end)
            c.helpers[end] = frozenset(inner)
            return form
    return None


def _step(c: Canonical, value: View) -> fx.Node | None:
    """Return the operation that makes a value; None for one that no expression has."""
    base, dims = value
    if not isinstance(base, fx.Node) or dims != c.whole(base):
        return None
    known = target_name(base) in _STEPS or isinstance(c.forms.get(base), Cast)
    plain = known and base.op in ("call_function", "call_method")
    return base if plain and base not in c.effects.writers else None


def _form(
    c: Canonical, end: fx.Node, value: fx.Node, steps: set[fx.Node]
) -> Activation | Norm | None:
    """Return what an expression computes of a value; add its steps."""
    rank = len(c.sizes(end))
    if not 0 < rank <= _LARGEST_RANK:
        return None
    x, known = _known(rank)
    try:
        with _disable_current_modes():
            result = _evaluate(c, end, {c.views[value]: x}, steps)
    except (ArithmeticError, ValueError, TypeError, RuntimeError):
        return None  # other arguments, or no function of small tensors
    if c.dtype(value) == c.dtype(end):
        for name, wanted in known.items():
            if _is_same(result, wanted):
                return Activation(value, name)
    for eps in {n for step in steps for n in tree_leaves((step.args, step.kwargs))}:
        if isinstance(eps, float) and 0.0 < eps < _LARGEST_EPS:
            for kind, norm in _NORMS.items():
                if _is_same(result, norm(x, x.shape[-1:], eps=eps)):
                    return Norm(value, kind, None, None, eps)
    return None


def _evaluate(
    c: Canonical, end: fx.Node, values: dict[View, torch.Tensor], steps: set[fx.Node]
) -> torch.Tensor:
    """Return the value of an expression; ValueError where it has other arguments.

    Steps compute in one dtype; casts to it from a narrower one are none.
    """
    shape, dtype = c.sizes(end), c.dtype(end)

    def operand(node: fx.Node) -> torch.Tensor:
        value = c.views.get(node, (node, ()))
        if value not in values:
            step = _step(c, value)
            if step is None:
                raise ValueError(f"{node} is another argument")
            values[value] = compute(step)
            steps.update(n for n in c.through(node) if isinstance(n, fx.Node))
        return values[value]

    def compute(step: fx.Node) -> torch.Tensor:
        if c.shape(step) not in (shape, (*shape[:-1], 1)) or c.dtype(step) != dtype:
            raise ValueError(f"{step} has another shape or dtype")
        steps.add(step)
        form = c.forms.get(step)
        if isinstance(form, Cast):
            if not isinstance(form.value, fx.Node) or not _widens(c, form):
                raise ValueError(f"{step} rounds")
            return operand(form.value)
        named = {name: value for name, value in step.kwargs.items() if name != "dtype"}
        (first, *args), kwargs = fx.map_arg((step.args, named), operand)
        if isinstance(first, (int, float)):
            first = torch.tensor(first, dtype=torch.float64)
        name = str(target_name(step))
        function = getattr(torch, name, None) or getattr(functional, name)
        result: torch.Tensor = function(first, *args, **kwargs)
        return result

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


def _is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.allclose(one, two, rtol=_SAME, atol=_SAME)


def _widens(c: Canonical, form: Cast) -> bool:
    narrow = c.dtype(form.value)
    return narrow is not None and narrow.is_floating_point and form.dtype.itemsize > narrow.itemsize


def norm_around(c: Canonical, node: fx.Node, name: str, form: Any) -> Norm | None:
    """Return the norm that ends at a node, with its helpers noted; None where none does.

    form: of the node alone.
    """
    nodes: set[fx.Node] = set()
    norm = None
    if isinstance(form, Cast):
        norm = _narrowed(c, form, nodes)
    elif name in ("mul", "add"):
        norm = _with_vector(c, node, form, nodes)
    if norm is not None:
        c.helpers[node] = frozenset(nodes - {node})
    return norm


def _with_vector(c: Canonical, node: fx.Node, form: Form, nodes: set[fx.Node]) -> Norm | None:
    """Read a norm times a weight, or plus a bias; either may be cast, and a weight stored less
    one."""
    for value, factor in form.orders if isinstance(form, (Scale, Add)) else ():
        inside: set[fx.Node] = set()
        norm, vector = _normed(c, value, inside), _vector(c, factor)
        if norm is None or vector is None or c.shape(value) != c.shape(node):
            continue
        if c.dtype(factor) != c.dtype(node) or not _is_last(c, factor, node):
            continue
        if isinstance(form, Scale) and norm.weight is None and norm.bias is None:
            nodes |= inside
            return dataclasses.replace(norm, weight=vector[0], offset=vector[1])
        if isinstance(form, Add) and norm.bias is None and norm.kind == "layer" and not vector[1]:
            nodes |= inside
            return dataclasses.replace(norm, bias=vector[0])
    return None


def _normed(c: Canonical, value: Key, nodes: set[fx.Node]) -> Norm | None:
    """Return the norm that a value is."""
    base = c.base(value)[0]
    form = c.forms[base]
    if not isinstance(form, Norm) or not c.is_whole(value):
        return None
    nodes |= {*(owner_of(key) for key in (base, *c.through(value))), *c.helpers.get(base, ())}
    return form


def _narrowed(c: Canonical, form: Cast, nodes: set[fx.Node]) -> Norm | None:
    """Return the norm that a cast returns to the dtype of the input of a wider computation."""
    norm = _normed(c, form.value, nodes)
    if norm is None or c.dtype(norm.value) == form.dtype:
        return norm  # it was widened by the product with the wider root
    wide = c.base(norm.value)[0]
    up = c.forms[wide]
    if not isinstance(up, Cast) or c.dtype(up.value) != form.dtype or not c.is_whole(norm.value):
        return None
    nodes |= {owner_of(key) for key in (wide, *c.through(norm.value))}
    return dataclasses.replace(norm, value=up.value)


def _vector(c: Canonical, key: Key) -> tuple[Key, float] | None:
    """Return (stored vector, number added to it) of a gain, cast or not."""
    base, offset = c.base(key)[0], 0.0
    form = c.forms[base]
    if isinstance(form, Add) and isinstance(form.b, float) and form.alpha == form.beta == 1.0:
        offset, base = form.b, c.base(form.a)[0]
        form = c.forms[base]
    if isinstance(form, Cast):
        base = c.base(form.value)[0]
    return (base, offset) if c.is_constant(base) and len(c.sizes(base)) == 1 else None


def _is_last(c: Canonical, vector: Key, node: fx.Node) -> bool:
    """Return whether a constant varies along the last dimension alone, and along all of it."""
    shape, base = c.sizes(node), c.base(vector)[0]
    dims = views.expand(c.base(vector)[1], shape)
    if dims is None or len(c.sizes(base)) != 1:
        return False
    lead = all(a.axis == views.BROADCAST for dim in dims[:-1] for a in dim)
    return lead and dims[-1] == c.whole(base)[0]
