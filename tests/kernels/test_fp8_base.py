"""An fp8 weight with plain low-rank factors beside it, in one kernel: x w and p v are one sum."""

import dataclasses

import numpy as np
import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove, random_arrays
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.linear.specs import LowRankSpec

BASE = LowRankSpec(
    m=16, k=384, r=32, n=512, scales="channel", dtype="float8_e4m3", x_dtype="bfloat16", base=True
)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize(
    "fields",
    [
        {"m": 1, "r": 8},
        {"m": 1, "k": 200, "r": 64, "n": 200, "scales": "tensor", "residual": True},
        {"m": 64, "w_layout": "col", "out_layout": "col", "scale": 2.0},
        {"m": 130, "r": 200, "bias": True, "activation": "gelu", "x_layout": "col"},
        {"m": 300, "x_dtype": "float16", "activation": "silu", "scales": "tensor"},
        {"m": 3, "lnc": 2},
        {"m": 256, "lnc": 2, "bias": True, "out_layout": "col"},
    ],
    ids=str,
)
def test_the_kernel_is_right_against_float64(target, fields):
    assert prove(build_kernel(dataclasses.replace(BASE, **fields), target)).passed


def test_the_reference_is_scales_times_the_sum_of_both_products():
    spec = dataclasses.replace(BASE, bias=True, scale=3.0)
    arrays = random_arrays(spec)
    named = {t.name: np.asarray(a, np.float64) for t, a in zip(spec.inputs(), arrays, strict=True)}
    assert [t.dtype for t in spec.inputs()][:4] == ["bfloat16"] * 3 + ["float8_e4m3"]
    assert "u_scale" not in named
    sums = named["x"] @ named["w"] + 3.0 * named["x"] @ named["u"] @ named["v"]
    np.testing.assert_allclose(
        spec.reference(*arrays), sums * named["w_scale"] + named["bias"], rtol=1e-12
    )


def test_its_bytes_are_one_for_w_and_two_for_the_factors():
    weights = 384 * 512 + 2 * (384 * 32 + 32 * 512) + 4 * 512
    assert BASE.minimal_hbm_bytes() == weights + 2 * 16 * (384 + 512)
    separate, (dense,) = BASE.as_products()
    assert dense.dtype == "float8_e4m3"
    assert [one.dtype for one in separate] == ["bfloat16", "bfloat16", "float8_e4m3"]


@pytest.mark.parametrize(
    "fields",
    [{"x_dtype": None}, {"u_layout": "col"}, {"v_layout": "col"}, {"tp": 2, "tp_axis": "columns"}],
    ids=str,
)
def test_what_no_kernel_computes_is_refused_with_the_way_out(fields):
    with pytest.raises(NmmError, match="pass x_dtype='bfloat16'"):
        dataclasses.replace(BASE, **fields)
