"""DTensor rules of the `torch.ops.nmm.*` ops: which placements a call accepts without resharding.

Five rows for y = (x u) v, with what moves between devices afterwards:

    replicate   x, u, v whole                              nothing
    token       x and y cut by tokens, u and v whole       nothing
    column      v cut by outputs (column parallel)         nothing; x u is made on every device
    row         x and u cut by inputs (row parallel)       y is Partial: a sum of width n
    rank        u cut by outputs, v by inputs              y is Partial: a sum of width n

A bias, an activation or a gate is not linear, so a call that has one refuses the Partial rows.
Row parallelism that sums at width r needs the collective between the two products, so such a model
must stay unfused. Cuts are dimensions of each operand as it is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from nmm_compiler.ops.definition import ROW

Placements = list[tuple[list[Any], list[Any]]]
"""Rows of (placements of the results, placements of the operands)."""


def cut(layout: str, side: str) -> int:
    """Return the dimension of a weight that holds its "in" or "out" features."""
    return (0 if side == "in" else 1) if layout == "row" else (1 if side == "in" else 0)


def features_dim(ndim: int, layout: str) -> int:
    """Return the dimension of activations that holds their features."""
    return 0 if layout == "col" else ndim - 1


def token_dims(ndim: int, layout: str) -> list[int]:
    """Return the dimensions of activations that count tokens."""
    return [1] if layout == "col" else list(range(ndim - 1))


def placements(
    x: Any, operands: Sequence[tuple[str, Any, str]], keywords: dict[str, Any]
) -> Placements:
    """Return what a call of one result accepts: the rows of the table above.

    operands: (role, tensor or None, the name of its layout) of each operand after x. A role is
    "first" and "last" for the factors u and v, "dense" for a weight, or "bias".
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    said = ROW | keywords
    x_layout, out_layout = said["x_layout"], said["out_layout"]
    given = {role for role, tensor, _ in operands if tensor is not None}
    whole = Replicate()

    def row(out: Any, of_x: Any, **sides: str) -> tuple[list[Any], list[Any]]:
        placed: list[Any] = []
        for role, tensor, layout in operands:
            side = sides.get(role)
            dim = cut(said[layout], side) if side and layout else 0
            placed.append(None if tensor is None else Shard(dim) if side else whole)
        return [out], [of_x, *placed]

    rows = [row(whole, whole)]
    if x_layout == out_layout:
        rows += [row(Shard(dim), Shard(dim)) for dim in token_dims(x.ndim, x_layout)]
    out_ndim = 2 if "col" in (x_layout, out_layout) else x.ndim
    out_features = Shard(features_dim(out_ndim, out_layout))
    rows.append(row(out_features, whole, last="out", dense="out", bias="out"))
    if "bias" not in given and said.get("activation", "identity") == "identity":
        x_features = Shard(features_dim(x.ndim, x_layout))
        rows.append(row(Partial(), x_features, first="in", dense="in"))
        if "dense" not in given:
            rows.append(row(Partial(), whole, first="out", last="in"))
    return rows


_registered = False


def register(rules: dict[Any, Callable]) -> None:
    """Register the rules, op -> function, with DTensor, once."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    for op, rule in rules.items():
        register_sharding(op)(rule)
    _registered = True


def register_when_used(rules: dict[Any, Callable]) -> None:
    """Register now if the program has DTensor loaded; importing it costs most of a second."""
    if not _registered and "torch.distributed.tensor" in sys.modules:
        register(rules)
