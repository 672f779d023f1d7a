"""Operands as a base tensor plus strides, so that no rule has to match names of view operations.

A view of a base node is a tuple of dimensions; each dimension is a tuple of atoms, outermost
first, and an atom (axis, size, inner) says: "`size` steps along axis `axis` of the base, each
`inner` elements of that axis long". A plain dimension has one atom, a flattened one several, a
dimension of size 1 none, an expanded one an atom on BROADCAST. Transposing permutes dimensions,
reshaping regroups the row-major list of atoms. Whether a reshape copies memory does not matter
here: values are compared, memory is compared in `effects`.

Sizes are ints, or sympy expressions for symbolic token dimensions; nothing here adds a guard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import sympy  # type: ignore[import-untyped]
import torch

# An int, or a sympy expression (sympy has no types to name it by).
Size: TypeAlias = Any

BROADCAST = -1
FEATURE = -2


class Atom(NamedTuple):
    """`size` steps along `axis`, each `inner` elements of that axis long."""

    axis: int
    size: Size
    inner: Size


Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def as_size(value: Any) -> Size:
    """Return an int, or the expression behind a SymInt, without specializing the latter."""
    if type(value) is int:
        return value
    if isinstance(value, torch.SymInt):
        value = value.node.expr
    if isinstance(value, sympy.Integer):
        return int(value)
    return value


def sizes_of(tensor: torch.Tensor) -> tuple[Size, ...]:
    """Return a tensor's shape; two of them compare as expressions, which adds no guard."""
    return tuple(map(as_size, tensor.shape))


def divide(a: Size, b: Size) -> Size | None:
    """Return a / b when it is certainly whole, else None."""
    if a == b:
        return 1
    if isinstance(b, int) and (b == 0 or isinstance(a, int)):
        return a // b if b and a % b == 0 else None
    quotient, rest = sympy.cancel(a / b).as_numer_denom()
    return as_size(quotient) if rest == 1 else None


def product(sizes: Sequence[Size]) -> Size:
    """Return the product of the sizes."""
    return as_size(math.prod(sizes))


def dim_size(dim: Dim) -> Size:
    """Return the number of elements along one dimension."""
    return dim[0].size if len(dim) == 1 else product([atom.size for atom in dim])


def shape_of(dims: Dims) -> tuple[Size, ...]:
    """Return the shape that the dimensions have."""
    return tuple(dim_size(dim) for dim in dims)


def identity(shape: Sequence[Size]) -> Dims:
    """Return the view of a base of this shape that is the base itself."""
    return tuple(() if s == 1 else (Atom(i, s, 1),) for i, s in enumerate(shape))


def reshape(dims: Dims, shape: Sequence[Size]) -> Dims | None:
    """Regroup the atoms, in row-major order, into `shape`; None when sizes cannot be split."""
    queue = [atom for dim in dims for atom in dim][::-1]
    out: list[Dim] = []
    for size in shape:
        if size == 0:
            return None
        taken: list[Atom] = []
        rest: Size = size
        while rest != 1:
            if not queue:
                return None
            atom = queue.pop()
            quotient = divide(rest, atom.size)
            if quotient is not None:
                taken.append(atom)
                rest = quotient
                continue
            quotient = divide(atom.size, rest)
            if quotient is None:
                return None
            taken.append(Atom(atom.axis, rest, product((atom.inner, quotient))))
            queue.append(Atom(atom.axis, quotient, atom.inner))
            rest = 1
        out.append(tuple(taken))
    return None if queue else tuple(out)


def expand(dims: Dims, shape: Sequence[Size]) -> Dims | None:
    """Broadcast to `shape`: missing and size-1 dimensions become BROADCAST atoms."""
    lead = len(shape) - len(dims)
    if lead < 0:
        return None
    out: list[Dim] = []
    for i, size in enumerate(shape):
        dim = dims[i - lead] if i >= lead else ()
        old = dim_size(dim)
        if old == size:
            out.append(dim)
        elif old == 1:
            out.append((Atom(BROADCAST, size, 0),))
        else:
            return None
    return tuple(out)


def compose(outer: Dims, inner: Dims | Mapping[int, Dim]) -> Dims | None:
    """Express `outer`, a view of A, over B; inner: A as a view of B, a dim for each axis of A."""
    out: list[Dim] = []
    for dim in outer:
        atoms: list[Atom] = []
        for atom in dim:
            if atom.axis < 0:
                atoms.append(atom)
                continue
            source = inner[atom.axis]
            total = dim_size(source)
            if atom.inner == 1 and atom.size == total:
                atoms.extend(source)
                continue
            head = divide(total, product((atom.size, atom.inner)))
            parts = None if head is None else reshape((source,), (head, atom.size, atom.inner))
            if parts is None:
                return None
            atoms.extend(parts[1])
        out.append(tuple(atoms))
    return tuple(out)


def invert(inner: Dims, dims: Dims, sizes: Mapping[int, Size]) -> Dims | None:
    """Given a value as dims over a base, and as dims over tokens, return the base over tokens.

    sizes: of the axes of the base. The result has a dim for each of them, in their order.
    """
    # By axis and how much of it is left there: how much is left behind a piece, and the piece.
    pieces: dict[tuple[int, Size], tuple[Size, Dim]] = {}
    for over_base, over_tokens in zip(inner, dims, strict=True):
        split = reshape((over_tokens,), [a.size for a in over_base])
        if split is None or any(a.axis == BROADCAST for a in over_base):
            return None
        for atom, part in zip(over_base, split, strict=True):
            pieces[atom.axis, product((atom.inner, atom.size))] = atom.inner, part
    out: list[Dim] = []
    for axis, size in sizes.items():
        rest, atoms = size, list[Atom]()
        while rest != 1:
            if (axis, rest) not in pieces:
                return None
            rest, part = pieces.pop((axis, rest))
            atoms += part
        out.append(tuple(atoms))
    return tuple(out)


def whole_axis(dim: Dim, shape: tuple[Size, ...]) -> int | None:
    """Return the axis that a dimension is; None where it is a part of one axis, several or none."""
    if len(dim) != 1 or dim[0].axis < 0 or dim[0].inner != 1:
        return None
    return dim[0].axis if dim[0].size == shape[dim[0].axis] else None


def coalesce(atoms: Sequence[Atom]) -> Dim:
    """Join neighbouring atoms that continue each other along one axis."""
    out: list[Atom] = []
    for atom in atoms:
        if out and out[-1].axis == atom.axis and out[-1].inner == product((atom.inner, atom.size)):
            out[-1] = Atom(atom.axis, product((out[-1].size, atom.size)), atom.inner)
        else:
            out.append(atom)
    return tuple(out)


def from_strides(
    shape: Sequence[Size], strides: Sequence[Size], new: Sequence[Size], new_strides: Sequence[Size]
) -> Dims | None:
    """Find the view that turns (shape, strides) into (new, new_strides) over the same memory.

    The strides must differ and be positive, so that they identify the dimensions; None otherwise.
    View operations without a handler are read in this way.
    """
    old = {st: i for i, (s, st) in enumerate(zip(shape, strides, strict=True)) if s != 1}
    if len(old) != sum(s != 1 for s in shape) or 0 in old:
        return None
    out: list[Dim] = []
    for size, stride in zip(new, new_strides, strict=True):
        if size == 1:
            out.append(())
        elif stride in old and shape[old[stride]] == size:
            out.append((Atom(old.pop(stride), size, 1),))
        else:
            return None
    return None if old else tuple(out)
