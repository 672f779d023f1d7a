"""What low rank brings to the calls of a graph, and would to its dense products, in one sentence.

Each dense product is priced by itself, as the passes price a chain: dense, and low-rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.prices.ways import Ways, ways
from nmm_compiler.report.headline import headline

NEXT = "next: nmm_compiler.compress(model, 0.2), or nmm plan DIRECTORY for the whole model"


def could_bring(found: Iterable[Any], target: str) -> str:
    """Return the sentence for `Opportunity`s of a graph; "" where there are none to price."""
    priced = [times for one in found if (times := _ways_at_a_rank(one, target)) is not None]
    if not priced:
        return ""
    said = _sentence(
        priced,
        "in the products that could be low-rank (at 80 % of their parameters)",
        could=True,
        quality="the quality is not known before calibration",
        remedy="more tokens a call, or the larger layers alone, may",
    )
    return f"{said}; {NEXT}"


def calls_bring(predicted: Iterable[dict[str, Any]]) -> str:
    """Return the sentence for the calls of a graph, from their `Match.info["predicted"]`."""
    fields = Ways.__dataclass_fields__
    rows = ({name: one[name] for name in fields} for one in predicted if one["dense"] is not None)
    judged = [Ways(**row) for row in rows]
    if not judged:
        return ""
    return _sentence(
        judged,
        "in the fused calls",
        quality="its quality is not judged here",
        remedy="a smaller rank, or more tokens a call, would help",
    )


def _sentence(priced: list[Ways], what: str, **said: Any) -> str:
    """Return the headline of computations one after the other."""
    gain = sum(times.dense or 0.0 for times in priced) / sum(times.low for times in priced)
    tokens = max(times.tokens for times in priced)
    sources = {times.source.replace("_", " ") for times in priced}
    targets = {times.target for times in priced}
    where = (
        f"({tokens:,} token{'s' * (tokens != 1)}, {', '.join(sorted(sources))}) on "
        f"{', '.join(sorted(targets))}"
    )
    error = max(times.error for times in priced)
    return headline([(gain, what)], where, error=error, **said)


def _ways_at_a_rank(one: Any, target: str) -> Ways | None:
    """Return the times of a dense product at the rank of an Opportunity; None where a dtype or a
    size has no kernels, or its tokens are symbolic."""
    if not one.m or one.dtype not in LowRankSpec.dtypes:
        return None
    tile = next((size for size in (128, 64, 32) if one.r >= 4 * size), 1)
    try:
        spec = LowRankSpec(m=one.m, k=one.k, r=one.r // tile * tile, n=one.n, dtype=one.dtype)
        return ways(spec, target)
    except NmmError:
        return None
