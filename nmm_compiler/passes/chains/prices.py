"""What the rules make of prices: refusals of calls that are slower.

Rules ask `prices.ways` at the call's token count. One call is taken unless smaller calls are
predicted to be faster. One dense product has to be stored by the model: where it is predicted to be
faster, the report says so. The switch "+simulated" selects the source of all times, one of
`prices.kernel.PRICES`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.passes.chains.linear_map import Stage
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Key
from nmm_compiler.prices.ways import Ways, ways

# Tokens that a symbolic count stands for: a short prefill.
TYPICAL_TOKENS = 128


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
