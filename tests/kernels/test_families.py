"""Every family: emitted source, run in the simulator, equals float64 within the derived bound."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kernels.judge import first_kernel, prove_right, several, within
from kernels.specs import SPECS
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.check_against_float64 import compare, random_arrays
from nmm_compiler.codegen.choose import rank, refusal
from nmm_compiler.errors import ShapeError, UnknownNameError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.linear.corrected import CorrectedSpec
from nmm_compiler.kernels.linear.spec import LinearSpec as ProductSpec
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.simulator.run import ArraySpec
from nmm_compiler.targets import get

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
FP8 = "float8_e4m3"
# Families whose specs take sizes as m, k, n.
PRODUCTS = [
    name
    for name, family in FAMILIES.items()
    if issubclass(family.spec_class, ProductSpec)
    and not issubclass(family.spec_class, CorrectedSpec)
]
# Families whose weights an index chooses: of plain formats, and not on trn1.
GROUPED = ("adapters", "experts")
FORMATTED = [family for family in PRODUCTS if family not in ("lowrank_shared", *GROUPED)]


def check_any_schedule(family, data):
    """Draw a spec, a target and one of its legal schedules; prove the emitted kernel."""
    spec = data.draw(SPECS[family], label="spec")
    targets = [name for name in ("trn1", "trn2", "trn3") if refusal(spec, get(name)) is None]
    target = data.draw(st.sampled_from(targets), label="target")
    legal = rank(spec, get(target))
    place = data.draw(st.integers(0, min(len(legal), 24) - 1), label="schedule")
    schedule = legal[place].schedule
    kernel = build_kernel(spec, target, schedule)
    prove_right(kernel, seed=data.draw(st.integers(0, 99), label="seed"))


@pytest.mark.parametrize("family", list(FAMILIES))
@given(data=st.data())
@settings(max_examples=3, deadline=None, suppress_health_check=_SLOW)
def test_emitted_source_equals_float64(family, data):
    check_any_schedule(family, data)


@pytest.mark.long
@pytest.mark.parametrize("family", list(FAMILIES))
@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=_SLOW)
def test_many_specs_equal_float64(family, data):
    check_any_schedule(family, data)


def small(family, m=8, k=16, r=4, n=32, **fields):
    """Return a small spec of any family of products."""
    sizes = {
        "matmul": {"n": n},
        "lowrank_shared": {"pairs": ((r, n),)},
        "adapters": {"n": n, "r": r, "groups": 2},
    }.get(family, {"n": n, "r": r})
    return FAMILIES[family].spec_class(**{"m": m, "k": k, **sizes, **fields})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", FP8])
@pytest.mark.parametrize("family", [*FORMATTED, "lowrank_shared"])
def test_zeros_and_a_lost_tile_fail_in_any_result(family, dtype):
    """Behind any chain of products: the bound of each element alone would let zeros pass."""
    pairs = {"pairs": ((200, (290, 260)), (40, 270))} if family == "lowrank_shared" else {}
    spec = small(family, 16, 300, 200, 290, dtype=dtype, **pairs)
    arrays = random_arrays(spec)
    want = several(spec.reference(*arrays))
    for j, lost in itertools.product(range(len(want)), (np.s_[:], np.s_[:, :128])):
        wrong = tuple(y.copy() for y in want)
        wrong[j][lost] = 0
        assert not within(spec, arrays, wrong)
    assert within(spec, arrays, want)


@pytest.mark.parametrize("family", PRODUCTS)
def test_a_wrong_result_fails_its_bound(family):
    """The bound is tight enough that one missing term of a contraction is seen."""
    spec = small(family, 40, 150, 70, 90, dtype="float32", activation="identity")
    arrays = list(random_arrays(spec))
    wrong = [a.copy() for a in arrays]
    wrong[1][-1] = 0
    got, want, bound = spec.reference(*wrong), spec.reference(*arrays), spec.error_bound(*arrays)
    assert not compare("wrong", several(got), several(want), several(bound)).passed


SMALL = {"m": 8, "k": 16, "n": 32}
GATED, PAIRS = GatedMLPSpec(**SMALL, r=4), LowRankSharedSpec(m=8, k=16, pairs=("4:32", "2:8,8"))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (MatmulSpec(**SMALL, dtype=FP8),
         MatmulSpec(**SMALL, dtype=FP8, scales="tensor", out_dtype="bfloat16"), True),
        (MatmulSpec(**SMALL), MatmulSpec(**SMALL, x_dtype="bfloat16"), True),
        (GATED, GatedMLPSpec(**SMALL, gate_r=4, up_r=4, down_r=4), True),
        (GATED, GatedMLPSpec(**SMALL, r=4, down_r=0), False),
        (PAIRS, dataclasses.replace(PAIRS, pairs=((4, 32), (2, (8, 8))), bias=(False,) * 3), True),
        (PAIRS, dataclasses.replace(PAIRS, pairs=((4, (32,)), (2, (8, 8))), out_layout="row"),
         True),
    ],
)  # fmt: skip
def test_what_says_the_same_compares_equal(one, other, equal):
    assert (one == other) is equal


def test_specs_count_their_work():
    spec = small("lowrank", bias=True)
    assert spec.flops() == 2 * 8 * 4 * (16 + 32)
    assert spec.minimal_hbm_bytes() == 2 * (8 * 16 + 16 * 4 + 4 * 32 + 32 + 8 * 32)
    assert small("gated_mlp").flops() == 2 * 8 * 4 * 3 * (16 + 32)
    assert GatedMLPUpSpec(m=8, k=16, n=32).flops() == 2 * 2 * 8 * 16 * 32
    target = get("trn2")
    sizes = {"m": 4096, "k": 4096, "r": 1024, "n": 4096, "x_layout": "col"}
    bf16 = LowRankSpec(**sizes).roofline_us(target)
    assert LowRankSpec(**sizes, dtype=FP8).roofline_us(target) == 0.75 * bf16
    mixed = LowRankSpec(**sizes, dtype=FP8, x_dtype="bfloat16")
    assert set(mixed.flops_by_dtype()) == {"bfloat16"}
    scales = 8  # one fp32 number for each weight
    less = LowRankSpec(**sizes).minimal_hbm_bytes() - mixed.minimal_hbm_bytes()
    assert less == 1024 * 8192 - scales


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("activation", "sillu", UnknownNameError, "did you mean 'silu'"),
        ("dtype", "bfloat", UnknownNameError, "did you mean 'bfloat16'"),
        ("x_layout", "column", UnknownNameError, "x_layout"),
        ("m", 0, ShapeError, "m is 0"),
        ("k", 2.0, ShapeError, "k is 2.0"),
    ],
)
@pytest.mark.parametrize("family", PRODUCTS)
def test_bad_fields(family, field, value, error, words):
    with pytest.raises(error, match=words):
        small(family, **{field: value})


def test_arrays_of_the_wrong_shape():
    spec = MatmulSpec(m=8, k=16, n=32)
    x, w = random_arrays(spec)
    with pytest.raises(ShapeError, match=r"w has shape \(32, 16\); pass \(16, 32\)"):
        spec.reference(x, w.T)
    with pytest.raises(ShapeError, match="takes 2 arrays"):
        spec.reference(x)


# fp8 weights beside an x of 16 bits or of fp8: operands, kernels against float64, double rows.

# Families whose weights alone are fp8: dtype is that of x, weight the format of w.
CORRECTED = [name for name, one in FAMILIES.items() if issubclass(one.spec_class, CorrectedSpec)]
OF_FP8 = [name for name in PRODUCTS if FP8 in FAMILIES[name].spec_class.dtypes]


def of_tiles(family, m, **formats):
    """Return a spec with three tiles of k, two of the rank; one of a rank beside a weight."""
    if family in CORRECTED:
        own = {"rank": 100, "weight": "fp8", "dtype": formats.pop("x_dtype")}
        return FAMILIES[family].spec_class(m=m, k=384, n=640, **own, **formats)
    if family == "lowrank_shared":
        formats["pairs"] = ((256, (640, 128)), (130, (256,)))
    return small(family, m, 384, 256, 640, dtype=FP8, scales="channel", **formats)


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
@pytest.mark.parametrize("family", [*OF_FP8, *CORRECTED])
def test_an_x_of_sixteen_bits_equals_float64(family, x_dtype, target):
    spec = of_tiles(family, 5, x_dtype=x_dtype)
    assert spec.inputs()[0].dtype == x_dtype
    assert {tensor.dtype for tensor in spec.outputs()} == {x_dtype}
    kernel = first_kernel(spec, target)
    prove_right(kernel)
    assert passes(kernel)[0] == 0


@pytest.mark.parametrize("target", ["trn2", pytest.param("trn3", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", OF_FP8)
def test_products_of_fp8_numbers_take_two_rows_a_pass(family, target):
    """k has three tiles, a pair and one; intermediates are bf16."""
    spec = of_tiles(family, 130)
    kernel = build_kernel(spec, target)
    prove_right(kernel)
    double, single = passes(kernel)
    assert kernel.schedule.double_row
    assert double > 0
    assert single > 0


# A proof compares every element with its own bound; wrong shapes and NaN fail.


@pytest.mark.parametrize("spoil", ["one element", "nan", "shape", "missing"])
def test_a_wrong_element_nan_shape_and_missing_outputs_fail(spoil):
    want, bound = np.ones((2, 3)), np.full((2, 3), 1e-3)
    got = {
        "one element": (want + np.eye(2, 3) * [[0], [1e-2]],),
        "nan": (np.full((2, 3), np.nan),),
        "shape": (np.ones((3, 2)),),
        "missing": (),
    }[spoil]
    assert not compare("k", got, (want,), (bound,)).passed


def test_random_arrays_are_the_same_for_the_same_seed_only():
    spec = LowRankSpec(m=4, k=8, r=2, n=8)
    first, again, other = (random_arrays(spec, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])
