"""What the rules make of prices: refusals of calls that are slower, the best order of products.

Rules ask `prices.ways` at the call's token count. One call is taken unless smaller calls are
predicted to be faster. One dense product has to be stored by the model: where it is predicted to be
faster, the report says so. The switch "+simulated" selects the source of all times, one of
`prices.kernel.PRICES`.

A kernel takes two factors, so a row x w1 w2 ... wn is cut once: u is the product of the matrices
left of the cut, v of those right of it, and the graph computes both at each call. Per token the cut
at the smallest inner dimension is best. Making u and v costs the same for any number of tokens, so
with few tokens fewer products of weights are best. Each product is priced as its own kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.passes.chains.linear_map import Stage
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Key
from nmm_compiler.prices.ways import Ways, ways
from nmm_compiler.targets import Target

# Tokens that a symbolic count stands for: a short prefill.
TYPICAL_TOKENS = 128


@dataclass(frozen=True)
class Cost:
    """Cost of products of matrices, in microseconds.

    product(m, k, n): [m, k] times [k, n]. fused(m, k, r, n): ([m, k] times [k, r]) times [r, n],
    the middle kept on chip.
    """

    product: Callable[[int, int, int], float]
    fused: Callable[[int, int, int, int], float]

    @staticmethod
    @functools.cache
    def on(target: str | Target, dtype: str, price: str, lnc: int = 1) -> Cost:
        """Return the predicted cost on a target; price, lnc: as in Options.

        A dtype that no kernel computes in costs what float32 does.
        """
        known = dtype if dtype in LowRankSpec.dtypes else "float32"

        def product(m: int, k: int, n: int) -> float:
            return ways(MatmulSpec(m=m, k=k, n=n, dtype=known), target, lnc, source=price).fused

        def fused(m: int, k: int, r: int, n: int) -> float:
            spec = LowRankSpec(m=m, k=k, r=r, n=n, dtype=known)
            return ways(spec, target, lnc, source=price).fused

        return Cost(product, fused)

    def of_row(self, sizes: Sequence[int]) -> float:
        """Return the cost of multiplying a row of matrices in the best order."""
        return _best(self, tuple(sizes))[0]

    def as_written(self, m: int, groups: Sequence[Sequence[int]]) -> float:
        """Return the cost of x times the groups from left to right.

        A group [k, ..., n] is a product of constants that the graph makes first. Two neighbours
        that are single matrices are fused where that is cheaper than their product would be.
        """
        total = sum(self.of_row(group) for group in groups)
        ends = [(group[0], group[-1], len(group) == 2) for group in groups]
        index = 0
        while index < len(ends):
            k, r, single = ends[index]
            if index + 1 < len(ends) and single and ends[index + 1][2]:
                n = ends[index + 1][1]
                if r * (k + n) < k * n:  # rule `lowrank` will find this pair
                    total += self.fused(m, k, r, n)
                    index += 2
                    continue
            total += self.product(m, k, r)
            index += 1
        return total

    def best_cut(self, m: int, sizes: Sequence[int]) -> tuple[float, int]:
        """Return the cost of the best (x u) v and how many matrices make u.

        sizes are the n + 1 dimensions of a row of n matrices.
        """
        return min(
            (
                self.of_row(sizes[: cut + 1])
                + self.of_row(sizes[cut:])
                + self.fused(m, sizes[0], sizes[cut], sizes[-1]),
                cut,
            )
            for cut in range(1, len(sizes) - 1)
        )


def order(cost: Cost, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the products that make a row of matrices, as (first, cut, end) in order of making.

    (i, j, e) multiplies the product of matrices i..j-1 with that of j..e-1.
    """
    steps: list[tuple[int, int, int]] = []

    def walk(first: int, end: int) -> None:
        if end - first < 2:
            return
        cut = first + _best(cost, tuple(sizes[first : end + 1]))[1]
        walk(first, cut)
        walk(cut, end)
        steps.append((first, cut, end))

    walk(0, len(sizes) - 1)
    return steps


@functools.lru_cache(maxsize=1024)
def _best(cost: Cost, sizes: tuple[int, ...]) -> tuple[float, int]:
    """Return cost and first cut of the cheapest order (the matrix chain problem)."""
    count = len(sizes) - 1
    best: dict[tuple[int, int], tuple[float, int]] = {(i, i + 1): (0.0, 0) for i in range(count)}
    for width in range(2, count + 1):
        for i in range(count - width + 1):
            end = i + width
            best[i, end] = min(
                (
                    best[i, j][0] + best[j, end][0] + cost.product(sizes[i], sizes[j], sizes[end]),
                    j - i,
                )
                for j in range(i + 1, end)
            )
    return best[0, count]


def call_ways(c: Canonical, spec: KernelSpec) -> Ways:
    """Return the times of a call on the target and cores of the options."""
    return ways(spec, c.chip, c.options.lnc, source=c.options.price)


def slower(times: Ways, node: fx.Node) -> Refusal | None:
    """Return a refusal of one call where smaller calls are predicted to be faster."""
    if times.fused <= times.separate:
        return None
    one = f"{times.fused:,.1f} us" if math.isfinite(times.fused) else "no kernel of this size"
    between = f" and a sum over {times.tp} devices" if times.tp > 1 else ""
    reason = (
        f"one call for {_counted(times.tokens)}: {one} on {times.target}, smaller calls{between} "
        f"{times.separate:,.1f} us (predicted, {times.source})"
    )
    return Refusal("slower", reason, node)


def _counted(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens != 1)}"


def tokens_to_judge(count: Any) -> int:
    """Return the token count that decides: TYPICAL_TOKENS for a symbolic one."""
    return max(1, count) if isinstance(count, int) else TYPICAL_TOKENS


def too_wide(c: Canonical, stage: Stage, r: int, n: int, key: Key) -> Refusal | None:
    """Return a refusal where the rank of x u v is so large that one dense product is the fastest.

    stage: the first product, x u. r, n: features of u and of v. key: the last product.
    """
    k = stage.weight.k
    if r * (k + n) < k * n:
        return None
    dtype = str(c.dtype(key)).removeprefix("torch.")
    m = tokens_to_judge(views.product(list(stage.tokens.values())))
    text = f"r (k + n) >= k n: {r} * ({k} + {n}) >= {k} * {n}, so one dense product is cheaper"
    if dtype in LowRankSpec.dtypes:  # else no kernel has a price
        times = call_ways(c, LowRankSpec(m=m, k=k, r=r, n=n, dtype=dtype))
        assert times.dense is not None
        if times.dense > times.low:
            return None
        text += (
            f": {times.dense:,.1f} us for {_counted(m)} on {times.target}, one call "
            f"{times.fused:,.1f}, two products {times.separate:,.1f} (predicted, {times.source})"
        )
    return Refusal("rank_too_large", text, key)
