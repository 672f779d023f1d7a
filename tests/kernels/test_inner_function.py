"""A function between the two products of `lowrank`: an activation, with a bias, or the RMS norm."""

import dataclasses

import numpy as np
import pytest
from judge import in_float64, prove_every_split, prove_right, within

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.kernels.linear.specs import LowRankSpec

SIZES = {"m": 20, "k": 300, "r": 140, "n": 200}


@pytest.mark.parametrize(
    ("inner", "target"),
    [
        *(
            ({"inner_activation": activation, "inner_bias": bias}, target)
            for activation in ACTIVATIONS
            for bias in (False, True)
            for target in ("trn1", "trn2")
        ),
        ({"inner_norm": True, "activation": "silu"}, "trn1"),
        ({"inner_norm": True, "activation": "silu"}, "trn3"),
    ],
    ids=str,
)
def test_any_activation_norm_and_bias_between_the_products(inner, target):
    kernel = build_kernel(LowRankSpec(**SIZES, bias=True, **inner), target)
    prove_right(kernel)


def test_a_kernel_without_the_function_fails():
    spec = LowRankSpec(**SIZES, inner_activation="relu", dtype="float32")
    arrays = random_arrays(spec)
    plain = dataclasses.replace(spec, inner_activation="identity").reference(*arrays)
    assert not within(spec, arrays, plain)
    assert within(spec, arrays, spec.reference(*arrays))


def test_no_dense_product_stands_for_it():
    spec = LowRankSpec(**SIZES, inner_activation="relu")
    apart, dense = spec.as_products()
    assert apart == dense
    assert [(p.activation, p.k, p.n) for p in apart] == [
        ("relu", spec.k, spec.r),
        ("identity", spec.r, spec.n),
    ]


@pytest.mark.parametrize("out_layout", ["row", "col"])
@pytest.mark.parametrize("m", [1, 20, 300])
@pytest.mark.parametrize(("r", "dtype"), [(60, "bfloat16"), (140, "float32"), (384, "bfloat16")])
def test_rms_norm_between_the_products(m, r, dtype, out_layout):
    spec = LowRankSpec(
        m=m, k=300, r=r, n=256, dtype=dtype, out_layout=out_layout, inner_norm=True, inner_eps=1e-3
    )
    prove_right(build_kernel(spec, "trn2"))


def test_two_cores_that_share_the_weights_share_the_norm():
    spec = LowRankSpec(m=3, k=1024, r=256, n=512, inner_norm=True, lnc=2)
    prove_every_split(spec, {"weights"})


def test_a_kernel_with_another_norm_fails():
    spec = LowRankSpec(m=20, k=300, r=128, n=200, inner_norm=True, dtype="float32")
    arrays = random_arrays(spec)
    x, u, v, gain = in_float64(arrays)
    p = x @ u
    ones = (p / np.sqrt((p * p).mean(1, keepdims=True) + 1e-6)) @ v  # without the gain
    off = (p / np.sqrt((p * p).sum(1, keepdims=True) / 127 + 1e-6) * gain) @ v  # a mean of 127
    assert not any(within(spec, arrays, wrong) for wrong in (ones, off))


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"inner_activation": "rleu"}, UnknownNameError, "did you mean 'relu'"),
        ({"inner_activation": "relu", "scale": 2.0}, SpecError, "fold the scale into v"),
        ({"inner_bias": True, "dtype": "float8_e4m3"}, SpecError, "use bfloat16"),
        ({"inner_norm": True, "inner_bias": True}, SpecError, "drop them"),
        ({"inner_norm": True, "inner_eps": -1.0}, SpecError, "0 or more"),
    ],
)
def test_what_does_not_go_together(fields, error, words):
    with pytest.raises(error, match=words):
        LowRankSpec(**SIZES, **fields)
