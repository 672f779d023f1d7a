"""Checks of an op's operands, and the shapes of its results.

The fake (meta) implementations of the ops use these functions. They run while a graph is traced, on
tensors without data, and their errors name the operand that does not fit. Sizes may be symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import LAYOUTS, check_name

Given = dict[str, Any]
"""The arguments of a call by their names."""


def read_layouts(keywords: Given) -> None:
    """Raise UnknownNameError unless each layout of a call is "row" or "col"."""
    for name, value in keywords.items():
        several = name == "out_layouts" and value is not None
        for layout in value if several else [value] * name.endswith("_layout"):
            check_name(name, layout, LAYOUTS)


def weight_shape(name: str, w: Tensor, layout: str) -> tuple[int, int]:
    """Return (inputs, outputs) of a weight, whichever way it is stored."""
    if w.dim() != 2:
        raise ShapeError(f"{name} has shape {tuple(w.shape)}; pass a 2-D weight")
    rows, columns = w.shape
    return (rows, columns) if layout == "row" else (columns, rows)


def tokens_of(x: Tensor, layout: str) -> tuple[tuple[Any, ...], int]:
    """Return the token dimensions of x and its feature count k."""
    if layout == "col":
        if x.dim() != 2:
            raise ShapeError(f"x has layout 'col' and shape {tuple(x.shape)}; pass a 2-D [k, m]")
        return (x.shape[1],), x.shape[0]
    if x.dim() < 1:
        raise ShapeError("x has no dimensions; pass [..., k]")
    return tuple(x.shape[:-1]), x.shape[-1]


def check_same(what: str, left: Any, right: Any) -> None:
    """Raise ShapeError unless two sizes are equal."""
    if left != right:
        raise ShapeError(f"{what}: {left} and {right} do not chain")


def of_each(given: Given, several: str, one: Any, count: int) -> Sequence[Any]:
    """Return a keyword of each linear of a call: those of a list, or one for all."""
    every = given.get(several)
    every = [one] * count if every is None else every
    check_same(f"numbers of linears and {several}", count, len(every))
    return every


def check_vector(name: str, vector: Tensor | None, n: Any) -> None:
    """Raise ShapeError unless a bias is [n], or absent."""
    if vector is not None and (vector.dim() != 1 or vector.shape[0] != n):
        raise ShapeError(f"{name} has shape {tuple(vector.shape)}; pass [{n}]")


def check_dtypes(x: Tensor, *operands: Tensor | None) -> None:
    """Raise SpecError unless all operands have the dtype of x."""
    for operand in operands:
        if operand is not None and operand.dtype != x.dtype:
            raise SpecError(
                f"operands have dtypes {x.dtype} and {operand.dtype}; cast them to one dtype"
            )


def empty_result(x: Tensor, tokens: tuple[Any, ...], n: Any, layout: str) -> Tensor:
    """Return an empty result of `n` features."""
    if layout == "row":
        return x.new_empty((*tokens, n))
    return x.new_empty((n, math.prod(tokens)))
