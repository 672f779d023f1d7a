"""Every family: emitted source, run in the simulator, equals float64 within the derived bound."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.proof import compare, prove, random_arrays
from nmm_compiler.codegen.schedule import rank
from nmm_compiler.errors import ShapeError, SpecError, UnknownNameError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.base import numpy_dtype
from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.targets import get

sys.path.insert(0, str(Path(__file__).parent))
from specs import SPECS

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_TARGETS = ("trn1", "trn2", "trn3")


def check_any_schedule(family, data):
    """Draw a spec, a target and one of its legal schedules; prove the emitted kernel."""
    spec = data.draw(SPECS[family], label="spec")
    target = data.draw(st.sampled_from(_TARGETS), label="target")
    legal = rank(spec, get(target))
    place = data.draw(st.integers(0, min(len(legal), 24) - 1), label="schedule")
    kernel = build_kernel(spec, target, legal[place].schedule)
    proof = prove(kernel, seed=data.draw(st.integers(0, 99), label="seed"))
    assert proof.passed, f"{proof}\n{spec}\n{kernel.schedule}\n{kernel.path}"


@pytest.mark.parametrize("family", list(FAMILIES))
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=_SLOW)
def test_emitted_source_equals_float64(family, data):
    check_any_schedule(family, data)


@pytest.mark.long
@pytest.mark.parametrize("family", list(FAMILIES))
@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=_SLOW)
def test_many_specs_equal_float64(family, data):
    check_any_schedule(family, data)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_wrong_result_fails_its_bound(family):
    """The bound is tight enough that one missing term of a contraction is seen."""
    sizes = {"m": 40, "k": 150, "n": 90, "dtype": "float32"}
    extra = {} if family == "matmul" else {"r": 70}
    spec = FAMILIES[family].spec_class(**sizes, **extra, activation="identity")
    arrays = list(random_arrays(spec))
    wrong = [a.copy() for a in arrays]
    wrong[1][-1] = 0
    bound = spec.error_bound(*arrays)
    proof = compare("wrong", (spec.reference(*wrong),), (spec.reference(*arrays),), (bound,))
    assert not proof.passed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_reference_is_plain_linear_algebra(dtype):
    spec = LowRankSpec(
        m=3, k=5, r=2, n=4, dtype=dtype, x_layout="col", v_layout="col", out_layout="col",
        bias=True, base=True, scale=0.5, activation="relu",
    )  # fmt: skip
    x, u, v, w, bias = arrays = random_arrays(spec, seed=3)
    x, u, v, w, bias = (np.asarray(a, dtype=np.float64) for a in (x, u, v, w, bias))
    expected = np.maximum(x.T @ w + 0.5 * (x.T @ u) @ v.T + bias, 0).T
    np.testing.assert_allclose(spec.reference(*arrays), expected, rtol=1e-13, atol=1e-13)


def test_gated_reference():
    spec = GatedMLPSpec(m=3, k=5, n=7, r=2, up_r=0, weight_layout="col", down_bias=True)
    names = [t.name for t in spec.inputs()]
    assert names == ["x", "gate_u", "gate_v", "up_w", "down_u", "down_v", "down_bias"]
    arrays = random_arrays(spec)
    x, gu, gv, up, du, dv, bias = (np.asarray(a, dtype=np.float64) for a in arrays)
    gate = x @ gu.T @ gv.T
    h = gate / (1 + np.exp(-gate)) * (x @ up.T)
    np.testing.assert_allclose(spec.reference(*arrays), h @ du.T @ dv.T + bias, rtol=1e-12)


def test_specs_count_their_work():
    spec = LowRankSpec(m=8, k=16, r=4, n=32, bias=True)
    assert spec.flops() == 2 * 8 * 4 * (16 + 32)
    assert spec.minimal_hbm_bytes() == 2 * (8 * 16 + 16 * 4 + 4 * 32 + 32 + 8 * 32)
    gated = GatedMLPSpec(m=8, k=16, n=32, r=4)
    assert gated.flops() == 2 * 8 * 4 * 3 * (16 + 32)
    assert GatedMLPUpSpec(m=8, k=16, n=32).flops() == 2 * 2 * 8 * 16 * 32


def test_specs_travel_as_json():
    for spec in (
        LowRankSpec(m=8, k=16, r=4, n=32, base=True, scale=0.25),
        MatmulSpec(m=8, k=16, n=32, activation="gelu"),
        GatedMLPSpec(m=8, k=16, n=32, r=4, up_r=0),
    ):
        again = type(spec).from_json(spec.to_json())
        assert again == spec
        assert again.digest() == spec.digest()


def test_ranks_that_say_the_same_compare_equal():
    one = GatedMLPSpec(m=8, k=16, n=32, r=4)
    assert one == GatedMLPSpec(m=8, k=16, n=32, gate_r=4, up_r=4, down_r=4)
    assert one != GatedMLPSpec(m=8, k=16, n=32, r=4, down_r=0)


def test_large_rank_is_allowed_with_a_note():
    (note,) = LowRankSpec(m=8, k=64, r=64, n=128).notes()
    assert "dense" in note
    assert "family matmul" in note
    assert not LowRankSpec(m=8, k=64, r=8, n=128).notes()
    assert GatedMLPUpSpec(m=8, k=64, n=64, r=60).notes()


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
@pytest.mark.parametrize("family", list(FAMILIES))
def test_bad_fields(family, field, value, error, words):
    given_fields = {"m": 8, "k": 16, "n": 32} | ({} if family == "matmul" else {"r": 4})
    with pytest.raises(error, match=words):
        FAMILIES[family].spec_class(**{**given_fields, field: value})


def test_infinite_scale_and_negative_rank():
    with pytest.raises(SpecError, match="scale is inf"):
        LowRankSpec(m=8, k=16, r=4, n=32, scale=float("inf"))
    with pytest.raises(ShapeError, match="up_r is -1"):
        GatedMLPSpec(m=8, k=16, n=32, r=4, up_r=-1)


def test_arrays_of_the_wrong_shape():
    spec = MatmulSpec(m=8, k=16, n=32)
    x, w = random_arrays(spec)
    with pytest.raises(ShapeError, match=r"w has shape \(32, 16\); pass \(16, 32\)"):
        spec.reference(x, w.T)
    with pytest.raises(ShapeError, match="takes 2 arrays"):
        spec.reference(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_accumulation_is_exact_over_a_long_contraction(dtype):
    """Partial sums never leave PSUM: ones times ones counts exactly, which bf16 sums could not."""
    k = 1000
    kernel = build_kernel(MatmulSpec(m=16, k=k, n=130, dtype="float32", x_layout="col"), "trn2")
    ones = [np.ones(t.shape, numpy_dtype(t.dtype)) for t in kernel.spec.inputs()]
    np.testing.assert_array_equal(kernel.simulate(*ones, mode="functional").output, k)
    spec = LowRankSpec(m=16, k=k, r=3, n=130, dtype=dtype)
    ones = [np.ones(t.shape, numpy_dtype(dtype)) for t in spec.inputs()]
    rounded = float(np.asarray(k, numpy_dtype(dtype)).astype(np.float64))
    want = np.asarray(3 * rounded, numpy_dtype(dtype))
    got = build_kernel(spec, "trn2").simulate(*ones, mode="functional").output
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


def test_schedules_are_records_of_their_family():
    for family in FAMILIES.values():
        fields = {f.name for f in dataclasses.fields(family.schedule_class)}
        assert {"m_block", "k_chunk", "k_order"} <= fields
