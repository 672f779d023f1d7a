"""Few-bit weights with low-rank branches in one kernel, of MX blocks on trn3 and of fp8 on trn2."""

import dataclasses

import numpy as np
import pytest

from kernels.judge import first_kernel, prove_right, spec_of, within
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.choose import rank as rank_schedules
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.packed_formats import FORMATS, from_nki
from nmm_compiler.kernels.tiling import FOURS, rows_in_runs
from nmm_compiler.targets import get

QKV = "n=256,64,64 rank=32,16,0"


def line(base, changes):
    """Return a spec: one of a linear, of an MLP, of a linear of few inputs, and what it changes."""
    known = {"one": "linear m=1 k=1024 n=512 rank=64", "mlp": "linear_mlp m=1 k=512 n=1024 rank=32"}
    known["few"] = "linear m=1 k=384 n=512 rank=32"
    return spec_of(f"{known[base]} {changes}")


ONE, MLP = line("one", ""), line("mlp", "")


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("one", "rank=0"),
        ("one", "lnc=2 weight=mxfp8"),
        ("one", "k=2688 n=514 bias activation=gelu weight=mxfp8"),
        ("one", "m=3 x_layout=col rank=130 residual"),
        ("one", "m=130 k=640 weight=mxfp8_e5m2 out_layout=col lnc=2"),
        ("one", f"{QKV} bias=true,false,true"),
        ("one", f"{QKV} m=40 norm=layer"),
        ("one", f"{QKV} branch=fp8 m=40 norm=layer"),
        ("mlp", "branch=fp8 rank=32,72,16 lnc=2"),
        ("mlp", ""),
        ("mlp", "m=130 rank=32,8,0 weight=mxfp8 norm=rms"),
        ("mlp", "m=20 n=258 k=640 no_down out_layout=col"),
        # whole 2,048 features: the scales of half of the outputs are moved
        ("one", "k=4608 n=1024,264 rank=32,0 branch=fp8"),
        ("one", "m=3 k=2048 n=2048 weight=mxfp8 residual"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("one", "m=513 dtype=float16 norm=rms norm_gain"),
                ("one", "n=4096,1024,1024 rank=64,32,8 k=512"),
                ("one", "rank=130 branch=fp8 m=300 bias weight=mxfp8 lnc=2"),
                ("mlp", "lnc=2 residual"),
                ("mlp", "k=2048 n=2048 residual norm=rms branch=fp8"),
            )
        ),
    ],
)
def test_kernels_of_mx_blocks_are_right_against_float64(base, changes):
    spec = line(base, changes)
    kernel = first_kernel(spec, "trn3")
    assert kernel.schedule.plan(spec.share(kernel.schedule.split)).order == FOURS
    prove_right(kernel)
    counts = kernel.profile().instructions
    assert counts["tensor"]["nc_matmul_mx"]
    wide = [t.name for t in spec.inputs() if t.dtype == "float32"]
    assert wide == ["branch_scale"] * bool(spec.branch)


FP8_KERNELS = [
    ("one", "n=512,128 rank=64,16 activation=silu,identity"),
    ("few", "k=200 n=200 residual"),
    ("few", "m=64 out_layout=col"),
    ("few", "k=200 n=200,72 rank=20,0 branch=fp8"),
    ("few", "m=130 rank=100 branch=fp8 activation=gelu lnc=2"),
    ("few", "m=130 rank=100 bias activation=gelu x_layout=col"),
    ("few", "k=512 n=2048 rank=64"),
    ("few", "m=300 dtype=float16 activation=silu"),
    ("few", "m=3 lnc=2"),
    ("mlp", "k=200 n=300"),
    ("mlp", "m=300 lnc=2 rank=32,0,16"),
    ("mlp", "m=2 lnc=2 residual"),
]


@pytest.mark.parametrize(
    ("base", "changes", "target"),
    [(*row, "trn2") for row in FP8_KERNELS] + [(*row, "trn3") for row in FP8_KERNELS[::5]],
)
def test_fp8_weights_with_branches_are_one_kernel(base, changes, target):
    spec = line(base, f"weight=fp8 {changes}")
    prove_right(first_kernel(spec, target))


@pytest.mark.parametrize("rank", [32, 64])
def test_q_k_and_v_of_an_8b_model_reach_0_8_of_the_roofline(rank):
    spec = line("one", f"k=4096 n=4096,1024,1024 rank={rank} weight=mxfp4 branch=fp8 norm=rms")
    profile = build_kernel(spec, "trn3").profile()
    assert profile.latency_us < profile.roofline_us / 0.8


@pytest.mark.parametrize("m", [1, 5, 48])
@pytest.mark.parametrize("weight", ["fp8", "mxfp4"])
def test_rows_are_turned_with_their_bias_scales_and_residual(weight, m):
    """Of panels of 8 tiles and of two and a half: several tiles in a transpose, where they fit."""
    spec = CorrectedSpec(m=m, k=512, n=1344, bias=True, residual=True, weight=weight)
    target = "trn3" if weight == "mxfp4" else "trn2"
    every = (choice.schedule for choice in rank_schedules(spec, get(target)))
    rows = next(one for one in every if one.turned and one.block == 1024)
    prove_right(build_kernel(spec, target, schedule=rows))


def test_h_is_there_until_a_plain_weight_behind_its_factors_has_read_it():
    """Of 14,336 features it fills half of SBUF beside the panels of down."""
    spec = CorrectedMLPSpec(m=128, k=4096, n=14336, rank=32, weight="fp8")
    for choice in rank_schedules(spec, get("trn3")):
        held = choice.schedule.buffers(choice.schedule.plan(spec.layer))
        assert held["h"] == (1, 3, 2 * 128 * 14336 // 128)


def test_x_is_quantized_once_and_every_product_of_a_step_is_in_one_sum():
    counts = build_kernel(line("one", QKV), "trn3").profile().instructions
    assert counts["vector"]["quantize_mx"] == 1
    counts = build_kernel(MLP, "trn3").profile().instructions
    assert counts["vector"]["quantize_mx"] == 2  # x, and h


def test_the_reference_is_of_the_weight_multiplied_out():
    spec = line("one", "bias weight=mxfp8")
    arrays = random_arrays(spec)
    named = dict(zip([t.name for t in spec.inputs()], arrays, strict=True))
    w = from_nki(named["w"], named["w_scale"], FORMATS["mxfp8"]).astype(np.float64)
    x, stored, v, bias = (named[name].astype(np.float64) for name in ("x", "u", "v", "bias"))
    u = np.empty_like(stored)
    u[rows_in_runs(spec.k, "fours")] = stored
    np.testing.assert_allclose(spec.reference(*arrays), x @ w + x @ u @ v + bias, rtol=1e-12)
    size = named["w"].nbytes + named["w_scale"].nbytes
    assert size == FORMATS["mxfp8"].stored_bytes(spec.n, spec.k, 4)


@pytest.mark.parametrize("spec", [ONE, MLP], ids=["one", "mlp"])
@pytest.mark.parametrize("lost", ["a block", "its scale", "the branch", "all"])
def test_the_bound_finds_what_is_lost(spec, lost):
    arrays = random_arrays(spec)
    named = {t.name: a.copy() for t, a in zip(spec.inputs(), arrays, strict=True)}
    last = "down_" if spec is MLP else ""
    if lost == "a block":
        named[f"{last}w"][:64] = 0
    elif lost == "its scale":
        named[f"{last}w_scale"][:] += 1
    elif lost == "the branch":
        named[f"{last}v"][:] = 0
    got = spec.reference(*named.values()) * (lost != "all")
    assert not within(spec, arrays, got)
    assert within(spec, arrays, spec.reference(*arrays))


def test_beside_fp8_weights_the_scales_multiply_both_products():
    spec = line("one", "bias weight=fp8")
    arrays = random_arrays(spec)
    named = {t.name: np.asarray(a, np.float64) for t, a in zip(spec.inputs(), arrays, strict=True)}
    assert [t.dtype for t in spec.inputs()][:4] == ["bfloat16"] * 3 + ["float8_e4m3"]
    sums = named["x"] @ named["w"] + named["x"] @ named["u"] @ named["v"]
    want = sums * named["w_scale"] + named["bias"]
    np.testing.assert_allclose(spec.reference(*arrays), want, rtol=1e-12)


def test_the_roofline_and_the_bytes_are_those_of_the_format():
    spec = CorrectedSpec(m=1, k=2048, n=8192, rank=64)
    weight = 2048 * 8192 // 2 + 2048 * 8192 // 32
    assert spec.minimal_hbm_bytes() == weight + 2 * 64 * (2048 + 8192) + 2 * (2048 + 8192)
    assert spec.flops_by_dtype()["mxfp4"] == 2 * 2048 * 8192
    separate, (dense,) = spec.as_products()
    assert [one.short().split()[0] for one in separate] == ["matmul", "matmul", "linear"]
    assert dense.dtype == "bfloat16"


def test_a_block_that_cuts_the_512s_of_h_is_refused_and_not_tried():
    spec = line("mlp", "m=85 k=640")
    made = [choice.schedule for choice in rank_schedules(spec, get("trn3"))]
    assert made
    assert not any(schedule.block % 512 for schedule in made)
    cut = dataclasses.replace(made[0], block=256)
    with pytest.raises(SpecError, match=r"block is 256; .* multiple of 512"):
        cut.check(spec, get("trn3"))
