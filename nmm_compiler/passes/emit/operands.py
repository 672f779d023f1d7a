"""Which tensor a call reads as x, and in which memory order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.linear_map import is_whole_feature
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, Virtual, owner_of
from nmm_compiler.passes.graph.views import FEATURE, Atom, Dim, Dims, Size


@dataclass
class Source:
    """The data operand of a call: a value, and its dimensions over tokens and FEATURE."""

    key: Key
    dims: Dims
    k: int

    def tokens(self) -> Dims:
        """Return the token dimensions in the order they have in the value."""
        out: list[Dim] = []
        for dim in self.dims:
            rest = tuple(a for a in dim if a.axis != FEATURE)
            if rest or not dim:
                out.append(rest)
        if self.k == 1 and out and out[-1] == ():
            out.pop()  # the feature dimension itself, of size 1
        return tuple(out)

    def is_row(self) -> bool:
        """Return whether the value is [tokens..., k] as it is."""
        return bool(self.dims) and is_whole_feature(self.dims[-1], self.k)

    def is_col(self) -> bool:
        """Return whether the value is [k, tokens] as it is."""
        return (
            len(self.dims) == 2
            and is_whole_feature(self.dims[0], self.k)
            and not any(a.axis == FEATURE for a in self.dims[1])
            and not is_whole_feature(self.dims[1], self.k)
        )


def best_source(c: Canonical, key: Key, dims: Dims, k: int, final: fx.Node) -> Source:
    """Return the operand, or the tensor that it is a view or copy of, if that needs no transpose.

    The call reads that tensor at its own place, so nothing may write to it in between.
    """
    here = Source(key, dims, k)
    base, inner = c.base(key)
    if base is key or isinstance(base, Virtual):
        return here
    inverse = _invert(inner, dims, c.shape(base) or ())
    if inverse is None:
        return here
    below = Source(base, inverse, k)
    if not below.is_col() and not below.is_row():
        return here
    position = c.effects.position
    seen = [owner_of(k) for k in c.through(key)]
    start = min(position[node] for node in seen)
    if c.effects.crossed_write(start - 1, position[final], [base, *seen]) is not None:
        return here
    return below


def _invert(inner: Dims, dims: Dims, shape: tuple[Size, ...]) -> Dims | None:
    """Given a value as dims over a base, and as dims over tokens, return the base over tokens."""
    pieces: dict[int, list[tuple[Atom, Dim]]] = {}
    for over_base, over_tokens in zip(inner, dims, strict=True):
        if not over_base:
            if over_tokens:
                return None
            continue
        sizes = [a.size for a in over_base]
        split = views.reshape((over_tokens,), sizes)
        if split is None or any(a.axis < 0 for a in over_base):
            return None
        for atom, part in zip(over_base, split, strict=True):
            pieces.setdefault(atom.axis, []).append((atom, part))
    out: list[Dim] = []
    for axis, size in enumerate(shape):
        if size == 1:
            out.append(())
            continue
        own = pieces.get(axis, [])
        rest: Size = size
        atoms: list[Atom] = []
        while rest != 1:
            index = next(
                (i for i, (a, _) in enumerate(own) if views.times(a.inner, a.size) == rest), None
            )
            if index is None:
                return None
            atom, part = own.pop(index)
            atoms.extend(part)
            rest = atom.inner
        out.append(tuple(atoms))
    return tuple(out)


def feature_axis(size: int) -> Dim:
    """Return the dimension of a whole feature axis."""
    return () if size == 1 else (Atom(FEATURE, size, 1),)


def source_over_raw(c: Canonical, made: Any, reader: Any) -> Source | None:
    """Return a reader's x as a [features, tokens] result, None when it does not fit.

    made: a Call or a pointwise operation of a region. reader: anything with a `source`.
    """
    base, view = c.base(reader.source.key)
    if base is not made.final or made.n != reader.source.k:
        return None
    lead = made.source.tokens() if made.lead is None else made.lead
    flat = tuple(a for d in lead for a in d)
    pieces: dict[int, list[tuple[Atom, Atom]]] = {}
    inner: Size = 1
    for atom in reversed(flat):
        pieces.setdefault(atom.axis, []).append((atom, Atom(1, atom.size, inner)))
        inner = views.times(inner, atom.size)
    axes: dict[int, Dim] = {}
    for axis, own in pieces.items():
        place: list[Atom] = []
        reached: Size = 1
        while own:  # the axis again, innermost part first
            index = next((i for i, (atom, _) in enumerate(own) if atom.inner == reached), None)
            if index is None:
                return None
            atom, there = own.pop(index)
            place.insert(0, there)
            reached = views.times(reached, atom.size)
        axes[axis] = tuple(place)
    over: list[Dim] = []
    for dim in made.out_dims:
        atoms: list[Atom] = []
        for atom in dim:
            if atom.axis == FEATURE:
                atoms.append(Atom(0, atom.size, atom.inner))
                continue
            part = views.compose(((Atom(0, atom.size, atom.inner),),), (axes[atom.axis],))
            if part is None:
                return None
            atoms.extend(part[0])
        over.append(tuple(atoms))
    seen = views.compose(view, tuple(over))
    if seen is None:
        return None
    inverse = _invert(seen, reader.source.dims, (made.n, inner))
    if inverse is None:
        return None
    source = Source(owner_of(reader.source.key), inverse, made.n)
    return source if source.is_col() else None
