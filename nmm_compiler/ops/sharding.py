"""DTensor rules of the `torch.ops.nmm.*` ops: which placements a call accepts without resharding.

Five rows for y = (x u) v, with what moves between devices afterwards:

    replicate   x, u, v whole                              nothing
    token       x and y cut by tokens, u and v whole       nothing
    column      v cut by outputs (column parallel)         nothing; x u is made on every device
    row         x and u cut by inputs (row parallel)       y is Partial: a sum of width n
    rank        u cut by outputs, v by inputs              y is Partial: a sum of width n

A bias, an activation or a gate is not linear, so a call that has one refuses the Partial rows.
Row parallelism that sums at width r wants the collective between the two products: leave those
unfused. Cuts are given in the stored layout of each operand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def cut(layout: str, side: str) -> int:
    """Return the dimension of a weight that holds its "in" or "out" features."""
    return (0 if side == "in" else 1) if layout == "row" else (1 if side == "in" else 0)


def features_dim(ndim: int, layout: str) -> int:
    """Return the dimension of activations that holds their features."""
    return 0 if layout == "col" else ndim - 1


def token_dims(ndim: int, layout: str) -> list[int]:
    """Return the dimensions of activations that count tokens."""
    return [1] if layout == "col" else list(range(ndim - 1))


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
