"""Family lowrank_shared: what it means, what it refuses, and what reading x once is worth."""

import pytest
from judge import prove_right, spec_of

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels.linear.specs import LowRankSharedSpec

LONG = pytest.mark.long
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
        ({"pairs": "4x32"}, SpecError, "pair '4x32' is not a rank"),
        ({"pairs": ((4, 0),)}, ShapeError, "n of pair 0 is 0"),
        ({"pairs": ((4.5, 8),)}, ShapeError, "r of pair 0 is 4.5"),
        ({"bias": (True,)}, ShapeError, "bias has 1 values for 2 results"),
        ({"activation": ("silu", "sillu")}, UnknownNameError, "did you mean 'silu'"),
        ({"out_layout": ("row", "rows")}, UnknownNameError, "did you mean 'row'"),
    ],
)
def test_bad_fields(fields, error, words):
    with pytest.raises(error, match=words):
        LowRankSharedSpec(**{"m": 8, "k": 16, "pairs": ((4, 32), (4, 32)), **fields})


@pytest.mark.parametrize("ranks", [(256, 128, 128), pytest.param((768, 384, 384), marks=LONG)])
@pytest.mark.parametrize("m", [1, 512, *(pytest.param(m, marks=LONG) for m in (16, 128, 2048))])
def test_x_is_read_once_for_q_k_and_v(m, ranks):
    """One kernel reads x once where three read it three times, and is predicted no slower."""
    spec = qkv(m, ranks)
    one = build_kernel(spec, "trn2").profile()
    three = [build_kernel(part, "trn2").profile() for part in spec.parts()]
    moved = one.hbm_read_bytes + one.hbm_write_bytes
    apart = sum(p.hbm_read_bytes + p.hbm_write_bytes for p in three)
    x = 2 * m * spec.k
    assert apart - moved >= 2 * x
    assert moved == spec.minimal_hbm_bytes()
    assert one.latency_us <= sum(p.latency_us for p in three)
