"""A low-rank product on several ranks: how its operands are cut, and what the ranks sum.

    axis       x            u            v            summed over the ranks       y
    columns    whole        whole        columns      nothing                     cut by features
    rows       by features  rows         whole        x u, r wide, before v       whole
    rank       whole        columns      rows         y, n wide                   whole

What is summed crosses in the format in which it is kept, so each rank's part is rounded once before
the sum: `part_error` is the error of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import Array, check_name
from nmm_compiler.kernels.error_bounds import combine, rounding_error
from nmm_compiler.kernels.tiling import item_bytes
from nmm_compiler.targets import Target

AXES = ("columns", "rows", "rank")
MOST_RANKS = 64
_SIZE = {"columns": "n", "rows": "k", "rank": "r"}
# The features of each operand that are cut: those that come "in" or go "out" of a product.
_CUTS: dict[str, dict[str, str]] = {
    "columns": {"v": "out", "w": "out", "bias": "out", "v_scale": "out"},
    "rows": {"x": "out", "u": "in"},
    "rank": {"u": "out", "v": "in", "inner_bias": "out", "u_scale": "out"},
}


def check_ranks(spec: Any) -> None:
    """Raise SpecError unless the ranks can compute the product together."""
    if not isinstance(spec.tp, int) or isinstance(spec.tp, bool) or not 1 <= spec.tp <= MOST_RANKS:
        raise SpecError(f"lowrank: tp is {spec.tp!r}; pass 1 to {MOST_RANKS} ranks")
    if spec.tp == 1:
        if spec.tp_axis:
            raise SpecError(f"lowrank: tp_axis is {spec.tp_axis!r} and tp 1; pass tp, or no axis")
        return
    check_name("tp_axis", spec.tp_axis, AXES)
    if spec.tp_axis != "columns" and (spec.base or spec.inner_norm):
        raise SpecError(
            f"lowrank: tp_axis {spec.tp_axis!r} sums the low-rank product alone, and a norm takes "
            f"whole sums; base is {spec.base}, inner_norm {spec.inner_norm}: use 'columns'"
        )
    if spec.tp_axis == "rank" and spec.activation != "identity":
        raise SpecError(
            f"lowrank: tp_axis 'rank' sums y, and activation {spec.activation!r} of a sum is no "
            "sum of activations; use 'rows' or 'columns', or apply it after the kernel"
        )


def check_target(spec: Any, target: Target) -> None:
    """Raise SpecError if the target's kernels have no collectives."""
    if spec.tp > 1 and "nki.collectives.all_reduce" in target.absent_instructions:
        raise SpecError(
            f"{spec.short()}: nki.collectives are documented for trn2 and trn3; on {target.name} "
            "pass tp=1 and sum between kernels"
        )


def sizes_of_whole(spec: Any) -> dict[str, Any]:
    """Return the fields of the product that all ranks compute together."""
    field = _SIZE[spec.tp_axis]
    return {field: getattr(spec, field) * spec.tp, "tp": 1, "tp_axis": ""}


def sizes_of_shard(spec: Any, tp: int, axis: str) -> dict[str, Any]:
    """Return the fields of one rank's share of a product."""
    check_name("tp_axis", axis, AXES)
    field = _SIZE[axis]
    size = getattr(spec, field)
    if size % tp:
        raise ShapeError(
            f"{spec.short()}: {field} is {size}, which does not divide by {tp} ranks; pad it, or "
            "use another axis"
        )
    return {field: size // tp, "tp": tp, "tp_axis": axis}


def shards(spec: Any, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Return the operands of each rank.

    A bias that is summed with the rest is on the first rank; the others have zeros.
    """
    names = [tensor.name for tensor in spec.whole().inputs()]
    return tuple(
        tuple(_shard(spec, name, array, rank) for name, array in zip(names, arrays, strict=True))
        for rank in range(spec.tp)
    )


def _shard(spec: Any, name: str, array: Any, rank: int) -> Any:
    if name == "bias" and spec.tp_axis == "rank" and rank:
        return array * 0
    dim = _cut_dim(spec, name, array)
    return array if dim is None else _cut(array, dim, spec.tp, rank)


def _cut_dim(spec: Any, name: str, array: Any) -> int | None:
    """Return the dimension along which ranks have parts of an operand, None for all of it."""
    side = _CUTS[spec.tp_axis].get(name)
    if side is None or (name.endswith("_scale") and spec.scales != "channel"):
        return None
    if len(array.shape) == 1:
        return 0
    return int((side == "out") ^ (spec.layout_of(name) == "col"))


def _cut(array: Any, dim: int, parts: int, place: int) -> Any:
    size = array.shape[dim] // parts
    at = slice(place * size, (place + 1) * size)
    return array[at] if dim == 0 else array[:, at]


def joined(spec: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands of the whole product, of which every rank has these.

    What a rank alone adds to a sum, a bias of "rank", is what all of them add.
    """
    made = []
    for tensor, array in zip(spec.inputs(), arrays, strict=True):
        dim = _cut_dim(spec, tensor.name, array)
        if tensor.name == "bias" and spec.tp_axis == "rank":
            array = (array.astype(np.float64) * spec.tp).astype(array.dtype)
        elif dim is not None:
            array = np.concatenate([array] * spec.tp, dim)
        made.append(array)
    return tuple(made)


def result_of(spec: Any, rank: int, result: Any) -> Any:
    """Return the part of the whole result, [m, n] as it is laid out, that a rank has."""
    if spec.tp_axis != "columns":
        return result
    return _cut(result, spec.out_layout == "row", spec.tp, rank)


def exchanged_bytes(spec: Any) -> int:
    """Return the bytes that each rank brings to the sum."""
    if spec.tp == 1 or spec.tp_axis == "columns":
        return 0
    rows = spec.tp_axis == "rows"
    size = item_bytes(exchanged_dtype(spec))
    return int(spec.m * (spec.r if rows else spec.n) * size)


def exchanged_dtype(spec: Any) -> str:
    """Return the format in which the ranks' parts cross."""
    if spec.tp_axis == "rank":
        return str(spec.result_dtype)
    return str(spec.layer.kept_dtype)


def part_error(
    spec: Any, left: Array, right: Array, error: Array | float, typical: bool, *, again: bool
) -> Array | float:
    """Return the error of rounding each rank's part of left @ right before the sum.

    error: of a part, a bias in it included. again: a function follows the sum, which is rounded for
    it; without one that rounding is the one of what is kept.
    """
    dtype = exchanged_dtype(spec)
    cut = zip(np.split(left, spec.tp, 1), np.split(right, spec.tp, 0), strict=True)
    made: Array | float = 0.0
    for one, other in cut:
        made = combine(made, rounding_error(np.abs(one @ other) + error, dtype), typical)
    if again:
        total = rounding_error(np.abs(left @ right) + error, dtype)
        made = combine(made, total, typical)
    return made
