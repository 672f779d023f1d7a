"""The steps allowed between two products: numbers, vectors, diagonals, biases, per-token numbers.

`trace_back` walks from a product's data operand to the product that made it, through views and the
affine steps that a kernel can absorb. It returns a refusal for any other step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import fx

from nmm_compiler.passes.chains.linear_map import path_nodes
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import (
    Add,
    Cast,
    Diagonal,
    Form,
    Key,
    Leaf,
    Opaque,
    Product,
    Scale,
    Virtual,
    describe,
    owner_of,
)
from nmm_compiler.passes.graph.distributed import DISTRIBUTED
from nmm_compiler.passes.graph.views import Dims


@dataclass(frozen=True)
class Step:
    """One affine step on a result: kind is "scale", "vector" or "bias".

    scale: times `number`, or times the one-element tensor `key`. vector: times the constant
    vector `key` over features. bias: plus `number` times the constant vector `key`. token: times
    the value `key`, over the tokens in dims.
    """

    kind: str
    number: float = 1.0
    key: Key | None = None
    dims: Dims = ()


def _constant_over(c: Canonical, factor: Key, target: Key) -> tuple[int, ...] | None:
    """Return the dimensions of `target` along which a constant varies; None if no constant."""
    shape, own = c.shape(target), c.shape(factor)
    if shape is None or own is None or not c.is_weight(factor):
        return None
    dims = views.expand(views.identity(own), shape)
    if dims is None:
        return None
    return tuple(
        i for i, dim in enumerate(dims) if any(atom.axis != views.BROADCAST for atom in dim)
    )


def _step_over(c: Canonical, kind: str, factor: Key, target: Key, number: float) -> Step | None:
    positions = _constant_over(c, factor, target)
    shape = c.shape(target)
    if positions is None or shape is None or c.dtype(factor) is None:
        return None
    if not positions:
        return None if kind == "bias" else Step("scale", number, factor)
    dims = views.identity(shape)
    if isinstance(factor, Virtual) and factor.attribute is None:
        factor = c.base(factor)[0]  # the vector itself, as a view with more dimensions
    return Step(kind, number, factor, tuple(dims[i] for i in positions))


def _token_step(c: Canonical, factor: Key, target: Key) -> Step | None:
    """Read a factor that is no constant and has the size 1 along some axes, as features have to be.

    `join_stages` refuses one that varies along features.
    """
    shape, own = c.shape(target), c.shape(factor)
    if shape is None or own is None or len(own) > len(shape) or isinstance(factor, Virtual):
        return None
    own = (*((1,) * (len(shape) - len(own))), *own)
    if c.is_weight(factor) or any(a not in (1, b) for a, b in zip(own, shape, strict=True)):
        return None
    if not any(a == 1 != b for a, b in zip(own, shape, strict=True)):
        return None
    dims = views.identity(shape)
    return Step("token", 1.0, factor, tuple(dims[i] for i, size in enumerate(own) if size != 1))


def _blocked(c: Canonical, form: Form, key: Key) -> Refusal:
    """Return a refusal that names what is between two products."""
    shown, code = describe(form), "between"
    if owner_of(key) in c.effects.writers:
        shown, code = "a write in place", "mutation"
    elif isinstance(form, Cast):
        code = "dtype"
    elif isinstance(form, Opaque) and form.name in DISTRIBUTED:
        shown, code = "a move between devices", "device"
    elif "dropout" in shown.lower():
        code = "training"
    return Refusal(code, f"{shown} between the products", key)


@dataclass
class Walk:
    """The position of `trace_back`: a base, its dimensions over those of the start, the steps so
    far."""

    key: Key
    dims: Dims
    steps: list[Step]
    nodes: set[fx.Node]

    def descend(self, c: Canonical, value: Key) -> bool:
        """Move to the operand that the current base is computed from, element by element."""
        base, inner = c.base(value)
        dims = views.compose(self.dims, inner)
        if dims is None:
            return False
        steps: list[Step] = []
        for step in self.steps:
            moved = views.compose(step.dims, inner)
            if moved is None:
                return False
            steps.append(dataclasses.replace(step, dims=moved))
        self.nodes |= {owner_of(self.key)} | path_nodes(c, value)
        self.key, self.dims, self.steps = base, dims, steps
        return True


def trace_back(c: Canonical, start: Key) -> tuple[Walk, Product] | tuple[Walk, Refusal]:
    """Walk from a value to the product that made it; steps come last first."""
    base, dims = c.base(start)
    return trace_on(c, Walk(base, dims, [], set(path_nodes(c, start))))


def trace_on(c: Canonical, walk: Walk) -> tuple[Walk, Product] | tuple[Walk, Refusal]:
    """Go on with a walk to the product that made its value."""
    while True:
        form = c.forms[walk.key]
        if isinstance(form, Product):
            diagonal = _diagonal(c, walk, form)
            if diagonal is None:
                return walk, form
            if diagonal is False:
                return walk, _blocked(c, form, walk.key)
            continue
        if isinstance(form, Cast) and _is_wider_for_a_while(c, walk.key):
            found: tuple[Key, list[Step]] | None = form.value, []
        else:
            found = affine(c, walk.key, form)
        if found is None:
            return walk, _blocked(c, form, walk.key)
        value, steps = found
        walk.steps.extend(steps)
        if not walk.descend(c, value):
            return walk, _blocked(c, form, walk.key)


_STEPS_COMPUTED_WIDER = 8


def _is_wider_for_a_while(c: Canonical, key: Key) -> bool:
    """Return whether a cast is one of two, to a wider dtype and back, with only steps between.

    A kernel keeps the intermediate of a chain in float32, so steps between are wider there too.
    """
    for _ in range(_STEPS_COMPUTED_WIDER):
        form = c.forms[key]
        if isinstance(form, Cast):
            own, inner = c.dtype(key), c.dtype(form.value)
            if own == torch.float32 and inner in (torch.bfloat16, torch.float16):
                return True
            if inner != torch.float32 or own not in (torch.bfloat16, torch.float16):
                return False
            value: Key = form.value
        else:
            found = affine(c, key, form)
            if found is None:
                return False
            value = found[0]
        key = c.base(value)[0]
    return False


def affine(c: Canonical, key: Key, form: Form) -> tuple[Key, list[Step]] | None:
    """Read scale and add as (value, steps last first), None when they are not affine."""
    if isinstance(form, Scale):
        if isinstance(form.factor, float):
            return form.value, [Step("scale", form.factor)]
        for value, factor in ((form.value, form.factor), (form.factor, form.value)):
            if c.shape(value) == c.shape(key):
                step = _step_over(c, "vector", factor, key, 1.0) or _token_step(c, factor, key)
                if step is not None and not isinstance(c.form(value), Leaf):
                    return value, [step]
        return None
    if isinstance(form, Add):
        if isinstance(form.b, float):
            if form.b == 0.0:
                return form.a, [Step("scale", form.alpha)]
            return None
        pairs = ((form.a, form.alpha, form.b, form.beta), (form.b, form.beta, form.a, form.alpha))
        for value, own, addend, sign in pairs:
            if c.shape(value) == c.shape(key):
                step = _step_over(c, "bias", addend, key, sign)
                if step is not None and not isinstance(c.form(value), Leaf):
                    return value, [step, Step("scale", own)]
    return None


def _diagonal(c: Canonical, walk: Walk, form: Product) -> bool | None:
    """Fold a product with diag(s); None when the product is none, False when it does not fold."""
    for value, other, own, labels in (
        (form.lhs, form.rhs, form.lhs_labels, form.rhs_labels),
        (form.rhs, form.lhs, form.rhs_labels, form.lhs_labels),
    ):
        diagonal = c.form(other)
        if not isinstance(diagonal, Diagonal) or len(labels) != 2:
            continue
        if not c.is_weight(diagonal.vector):
            return False
        inside = [i for i, label in enumerate(own) if label in labels]
        new = next((x for x in labels if x not in own), None)
        if len(inside) != 1 or new is None:
            return False
        moved = tuple(own.index(x) if x != new else inside[0] for x in form.out_labels)
        shape = c.shape(value)
        if shape is None:
            return False
        identity = views.identity(shape)
        renamed = tuple(identity[i] for i in moved)
        dims = views.compose(walk.dims, renamed)
        steps = [views.compose(s.dims, renamed) for s in walk.steps]
        if dims is None or any(s is None for s in steps):
            return False
        walk.dims = dims
        walk.steps = [
            dataclasses.replace(s, dims=d or ()) for s, d in zip(walk.steps, steps, strict=True)
        ]
        walk.steps.append(Step("vector", 1.0, diagonal.vector, (identity[inside[0]],)))
        walk.nodes |= path_nodes(c, other) | {owner_of(c.base(other)[0])}
        walk.nodes |= c.helpers.get(walk.key, frozenset())
        return bool(walk.descend(c, value))
    return None
