"""One function prices a call fused, in smaller calls and dense, from one source."""

import dataclasses
import math

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import CapacityError
from nmm_compiler.kernels.experts import ExpertsSpec
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.options import LARGEST_BUCKET
from nmm_compiler.prices import kernel as prices
from nmm_compiler.prices.kernel import (
    LAUNCH_GAP_US,
    PAIR_BARRIER_US,
    collective_us,
    estimate_us,
    launches_of,
    simulated_us,
    wait_us,
)
from nmm_compiler.prices.ways import (
    alternatives,
    dense_rows,
    ways,
)
from nmm_compiler.targets import get
from nmm_compiler.targets.collective_time import collective_alone_us

SPEC = LowRankSpec(m=64, k=256, r=64, n=256)
GATED = GatedMLPSpec(m=64, k=256, n=512, gate_r=32, up_r=32, down_r=32)
SHARED = LowRankSharedSpec(m=64, k=256, pairs=((8, (64,)), (8, (32, 32))))
TRN2 = get("trn2")


def flops(spec, target):
    return float(spec.flops())


@pytest.fixture
def priced(monkeypatch):
    """Return a function that sets the closed form to a function of (spec, target)."""
    return lambda price: monkeypatch.setitem(prices.PRICES, "closed_form", price)


def test_each_way_is_its_kernels_and_a_gap_between_them(priced):
    priced(flops)
    found = ways(SPEC, "trn2")
    assert found.fused == SPEC.flops()
    assert found.separate == SPEC.flops() + LAUNCH_GAP_US
    assert found.dense == 2 * 64 * 256 * 256
    assert (found.tokens, found.target, found.source) == (64, "trn2", "closed_form")
    assert found.gain == found.dense / found.fused


def test_a_way_without_a_schedule_takes_infinitely_long(priced):
    def no_fused(spec, target):
        if spec.family == "lowrank":
            raise CapacityError("too large")
        return flops(spec, target)

    priced(no_fused)
    found = ways(SPEC, "trn2")
    assert found.fused == math.inf
    assert found.low == found.separate == SPEC.flops() + LAUNCH_GAP_US


def test_results_without_a_kernel_of_them_all_are_no_one_call(priced):
    def each(spec, target):
        if spec.family == "lowrank_shared":
            raise CapacityError("too large")
        return 5.0

    priced(each)
    found = ways(SHARED, "trn2")
    assert (found.fused, found.separate) == (math.inf, 3 * 5.0 + 2 * LAUNCH_GAP_US)


@pytest.mark.parametrize("source", ["closed_form", "simulated"])
@pytest.mark.parametrize("call", [SPEC, GATED, SHARED], ids=lambda call: call.family)
def test_dense_is_the_fastest_dense_row_and_of_the_source_of_the_call(call, source):
    """Three separate dense products are no rival of a gated MLP in one kernel."""
    found = ways(call, "trn2", source=source)
    one = {"closed_form": estimate_us, "simulated": simulated_us}[source]
    rows = dense_rows(call)
    assert not any(one.family.startswith("lowrank") for row in rows for one in row)
    totals = [sum(one(s, TRN2) for s in row) + (len(row) - 1) * LAUNCH_GAP_US for row in rows]
    assert found.dense == pytest.approx(min(totals))
    assert found.fused == one(call, TRN2)


def test_the_dense_rows_of_a_gated_mlp_are_one_kernel_two_three_and_a_joined_weight():
    rows = {tuple((s.family, s.n) for s in row) for row in dense_rows(GATED)}
    assert rows == {
        (("gated_mlp", 512),),
        (("gated_mlp_up", 512), ("matmul", 256)),
        (("matmul", 512), ("matmul", 512), ("matmul", 256)),
        (("matmul", 1024), ("matmul", 256)),
    }
    dense = dataclasses.replace(GATED, gate_r=0, up_r=0, down_r=0)
    assert dense_rows(GATED)[0] == (dense,)
    assert {tuple(s.n for s in row) for row in dense_rows(SHARED)} == {(64, 32, 32), (128,)}


@pytest.mark.parametrize(
    "call",
    [
        GATED,
        dataclasses.replace(GATED, up_r=0, gate_bias=True, norm="rms", norm_gain=True),
        dataclasses.replace(GATED, residual=True, x_layout="col", weight_layout="col"),
        GatedMLPUpSpec(m=16, k=256, n=512, gate_r=32, up_r=16, dtype="float32"),
        dataclasses.replace(GATED, dtype="float8_e4m3", scales="channel", x_dtype="bfloat16"),
        SHARED,
        SPEC,
    ],
    ids=lambda call: call.short(),
)
def test_every_row_multiplies_by_the_weights_of_the_call(call):
    """Rows differ in launches, not in weights: each row's flops are those of the call."""
    for row in alternatives(call):
        more = 2 if call is SHARED and row != (call,) else 1  # a shared u is multiplied by again
        assert call.flops() <= sum(spec.flops() for spec in row) <= more * call.flops()
        assert {spec.dtype for spec in row} == {call.dtype}
        assert sum(spec.residual for spec in row) == call.residual or row[-1].family == "matmul"


def test_one_call_has_the_price_of_the_kernel_that_is_built():
    """Below and above 128 tokens: no schedule is priced that `build_kernel` does not take."""
    for spec in (SPEC, LowRankSpec(m=512, k=512, r=192, n=2048)):
        assert simulated_us(spec, TRN2) == build_kernel(spec, "trn2").profile().latency_us


def test_a_call_of_more_tokens_than_the_largest_bucket_is_several_launches():
    spec = MatmulSpec(m=2 * LARGEST_BUCKET + 3, k=128, n=128)
    block, rest = (dataclasses.replace(spec, m=m) for m in (LARGEST_BUCKET, 3))
    assert launches_of(spec) == {block: 2, rest: 1}
    assert simulated_us(spec, TRN2) == 2 * simulated_us(block, TRN2) + simulated_us(rest, TRN2)


def test_a_price_is_kept_and_read_again():
    spec = MatmulSpec(m=8, k=192, n=128)
    first = simulated_us(spec, TRN2)
    prices.simulated_us.cache_clear()
    assert simulated_us(spec, TRN2) == first


def test_two_cores_are_charged_a_barrier_on_every_way():
    one, two = (ways(SPEC, "trn2", lnc) for lnc in (1, 2))
    shared = dataclasses.replace(SPEC, lnc=2)
    beyond = prices.exchanges_of(shared) * prices.beyond_simulated_us(TRN2)
    assert two.fused == estimate_us(shared, TRN2) + PAIR_BARRIER_US + beyond != one.fused
    odd = dataclasses.replace(SPEC, m=7, n=333)  # cannot be shared: the other core waits
    assert ways(odd, "trn2", 2).fused == estimate_us(odd, TRN2) + PAIR_BARRIER_US


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (SPEC, 1),
        (dataclasses.replace(SPEC, norm="rms"), 0),  # each core makes all of x u
        (dataclasses.replace(SPEC, m=512), 0),  # cut by tokens
        (MatmulSpec(m=1, k=256, n=512), 0),
        (GatedMLPSpec(m=1, k=256, n=512, r=64), 2),
        (CorrectedSpec(m=1, k=256, n=512, rank=16, weight="fp8"), 0),
        (CorrectedMLPSpec(m=1, k=256, n=512, rank=16, weight="fp8"), 1),  # of h
        (ExpertsSpec(m=1, k=256, n=128, groups=8, top_k=2), 1),
    ],
    ids=str,
)
def test_two_cores_exchange_as_often_as_their_kernel_does(spec, count):
    assert prices.exchanges_of(dataclasses.replace(spec, lnc=2)) == count


def test_ranks_are_priced_with_the_sum_inside_and_apart():
    """The kernel that sums p hides v behind the sum; kernels apart add up."""
    whole = LowRankSpec(m=16, k=4096, r=512, n=1024)
    rows = whole.sharded(4, "rows")
    found = ways(rows, "trn2", source="simulated")
    assert found.fused == simulated_us(rows, TRN2) + wait_us(4, TRN2)
    alone = dataclasses.replace(rows, tp=1, tp_axis="")
    products = sum(simulated_us(one, TRN2) for one in alone.as_products()[0])
    summed = collective_us("all_reduce", 16 * 512 * 2, 4, TRN2)
    assert found.separate == pytest.approx(products + summed + 2 * LAUNCH_GAP_US)
    assert found.fused + 4 < found.separate
    assert found.tp == 4


@pytest.mark.parametrize(
    "more", [{"base": True}, {"inner_bias": True}, {"inner_activation": "relu"}]
)
def test_what_stands_for_no_dense_product_has_no_dense_time(more):
    found = ways(dataclasses.replace(SPEC, **more), "trn2")
    assert found.dense is None
    assert found.gain is None


# Collectives follow the published points.


@pytest.mark.parametrize("name", ["trn1", "trn2"])
def test_published_points_are_met_but_for_the_wait(name):
    target = get(name)
    for ranks, size, us in target.collective_points:
        least = min(point[2] for point in target.collective_points if point[0] == ranks)
        wait = (prices.WAIT_FACTOR - 1) * math.log2(ranks) / math.log2(prices.WAIT_RANKS) * least
        assert collective_us("all_reduce", size, ranks, target) == pytest.approx(us + wait)


def test_more_bytes_take_longer_and_a_gather_moves_half():
    target = get("trn2")
    times = [collective_us("all_reduce", 1 << bits, 4, target) for bits in range(10, 30, 2)]
    assert times == sorted(times)
    assert times[-1] > 2 * times[-3]  # beyond the table, in proportion to the bytes
    half = collective_us("all_reduce", 1 << 23, 4, target)
    assert collective_us("all_gather", 1 << 24, 4, target) == half


@pytest.mark.parametrize("size", [10_240, 32 << 10, 1 << 20])
def test_64_ranks_of_trn2_take_a_latency_and_the_time_of_their_bytes(size):
    """The published law: 17.5 us + bytes / 100 GB/s, also between its points."""
    alone = collective_alone_us(size, 64, get("trn2"))
    assert alone == pytest.approx(17.5 + size / 1e5, rel=5e-3)  # the points have three digits
