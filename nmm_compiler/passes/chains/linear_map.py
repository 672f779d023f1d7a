"""Reads one product with a constant matrix as a map of features, and the steps allowed beside it.

`read_stage` turns a labelled product into: data operand, a 2-D weight [k, n] as it is stored, and
how the dimensions of the data and of the result decompose into tokens and features. Token labels
become axes >= 0 of a `Dims`, features become the axis FEATURE.

`trace_back` walks from a product's data operand to the product that made it, through views and the
affine steps that a kernel can absorb: numbers, vectors, diagonals, biases, per-token numbers. It
returns a refusal for any other step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
from torch import fx

from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Add,
    Canonical,
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
from nmm_compiler.passes.graph.views import FEATURE, Atom, Dims, Size, row_major


@dataclass(frozen=True)
class Weight:
    """A constant matrix: the value to pass, and whether it is stored [k, n] ("row") or [n, k].

    factors: when given, the matrix is their product, which the graph makes at each call.
    """

    key: Key
    k: int
    n: int
    layout: str
    factors: tuple[Weight, ...] = ()

    @property
    def stored(self) -> tuple[int, int]:
        """Return the 2-D shape that the kernel gets."""
        return (self.k, self.n) if self.layout == "row" else (self.n, self.k)

    @property
    def keys(self) -> list[Key]:
        """Return the values that the matrix is read from."""
        return [f.key for f in self.factors] if self.factors else [self.key]

    def transposed(self) -> Weight:
        """Return the same storage read as [n, k]."""
        return Weight(self.key, self.n, self.k, "col" if self.layout == "row" else "row")


@dataclass(frozen=True)
class Stage:
    """data [tokens, k] times weight [k, n].

    x_dims and out_dims describe the data operand and the result over token axes and FEATURE.
    """

    key: Key
    x: Key
    x_dims: Dims
    weight: Weight
    out_dims: Dims
    tokens: dict[int, Size]
    nodes: frozenset[fx.Node]


def path_nodes(c: Canonical, key: Key) -> frozenset[fx.Node]:
    """Return the fx nodes of the rearrangements between a value and its base."""
    keys = c.through(key)
    return frozenset(owner_of(k) for k in keys).union(*(c.helpers.get(k, ()) for k in keys))


def _ordered(atoms: list[tuple[int, int, int]]) -> list[tuple[int, int, int]] | None:
    """Sort (label, size, stride) from outermost in, None unless they make one plain axis."""
    atoms = sorted(atoms, key=lambda a: -a[2])
    for outer, inner in itertools.pairwise(atoms):
        if outer[2] != inner[1] * inner[2]:
            return None
    return atoms


def _feature_dims(atoms: list[tuple[int, int, int]]) -> dict[int, Atom]:
    inner, found = 1, {}
    for label, size, _ in reversed(atoms):
        found[label] = Atom(FEATURE, size, inner)
        inner *= size
    return found


def read_stage(
    c: Canonical, key: Key, form: Product, weight_is_rhs: bool, computed: bool = False
) -> Stage | Refusal:
    """Read a product as data times weight, with the weight on the given side.

    computed: the weight need not be constant; the caller checks what it is made of.
    """
    x, w = (form.lhs, form.rhs) if weight_is_rhs else (form.rhs, form.lhs)
    x_labels, w_labels = form.lhs_labels, form.rhs_labels
    if not weight_is_rhs:
        x_labels, w_labels = w_labels, x_labels
    if not computed and not c.is_weight(w):
        return Refusal(
            "weight",
            "the weight is computed in the graph",
            w,
        )
    base, w_dims = c.base(w)
    shape = c.shape(base)
    if shape is None or not all(isinstance(s, int) for s in shape):
        return Refusal(
            "weight",
            "the weight has symbolic dimensions",
            w,
        )
    x_shape = c.shape(x)
    assert x_shape is not None
    strides = row_major([int(s) for s in shape])
    out = set(form.out_labels)
    real_x = {label for label, s in zip(x_labels, x_shape, strict=True) if s != 1}
    inputs: list[tuple[int, int, int]] = []
    outputs: list[tuple[int, int, int]] = []
    odd = Refusal(
        "weight",
        "the weight is no plain matrix of its parameter (batched, strided or repeated)",
        w,
    )
    for label, dim in zip(w_labels, w_dims, strict=True):
        atoms = [a for a in views.coalesce(dim) if a.axis != views.BROADCAST]
        if len(atoms) != len(dim) and label not in out:
            return odd
        if not atoms:
            continue
        if label in out and label in real_x:
            return Refusal(
                "weight",
                "both operands vary along a batch dimension (per-head weights or activations)",
                w,
            )
        flat = [(label, int(a.size), strides[a.axis] * int(a.inner)) for a in atoms]
        joined = _ordered(flat)
        if joined is None or joined != flat:  # several axes, in an order that is not the stored one
            return odd
        entry = (label, math.prod(size for _, size, _ in flat), joined[-1][2])
        (outputs if label in out else inputs).append(entry)
    k_atoms, n_atoms = _ordered(inputs), _ordered(outputs)
    if k_atoms is None or n_atoms is None:
        return odd
    k, n = (math.prod(size for _, size, _ in atoms) for atoms in (k_atoms, n_atoms))
    k_stride = k_atoms[-1][2] if k_atoms else n
    n_stride = n_atoms[-1][2] if n_atoms else 1
    if k * n != math.prod(shape):
        return odd
    if (n_stride, k_stride) == (1, n) or (k == 1 and n_stride == 1):
        layout = "row"
    elif (k_stride, n_stride) == (1, k) or (n == 1 and k_stride == 1):
        layout = "col"
    else:
        return odd
    k_dims, n_dims = _feature_dims(k_atoms), _feature_dims(n_atoms)
    tokens: dict[int, Size] = {}
    x_dims: list[tuple[Atom, ...]] = []
    for label, size in zip(x_labels, x_shape, strict=True):
        if size == 1:
            x_dims.append(())
        elif label in k_dims:
            if k_dims[label].size != size:
                return odd
            x_dims.append((k_dims[label],))
        elif label in out:
            tokens[label] = size
            x_dims.append((Atom(label, size, 1),))
        else:
            return odd
    if any(label not in x_labels or label not in real_x for label in k_dims):
        return odd
    out_dims: list[tuple[Atom, ...]] = []
    for label in form.out_labels:
        if label in n_dims:
            out_dims.append((n_dims[label],))
        elif label in tokens:
            out_dims.append((Atom(label, tokens[label], 1),))
        else:
            pairs = zip(w_labels, w_dims, strict=True)
            if any(a.axis == views.BROADCAST for own, dim in pairs if own == label for a in dim):
                return odd
            out_dims.append(())
    nodes = frozenset({owner_of(key)}) | path_nodes(c, w) | c.helpers.get(key, frozenset())
    weight = Weight(base, k, n, layout)
    return Stage(key, x, tuple(x_dims), weight, tuple(out_dims), tokens, nodes)


def is_whole_feature(atoms: views.Dim, size: int) -> bool:
    """Return whether the atoms are the feature axis, all of it, in order."""
    if size == 1:
        return not atoms
    return views.coalesce(atoms) == (Atom(FEATURE, size, 1),)


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
        for value, factor in form.orders:
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
