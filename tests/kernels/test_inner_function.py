"""A function between the two products of `lowrank`: an activation, with a bias, or the RMS norm."""

import dataclasses

import numpy as np
import pytest
from judge import in_float64, prove_every_split, within

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import prove, random_arrays
from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.kernels.error_bounds import activation_value
from nmm_compiler.kernels.linear.specs import LowRankSpec

SIZES = {"m": 20, "k": 300, "r": 140, "n": 200}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_any_activation_and_bias_between_the_products(activation, bias, target):
    spec = LowRankSpec(**SIZES, inner_activation=activation, inner_bias=bias, bias=True)
    kernel = build_kernel(spec, target)
    proof = prove(kernel)
    assert proof.passed, f"{proof}\n{kernel.schedule}"


def test_the_reference_is_two_layers_with_a_function_between():
    spec = LowRankSpec(
        m=3, k=5, r=4, n=2, dtype="float32", inner_activation="gelu", inner_bias=True, bias=True
    )
    assert [t.name for t in spec.inputs()] == ["x", "u", "v", "bias", "inner_bias"]
    arrays = random_arrays(spec, seed=1)
    x, u, v, bias, inner = (np.asarray(a, dtype=np.float64) for a in arrays)
    want = activation_value(x @ u + inner, "gelu") @ v + bias
    np.testing.assert_allclose(spec.reference(*arrays), want, rtol=1e-13)


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
    proof = prove(build_kernel(spec, "trn2"))
    assert proof.passed, proof


@pytest.mark.parametrize("target", ["trn1", "trn3"])
def test_rms_norm_with_bias_and_activation_behind(target):
    spec = LowRankSpec(**SIZES, inner_norm=True, bias=True, activation="silu")
    assert prove(build_kernel(spec, target)).passed


def test_two_cores_that_share_the_weights_share_the_norm():
    spec = LowRankSpec(m=3, k=1024, r=256, n=512, inner_norm=True, lnc=2)
    prove_every_split(spec, {"weights"})


def test_the_norm_of_the_reference_is_that_of_float64():
    spec = LowRankSpec(m=3, k=5, r=4, n=2, dtype="float32", inner_norm=True, inner_eps=0.5)
    assert [t.name for t in spec.inputs()] == ["x", "u", "v", "inner_gain"]
    arrays = random_arrays(spec, seed=1)
    x, u, v, gain = (np.asarray(a, dtype=np.float64) for a in arrays)
    p = x @ u
    want = (p / np.sqrt((p * p).mean(1, keepdims=True) + 0.5) * gain) @ v
    np.testing.assert_allclose(spec.reference(*arrays), want, rtol=1e-13)


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
