"""What exchanging data between cores takes, by published laws.

Isolated latencies come from the target (`collective_points`). In a running model the cores do not
arrive at the same time, and the wait is most of a small collective.
"""

from __future__ import annotations

import math

from nmm_compiler.targets import Target

# Core pair of one logical core: published for trn2 (NxD Inference and NKI notes).
PAIR_EXCHANGE_US = 9.2
PAIR_BARRIER_US = 3.0
# Median of all-reduces in a decode of 64 ranks, 44 us, over the isolated 17.5 us; the best took
# 17.5 us and one in ten more than 135 us.
WAIT_FACTOR = 44.0 / 17.5
WAIT_RANKS = 64


def collective_us(kind: str, size: int, ranks: int, target: Target) -> float:
    """Return microseconds of a collective over `size` bytes, the whole of what it makes.

    kind: all_reduce, all_gather or reduce_scatter; the last two move half of what the first does.
    """
    if ranks == 1:
        return 0.0
    moved = size if kind == "all_reduce" else size / 2
    alone = _between_ranks(max(moved, 1.0), ranks, target)
    return alone + _wait_us(ranks, target)


def _wait_us(ranks: int, target: Target) -> float:
    """Return how long a core waits for the others: it grows with the steps of a tree of ranks."""
    steps = math.log2(ranks) / math.log2(WAIT_RANKS)
    return (WAIT_FACTOR - 1.0) * steps * _between_ranks(1.0, ranks, target)


def _between_ranks(size: float, ranks: int, target: Target) -> float:
    """Return the published latency, interpolated in the logarithms of ranks and of bytes."""
    by_ranks: dict[int, list[tuple[float, float]]] = {}
    for group, at, us in target.collective_points:
        by_ranks.setdefault(group, []).append((float(at), us))
    curve = [(float(r), _on_curve(sorted(points), size)) for r, points in sorted(by_ranks.items())]
    return _on_curve(curve, float(ranks))


def _on_curve(points: list[tuple[float, float]], at: float) -> float:
    """Interpolate in logarithms; below the first point its value, above the last its slope."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1]
    above = next((i for i, (x, _) in enumerate(points) if x >= at), len(points) - 1)
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    if at > points[-1][0]:  # bytes beyond the table at the rate of its last stretch
        return y1 + (at - x1) * (y1 - y0) / (x1 - x0)
    share = math.log(at / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))
