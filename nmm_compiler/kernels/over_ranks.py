"""A low-rank product on several ranks, each with a part of the input features: tp_axis "rows".

x is cut by features and u by rows. The ranks sum x u, r wide, before v, which every rank has
whole, as it has y. What is summed crosses in the format in which it is kept, so each rank's part is
rounded once before the sum: `part_error` is the error of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import Array, check_name
from nmm_compiler.kernels.error_bounds import combine, rounding_error
from nmm_compiler.kernels.tiling import item_bytes
from nmm_compiler.targets import Target

AXES = ("rows",)
MOST_RANKS = 64


def check_ranks(spec: Any) -> None:
    """Raise SpecError unless the ranks can compute the product together."""
    if not isinstance(spec.tp, int) or isinstance(spec.tp, bool) or not 1 <= spec.tp <= MOST_RANKS:
        raise SpecError(f"lowrank: tp is {spec.tp!r}; pass 1 to {MOST_RANKS} ranks")
    if spec.tp == 1:
        if spec.tp_axis:
            raise SpecError(f"lowrank: tp_axis is {spec.tp_axis!r} and tp 1; pass tp, or no axis")
        return
    check_name("tp_axis", spec.tp_axis, AXES)
    if spec.base or spec.inner_norm:
        raise SpecError(
            f"lowrank: tp_axis {spec.tp_axis!r} sums the low-rank product alone, and a norm takes "
            f"whole sums; base is {spec.base}, inner_norm {spec.inner_norm}: cut v by its outputs "
            "instead, which sums nothing, in calls without tp"
        )


def check_target(spec: Any, target: Target) -> None:
    """Raise SpecError if the target's kernels have no collectives."""
    if spec.tp > 1 and "nki.collectives.all_reduce" in target.absent_instructions:
        raise SpecError(
            f"{spec.short()}: nki.collectives are documented for trn2 and trn3; on {target.name} "
            "pass tp=1 and sum between kernels"
        )


def sizes_of_shard(spec: Any, tp: int, axis: str) -> dict[str, Any]:
    """Return the fields of one rank's share of a product."""
    check_name("tp_axis", axis, AXES)
    if spec.k % tp:
        raise ShapeError(
            f"{spec.short()}: k is {spec.k}, which does not divide by {tp} ranks; pad it"
        )
    return {"k": spec.k // tp, "tp": tp, "tp_axis": axis}


def _cut_dims(spec: Any) -> dict[str, int]:
    """Return the dimension of which ranks have parts, of x and of u."""
    return {"x": int(spec.x_layout == "row"), "u": int(spec.u_layout == "col")}


def shards(spec: Any, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """Return the operands of each rank."""
    x, u, *rest = arrays
    x_dim, u_dim = _cut_dims(spec).values()
    each = zip(_parts(x, x_dim, spec.tp), _parts(u, u_dim, spec.tp), strict=True)
    return tuple((*own, *rest) for own in each)


def _parts(array: Any, dim: int, count: int) -> list[Any]:
    size = array.shape[dim] // count
    cuts = [slice(place * size, (place + 1) * size) for place in range(count)]
    return [array[at] if dim == 0 else array[:, at] for at in cuts]


def joined(spec: Any, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the operands of the whole product, of which every rank has these."""
    x, u, *rest = arrays
    x_dim, u_dim = _cut_dims(spec).values()
    return np.concatenate([x] * spec.tp, x_dim), np.concatenate([u] * spec.tp, u_dim), *rest


def exchanged_bytes(spec: Any) -> int:
    """Return the bytes that each rank brings to the sum."""
    return int(spec.m * spec.r * item_bytes(spec.layer.kept_dtype)) if spec.tp > 1 else 0


def part_error(spec: Any, left: Array, right: Array, typical: bool, *, again: bool) -> Array:
    """Return the error of rounding each rank's part of left @ right before the sum.

    again: a function follows the sum, which is rounded for it; without one that rounding is the one
    of what is kept.
    """
    dtype = spec.layer.kept_dtype
    parts = zip(np.split(left, spec.tp, 1), np.split(right, spec.tp, 0), strict=True)
    made = np.zeros(1)
    for one, other in [*parts, *([(left, right)] * again)]:
        made = combine(made, rounding_error(np.abs(one @ other), dtype), typical)
    return made
