"""One call, two products or one dense product: the prices decide, and say from how many tokens."""

import math

import pytest

from nmm_compiler.codegen import latency
from nmm_compiler.codegen.latency import (
    BREAK_EVEN_TOKENS,
    LAUNCH_GAP_US,
    MOST_TOKENS,
    Ways,
    pays_from,
    simulated_us,
    ways_us,
)
from nmm_compiler.errors import CapacityError
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec

SPEC = LowRankSpec(m=64, k=256, r=64, n=256)


def flops(spec, target):
    return float(spec.flops())


def test_each_way_is_its_kernels_and_a_gap_for_each():
    found = ways_us(SPEC, "trn2", flops)
    assert found.fused == SPEC.flops() + LAUNCH_GAP_US
    assert found.separate == SPEC.flops() + 2 * LAUNCH_GAP_US
    assert found.dense == 2 * 64 * 256 * 256 + LAUNCH_GAP_US
    assert found.best == "fused"
    assert Ways(fused=2.0, separate=1.0, dense=3.0).best == "separate"
    assert Ways(fused=2.0, separate=2.0, dense=2.0).best == "fused"


def test_a_way_without_a_schedule_is_never_taken():
    def no_fused(spec, target):
        if spec.family == "lowrank":
            raise CapacityError("too large")
        return flops(spec, target)

    found = ways_us(SPEC, "trn2", no_fused)
    assert found.fused == math.inf
    assert found.best == "separate"


def test_low_rank_pays_from_where_every_larger_count_pays():
    def slow_below(limit):
        def price(spec, target):
            factors = spec.family == "lowrank" or 64 in (spec.k, spec.n)
            return spec.flops() * (9.0 if factors and spec.m < limit else 1.0)

        return price

    assert pays_from(SPEC, "trn2", slow_below(200)) == 256
    assert pays_from(SPEC, "trn2", slow_below(1)) == BREAK_EVEN_TOKENS[0]
    assert pays_from(LowRankSpec(m=64, k=256, r=255, n=256), "trn2", flops) is None


def test_a_long_call_is_as_many_calls_of_the_most_tokens():
    spec = MatmulSpec(m=2 * MOST_TOKENS + 3, k=128, n=128)
    block, rest = (simulated_us(MatmulSpec(m=m, k=128, n=128), "trn2") for m in (MOST_TOKENS, 3))
    assert simulated_us(spec, "trn2") == pytest.approx(2 * block + rest)


def test_a_price_is_kept_and_read_again():
    spec = MatmulSpec(m=8, k=192, n=128)
    first = simulated_us(spec, "trn2")
    latency._simulated_us.cache_clear()
    assert simulated_us(spec, "trn2") == first
