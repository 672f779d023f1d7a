"""Ranks for all layers within the budget, none of which makes its layer slower than dense.

The allocators of `ranks.py` spend a budget; prices say what their ranks would take. A layer that
would be slower low-rank than dense stays dense, and the budget is spent again on the others, until
no layer is slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nmm_compiler.errors import ModelError
from nmm_compiler.lowrank_models.layer_calls import Rank
from nmm_compiler.lowrank_models.predicted_time import Prices
from nmm_compiler.lowrank_models.ranks import (
    Shape,
    allocate_global,
    allocate_uniform,
    legal_ranks,
)

Ranks = dict[str, Rank]
Slow = dict[str, str]


def uniform_ranks(
    shapes: Sequence[Shape], ratio: float, align: int, prices: Prices | None
) -> tuple[Ranks, Slow]:
    """Return (ranks, why some stay dense) of uniform allocation.

    prices: None permits slower layers. Raises ModelError when no legal ranks meet the ratio, or all
    of them are slower.
    """
    slow: Slow = {}
    while True:
        left = [shape for shape in shapes if shape.name not in slow]
        ranks: Ranks = dict.fromkeys((shape.name for shape in shapes), None)
        ranks |= allocate_uniform(left, ratio, align)
        found = found_slower(ranks, prices)
        if not found:
            return ranks, slow
        slow |= found
        check_left(shapes, align, slow, prices)


def global_ranks(
    shapes: Sequence[Shape],
    members: Mapping[str, Sequence[str]],
    losses: Mapping[str, Sequence[float]],
    ratio: float,
    align: int,
    prices: Prices | None,
) -> tuple[Ranks, Slow]:
    """Return (ranks of the members, why some stay dense) of global allocation.

    shapes: one for each group of members that gets one rank together. Raises ModelError as
    `uniform_ranks` does.
    """
    nominal = {
        name: _nominal(shape, ratio, align) for shape in shapes for name in members[shape.name]
    }
    slow: Slow = {}
    for shape in shapes:
        first = members[shape.name][0]
        ranks = legal_ranks(shape, align)
        if prices is not None and ranks and all(
            prices.settled.is_slower(first, rank, nominal) for rank in ranks
        ):  # fmt: skip
            slow |= dict.fromkeys(members[shape.name], slow_note(prices.settled, first, nominal))
    check_left(shapes, align, {s.name: "" for s in shapes if members[s.name][0] in slow}, prices)

    def permitted(name: str, rank: int) -> bool:
        return prices is None or not prices.is_slower(members[name][0], rank, nominal)

    while True:
        left = [shape for shape in shapes if members[shape.name][0] not in slow]
        shared = allocate_global(left, losses, ratio, align, permitted=permitted)
        made: Ranks = {name: shared.get(s.name) for s in shapes for name in members[s.name]}
        found = found_slower(made, prices)
        if not found:
            return made, slow
        slow |= found
        check_left(
            shapes, align, {s.name: "" for s in shapes if members[s.name][0] in slow}, prices
        )


def found_slower(ranks: Ranks, prices: Prices | None) -> Slow:
    """Return the layers that these ranks make slower than dense, each with the figures."""
    if prices is None:
        return {}
    judge = prices.settled
    return {name: slow_note(judge, name, ranks) for name in judge.slower(ranks)}


def slow_note(prices: Prices, name: str, ranks: Mapping[str, Rank]) -> str:
    """Return that a layer stays dense, because its call would be slower."""
    low, dense = prices.at(name, ranks.get(name), ranks), prices.faster_us(name, ranks)
    return f"its call would take {low:.1f} us, dense {dense:.1f}: kept dense"


def check_left(
    shapes: Sequence[Shape], align: int, slow: Mapping[str, str], prices: Prices | None
) -> None:
    """Raise ModelError where each shape that has a legal rank is slower than dense."""
    legal = [shape for shape in shapes if len(legal_ranks(shape, align))]
    if prices is None or not legal or any(shape.name not in slow for shape in legal):
        return
    raise all_slower(len(legal), prices)


def all_slower(count: int, prices: Prices) -> ModelError:
    """Return the error for a model in which low rank pays in no layer."""
    return ModelError(
        f"low rank is predicted to be slower than dense in all {count} layers that have a "
        f"rank, for {said(prices)}; pass allow_slower=True for a smaller model all the same, a "
        "larger ratio, or the workload= that the model serves"
    )


def said(prices: Prices) -> str:
    """Return the workload in words."""
    return ", ".join(
        f"{tokens} token{'s' * (tokens != 1)} a call" + (f" ({weight:.0%})" if weight < 1 else "")
        for _, tokens, weight in prices.workload
    )


def _nominal(shape: Shape, ratio: float, align: int) -> Rank:
    """Return the rank that a shape would have at the ratio, None where none is legal."""
    ranks = legal_ranks(shape, align)
    ideal = (1 - ratio) * shape.k * shape.n / (shape.k + shape.n)
    return min(ranks, key=lambda rank: abs(rank - ideal), default=None)
