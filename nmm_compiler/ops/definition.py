"""The record that defines an op: its operands and keywords as a table, from which the rest follows.

Layouts are keywords ("row" x is [..., k], "col" x is [k, m]; "row" u is [k, r], "col" u is what
`nn.Linear` stores, [r, k]; a "col" result is [n, m]; out_layouts has one layout for each result),
and so are the target and the executor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils._pytree import tree_unflatten

from nmm_compiler.errors import ShapeError
from nmm_compiler.ops.launches import Launch
from nmm_compiler.ops.operands import Given, check_same

Placements = list[tuple[list[Any], list[Any]]]
"""Rows of (placements of the results, placements of the operands) that DTensor may use."""

LAYOUTS = {"x_layout": "row", "out_layout": "row"}
WHERE = {"target": "trn2", "executor": "reference"}
NORM = {"norm": "none", "norm_offset": 0.0, "norm_eps": 1e-6}
_TYPES = {str: "str", float: "float", int: "int", bool: "bool"}
_OPTIONAL = {
    "x_scale": "float?",
    "scale": "float?",
    "activations": "str[]?",
    "out_layouts": "str[]?",
}


EACH = "each"
"""The end of an operand with a tensor for each of several linears."""


class Held(NamedTuple):
    """A tensor of a call, None where it is left out: of which operand, part, and linear."""

    name: str
    letter: str
    end: str
    tensor: Any


@dataclass(frozen=True)
class Operand:
    """An argument that holds tensors.

    kind: its type in a schema. letter: which part of a linear it is: "u", "v", "w", "bias",
    "inner_bias"; "w_scale" and "branch_scale" of stored numbers; "uvw" for [u, v] or [w], "scale"
    for the scales of all weights in their order; "" for what belongs to no linear. end: the linear
    that has it, EACH for a tensor for each, "" for the only one, or for all.
    """

    name: str
    kind: str = "Tensor"
    letter: str = ""
    end: str = ""

    def tensors(self, value: Any, ends: Sequence[str]) -> Iterator[Held]:
        """Yield the tensors of a value; ends: of the linears of a call."""
        several = value if isinstance(value, (list, tuple)) else [value]
        letters: Sequence[str] = [self.letter] * len(several)
        if self.letter == "uvw":
            if not 1 <= len(several) <= 2:
                count = len(several)
                raise ShapeError(f"{self.name} has {count} weights; pass [u, v] or a dense [w]")
            letters = "uv" if len(several) == 2 else "w"
        if self.end != EACH or value is None:
            ends = [self.end] * len(several)
        check_same(f"numbers of linears and {self.name}", len(ends), len(several))
        for letter, end, tensor in zip(letters, ends, several, strict=True):
            yield Held(self.name, letter, end, tensor)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One torch op; subclasses say what it computes and how it reaches kernels.

    operands: x first. keywords: each with its default. bare: what `reference` computes of a call
    without norm and residual, which saves a Python call. fake: arguments by name -> empty results;
    raises NmmError for operands that do not fit. lower: (arguments by name, x as a matrix, its
    tokens, what transposes weights) -> the launch of a call.
    """

    fake: ClassVar[Callable[..., Any]]
    lower: ClassVar[Callable[..., Launch]]

    name: str
    operands: tuple[Operand, ...]
    keywords: Given
    bare: Any = None

    @property
    def many(self) -> bool:
        """Whether the op returns a list of tensors: one for each bias that there may be."""
        return "biases" in self.defaults

    @property
    def schema(self) -> str:
        """Arguments and results as PyTorch writes them."""
        made = [
            f"{one.kind} {one.name}" + ("=None" if one.kind.endswith("?") else "")
            for one in self.operands
        ]
        made.append("*")
        for name, value in self.keywords.items():
            kind = _OPTIONAL[name] if value is None else _TYPES[type(value)]
            made.append(f"{kind} {name}={value!r}")
        return f"({', '.join(made)}) -> Tensor{'[]' if self.many else ''}"

    def bound(self, args: Sequence[Any], kw: Given) -> Given:
        """Return every argument of a call by its name, those that it leaves out too."""
        return {**self.defaults, **dict(zip(self.defaults, args, strict=False)), **kw}

    def ends_of(self, given: Given) -> Sequence[str]:
        """Return what tells the linears of a call apart."""
        return ("",)

    def tensors(self, given: Given) -> list[Held]:
        """Return every tensor of a call in the order of its operands; given: arguments by name."""
        ends = self.ends_of(given)
        made = [held for one in self.operands for held in one.tensors(given[one.name], ends)]
        weights = [one for one in made if one.letter in ("u", "v", "w")]
        scales = [place for place, one in enumerate(made) if one.letter == "scale"]
        if "scales" in given:
            check_same("numbers of weights and scales", len(weights), len(scales))
        for place, weight in zip(scales, weights, strict=False):
            made[place] = made[place]._replace(letter=f"{weight.letter}_scale", end=weight.end)
        return made

    @functools.cached_property
    def defaults(self) -> Given:
        """Every argument with its default, operands first."""
        return {**dict.fromkeys(one.name for one in self.operands), **self.keywords}

    def reference(self, *args: Any, **kw: Any) -> Any:
        """Return what the op computes, in plain PyTorch; takes the schema's arguments."""
        return self.bare(*args, **kw)

    def by_kernels(self, args: tuple, kw: Given) -> Any:
        """Return the results again, differentiable by calls of this package's ops."""
        return self.reference(*args, **kw)

    def of_arguments(self, function: Callable[[Given], Any]) -> Callable:
        """Return a function of a call's arguments by name as one of the arguments themselves."""
        return lambda *args, **kw: function(self.bound(args, kw))

    def sharding(self, given: Given) -> Placements:
        """Return the placements that DTensor may use: every tensor is whole on each device."""
        from torch.distributed.tensor import Replicate

        held = [given[one.name] for one in self.operands]
        return [([Replicate()], [None if one is None else Replicate() for one in held])]

    def gradient(
        self, flat: Sequence[Any], form: Any, kw: Given, grads: Sequence[Any],
        need: Sequence[bool],
    ) -> list[Any]:  # fmt: skip
        """Return a gradient, or None, for each tensor of a call's operands, `flat` of that form.

        grads: those of the results, None for one that no loss reads. need: which tensors need one.
        """
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            held = [
                t if not n else t.view_as(t) if again else t.detach().requires_grad_()
                for t, n in zip(flat, need, strict=True)
            ]
            made = self.by_kernels(tree_unflatten(held, form), kw)
            results = made if isinstance(made, list) else [made]
            read = [
                (y, g)
                for y, g in zip(results, grads, strict=True)
                if g is not None and y.requires_grad
            ]
            wanted = [t for t, n in zip(held, need, strict=True) if n]
            found: Any = [None] * len(wanted)
            if read and wanted:
                outputs, of_outputs = zip(*read, strict=True)
                found = torch.autograd.grad(
                    outputs, wanted, of_outputs, create_graph=again, allow_unused=True
                )
        each = iter(found)
        return [next(each) if n else None for n in need]
