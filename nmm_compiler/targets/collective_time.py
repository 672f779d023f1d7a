"""The time of a collective alone: the target's published points, interpolated."""

from __future__ import annotations

import math

from nmm_compiler.targets.base import Target


def collective_alone_us(size: float, ranks: int, target: Target) -> float:
    """Return microseconds of an all-reduce of `size` bytes whose ranks all arrive at once.

    Interpolates `Target.collective_points`: in bytes along straight lines, since a collective takes
    a latency and the time that its bytes need on the links (AWS Neuron, "Intra-node Collective
    Communications"); in the logarithm of ranks, as the steps of a tree grow.
    """
    by_ranks: dict[int, list[tuple[float, float]]] = {}
    for group, at, us in target.collective_points:
        by_ranks.setdefault(group, []).append((float(at), us))
    curve = [(float(r), _along(sorted(points), size)) for r, points in sorted(by_ranks.items())]
    return _along(curve, float(ranks), in_logarithms=True)


def _along(points: list[tuple[float, float]], at: float, *, in_logarithms: bool = False) -> float:
    """Interpolate; below the first point its value, above the last the rate of its last stretch.

    in_logarithms: between two points in the logarithms of both axes.
    """
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    above = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    if in_logarithms and at <= x1:
        share = math.log(at / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))
    return y1 + (at - x1) * (y1 - y0) / (x1 - x0)
