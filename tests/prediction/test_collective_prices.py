"""Collectives follow the published points, and cost nothing where there is one core."""

import math

import pytest

from nmm_compiler import targets
from nmm_compiler.prices.kernel import WAIT_FACTOR, WAIT_RANKS, collective_us
from nmm_compiler.targets.collective_time import collective_alone_us


def test_one_core_exchanges_nothing():
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        assert collective_us(kind, 1 << 20, 1, targets.get("trn2")) == 0.0


@pytest.mark.parametrize("name", ["trn1", "trn2"])
def test_published_points_are_met_but_for_the_wait(name):
    target = targets.get(name)
    for ranks, size, us in target.collective_points:
        least = min(point[2] for point in target.collective_points if point[0] == ranks)
        wait = (WAIT_FACTOR - 1) * math.log2(ranks) / math.log2(WAIT_RANKS) * least
        assert collective_us("all_reduce", size, ranks, target) == pytest.approx(us + wait)


def test_more_bytes_take_longer_and_a_gather_moves_half():
    target = targets.get("trn2")
    times = [collective_us("all_reduce", 1 << bits, 4, target) for bits in range(10, 30, 2)]
    assert times == sorted(times)
    assert times[-1] > 2 * times[-3]  # beyond the table, in proportion to the bytes
    half = collective_us("all_reduce", 1 << 23, 4, target)
    assert collective_us("all_gather", 1 << 24, 4, target) == half


@pytest.mark.parametrize("size", [10_240, 32 << 10, 1 << 20])
def test_64_ranks_of_trn2_take_a_latency_and_the_time_of_their_bytes(size):
    """The published law: 17.5 us + bytes / 100 GB/s, also between its points."""
    alone = collective_alone_us(size, 64, targets.get("trn2"))
    assert alone == pytest.approx(17.5 + size / 1e5, rel=5e-3)  # the points have three digits
