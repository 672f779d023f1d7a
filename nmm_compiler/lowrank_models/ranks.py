"""Ranks for all matrices at once, under one budget.

In: the shapes of the matrices, a budget, the tile `align` that every rank must be a multiple of,
and for global allocation the spectrum of each matrix in one common unit of loss. Out: a rank, or
None (dense), per matrix. The allocation considers only multiples of the tile below break-even, r (k
+ n) < k n; it rounds no rank afterwards. A matrix with a base of few bits keeps that base and is
never dense; its branch may have rank 0.

The allocation is a multiple-choice knapsack: each matrix offers its ranks and "dense", each with
a cost (elements) and a loss (the sum of discarded squared singular values). All begin at the
cheapest. The upgrade that saves most loss per cost, of those that fit into what is left of the
budget, is made until none is left. The first upgrades are steps of the lower convex hulls, so the
result is optimal up to the first one that does not fit. Uniform allocation is the same, with the
square of the share that a matrix lost as its loss per element.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nmm_compiler.errors import ModelError

ALIGNS = (128, 64, 32)
_MAX_MOVED = 0.04


@dataclass(frozen=True)
class Shape:
    """A matrix to allocate a rank for: y = x W^T with W [n, k].

    count: how many such matrices get this rank together, as the experts of a layer do.
    base: what its base takes, in elements of the dense weight's size; None without a base.
    unit: what an element of the factors takes, likewise.
    """

    name: str
    k: int
    n: int
    count: int = 1
    base: float | None = None
    unit: float = 1.0

    @property
    def without(self) -> int | None:
        """What stands for no factors: None, the dense matrix; with a base 0, it alone."""
        return None if self.base is None else 0

    def cost(self, rank: int | None) -> float:
        """Return the elements that are kept: k n when dense, else those of the base and factors."""
        if rank is None:
            return float(self.k * self.n)
        return (self.base or 0.0) + self.unit * rank * (self.k + self.n)

    def nearest(self, ranks: Sequence[int], ratio: float) -> int | None:
        """Return the rank of these that removes about this share, None where there are none."""
        ideal = (1 - ratio) * self.k * self.n / (self.k + self.n)
        return min(ranks, key=lambda rank: abs(rank - ideal), default=None)

    @property
    def largest_rank(self) -> int:
        """The last rank below break-even."""
        left = self.k * self.n - (self.base or 0.0)
        return math.ceil(left / (self.unit * (self.k + self.n))) - 1


def legal_ranks(shape: Shape, align: int) -> range:
    """Return the multiples of align that are below break-even, without a base r (k + n) < k n."""
    return range(align, shape.largest_rank + 1, align)


def choose_align(shapes: Sequence[Shape], ratio: float) -> int:
    """Return the tile that ranks at this ratio can be multiples of: 128, else 64, else 32.

    128 is the width of the tensor engine. It is taken when moving every rank to its
    nearest legal multiple moves at most 4 % of all parameters; small models, where one tile is a
    large share of the rank, get 64 or 32.
    """
    total = sum(s.count * s.cost(None) for s in shapes)
    for align in ALIGNS[:-1]:
        ranks = [legal_ranks(shape, align) for shape in shapes]
        moved = sum(
            s.count * abs(s.cost(s.nearest(each, ratio) or 0) - (1 - ratio) * s.cost(None))
            for s, each in zip(shapes, ranks, strict=True)
        )
        if moved <= _MAX_MOVED * total and any(ranks):
            return align
    return ALIGNS[-1]


def allocate_uniform(shapes: Sequence[Shape], ratio: float, align: int) -> dict[str, int | None]:
    """Return ranks that remove about the same share of every matrix, equal for equal shapes.

    At least `ratio` of the parameters of the matrices that have a legal rank is removed in all.

    Raises ModelError when no legal ranks remove that much.
    """
    alike: dict[tuple[int, int], list[Shape]] = defaultdict(list)
    for shape in shapes:
        alike[shape.k, shape.n].append(shape)
    each = [replace(some[0], count=sum(s.count for s in some)) for some in alike.values()]
    losses = {
        s.name: [s.count * (s.cost(None) - s.cost(r)) ** 2 / s.cost(None)
                 for r in range(s.largest_rank + 1)]
        for s in each
    }  # fmt: skip
    ranks = allocate_global(each, losses, ratio, align, permitted=lambda _, rank: rank is not None)
    return {s.name: ranks[alike[s.k, s.n][0].name] for s in shapes}


def allocate_global(
    shapes: Sequence[Shape],
    losses: Mapping[str, Sequence[float]],
    ratio: float,
    align: int,
    *,
    permitted: Callable[[str, int | None], bool] = lambda name, rank: True,
) -> dict[str, int | None]:
    """Return the ranks that leave the least total loss for at most (1 - ratio) of the dense cost.

    losses: per name, the loss of keeping rank 0, 1, 2, ... (what remains of the squared singular
        values), in a unit common to all matrices; dense loses 0.
    permitted: (name, rank) -> whether the rank, or None for dense, may be chosen.

    Raises ModelError when no legal ranks fit the budget.
    """
    if ratio == 0:
        return {s.name: None for s in shapes}
    # by name: ranks, costs and losses by rising cost, each with less loss than before
    tables: dict[str, tuple[list[int | None], np.ndarray, np.ndarray]] = {}
    dense = 0.0
    for shape in shapes:
        ranks: list[int | None] = [*legal_ranks(shape, align)]
        if not ranks and shape.base is None:
            continue
        dense += shape.count * shape.cost(None)
        ranks = [r for r in (*ranks, shape.without) if permitted(shape.name, r)]
        tail = losses[shape.name]
        lost = np.array([0.0 if r is None else tail[min(r, len(tail) - 1)] for r in ranks])
        costs = np.array([shape.count * shape.cost(r) for r in ranks])
        order = np.lexsort((lost, costs))
        least = np.minimum.accumulate(lost[order])
        order = order[np.append(True, np.diff(least) < 0)]
        tables[shape.name] = [ranks[i] for i in order], costs[order], lost[order]
    if not tables:
        largest = max(shapes, key=lambda s: s.largest_rank)
        raise ModelError(
            f"no matrix has a rank that is a multiple of align={align} and below break-even: "
            f"{largest.name} [{largest.n}, {largest.k}] allows ranks up to {largest.largest_rank}; "
            "pass an align of at most that, or leave it out by exclude="
        )
    budget = (1 - ratio) * dense
    picked = dict.fromkeys(tables, 0)
    left = budget - sum(costs[0] for _, costs, _ in tables.values())
    if left < 0:
        reachable = 1 - (budget - left) / dense
        raise ModelError(
            f"ratio {ratio:g} cannot be met with ranks that are multiples of align={align}: the "
            f"smallest in every matrix removes {reachable:.3f}; pass a ratio of at most that, or a "
            "smaller align"
        )

    waiting: list[tuple[float, float, str, int]] = []

    def offer(name: str) -> None:
        """Add (loss per cost, -cost, name, choice) of what saves most, of what fits."""
        at, (_, costs, saved) = picked[name], tables[name]
        more = costs[at + 1 :] - costs[at]
        per_cost = (saved[at + 1 :] - saved[at])[more <= left] / more[more <= left]
        if len(per_cost):
            best = int(per_cost.argmin())
            upgrade = float(per_cost[best]), -float(more[best]), name, at + 1 + best
            heapq.heappush(waiting, upgrade)

    for name in tables:
        offer(name)
    while waiting:
        *_, name, choice = heapq.heappop(waiting)
        costs = tables[name][1]
        more = costs[choice] - costs[picked[name]]
        if more <= left:
            left -= more
            picked[name] = choice
        offer(name)
    chosen = {name: tables[name][0][choice] for name, choice in picked.items()}
    return {s.name: chosen.get(s.name) for s in shapes}
