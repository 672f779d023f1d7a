"""What the rules make of the prices of a call: refusals of calls that are slower.

Rules ask `prices.ways` at the call's token count. One call is taken unless smaller calls are
predicted to be faster. One dense product has to be stored by the model: where it is predicted to be
faster, the report says so, and from how many tokens low rank pays. Options(price=...) selects the
source of all times, one of `prices.kernel.PRICES`.
"""

from __future__ import annotations

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
from nmm_compiler.prices.ways import Ways, pays_from, ways

# A dense product that is predicted to take less than this times the call is near break-even.
_NEAR = 1.25


def call_ways(c: Canonical, spec: KernelSpec) -> Ways:
    """Return the times of a call on the target and cores of the options."""
    return ways(spec, c.chip, c.options.lnc, source=c.options.price)


def predicted_info(c: Canonical, spec: KernelSpec, times: Ways) -> dict[str, Any]:
    """Return the times as plain JSON data for `Match.info`.

    pays_from: tokens from which low rank is faster than dense, of a chain near break-even; 0 for
    any other chain, None where low rank is faster at no count.
    """
    even: int | None = 0
    if times.dense is not None and times.dense < _NEAR * times.low:
        even = pays_from(spec, c.chip, c.options.lnc, c.options.price)
    return {"predicted": {**times.to_dict(), "pays_from": even}}


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
