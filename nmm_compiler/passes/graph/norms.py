"""Norms that are spelled out: x * rsqrt(mean(x ** 2) + eps) * weight, and layer norms like it.

    x * rsqrt(mean(x ** 2) + eps) * w             Llama, in float32, cast back before the weight
    (x.float() * rsqrt(...) * (1 + w)).to(x)      Gemma, whose weight is stored less one

The last operation of the expression gets the form Norm, whose value is the input of the whole
expression; the operations before it are its helpers. An expression that differs from a norm over
the last dimension in any way is not changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Add,
    Canonical,
    Cast,
    Form,
    Key,
    Norm,
    Scale,
    owner_of,
)
from nmm_compiler.passes.graph.torch_names import Call, target_name

_ENDS = frozenset({"mul", "div", "add"})


def spelled_norm(c: Canonical, node: fx.Node, name: str, form: Any) -> Norm | None:
    """Return the norm that ends at a node, with its helpers noted; None where none does.

    form: of the node alone.
    """
    nodes: set[fx.Node] = set()
    if isinstance(form, Cast):
        norm = _narrowed(c, form, nodes)
    elif name in _ENDS:
        norm = _core(c, node, name, nodes) or _with_vector(c, node, form, nodes)
    else:
        return None
    if norm is not None:
        c.helpers[node] = frozenset(nodes - {node})
    return norm


def _core(c: Canonical, node: fx.Node, name: str, nodes: set[fx.Node]) -> Norm | None:
    """Read value * rsqrt(mean square + eps), or value / sqrt(mean square + eps)."""
    if name == "add" or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    for value, factor in (node.args, node.args[::-1]) if name == "mul" else (node.args,):
        assert isinstance(value, fx.Node)
        assert isinstance(factor, fx.Node)
        inside: set[fx.Node] = set()
        under = _root_of(c, factor, inverse=name == "mul", nodes=inside)
        shifted = None if under is None else _plus_number(c, under, inside)
        if shifted is None or c.shape(value) != c.shape(node):
            continue
        squares, eps = shifted
        kind = _kind(c, value, squares, inside)
        if kind is not None:
            nodes |= inside
            return Norm(kind[1], kind[0], None, None, eps)
    return None


def _root_of(c: Canonical, key: fx.Node, inverse: bool, nodes: set[fx.Node]) -> fx.Node | None:
    """Return s where a value is 1 / sqrt(s), or sqrt(s) itself."""
    node = _same(c, key, nodes)
    name = target_name(node)
    if inverse and name == "reciprocal":
        nodes.add(node)
        return _root_of(c, _first(node), False, nodes)
    powers = {"rsqrt": -0.5, "sqrt": 0.5}
    power = node.args[1] if name == "pow" and len(node.args) > 1 else powers.get(name or "")
    if power != (-0.5 if inverse else 0.5):
        return None
    nodes.add(node)
    return _first(node)


def _plus_number(c: Canonical, key: fx.Node, nodes: set[fx.Node]) -> tuple[fx.Node, float] | None:
    node = _same(c, key, nodes)
    form = c.forms.get(node)
    if not isinstance(form, Add) or not isinstance(form.b, float) or form.alpha != 1.0:
        return None
    nodes.add(node)
    return (form.a, form.beta * form.b) if isinstance(form.a, fx.Node) else None


def _kind(
    c: Canonical, value: fx.Node, squares: fx.Node, nodes: set[fx.Node]
) -> tuple[str, Key] | None:
    """Return ("rms" or "layer", the normalized value) where `squares` are its mean squares."""
    node = _same(c, squares, nodes)
    if target_name(node) == "var" and _over_last(c, node, "dim"):
        call = Call(node, "var")
        biased = call.get(2, "unbiased") is False or node.kwargs.get("correction") == 0
        centered = _minus_mean(c, value, nodes)
        if biased and centered is not None and _is(c, _first(node), centered):
            nodes |= {node, *_path(c, value)}
            return "layer", centered
        return None
    if target_name(node) != "mean" or not _over_last(c, node, "dim"):
        return None
    nodes.add(node)
    square = _same(c, _first(node), nodes)
    root = _squared(c, square)
    if root is None:
        return None
    nodes |= {square, *_path(c, root), *_path(c, value)}
    centered, other = _minus_mean(c, value, nodes), _minus_mean(c, root, nodes)
    if centered is not None and other is not None and _is(c, centered, other):
        return "layer", centered
    return ("rms", value) if _is(c, root, value) or _widened(c, root, value, nodes) else None


def _minus_mean(c: Canonical, value: fx.Node, nodes: set[fx.Node]) -> fx.Node | None:
    """Return x where a value is x - mean(x)."""
    node = owner_of(c.base(value)[0])
    form = c.forms.get(node)
    if target_name(node) != "sub" or not isinstance(form, Add) or isinstance(form.b, float):
        return None
    if (form.alpha, form.beta) != (1.0, -1.0) or not isinstance(form.a, fx.Node):
        return None
    mean = owner_of(c.base(form.b)[0])
    plain = target_name(mean) == "mean" and _over_last(c, mean, "dim")
    if not plain or not _is(c, _first(mean), form.a):
        return None
    nodes |= {mean, node}
    return form.a


def _squared(c: Canonical, node: fx.Node) -> fx.Node | None:
    name, first = target_name(node), _first(node)
    if name == "square" or (name == "pow" and node.args[1:2] in ((2,), (2.0,))):
        return first
    twice = name == "mul" and len(node.args) == 2 and isinstance(node.args[1], fx.Node)
    return first if twice and _is(c, node.args[1], first) else None  # type: ignore[arg-type]


def _over_last(c: Canonical, node: fx.Node, name: str) -> bool:
    """Return whether a reduction runs over the last dimension, which it keeps."""
    call = Call(node, "")
    dims, source = call.get(1, name), _first(node)
    listed = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    rank = len(c.shape(source) or ())
    kept = c.shape(node) == (*(c.shape(source) or ())[:-1], 1)
    same = c.dtype(source) == c.dtype(node)
    return bool(rank) and listed in ([-1], [rank - 1]) and kept and same


def _first(node: fx.Node) -> fx.Node:
    found = node.args[0] if node.args else node.kwargs.get("input", node)
    return found if isinstance(found, fx.Node) else node


def _is(c: Canonical, one: fx.Node, two: fx.Node) -> bool:
    """Return whether two nodes are the same value, read the same way round."""
    return c.views.get(one) == c.views.get(two)


def _widened(c: Canonical, one: fx.Node, two: fx.Node, nodes: set[fx.Node]) -> bool:
    """Return whether one node is the other, cast to a wider dtype."""
    form = c.forms.get(_same(c, one, nodes))
    if not isinstance(form, Cast) or not isinstance(form.value, fx.Node):
        return False
    nodes.add(owner_of(c.base(one)[0]))
    return _is(c, form.value, two) and form.dtype.itemsize > c.dtype(two).itemsize  # type: ignore[union-attr]


def _same(c: Canonical, node: fx.Node, nodes: set[fx.Node]) -> fx.Node:
    """Return the value that a node copies; record the nodes between."""
    base = c.base(node)[0]
    if isinstance(base, fx.Node) and c.is_whole(node):
        nodes |= set(_path(c, node))
        return base
    return node


def _path(c: Canonical, node: fx.Node) -> list[fx.Node]:
    return [owner_of(key) for key in c.through(node)]


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
    return (base, offset) if c.is_constant(base) and len(c.shape(base) or ()) == 1 else None


def _is_last(c: Canonical, vector: Key, node: fx.Node) -> bool:
    """Return whether a constant varies along the last dimension alone, and along all of it."""
    shape, base = c.shape(node) or (), c.base(vector)[0]
    dims = views.expand(c.base(vector)[1], shape)
    if dims is None or len(c.shape(base) or ()) != 1:
        return False
    lead = all(a.axis == views.BROADCAST for dim in dims[:-1] for a in dim)
    return lead and dims[-1] == views.identity(c.shape(base) or ())[0]
