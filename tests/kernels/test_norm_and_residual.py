"""The norm of x before the first products and the residual behind the last, in every family."""

import dataclasses

import numpy as np
import pytest

from kernels.judge import first_kernel, in_float64, prove_every_split, prove_right, spec_of, within
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.choose import choose
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.targets import get

RMS = "norm=rms norm_gain norm_offset=1.0 norm_eps=1e-5"
LAYER = "norm=layer norm_gain norm_bias norm_eps=1e-5"
# ragged contractions and outputs, each family
SMALL = {
    "matmul": "m=20 k=300 n=200",
    "lowrank": "m=20 k=300 r=140 n=200",
    "lowrank_shared": "m=20 k=300 pairs=100:200 pairs=60:130,64",
    "gated_mlp_up": "m=20 k=300 n=200 r=60",
    "gated_mlp": "m=20 k=300 n=200 r=60",
}
# MX blocks, which trn3 multiplies: a norm takes whole 512s of them
FEW_BITS = {"linear": "m=20 k=512 n=200 rank=30", "linear_mlp": "m=20 k=512 n=512 rank=30,0,20"}
EVERY = SMALL | FEW_BITS
# fp8 weights, x of 16 bits
FP8 = "dtype=float8_e4m3 x_dtype=bfloat16 scales=channel"
OF_FP8 = {
    **{family: f"{fields} {FP8}" for family, fields in SMALL.items()},
    "linear": "m=20 k=300 n=200 rank=30 weight=fp8",
    "linear_mlp": "m=20 k=300 n=200 rank=30,0,20 weight=fp8",
}


def _long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


def ended(family, fields, norm):
    """Return a spec with a norm, and with a residual where its family adds one."""
    spec = spec_of(f"{family} {fields} {norm}")
    return dataclasses.replace(spec, residual=spec.adds_residual)


EACH = [
    *((*item, norm, "trn2") for item in SMALL.items() for norm in (RMS, LAYER)),
    # in turns: what a norm does has no branch on the format of the weights
    *((*item, norm, "trn2") for item, norm in zip(OF_FP8.items(), [RMS, LAYER] * 4, strict=False)),
    *((*item, norm, "trn3") for item, norm in zip(FEW_BITS.items(), (LAYER, RMS), strict=True)),
    *(_long(*item, norm, "trn1") for item in SMALL.items() for norm in (RMS, LAYER)),
    *(_long(*item, norm, "trn3") for item in SMALL.items() for norm in (RMS, LAYER)),
]


@pytest.mark.parametrize(("family", "fields", "norm", "target"), EACH)
def test_every_family_and_format(family, fields, norm, target):
    spec = ended(family, fields, norm)
    dtypes = {tensor.name: tensor.dtype for tensor in spec.inputs()}
    assert dtypes["norm_gain"] == dtypes["x"] == "bfloat16"
    assert ("residual" in dtypes) == (family not in ("lowrank_shared", "gated_mlp_up"))
    prove_right(first_kernel(spec, target))


@pytest.mark.parametrize("dialect", ["nki", "neuronxcc"])
def test_a_row_of_whole_tiles_takes_its_residual_in_both_dialects(dialect):
    """TensorE turns it, 128 outputs a partition, and the residual lies so, too."""
    spec = spec_of("lowrank m=1 k=384 r=64 n=512 residual")
    prove_right(build_kernel(spec, "trn1", dialect=dialect))


@pytest.mark.parametrize("family", ["matmul", *map(_long, list(SMALL)[1:])])
def test_two_cores(family):
    """The norm takes all features of x, so that no core has half of its rows."""
    sizes = {"lowrank_shared": "m=20 pairs=128:256"}.get(family, f"{SMALL[family]} n=256")
    prove_every_split(ended(family, f"{sizes} k=512 lnc=2", RMS), {"tokens", "weights"})


def test_a_loop_on_the_device_takes_its_tokens_of_the_residual():
    spec = ended("lowrank", "m=300 k=128 r=64 n=128", RMS)
    schedule = choose(spec, "trn2")[0].schedule
    looped = dataclasses.replace(schedule, m_block=128).in_loop(spec.layer, get("trn2"))
    looped.check(spec, get("trn2"))
    kernel = build_kernel(spec, "trn2", looped)
    assert "fori_loop" in kernel.source
    prove_right(kernel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_norm_or_no_residual_fails(dtype):
    """A mean of one feature less, no gain, no mean, no residual: each leaves the bound."""
    spec = ended("matmul", f"m=20 k=128 n=200 dtype={dtype}", LAYER)
    arrays = random_arrays(spec)
    want = spec.reference(*arrays)
    x, w, gain, bias, residual = in_float64(arrays)
    centered = x - x.mean(1, keepdims=True)

    def result(value, factor, size=128):
        unit = value / np.sqrt((value**2).sum(1, keepdims=True) / size + 1e-5)
        return (unit * factor + bias) @ w + residual

    np.testing.assert_allclose(result(centered, gain), want, rtol=1e-9, atol=1e-12)
    wrong = [result(centered, 1.0), result(x, gain), want - residual]
    wrong += [result(centered, gain, 127)] * (dtype == "float32")
    assert not any(within(spec, arrays, y) for y in wrong)


def test_large_means_are_within_the_bound():
    """The mean is taken off before the squares are summed, so that nothing cancels in them."""
    spec = spec_of(f"matmul m=4 k=256 n=128 dtype=float32 {LAYER}")
    arrays = list(random_arrays(spec))
    arrays[0] = arrays[0] + np.float32(1000.0)
    (got,) = build_kernel(spec, "trn2").simulate(*arrays, mode="functional").outputs
    want = spec.reference(*arrays)
    assert (np.abs(got - want) <= spec.error_bound(*arrays)).all()
    assert np.abs(got - want).max() < 2e-3  # a sum of squares of 1000 would lose 0.06


@pytest.mark.parametrize("family", EVERY)
def test_plain_specs_keep_their_json(family):
    plain = spec_of(f"{family} {EVERY[family]}")
    left_out = {"norm", "norm_eps", "residual", "x_dtype", "lnc", "tp", "tp_axis"}
    assert not left_out & set(plain.to_dict())
    spec = ended(family, EVERY[family], RMS)
    assert type(spec).from_dict(spec.to_dict()) == spec
    assert {"norm", "norm_gain", "norm_offset", "norm_eps"} <= set(spec.to_dict())


@pytest.mark.long
@pytest.mark.parametrize("target", ["trn2", "trn3"])
def test_one_token_costs_at_most_three_microseconds_more(target):
    """Shapes of Llama 3.2 1B, the best schedule of each."""
    for family, fields in (
        ("matmul", "n=3072"),
        ("lowrank", "r=816 n=2048"),
        ("lowrank_shared", "pairs=816:2048 pairs=320:512 pairs=320:512"),
        ("gated_mlp", "n=8192"),
        ("gated_mlp", "n=8192 r=1280"),
    ):
        fields = f"m=1 k=2048 {fields}"
        both = spec_of(f"{family} {fields}"), ended(family, fields, RMS)
        apart, inside = (choose(spec, target)[0].simulated_us for spec in both)
        assert inside - apart <= 3.0, (family, fields, apart, inside)


def test_every_family_of_products_is_here():
    assert set(EVERY) == set(FAMILIES) - {"attention", "adapters", "experts"}


# A function between the two products of `lowrank`: an activation, with a bias, or the RMS norm.

SIZES = f"lowrank {SMALL['lowrank']}"


@pytest.mark.parametrize(
    ("inner", "target"),
    [
        *((f"inner_activation={name}", "trn1") for name in ACTIVATIONS),
        *((f"inner_activation={name} inner_bias", "trn2") for name in ACTIVATIONS),
        ("inner_norm activation=silu", "trn1"),
        ("inner_norm activation=silu", "trn3"),
    ],
)
def test_any_activation_norm_and_bias_between_the_products(inner, target):
    prove_right(first_kernel(spec_of(f"{SIZES} bias {inner}"), target))


def test_no_dense_product_stands_for_it():
    spec = spec_of(f"{SIZES} inner_activation=relu")
    apart, dense = spec.as_products()
    assert apart == dense
    assert [(p.activation, p.k, p.n) for p in apart] == [
        ("relu", spec.k, spec.r),
        ("identity", spec.r, spec.n),
    ]


@pytest.mark.parametrize(("m", "out_layout"), [(1, "row"), (20, "col"), (300, "row")])
@pytest.mark.parametrize(("r", "dtype"), [(60, "bfloat16"), (140, "float32"), (384, "bfloat16")])
def test_rms_norm_between_the_products(m, r, dtype, out_layout):
    fields = f"m={m} k=300 r={r} n=256 dtype={dtype} out_layout={out_layout} inner_eps=1e-3"
    prove_right(first_kernel(spec_of(f"lowrank {fields} inner_norm")))


def test_two_cores_that_share_the_weights_share_the_norm():
    spec = spec_of("lowrank m=3 k=1024 r=256 n=512 inner_norm lnc=2")
    prove_every_split(spec, {"weights"})


def test_a_kernel_with_another_norm_fails():
    spec = spec_of("lowrank m=20 k=300 r=128 n=200 inner_norm dtype=float32")
    arrays = random_arrays(spec)
    x, u, v, gain = in_float64(arrays)
    p = x @ u
    ones = (p / np.sqrt((p * p).mean(1, keepdims=True) + 1e-6)) @ v  # without the gain
    off = (p / np.sqrt((p * p).sum(1, keepdims=True) / 127 + 1e-6) * gain) @ v  # a mean of 127
    assert not any(within(spec, arrays, wrong) for wrong in (ones, off))
