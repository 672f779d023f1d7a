"""Predicted times of a computation: as one kernel, as its products one by one, and dense.

Rules ask at the call's token count. One call is taken unless its products one by one are predicted
to be faster. One dense product has to be stored by the model: where it is predicted to be faster,
the report says so, and from how many tokens low rank pays. Options(price=...) selects the price of
a kernel, one of `codegen.latency.PRICES`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from torch import fx

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.passes.chains.linear_map import Stage
from nmm_compiler.passes.chains.product_order import TYPICAL_TOKENS
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key
from nmm_compiler.targets import Target

# A dense product that is predicted to take less than this times the call is near break-even.
_NEAR = 1.25


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Microseconds of one computation three ways, launches included, at a token count.

    price: of `codegen.latency.PRICES`. pays_from: tokens from which low rank is faster than dense,
    of a chain near break-even; 0 for any other chain, None where low rank is faster at no count.
    dense is None for adapters on a dense weight: merged, they are a dense product; and for a chain
    that `tp` devices share, whose products have the sum over the devices between them.
    """

    call: float
    products: float
    dense: float | None
    tokens: int
    target: str
    price: str
    pays_from: int | None = 0
    tp: int = 1

    def info(self) -> dict[str, Any]:
        """Return plain JSON data for `Match.info`."""
        return {"predicted": dataclasses.asdict(self)}

    def slower(self, node: fx.Node) -> Refusal | None:
        """Return a refusal of one call where its products are predicted to be faster."""
        if self.call <= self.products:
            return None
        one = f"{self.call:,.1f} us" if math.isfinite(self.call) else "no kernel of this size"
        between = f" and a sum over {self.tp} devices" if self.tp > 1 else ""
        reason = (
            f"one call for {_counted(self.tokens)}: {one} on {self.target}, its products one by "
            f"one{between} {self.products:,.1f} us (predicted, {self.price})"
        )
        return Refusal("slower", reason, node)


def _counted(tokens: int) -> str:
    return f"{tokens} token{'s' * (tokens != 1)}"


def tokens_to_judge(count: Any) -> int:
    """Return the token count that decides: TYPICAL_TOKENS for a symbolic one."""
    return max(1, count) if isinstance(count, int) else TYPICAL_TOKENS


@functools.lru_cache(maxsize=1024)
def prices_of(spec: KernelSpec, chip: Target, price: str, lnc: int = 1) -> Predicted:
    """Return the predicted times of a spec on so many physical cores of a target."""
    from nmm_compiler.codegen.latency import pays_from, price_on, ways_us
    from nmm_compiler.codegen.rank_ways import rank_way

    one = price_on(price, lnc)
    ranks = getattr(spec, "tp", 1)
    if ranks > 1:
        way = rank_way(spec, chip, one)
        return Predicted(way.inside_us, way.apart_us, None, spec.m, chip.name, price, 0, ranks)
    ways = ways_us(spec, chip, one)
    adapters = getattr(spec, "base", False) or getattr(spec, "inner", False)
    even: int | None = 0
    if not adapters and ways.dense < _NEAR * min(ways.fused, ways.separate):
        even = pays_from(spec, chip, one)
    dense = None if adapters else ways.dense
    return Predicted(ways.fused, ways.separate, dense, spec.m, chip.name, price, even)


def too_wide(c: Canonical, stage: Stage, r: int, n: int, key: Key) -> Refusal | None:
    """Return a refusal where the rank of x u v is so large that one dense product is the fastest.

    stage: the first product, x u. r, n: features of u and of v. key: the last product.
    """
    k = stage.weight.k
    if r * (k + n) < k * n:
        return None
    dtype = str(c.dtype(key)).removeprefix("torch.")
    m = tokens_to_judge(views.product(list(stage.tokens.values())))
    known = dtype in LowRankSpec.dtypes  # else no kernel has a price
    found = None
    if known:
        spec = LowRankSpec(m=m, k=k, r=r, n=n, dtype=dtype)
        found = prices_of(spec, c.chip, c.options.price, c.options.lnc)
    text = f"r (k + n) >= k n: {r} * ({k} + {n}) >= {k} * {n}, so one dense product is cheaper"
    if found is not None:
        assert found.dense is not None
        if found.dense > min(found.call, found.products):
            return None
        text += (
            f": {found.dense:,.1f} us for {_counted(m)} on {found.target}, one call "
            f"{found.call:,.1f}, two products {found.products:,.1f} (predicted, {found.price})"
        )
    return Refusal("rank_too_large", text, key)
