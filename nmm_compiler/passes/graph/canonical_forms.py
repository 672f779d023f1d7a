"""Canonical forms: what a node computes, for every spelling of it.

The rules see only these. A form refers to values by key: an fx node, or a `Virtual`, an
intermediate value of a node (the product inside a `linear` with bias, the first product of a
three-operand einsum). View-like nodes have no form of their own: they are views of a base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.passes.graph.views import Size


class Virtual:
    """A value inside a node: it has a shape and a dtype, and exactly one reader, its owner.

    attribute and tensor are set for a parameter of a called module: the path for `get_attr`, and
    its tensor.
    """

    __slots__ = ("attribute", "dtype", "label", "owner", "shape", "tensor")

    def __init__(
        self,
        owner: fx.Node,
        label: str,
        shape: tuple[Size, ...],
        dtype: torch.dtype,
        attribute: str | None = None,
        tensor: torch.Tensor | None = None,
    ) -> None:
        self.owner, self.label, self.shape, self.dtype = owner, label, shape, dtype
        self.attribute, self.tensor = attribute, tensor

    @property
    def name(self) -> str:
        """Return the owner's name with the name of this part."""
        return f"{self.owner.name}.{self.label}"

    def __repr__(self) -> str:
        return self.name


Key = fx.Node | Virtual


def owner_of(key: Key) -> fx.Node:
    """Return the fx node that computes the value."""
    return key.owner if isinstance(key, Virtual) else key


@dataclass(frozen=True)
class Leaf:
    """A value from outside the graph: source is parameter, buffer, attribute or input."""

    source: str


@dataclass(frozen=True)
class Product:
    """A contraction of two operands; each dimension carries a label, as in an einsum.

    Labels in lhs and rhs but not in out are contracted.
    """

    lhs: Key
    rhs: Key
    lhs_labels: tuple[int, ...]
    rhs_labels: tuple[int, ...]
    out_labels: tuple[int, ...]


@dataclass(frozen=True)
class Scale:
    """value * factor, where factor is a number or another tensor of any kind."""

    value: Key
    factor: float | Key


@dataclass(frozen=True)
class Add:
    """alpha * a + beta * b; b may be a number."""

    a: Key
    b: Key | float
    alpha: float = 1.0
    beta: float = 1.0


@dataclass(frozen=True)
class Cast:
    """A change of dtype."""

    value: Key
    dtype: torch.dtype


@dataclass(frozen=True)
class Activation:
    """A pointwise function by name: relu, silu, gelu, gelu_tanh, sigmoid, tanh, ..."""

    value: Key
    name: str


@dataclass(frozen=True)
class Norm:
    """RMS or layer normalization over the last dimension; weight and bias may be absent.

    kind: "rms" or "layer". eps stands under the root; None where it is not known.
    """

    value: Key
    kind: str
    weight: Key | None
    bias: Key | None = None
    eps: float | None = None


@dataclass(frozen=True)
class Diagonal:
    """A square matrix with the vector on its diagonal."""

    vector: Key


@dataclass(frozen=True)
class Opaque:
    """Anything else; `name` says what, `inputs` are its tensor arguments."""

    name: str
    inputs: tuple[Any, ...]


Form = Leaf | Product | Scale | Add | Cast | Activation | Norm | Diagonal | Opaque


def describe(form: Form) -> str:
    """Return two or three words for messages."""
    if isinstance(form, Opaque):
        return form.name
    if isinstance(form, Activation):
        return f"activation {form.name}"
    if isinstance(form, Norm):
        return f"{form.kind} norm"
    if isinstance(form, Cast):
        return f"cast to {str(form.dtype).removeprefix('torch.')}"
    return type(form).__name__.lower()
