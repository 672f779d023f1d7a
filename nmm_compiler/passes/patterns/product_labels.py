"""The labels of a product by role: batch, left, right, summed over.

A pattern's label stands for all labels of the graph with the same role, so that a pattern of
matrices matches products with any number of token dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, Product
from nmm_compiler.passes.graph.views import Atom, Size


@dataclass(frozen=True)
class Labels:
    """The labels of a product by role, without those of size 1."""

    batch: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    inner: tuple[int, ...]

    @classmethod
    def of(
        cls,
        c: Canonical,
        lhs: Key,
        rhs: Key,
        lhs_labels: tuple[int, ...],
        rhs_labels: tuple[int, ...],
        form: Product,
    ) -> Labels | None:
        """Sort the labels; None where a sum runs over what only one operand has."""
        own, other = _real(c, lhs, lhs_labels), _real(c, rhs, rhs_labels)
        if own is None or other is None:
            return None
        out = [x for x in form.out_labels if x in own or x in other]
        inner = [x for x in lhs_labels if x in own and x not in out]
        if any(x not in own for x in other if x not in out) or any(x not in other for x in inner):
            return None
        return cls(
            tuple(x for x in out if x in own and x in other),
            tuple(x for x in out if x in own and x not in other),
            tuple(x for x in out if x in other and x not in own),
            tuple(inner),
        )


def _real(c: Canonical, key: Key, labels: tuple[int, ...]) -> set[int] | None:
    """Return the labels along which an operand varies; None where it is repeated in part."""
    found = set()
    for label, dim in zip(labels, c.base(key)[1], strict=True):
        kinds = {a.axis == views.BROADCAST for a in dim}
        if len(kinds) > 1:
            return None
        if kinds == {False}:
            found.add(label)
    return found


def labels_of(dim: views.Dim, form: Product, shape: tuple[Size, ...]) -> tuple[int, ...] | None:
    """Return the labels of whole axes of a product's result; None where one is cut."""
    found = []
    for atom in dim:
        if atom.axis < 0:
            return None
        if atom.inner != 1 or atom.size != shape[atom.axis]:
            return None
        found.append(form.out_labels[atom.axis])
    return tuple(found)


def axis_of(form: Product, key: Key, c: Canonical, label: int) -> Atom | None:
    """Return the axis of a product's result that a label is; None for one that is summed over."""
    if label not in form.out_labels:
        return None
    axis = form.out_labels.index(label)
    return Atom(axis, (c.shape(key) or ())[axis], 1)
