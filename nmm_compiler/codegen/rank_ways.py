"""How several ranks should share a low-rank product: the predicted time of each way.

`rank_ways(whole, 4)` prices each axis twice: as one kernel with its sum over the ranks inside, and
as kernels with a collective between them, which need a launch each. The kernel wins where the
loads of what comes after the sum hide behind it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from nmm_compiler.codegen.latency import Price, calls_us, simulated_us
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.over_ranks import AXES
from nmm_compiler.records import Record
from nmm_compiler.report.parts import Grid
from nmm_compiler.targets import Target
from nmm_compiler.targets.collective_time import collective_alone_us


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankWay(Record):
    """One way to share a product, per rank. All times are predicted.

    inside_us: one kernel, the sum over the ranks in it. apart_us: kernels and a collective, one
    after the other. collective_us: the published time of the sum alone, in both. exchanged_bytes:
    what each rank brings to it. weight_bytes: of the weights that a rank holds.
    """

    axis: str
    inside_us: float
    apart_us: float
    collective_us: float
    exchanged_bytes: int
    weight_bytes: int

    @property
    def best_us(self) -> float:
        """The time of the faster of both."""
        return min(self.inside_us, self.apart_us)

    @property
    def pays(self) -> bool:
        """Whether one kernel with the sum inside is no slower than kernels and a collective."""
        return math.isfinite(self.inside_us) and self.inside_us <= self.apart_us


def rank_ways(
    whole: Any, tp: int, target: str | Target = "trn2", price: Price = simulated_us
) -> tuple[RankWay, ...]:
    """Return the ways in which `tp` ranks can share a low-rank product, fastest first.

    whole: the LowRankSpec of the product. A way that is impossible, as its size does not divide or
    a function stands where a sum would, is left out. Raises SpecError where none is possible.
    """
    chip = machine_target(target)
    found, refused = [], ""
    for axis in AXES:
        try:
            spec = whole.sharded(tp, axis)
        except (ShapeError, SpecError) as error:
            refused = str(error)
            continue
        found.append(rank_way(spec, chip, price))
    if not found:
        raise SpecError(f"no way to share {whole.short()} between {tp} ranks: {refused}")
    return tuple(sorted(found, key=lambda way: way.best_us))


def shared_best(whole: Any, tp: int, target: str | Target = "trn2") -> Any:
    """Return the spec of one of `tp` ranks, by the axis that is predicted fastest as one kernel."""
    ways = rank_ways(whole, tp, target)
    return whole.sharded(tp, min(ways, key=lambda way: way.inside_us).axis)


def rank_way(spec: Any, target: str | Target = "trn2", price: Price = simulated_us) -> RankWay:
    """Return the times of one way; spec: the LowRankSpec of one rank."""
    chip = machine_target(target)
    try:
        spec.check(chip)
        inside = calls_us((spec,), chip, price)
    except SpecError:  # no collectives there
        inside = math.inf
    size = spec.exchanged_bytes()
    sums = collective_alone_us(size, spec.tp, chip) if size else 0.0
    alone = dataclasses.replace(spec, tp=1, tp_axis="")
    products = (alone,) if spec.tp_axis != "rows" else alone.as_products()[0]
    apart = calls_us(products, chip, price) + sums if size else inside
    weights = set(spec.weights())
    held = sum(tensor.bytes for tensor in spec.inputs() if tensor.name in weights)
    return RankWay(
        axis=spec.tp_axis, inside_us=inside, apart_us=apart, collective_us=sums,
        exchanged_bytes=size, weight_bytes=held,
    )  # fmt: skip


def ways_table(ways: tuple[RankWay, ...]) -> Grid:
    """Return the ways as a table, fastest first."""
    rows = [
        (way.axis, _us(way.inside_us), _us(way.apart_us), f"{way.collective_us:.1f}",
         f"{way.exchanged_bytes:,}", f"{way.weight_bytes:,}")
        for way in ways
    ]  # fmt: skip
    head = ("axis", "one kernel us", "apart us", "collective us", "bytes summed", "weight bytes")
    return Grid.of(head, rows, right=head[1:])


def _us(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "no schedule"
