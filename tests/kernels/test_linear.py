"""Linear layers: what the chosen kernels compute, move and take, over every kind of layer."""

import dataclasses
from pathlib import Path

import pytest

from kernels.judge import prove_right, spec_of
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.choose import choose, rank, simulated
from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.linear.specs import LowRankSharedSpec
from nmm_compiler.simulator.run import ArraySpec, simulate
from nmm_compiler.simulator.timing.schedule import time_trace
from nmm_compiler.targets import get

TUTORIAL = Path(__file__).parents[2] / "benchmarks" / "kernels" / "dense_blocked.py"
TRN2 = get("trn2")
FP8 = "dtype=float8_e4m3 scales=channel"
COLUMNS = "x_layout=col out_layout=col"
KINDS = {
    "few, rows": "matmul m=1 k=300 n=640",
    "few, columns": f"matmul m=5 k=256 n=640 bias {COLUMNS}",
    "few, fp32": "matmul m=2 k=200 n=640 x_layout=col dtype=float32 activation=gelu",
    "few, fp8": f"matmul m=1 k=700 n=640 x_layout=col activation=silu {FP8}",
    "few, one scale": "matmul m=2 k=512 n=640 dtype=float8_e4m3 scales=tensor",
    "few, x in columns": f"matmul m=3 k=700 n=640 x_layout=col {FP8}",
    "few, low rank": "lowrank m=1 k=300 r=200 n=640 activation=silu scale=0.5",
    "one token, a residual": "matmul m=1 k=512 n=1152 residual",
    "few, low rank columns": "lowrank m=16 k=256 r=300 n=640 out_layout=col bias",
    "few, low rank fp8": f"lowrank m=1 k=1024 r=300 n=640 x_layout=col {FP8}",
    "odd": "lowrank m=17 k=1021 r=200 n=509 x_layout=col bias",
    "odd, base": "lowrank m=5 k=509 r=40 n=300 x_layout=col base",
    "few, the last loads in pieces": "lowrank m=2 k=256 r=200 n=4500",
    "ranks that share banks": "lowrank m=100 k=256 r=1300 n=300",
    "rank 1": "lowrank m=70 k=256 r=1 n=300 base",
    "stored turned": "lowrank m=77 k=1024 r=96 n=200 x_layout=col u_layout=col",
    "two parts": f"lowrank m=530 k=256 r=96 n=128 {COLUMNS}",
    "blocks of tokens": "lowrank m=1030 k=700 r=300 n=136 dtype=float32 x_layout=col",
    "tokens beyond a tile": "lowrank m=272 k=256 r=900 n=640 norm=rms norm_gain residual",
    "dense, turned": "matmul m=600 k=600 n=560 bias activation=silu w_layout=col",
    "dense, fp8": f"matmul m=200 k=900 n=300 x_layout=col {FP8}",
    "dense, fp8, wide": f"matmul m=160 k=128 n=4700 bias x_dtype=bfloat16 {FP8}",
    "shared": "lowrank_shared m=9 k=384 pairs=100:700 pairs=64:130,256",
    "shared, fp32": "lowrank_shared m=140 k=600 pairs=200:384 pairs=60:640 x_layout=col "
    "dtype=float32",
    "gated, biases": f"gated_mlp_up m=5 k=256 n=640 gate_bias up_bias activation=gelu {COLUMNS}",
    "gated, turned": "gated_mlp_up m=16 k=256 n=640 weight_layout=col out_layout=col",
    "gated, two cores": f"gated_mlp_up m=4 k=256 n=2560 lnc=2 {COLUMNS}",
    "gated, two parts": f"gated_mlp_up m=520 k=256 n=256 r=128 {COLUMNS}",
    "mlp, residual": "gated_mlp m=3 k=384 n=640 norm=rms norm_gain residual",
    "mlp, columns": f"gated_mlp m=2 k=256 n=1280 down_bias {COLUMNS}",
    "mlp, cores": "gated_mlp m=4 k=256 n=640 lnc=2 x_layout=col",
    "mlp, fp8": f"gated_mlp m=3 k=512 n=512 r=128 x_layout=col {FP8}",
    "mlp, down": "gated_mlp m=129 k=300 n=1030 gate_r=40 up_r=50 down_r=200",
}


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_kernels_equal_float64(kind):
    prove_right(build_kernel(spec_of(KINDS[kind]), "trn2"))


@pytest.mark.parametrize(
    "kind",
    ["few, low rank", "few, the last loads in pieces", "ranks that share banks", "odd",
     "tokens beyond a tile", "mlp, down"],
)  # fmt: skip
def test_beta_1_equals_float64(kind):
    prove_right(build_kernel(spec_of(KINDS[kind]), "trn1", dialect="neuronxcc"))


@pytest.mark.parametrize("line", ["lowrank m=1 k=2048 r=1280 n=8192", "matmul m=1 k=2048 n=8192"])
def test_one_token_in_fp8_is_within_half_again_of_its_roofline(line):
    spec = spec_of(f"{line} x_layout=col {FP8}")
    assert spec.roofline_us(TRN2) / choose(spec, "trn2")[0].simulated_us >= 2 / 3


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("matmul m=1 k=2048 n=2048", 0.78),
        ("lowrank m=1 k=14336 r=2560 n=4096", 0.94),
        ("lowrank m=128 k=8192 r=1280 n=2048", 0.8),
    ],
)
def test_few_tokens_take_little_more_than_their_bytes(line, share):
    spec = spec_of(line)
    assert spec.roofline_us(TRN2) / choose(spec, "trn2")[0].simulated_us >= share


@pytest.mark.parametrize(
    "line", ["lowrank m=1024 k=8192 r=1280 n=2048", "matmul m=512 k=4096 n=1024"]
)
def test_what_fits_is_read_once(line):
    spec = spec_of(f"{line} x_layout=col")
    profile = build_kernel(spec, "trn2").profile()
    assert profile.hbm_read_bytes + profile.hbm_write_bytes == spec.minimal_hbm_bytes()


@pytest.mark.parametrize(
    ("m", "k", "n", "target"),
    [
        (512, 4096, 1024, "trn2"),
        (1, 2048, 2048, "trn1"),
        (256, 1024, 2048, "trn1"),
        pytest.param(512, 4096, 1024, "trn1", marks=pytest.mark.long),
        pytest.param(1, 2048, 2048, "trn2", marks=pytest.mark.long),
        pytest.param(256, 1024, 2048, "trn2", marks=pytest.mark.long),
    ],
)
def test_never_slower_than_the_blocking_of_the_tutorial(m, k, n, target):
    """AWS's blocks with the sums of all token tiles, tuned: (tiles of n, of k) in a block."""
    arrays = [ArraySpec((k, m), "bfloat16"), ArraySpec((k, n), "bfloat16")]
    tuned = min(
        simulate(
            f"{TUTORIAL}:dense_blocked", *arrays, target=target, mode="timing",
            m_tiles_in_block=4, n_tiles_in_block=n_tiles, k_tiles_in_block=k_tiles,
        ).profile.latency_us
        for n_tiles, k_tiles in ((1, 4), (2, 4), (2, 8))
    )  # fmt: skip
    assert (
        choose(spec_of(f"matmul m={m} k={k} n={n} x_layout=col"), target)[0].simulated_us <= tuned
    )


@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_the_chosen_schedule_of_an_odd_shape_is_the_best_of_its_candidates(target):
    spec = spec_of("lowrank m=17 k=1021 r=61 n=509 x_layout=col")
    chip = get(target)
    times = {round(simulated(spec, c.schedule, chip)[0], 3) for c in rank(spec, chip)}
    assert len(times) > 1
    assert choose(spec, target)[0].simulated_us <= 1.02 * min(times)


@pytest.mark.parametrize(
    ("line", "few", "more"),
    [
        ("lowrank k=2048 r=512 n=2048", 1, 2),
        (f"gated_mlp_up k=1024 n=1024 r=256 {COLUMNS}", 512, 513),
    ],
    ids=["rows are not loaded an element at a time", "more than a bank move in two even parts"],
)
def test_one_token_more_takes_hardly_more_time(line, few, more):
    one, two = (choose(spec_of(f"{line} m={m}"), TRN2)[0].simulated_us for m in (few, more))
    assert two < 1.1 * one


@pytest.mark.parametrize(
    "line",
    [f"gated_mlp_up m=1 k=1024 n=4096 {COLUMNS}", f"gated_mlp_up m=16 k=1024 n=4096 {COLUMNS}",
     "gated_mlp m=1 k=1024 n=4096 x_layout=col", f"gated_mlp m=1 k=1024 n=4096 {COLUMNS}",
     "gated_mlp m=16 k=7168 n=128"],
)  # fmt: skip
def test_a_dense_gated_kernel_is_faster_than_its_products(line):
    spec = spec_of(line)
    apart = [choose(one, "trn2")[0].simulated_us for one in spec.as_products()[0]]
    assert choose(spec, "trn2")[0].simulated_us < sum(apart)


def test_a_program_too_long_to_be_simulated_is_one_with_a_loop():
    spec = spec_of("gated_mlp m=2048 k=4096 n=14336 r=2560 x_layout=col")
    assert rank(spec, TRN2)[0].instructions < 80_000


# A compiler that keeps program order costs a kernel next to nothing: loads come before stores.

# Layers of Llama-3.2-1B, several panels of weights each, so that loads follow stores.
SPECS = {
    "matmul": "m=128 k=2048 n=8192 x_layout=col",
    "lowrank": "m=512 k=2048 r=1312 n=8192 x_layout=col",
    "lowrank_shared": "m=512 k=2048 pairs=832:2048 pairs=320:512 pairs=320:512",
    "gated_mlp_up": f"m=128 k=2048 n=8192 r=1312 {COLUMNS}",
    "gated_mlp": "m=128 k=2048 n=8192 r=1312 x_layout=col",
}


def latencies(kernel, target):
    """Return the predicted latency with and without leave to reorder."""
    arrays = [ArraySpec(t.shape, t.dtype) for t in kernel.spec.inputs()]
    trace = kernel.simulate(*arrays, mode="timing").trace
    return tuple(
        time_trace(trace, get(target), reorder=reorder).latency_us for reorder in (True, False)
    )


# trn1 has no queue of its own for stores: these two wait behind theirs.
BEHIND_STORES = {("lowrank_shared", "trn1"): 1.07, ("gated_mlp_up", "trn1"): 1.13}


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("matmul", "trn2"),
        ("lowrank", "trn2"),
        ("lowrank_shared", "trn1"),
        pytest.param("matmul", "trn1", marks=pytest.mark.long),
        pytest.param("lowrank", "trn1", marks=pytest.mark.long),
        pytest.param("lowrank_shared", "trn2", marks=pytest.mark.long),
        *(
            pytest.param(family, target, marks=pytest.mark.long)
            for family in ("gated_mlp_up", "gated_mlp")
            for target in ("trn1", "trn2")
        ),
    ],
)
def test_program_order_costs_at_most_a_twentieth(family, target):
    free, kept = latencies(build_kernel(spec_of(f"{family} {SPECS[family]}"), target), target)
    most = BEHIND_STORES.get((family, target), 1.05)
    assert kept <= most * free, f"{kept:.1f} us in program order, {free:.1f} us without it"


def test_what_a_target_cannot_do_is_refused():
    spec = spec_of(f"lowrank {SPECS['lowrank']}")
    schedule = choose(spec, "trn1")[0].schedule
    assert not schedule.own_queue
    with pytest.raises(SpecError, match="own_queue needs descriptors that the device writes"):
        dataclasses.replace(schedule, own_queue=True).check(spec, get("trn1"))


# Family lowrank_shared: what it means, what it refuses, and what reading x once is worth.

MIXED = spec_of(
    "lowrank_shared m=40 k=150 pairs=70:90,200 pairs=130:33 dtype=float32 x_layout=col "
    "v_layout=col bias=true,false,true activation=relu,identity,silu out_layout=row,col,col"
)


def qkv(m, ranks=(256, 128, 128)):
    """Return the attention projections of Llama-3.2-1B, factored."""
    q, k, v = ranks
    return spec_of(
        f"lowrank_shared m={m} k=2048 pairs={q}:2048 pairs={k}:512 pairs={v}:512 x_layout=col"
    )


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_every_result_has_its_own_epilogue_and_layout(target):
    kernel = build_kernel(MIXED, target)
    prove_right(kernel)
    shapes = [y.shape for y in kernel.simulate(*random_arrays(MIXED), mode="functional").outputs]
    assert shapes == [(40, 90), (200, 40), (33, 40)] == [y.shape for y in MIXED.outputs()]


@pytest.mark.parametrize("x_dtype", [None, "bfloat16"])
def test_fp8_sums_of_more_than_512_tokens_leave_psum_whole(x_dtype):
    """513 tokens move in two equal parts, with pairs of contraction tiles and with single ones."""
    spec = LowRankSharedSpec(
        m=513, k=384, pairs=((60, (100,)),), dtype="float8_e4m3", scales="channel",
        x_dtype=x_dtype, x_layout="col",
    )  # fmt: skip
    prove_right(build_kernel(spec, "trn2"))


def test_x_and_each_product_with_u_count_once():
    spec = LowRankSharedSpec(m=8, k=16, pairs=((4, (32, 32)), (2, 8)))
    assert spec.flops() == 2 * 8 * (4 * (16 + 32 + 32) + 2 * (16 + 8))
    weights = 16 * 4 + 4 * 32 * 2 + 16 * 2 + 2 * 8
    assert spec.minimal_hbm_bytes() == 2 * (8 * 16 + weights + 8 * (32 + 32 + 8))
    assert [(p.r, p.n) for p in spec.parts()] == [(4, 32), (4, 32), (2, 8)]
    assert spec.short() == "lowrank_shared m8 k16 4x32_32 2x8 bfloat16"
    assert len(qkv(8, (2048, 128, 128)).notes()) == 1


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"pairs": ()}, SpecError, "needs a v"),
        ({"pairs": ((4, ()),)}, SpecError, "needs a v"),
        ({"pairs": ((4.5, 8),)}, ShapeError, "r of pair 0 is 4.5"),
    ],
)
def test_bad_fields(fields, error, words):
    with pytest.raises(error, match=words):
        LowRankSharedSpec(**{"m": 8, "k": 16, "pairs": ((4, 32), (4, 32)), **fields})


@pytest.mark.parametrize(
    "ranks", [(256, 128, 128), pytest.param((768, 384, 384), marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "m", [1, 512, *(pytest.param(m, marks=pytest.mark.long) for m in (16, 128, 1024))]
)
def test_x_is_read_once_for_q_k_and_v(m, ranks):
    """And one kernel is predicted no slower than three."""
    spec = qkv(m, ranks)
    one = build_kernel(spec, "trn2").profile()
    three = [build_kernel(part, "trn2").profile() for part in spec.parts()]
    assert one.hbm_read_bytes + one.hbm_write_bytes == spec.minimal_hbm_bytes()
    assert one.latency_us <= sum(p.latency_us for p in three)
