"""Reads one product with a constant matrix as a map of features; chains consist of these.

`read_stage` turns a labelled product into: data operand, a 2-D weight [k, n] as it is stored, and
how the dimensions of the data and of the result decompose into tokens and features. Token labels
become axes >= 0 of a `Dims`, features become the axis FEATURE.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, Product, owner_of
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
        size = 1
        for entry in flat:
            size *= entry[1]
        entry = (label, size, joined[-1][2])
        (outputs if label in out else inputs).append(entry)
    k_atoms, n_atoms = _ordered(inputs), _ordered(outputs)
    if k_atoms is None or n_atoms is None:
        return odd
    k, n, total = 1, 1, 1
    for atom in k_atoms:
        k *= atom[1]
    for atom in n_atoms:
        n *= atom[1]
    for s in shape:
        total *= int(s)
    k_stride = k_atoms[-1][2] if k_atoms else n
    n_stride = n_atoms[-1][2] if n_atoms else 1
    if k * n != total:
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
            expanded = [
                a
                for own, dim in zip(w_labels, w_dims, strict=True)
                if own == label
                for a in dim
                if a.axis == views.BROADCAST
            ]
            if expanded:
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
