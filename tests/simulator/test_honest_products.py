"""A product that claims a cheap mode is rounded, checked or refused; no profile beats its peak."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_kernels import run, values
from trace_builder import Scene, profile_trace

from nmm_compiler import targets
from nmm_compiler.errors import HazardError, InternalFaultError
from nmm_compiler.simulator.tensors.dtypes import round_tfloat32
from nmm_compiler.simulator.timing.costs import tensor_cost
from nmm_compiler.simulator.timing.profile import Profile

# Product of the peak: what mfu may reach, for each way to multiply.
LIMITS = {"float32": 0.25, "bfloat16": 1.0, "float8_e4m3": 1.0}


PRODUCT = """
    x, y = load(a), load(b)
    acc = nl.ndarray((a.shape[1], b.shape[1]), nl.float32, nl.psum)
    nisa.nc_matmul(dst=acc, stationary={x}, moving={y}{flags})
    return out(acc)
"""


def product(a, b, x="x", y="y", flags="", **options):
    return run(PRODUCT.format(x=x, y=y, flags=flags), a, b, **options)


def test_a_tfloat32_view_of_float32_data_is_rounded_when_it_is_read():
    a, b = values((128, 64)), values((128, 512), seed=1)
    fast = product(a, b, "x.view(nl.tfloat32)", "y.view(nl.tfloat32)", mode="full")
    slow = product(a, b, mode="full")
    rounded = round_tfloat32(a).astype(np.float64).T @ round_tfloat32(b)
    size = np.abs(a).astype(np.float64).T @ np.abs(b)
    assert (np.abs(fast.output - rounded) <= 128 * 2.0**-23 * size).all()
    assert np.abs(fast.output - slow.output).max() > 1e-4  # ten bits are not 23
    ratio = slow.profile.compute_us / fast.profile.compute_us
    assert ratio == pytest.approx(4)


def test_a_tfloat32_view_is_rounded_in_elementwise_instructions_and_its_bits_are_kept():
    a = values((8, 16))
    doubled, copied = run(
        """
        x = load(a)
        y = nl.ndarray(a.shape, nl.float32, nl.sbuf)
        nisa.tensor_scalar(dst=y, data=x.view(nl.tfloat32), op0=nl.multiply, operand0=2.0)
        z = nl.ndarray(a.shape, nl.tfloat32, nl.sbuf)
        nisa.tensor_copy(dst=z, src=x.view(nl.tfloat32))
        return out(y), out(z.view(nl.float32))
        """,
        a,
    ).outputs
    assert np.array_equal(doubled, 2 * round_tfloat32(a))
    assert np.array_equal(copied, a)


@pytest.mark.parametrize("other", ["tfloat32", "float32"])
def test_one_float32_operand_makes_a_product_a_float32_product(other):
    a, b = values((128, 64)), values((128, 512), seed=1)
    mixed = product(a, b, "x", f"y.view(nl.{other})", mode="full")
    assert mixed.profile.compute_us == product(a, b, mode="full").profile.compute_us


@pytest.mark.parametrize("role", ["stationary", "moving"])
@pytest.mark.parametrize("strict", [True, False])
def test_onezero_is_refused_on_other_data(role, strict):
    a, b = values((32, 16)), values((32, 64), seed=1)
    ones = np.round(np.random.default_rng(2).random((32, 64))).astype(np.float32)
    flags = f", is_{role}_onezero=True"
    with pytest.raises(HazardError, match=rf"{role} holds \[-?[0-9.]+\] .*ones and zeros only"):
        product(a, b, flags=flags, strict=strict)
    one = (ones[:, :16], b) if role == "stationary" else (a, ones)
    wanted = one[0].astype(np.float64).T @ one[1]
    assert np.abs(product(*one, flags=flags).output - wanted).max() < 32 * 2.0**-20


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("moving", ["random", "ones", "two", "nan", "empty column"])
def test_transpose_mode_multiplies_nothing(dtype, moving):
    eye = np.eye(32, dtype=np.float32)
    eye = {
        "random": values((32, 32)),
        "ones": np.ones_like(eye),
        "two": 2 * eye,
        "nan": np.where(eye == 0, eye, np.float32(np.nan)),
        "empty column": eye * (eye[0] == 0),
    }[moving].astype(dtype)
    body = """
        x, y = load(a), load(b)
        acc = nl.ndarray((16, 32), a.dtype, nl.psum)
        nisa.nc_matmul(dst=acc, stationary=x, moving=y, is_transpose=True)
        return out(acc)
    """
    a = values((32, 16)).astype(dtype)
    a[0, 0], a[1, 1] = np.nan, np.inf
    with pytest.raises(HazardError, match="is no identity matrix"):
        run(body, a, eye)
    turned = run(body, a, np.eye(32).astype(dtype)).output
    assert turned.tobytes() == np.ascontiguousarray(a.T).tobytes()


def test_where_there_is_no_transpose_mode_the_flag_only_marks_a_product():
    """AWS: on NeuronCore-v2 is_transpose=True is for the profile's accounting."""
    a, b = values((128, 64)), values((128, 512), seed=1)
    marked = product(a, b, flags=", is_transpose=True", target="trn1")
    assert np.array_equal(marked.output, product(a, b, target="trn1").output)


def test_a_float32_transpose_costs_the_same_with_any_identity():
    """The dtype of the data sets the rate, not that of the matrix that moves."""
    trn2 = targets.get("trn2")
    (one,), (other,) = (
        Scene(f"""
            sbuf data 128x128
            sbuf eye 128x128 {moving}
            psum bank 128x128
            tensor bank data eye is_transpose=1
        """).trace.instructions
        for moving in ("float32", "bfloat16")
    )
    assert tensor_cost(trn2, one) == tensor_cost(trn2, other)


SIZES = (st.sampled_from(sizes) for sizes in ([1, 32, 128], [1, 64, 128], [1, 64, 512]))
SHAPES = st.tuples(*SIZES, st.booleans(), st.booleans())


def products(dtype, double, shapes):
    """Return the dtype, whether rows are double, and a trace of products with any flags."""
    double = double and dtype.startswith("float8")
    mode = "perf_mode=double_row" if double else ""
    return dtype, double, Scene("".join(f"""
        sbuf stationary {k}x{m} {dtype}
        sbuf moving {k}x{n} {dtype}
        psum sum {m}x{n}
        tensor sum stationary moving {mode} is_transpose={turns:d} onezero={onezero:d}
    """ for k, m, n, turns, onezero in shapes)).trace  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    st.builds(
        products,
        st.sampled_from(sorted(LIMITS)),
        st.booleans(),
        st.lists(SHAPES, min_size=1, max_size=40),
    ),
    st.sampled_from(["trn1", "trn2", "trn3"]),
)
def test_no_profile_is_above_the_limit_of_its_dtype(made, target):
    dtype, double, trace = made
    profile = profile_trace(trace, targets.get(target))
    assert profile.mfu <= LIMITS[dtype] * (2 if double else 1)
    assert profile.compute_us <= profile.latency_us


ONE_BANK = """
    sbuf stationary 128x128 {dtype}
    sbuf moving 128x512 {dtype}
    psum bank 128x512
"""


def test_a_profile_above_its_limit_cannot_be_made(monkeypatch):
    trace = Scene(ONE_BANK.format(dtype="float32") + 50 * "tensor bank stationary moving\n").trace
    target = targets.get("trn2")
    profile = profile_trace(trace, target)
    assert 0.2 < profile.mfu <= 0.25
    for change in ({"latency_us": profile.compute_us * 0.99}, {"mbu": 1.01}):
        with pytest.raises(InternalFaultError, match="fault in the timing model"):
            dataclasses.replace(profile, **change)
    with pytest.raises(InternalFaultError):
        Profile.from_dict({**profile.to_dict(), "latency_us": 1.0})
    monkeypatch.setattr("nmm_compiler.simulator.timing.costs.tensor_dtype", lambda ins: "bfloat16")
    with pytest.raises(InternalFaultError, match="the products"):
        profile_trace(trace, target)


def test_mx_products_count_four_rows_a_partition():
    text = ONE_BANK.format(dtype="float8_e4m3fn_x4") + "tensor bank stationary moving perf_mode=mx"
    profile = profile_trace(Scene(text).trace, targets.get("trn3"))
    assert profile.flops == 4 * 2 * 128 * 128 * 512
    assert profile.compute_us == pytest.approx(512 / 2.4e9 * 1e6)
