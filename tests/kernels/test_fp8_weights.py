"""fp8 weights beside an x of 16 bits or of fp8: operands, kernels against float64, double rows."""

import numpy as np
import pytest
from judge import prove_right

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.linear.corrected import CorrectedSpec
from nmm_compiler.kernels.linear.spec import LinearSpec as ProductSpec
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.simulator.run import ArraySpec

FP8 = "float8_e4m3"
# Families whose weights alone are fp8: dtype is that of x, weight the format of w.
CORRECTED = [name for name, one in FAMILIES.items() if issubclass(one.spec_class, CorrectedSpec)]
PRODUCTS = [
    name
    for name, one in FAMILIES.items()
    if issubclass(one.spec_class, ProductSpec)
    and FP8 in one.spec_class.dtypes
    and name not in CORRECTED
]


def spec_of(family, m, **formats):
    """A small spec with three tiles of k, two of the rank; one of a rank beside a weight."""
    sizes = {"m": m, "k": 384, "n": 640}
    if family in CORRECTED:
        dtype = formats.pop("x_dtype")
        return FAMILIES[family].spec_class(**sizes, rank=100, weight="fp8", dtype=dtype, **formats)
    if family == "lowrank_shared":
        sizes = {"m": m, "k": 384, "pairs": ((256, (640, 128)), (130, (256,)))}
    elif family != "matmul":
        sizes["r"] = 256
    return FAMILIES[family].spec_class(**sizes, dtype=FP8, scales="channel", **formats)


def passes(kernel):
    """The number of TensorE's passes over two rows, and over one."""
    arrays = [ArraySpec(t.shape, t.dtype) for t in kernel.spec.inputs()]
    trace = kernel.simulate(*arrays, mode="timing").trace
    modes = [
        str(i.attributes.get("perf_mode"))
        for i in trace.instructions
        if i.op == "nc_matmul" and any("float8" in read.dtype for read in i.reads)
    ]
    double = sum("double_row" in mode for mode in modes)
    return double, len(modes) - double


@pytest.mark.parametrize(
    ("x_dtype", "target"),
    [
        ("bfloat16", "trn2"),
        ("float16", "trn3"),
        pytest.param("bfloat16", "trn3", marks=pytest.mark.long),
        pytest.param("float16", "trn2", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("family", [*PRODUCTS, *CORRECTED])
def test_an_x_of_sixteen_bits_equals_float64(family, x_dtype, target):
    spec = spec_of(family, 5, x_dtype=x_dtype)
    assert spec.inputs()[0].dtype == x_dtype
    assert "x_scale" not in {tensor.name for tensor in spec.inputs()}
    assert {tensor.dtype for tensor in spec.outputs()} == {x_dtype}
    kernel = build_kernel(spec, target)
    prove_right(kernel)
    assert passes(kernel)[0] == 0


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("family", PRODUCTS)
def test_products_of_fp8_numbers_take_two_rows_a_pass(family, target):
    """k has three tiles, a pair and one; intermediates are bf16."""
    spec = spec_of(family, 130)
    kernel = build_kernel(spec, target)
    prove_right(kernel)
    double, single = passes(kernel)
    assert kernel.schedule.double_row
    assert double > 0
    assert single > 0


def test_fp8_shared_kernels_are_launched_apart_with_their_scales():
    spec = spec_of("lowrank_shared", 8)
    arrays = dict(zip((t.name for t in spec.inputs()), random_arrays(spec), strict=True))
    whole = spec.reference(*arrays.values())
    for (part, names), want in zip(spec.parts(), whole, strict=True):
        np.testing.assert_array_equal(part.reference(*(arrays[name] for name in names)), want)


def test_the_products_of_a_16_bit_x_count_at_its_rate():
    sizes = {"m": 512, "k": 1024, "r": 256, "n": 1024}
    mixed = LowRankSpec(**sizes, dtype=FP8, x_dtype="bfloat16")
    assert set(mixed.flops_by_dtype()) == {"bfloat16"}
    plain = LowRankSpec(**sizes)
    weights = 256 * 2048
    scales = 8  # one fp32 number for each weight
    assert plain.minimal_hbm_bytes() - mixed.minimal_hbm_bytes() == weights - scales


def test_a_plain_spec_says_nothing_of_x():
    same = LowRankSpec(m=8, k=16, r=4, n=32, x_dtype="bfloat16")
    assert same == LowRankSpec(m=8, k=16, r=4, n=32)
    assert "x_dtype" not in same.to_dict()
