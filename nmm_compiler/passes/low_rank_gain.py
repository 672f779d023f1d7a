"""What low rank brings to the calls of a graph, and would to its dense products, in one sentence.

Each dense product is priced by itself, as the passes price a chain: dense, and low-rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from nmm_compiler.codegen.latency import PRICES, ways_us
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.report.headline import headline

NEXT = "next: nmm_compiler.compress(model, 0.2), or nmm plan DIRECTORY for the whole model"


def could_bring(found: Iterable[Any], target: str) -> str:
    """Return the sentence for `Opportunity`s of a graph; "" where there are none to price."""
    dense = low = 0.0
    tokens = set()
    for one in found:
        ways = _ways(one.m, one.k, one.r, one.n, one.dtype, target) if one.m else None
        if ways is not None:
            dense, low = dense + ways[0], low + ways[1]
            tokens.add(one.m)
    if not low:
        return ""
    count = f"{max(tokens):,} token{'s' * (max(tokens) != 1)}"
    said = headline(
        [(dense / low, "in the products that could be low-rank")],
        f"(at 80 % of their parameters, {count}) on {target}",
        quality="the quality is not known before calibration",
        remedy="more tokens a call, or the larger layers alone, may",
    )
    return f"{said}; {NEXT}"


def calls_bring(predicted: Iterable[dict[str, Any]]) -> str:
    """Return the sentence for the calls of a graph, from their `Match.info["predicted"]`."""
    judged = [one for one in predicted if one["dense"] is not None]
    call = sum(one["call"] for one in judged)
    if not call:
        return ""
    tokens, targets = max(one["tokens"] for one in judged), {one["target"] for one in judged}
    return headline(
        [(sum(one["dense"] for one in judged) / call, "in the fused calls")],
        f"({tokens:,} token{'s' * (tokens != 1)}) on {', '.join(sorted(targets))}",
        quality="its quality is not judged here",
        remedy="a smaller rank, or more tokens a call, would help",
    )


@functools.lru_cache(maxsize=1024)
def _ways(m: int, k: int, r: int, n: int, dtype: str, target: str) -> tuple[float, float] | None:
    """Return (dense, low-rank) microseconds; None for a dtype or a size without kernels."""
    if dtype not in LowRankSpec.dtypes:
        return None
    tile = next((size for size in (128, 64, 32) if r >= 4 * size), 1)
    try:
        spec = LowRankSpec(m=m, k=k, r=r // tile * tile, n=n, dtype=dtype)
        ways = ways_us(spec, target, PRICES["closed_form"])
    except NmmError:
        return None
    return ways.dense, min(ways.fused, ways.separate)
