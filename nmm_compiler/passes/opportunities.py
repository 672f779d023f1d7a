"""The dense products with constant weights in a graph, and what low rank would bring.

Each dense product is priced by itself, as the passes price a chain: dense, and low-rank. The
sentences say what low rank brings to the calls of a graph, and would to its dense products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.passes.chains.linear_map import read_stage
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.graph.canonical import Canonical, owner_of
from nmm_compiler.passes.rules.base import module_path
from nmm_compiler.passes.rules.lowrank import products_at
from nmm_compiler.prices.ways import Ways, ways
from nmm_compiler.report.headline import headline

NEXT = "next: nmm_compiler.compress(model, 0.2), or nmm plan DIRECTORY for the whole model"


@dataclass(frozen=True)
class Opportunity:
    """A dense product that could be factorized, and the savings of rank `r`.

    node: the product. r is the rank that keeps 80 % of the parameters; break_even is the first rank
    at which the factors are no smaller than the dense matrix. m: tokens of the product, None for a
    symbolic count; dtype: its operands'. saved_bytes are bytes of weight read per call,
    saved_flops_per_token are floating-point operations.
    """

    node: str
    module: str
    k: int
    n: int
    r: int
    break_even: int
    saved_bytes: int
    saved_flops_per_token: int
    m: int | None = None
    dtype: str = "bfloat16"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


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
        remedy="more tokens a call, or the larger layers alone, may gain more",
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


def _looked_up(weight: fx.Node) -> bool:
    """Return whether an embedding reads the weight too; `compress` leaves such tied weights
    dense."""
    seen, left = set[fx.Node](), [weight]
    while left:
        node = left.pop()
        if node not in seen and (node is weight or node.op in ("placeholder", "get_attr")):
            seen.add(node)
            left += node.all_input_nodes
    readers = [user for node in seen for user in node.users]
    return any("embedding" in getattr(user.target, "__name__", "") for user in readers)


def _count(sizes: Iterable[Any]) -> int | None:
    """Return the tokens of a product; None where a size is symbolic."""
    known = list(sizes)
    return math.prod(known) if all(isinstance(size, int) for size in known) else None


def opportunities(c: Canonical, covered: set[fx.Node]) -> list[Opportunity]:
    """Return the dense products with a constant 2-D weight that factors would make smaller."""
    found: list[Opportunity] = []
    for node in c.graph.nodes:
        if node in covered:
            continue
        for key, form in products_at(c, node):
            rhs = c.is_constant(form.rhs)
            data = form.lhs if rhs else form.rhs
            if c.is_constant(data) or not c.is_constant(form.rhs if rhs else form.lhs):
                continue
            if _looked_up(owner_of(form.rhs if rhs else form.lhs)):
                continue
            stage = read_stage(c, key, form, rhs)
            if isinstance(stage, Refusal):
                continue
            k, n = stage.weight.k, stage.weight.n
            r = int(0.8 * k * n / (k + n))
            if r < 1 or min(k, n) < 2:
                continue
            saved = k * n - r * (k + n)
            dtype = c.dtype(key)
            size = dtype.itemsize if dtype is not None else 2
            break_even = -(-k * n // (k + n))
            found.append(
                Opportunity(
                    node=owner_of(key).name,
                    module=module_path(node),
                    k=k,
                    n=n,
                    r=r,
                    break_even=break_even,
                    saved_bytes=saved * size,
                    saved_flops_per_token=2 * saved,
                    m=_count(stage.tokens.values()),
                    dtype=str(dtype).removeprefix("torch."),
                )
            )
    return found
