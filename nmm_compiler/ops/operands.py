"""Checks of an op's operands, and the shapes of its results.

The fake (meta) implementations of the ops use these functions. They run while a graph is traced, on
tensors without data, and their errors name the operand that does not fit. Sizes may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels.base import LAYOUTS
from nmm_compiler.ops.definition import ROW


def read_layouts(keywords: dict[str, Any]) -> dict[str, str]:
    """Return the layouts of a call, with those that it leaves out.

    Raises UnknownNameError unless each is "row" or "col".
    """
    given = {name: value for name, value in keywords.items() if name in ROW}
    for name, layout in given.items():
        if layout not in LAYOUTS:
            raise UnknownNameError(name, layout, LAYOUTS)
    return ROW | given


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


def chain_outputs(name: str, k: Any, weights: Sequence[Tensor], layout: str) -> int:
    """Return the output features of x times the weights, checking that each follows the last."""
    if not 1 <= len(weights) <= 2:
        raise ShapeError(f"{name} has {len(weights)} weights; pass [u, v] or a dense [w]")
    features = k
    for index, w in enumerate(weights):
        inputs, outputs = weight_shape(f"{name}[{index}]", w, layout)
        check_same(f"features into {name}[{index}]", features, inputs)
        features = outputs
    return features


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
    m: Any = 1
    for size in tokens:
        m = m * size
    return x.new_empty((n, m))
