"""Latencies of collectives between cores, by published laws.

Isolated latencies come from the target (`collective_points`). In a running model the cores do not
arrive at the same time, and waiting is most of a small collective.
"""

from __future__ import annotations

import math

from nmm_compiler.targets import Target
from nmm_compiler.targets.collective_time import collective_alone_us

# Core pair of one logical core: published for trn2 (NxD Inference and NKI notes).
PAIR_EXCHANGE_US = 9.2
PAIR_BARRIER_US = 3.0
# Median of all-reduces in a decode of 64 ranks, 44 us, over the isolated 17.5 us; the best took
# 17.5 us and one in ten more than 135 us.
WAIT_FACTOR = 44.0 / 17.5
WAIT_RANKS = 64


def collective_us(kind: str, size: int, ranks: int, target: Target) -> float:
    """Return microseconds of a collective; size: bytes of its whole result.

    kind: all_reduce or all_gather, which moves half as much.
    """
    if ranks == 1:
        return 0.0
    moved = size if kind == "all_reduce" else size / 2
    alone = collective_alone_us(max(moved, 1.0), ranks, target)
    return alone + wait_us(ranks, target)


def wait_us(ranks: int, target: Target) -> float:
    """Return how long a core waits for the others: it grows with the steps of a tree of ranks."""
    steps = math.log2(ranks) / math.log2(WAIT_RANKS)
    return (WAIT_FACTOR - 1.0) * steps * collective_alone_us(1.0, ranks, target)
