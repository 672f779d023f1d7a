"""Ranks for all matrices at once, under one budget.

In: the shapes of the matrices, a budget, the tile `align` that every rank must be a multiple of,
and for global allocation the spectrum of each matrix in one common unit of loss. Out: a rank, or
None (dense), per matrix. The allocation considers only multiples of the tile below break-even, r (k
+ n) < k n; it rounds no rank afterwards. A matrix with a base of few bits keeps that base and is
never dense; its branch may have rank 0.

Global allocation is a multiple-choice knapsack: each matrix offers its ranks and "dense", each with
a cost (elements) and a loss (the sum of discarded squared singular
values). The steps of each matrix's lower convex hull are taken in the order of loss saved per cost,
which is optimal up to the last step; the rest of the budget is then spent on single upgrades.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    def cost(self, rank: int | None) -> float:
        """Return the elements that are kept: k n when dense, else those of the base and factors."""
        if rank is None:
            return float(self.k * self.n)
        return (self.base or 0.0) + self.unit * rank * (self.k + self.n)

    @property
    def largest_rank(self) -> int:
        """The last rank below break-even."""
        left = self.k * self.n - (self.base or 0.0)
        return math.ceil(left / (self.unit * (self.k + self.n))) - 1


@dataclass(frozen=True)
class _Choice:
    rank: int | None
    cost: float
    loss: float


def legal_ranks(shape: Shape, align: int) -> range:
    """Return the multiples of align that are below break-even, without a base r (k + n) < k n."""
    return range(align, shape.largest_rank + 1, align)


def choose_align(shapes: Sequence[Shape], ratio: float) -> int:
    """Return the tile that ranks at this ratio can be multiples of: 128, else 64, else 32.

    128 is the width of the tensor engine. It is taken when moving every rank to its
    nearest legal multiple moves at most 4 % of all parameters; small models, where one tile is a
    large share of the rank, get 64 or 32.
    """
    total = sum(s.k * s.n for s in shapes)
    for align in ALIGNS[:-1]:
        moved = 0.0
        for shape in shapes:
            ranks = legal_ranks(shape, align)
            ideal = (1 - ratio) * shape.k * shape.n / (shape.k + shape.n)
            nearest = min((abs(r - ideal) for r in ranks), default=ideal)
            moved += nearest * (shape.k + shape.n)
        if moved <= _MAX_MOVED * total:
            return align
    return ALIGNS[-1]


def allocate_uniform(shapes: Sequence[Shape], ratio: float, align: int) -> dict[str, int | None]:
    """Return ranks that remove about the same share of every matrix, equal for equal shapes.

    At least `ratio` of the parameters of the matrices that have a legal rank is removed in all:
    every rank starts at the multiple below its ideal value (1 - ratio) k n / (k + n), and the rest
    of the budget goes to the shapes that were rounded down most.

    Raises ModelError when no legal ranks remove that much.
    """
    if ratio == 0:
        return {s.name: None for s in shapes}
    usable = _usable(shapes, align)
    budget = (1 - ratio) * sum(s.k * s.n for s in usable)
    groups: dict[tuple[int, int], list[Shape]] = defaultdict(list)
    for shape in usable:
        groups[shape.k, shape.n].append(shape)
    tiles: dict[tuple[int, int], int] = {}
    short: dict[tuple[int, int], float] = {}
    for (k, n), members in groups.items():
        ideal = (1 - ratio) * k * n / (k + n)
        tiles[k, n] = max(1, min(int(ideal // align), len(legal_ranks(members[0], align))))
        short[k, n] = (ideal - tiles[k, n] * align) / ideal

    def step(key: tuple[int, int]) -> int:
        return align * (key[0] + key[1]) * len(groups[key])

    spent = sum(tiles[key] * step(key) for key in groups)
    # Shapes whose first tile is already above the ideal rank can push the total over the budget.
    while spent > budget:
        shrinkable = [key for key in groups if tiles[key] > 1]
        if not shrinkable:
            raise _unreachable("ratio", ratio, 1 - spent / sum(s.k * s.n for s in usable), align)
        key = max(shrinkable, key=lambda key: (tiles[key] * (key[0] + key[1])) / (key[0] * key[1]))
        tiles[key] -= 1
        spent -= step(key)
    for key in sorted(groups, key=lambda key: -short[key]):
        fits = tiles[key] < len(legal_ranks(groups[key][0], align))
        if fits and short[key] > 0 and spent + step(key) <= budget:
            tiles[key] += 1
            spent += step(key)
    ranks: dict[str, int | None] = {s.name: None for s in shapes}
    ranks.update({s.name: tiles[s.k, s.n] * align for s in usable})
    return ranks


def allocate_global(
    shapes: Sequence[Shape],
    losses: Mapping[str, Sequence[float]],
    ratio: float,
    align: int,
    *,
    permitted: Callable[[str, int], bool] | None = None,
) -> dict[str, int | None]:
    """Return the ranks that leave the least total loss for at most (1 - ratio) of the dense cost.

    losses: per name, the loss of keeping rank 0, 1, 2, ... (what remains of the squared singular
        values), in a unit common to all matrices; dense loses 0.
    permitted: (name, rank) -> whether the rank may be chosen.

    Raises ModelError when no legal ranks fit the budget.
    """
    if ratio == 0:
        return {s.name: None for s in shapes}
    usable = _usable(shapes, align)
    dense = sum(s.count * s.cost(None) for s in usable)
    budget = (1 - ratio) * dense
    tables = {s.name: _choices(s, losses[s.name], align, permitted) for s in usable}
    hulls = {name: _hull(table) for name, table in tables.items()}
    spent = sum(hull[0].cost for hull in hulls.values())
    if spent > budget:
        raise _unreachable("ratio", ratio, 1 - spent / dense, align)
    picked = {name: hull[0] for name, hull in hulls.items()}
    steps = [
        (-(a.loss - b.loss) / (b.cost - a.cost), name, i)
        for name, hull in hulls.items()
        for i, (a, b) in enumerate(itertools.pairwise(hull))
    ]
    heapq.heapify(steps)
    while steps:
        _, name, i = heapq.heappop(steps)
        step = hulls[name][i + 1]
        more = step.cost - picked[name].cost
        if (
            spent + more <= budget
        ):  # where a step does not fit, later ones of its hull do not either
            spent += more
            picked[name] = step
    _spend_rest(tables, picked, budget - spent)
    ranks: dict[str, int | None] = {s.name: None for s in shapes}
    ranks.update({name: choice.rank for name, choice in picked.items()})
    return ranks


def check_explicit(shape: Shape, rank: int, align: int | None) -> tuple[int | None, str]:
    """Return (rank or None for dense, note) for a rank the user gave.

    Raises ModelError for a rank that is no multiple of an `align` that was given.
    """
    if align is not None and rank % align:
        raise ModelError(
            f"rank {rank} for {shape.name} is no multiple of align={align}: pass "
            f"{max(align, rank // align * align)} or {-(-rank // align) * align}, or align=1"
        )
    if rank > shape.largest_rank:
        without, kept = (None, "kept dense") if shape.base is None else (0, "the base alone")
        return without, f"rank {rank} saves nothing (break-even above {shape.largest_rank}): {kept}"
    return rank, ""


def _usable(shapes: Sequence[Shape], align: int) -> list[Shape]:
    """Return the shapes that have a legal rank at all; raise ModelError when none has."""
    usable = [s for s in shapes if len(legal_ranks(s, align)) or s.base is not None]
    if not usable:
        largest = max(shapes, key=lambda s: s.largest_rank)
        limit = largest.largest_rank
        raise ModelError(
            f"no matrix has a rank that is a multiple of align={align} and below break-even; the "
            f"largest, {largest.name} [{largest.n}, {largest.k}], allows ranks up to {limit}: pass "
            f"a smaller align, e.g. align={_power_below(limit)}"
            if limit
            else f"the matrices are too small to factorize: the largest, {largest.name} "
            f"[{largest.n}, {largest.k}], breaks even below rank 1; exclude them"
        )
    return usable


def _power_below(limit: int) -> int:
    """Return a power of two that leaves a few ranks to choose from below `limit`."""
    return 1 << max(0, limit.bit_length() - 3)


def _unreachable(what: str, asked: float, reachable: float, align: int) -> ModelError:
    return ModelError(
        f"{what} {asked:g} cannot be met with ranks that are multiples of align={align}: the "
        f"smallest in every matrix removes {reachable:.3f}; pass a {what} of at most that, "
        "or a smaller align"
    )


def _choices(
    shape: Shape,
    losses: Sequence[float],
    align: int,
    permitted: Callable[[str, int], bool] | None = None,
) -> list[_Choice]:
    """Return the choices of a matrix by rising cost, each with less loss than the one before."""
    table = [
        _Choice(rank, shape.count * shape.cost(rank), float(losses[min(rank, len(losses) - 1)]))
        for rank in legal_ranks(shape, align)
        if permitted is None or permitted(shape.name, rank)
    ]
    without = None if shape.base is None else 0
    table.append(
        _Choice(without, shape.count * shape.cost(without), losses[0] if shape.base else 0.0)
    )
    table.sort(key=lambda c: (c.cost, c.loss))
    best: list[_Choice] = []
    for choice in table:
        if not best or choice.loss < best[-1].loss:
            best.append(choice)
    return best


def _hull(table: Sequence[_Choice]) -> list[_Choice]:
    """Return the lower convex hull of (cost, loss)."""
    hull: list[_Choice] = []
    for c in table:
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (b.loss - a.loss) * (c.cost - a.cost) < (c.loss - a.loss) * (b.cost - a.cost):
                break
            hull.pop()
        hull.append(c)
    return hull


def _spend_rest(
    tables: Mapping[str, Sequence[_Choice]], picked: dict[str, _Choice], left: float
) -> None:
    """Upgrade single matrices, best loss saved per cost first, until no upgrade fits."""
    while True:
        best: tuple[float, str, _Choice] | None = None
        for name, table in tables.items():
            now = picked[name]
            for choice in table:
                more = choice.cost - now.cost
                if 0 < more <= left:
                    gain = (now.loss - choice.loss) / more
                    if gain > 0 and (best is None or gain > best[0]):
                        best = (gain, name, choice)
        if best is None:
            return
        _, name, choice = best
        left -= choice.cost - picked[name].cost
        picked[name] = choice
