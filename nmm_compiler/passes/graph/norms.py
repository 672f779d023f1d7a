"""The weight, the bias and the casts that belong to a norm that is spelled out.

    x * rsqrt(mean(x ** 2) + eps) * w             Llama, in float32, cast back before the weight
    (x.float() * rsqrt(...) * (1 + w)).to(x)      Gemma, whose weight is stored less one

`spelled_out` recognizes x * rsqrt(...). The last operation of the whole expression gets the form
Norm, whose value is the input of it all; the operations before it are its helpers.
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
    return (base, offset) if c.is_constant(base) and len(c.shape(base) or ()) == 1 else None


def _is_last(c: Canonical, vector: Key, node: fx.Node) -> bool:
    """Return whether a constant varies along the last dimension alone, and along all of it."""
    shape, base = c.shape(node) or (), c.base(vector)[0]
    dims = views.expand(c.base(vector)[1], shape)
    if dims is None or len(c.shape(base) or ()) != 1:
        return False
    lead = all(a.axis == views.BROADCAST for dim in dims[:-1] for a in dim)
    return lead and dims[-1] == views.identity(c.shape(base) or ())[0]
