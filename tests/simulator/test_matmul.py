"""TensorE: nc_matmul, its accumulation and tiling modes, nc_transpose, MX.

A product that claims a cheap mode is rounded, checked or refused; no profile beats its peak.
"""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from simulator_kernels import check, run, values
from trace_builder import Scene, profile_trace

from nmm_compiler import targets
from nmm_compiler.errors import HazardError, InternalFaultError
from nmm_compiler.simulator.tensors.dtypes import round_tfloat32
from nmm_compiler.simulator.timing.costs import tensor_cost
from nmm_compiler.simulator.timing.profile import Profile

DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2]


MATMUL = """
    x, y = load(a), load(b)
    acc = nl.ndarray((a.shape[1], b.shape[1]), nl.float32, nl.psum)
    nisa.nc_matmul(dst=acc, stationary=x, moving=y)
    return out(acc)
"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (128, 128, 512), (65, 3, 130), (17, 128, 1)])
def test_matmul(dtype, shape):
    k, m, n = shape
    a, b = values((k, m), dtype), values((k, n), dtype, 1)
    x, y = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(run(MATMUL, a, b).output - x.T @ y)
    assert (error <= k * 2.0**-23 * (np.abs(x).T @ np.abs(y)) + 1e-30).all()


def test_accumulation_first_overwrites_then_adds():
    a, b = values((128, 16)), values((128, 32), seed=1)
    body = """
        x, y = load(a), load(b)
        acc = nl.ndarray((16, 32), nl.float32, nl.psum)
        for i in range(3):
            nisa.nc_matmul(dst=acc, stationary=x, moving=y)
        three = out(acc)
        nisa.nc_matmul(dst=acc, stationary=x, moving=y, accumulate=False)
        one = out(acc)
        nisa.nc_matmul(dst=acc, stationary=x, moving=y, accumulate=True)
        return three, one, out(acc)
    """
    once = a.astype(np.float64).T @ b
    check(body, [a, b], 3 * once, once, 2 * once, within=1e-3)


def test_partly_written_region_adds_only_where_written():
    a, b = values((128, 16)), values((128, 32), seed=1)
    body = """
        x, y = load(a), load(b)
        acc = nl.ndarray((16, 32), nl.float32, nl.psum)
        nisa.nc_matmul(dst=acc[:, 0:16], stationary=x, moving=y[:, 0:16])
        nisa.nc_matmul(dst=acc, stationary=x, moving=y)
        return out(acc)
    """
    wanted = a.astype(np.float64).T @ b
    wanted[:, :16] *= 2
    check(body, [a, b], wanted, within=1e-3)


@pytest.mark.parametrize("accumulate", ["None", "i > 0"])
def test_sums_of_one_psum_bank_grow_in_turn(accumulate):
    """nki-library, gate_up_projection_mx_shard_H.py: four sums lie in one bank."""
    a, b = values((3 * 64, 16)), values((3 * 64, 4 * 128), seed=1)
    body = f"""
        x = nl.ndarray((64, 3, 16), nl.float32, nl.sbuf)
        y = nl.ndarray((64, 3, 512), nl.float32, nl.sbuf)
        acc = nl.ndarray((16, 4, 128), nl.float32, nl.psum)
        for i in range(3):
            nisa.dma_copy(dst=x[:, i], src=a[64 * i : 64 * (i + 1)])
            nisa.dma_copy(dst=y[:, i], src=b[64 * i : 64 * (i + 1)])
        for i in range(3):
            for j in range(4):
                nisa.nc_matmul(dst=acc[:, j], stationary=x[:, i],
                               moving=y[:, i, 128 * j : 128 * (j + 1)], accumulate={accumulate})
        return out(acc.reshape((16, 512)))
    """
    error = np.abs(run(body, a, b).output - a.astype(np.float64).T @ b)
    assert (error <= 192 * 2.0**-23 * (np.abs(a).T @ np.abs(b))).all()


def test_accumulate_onto_nothing_warns_and_onto_memset_adds_on_trn3():
    a, b = values((128, 16)), values((128, 32), seed=1)
    onto_nothing = MATMUL.replace("moving=y)", "moving=y, accumulate=True)")
    (said,) = run(onto_nothing, a, b, strict=False).warnings
    assert "no matmul has written" in said
    onto_ones = MATMUL.replace(
        "    nisa.nc_matmul", "    nisa.memset(dst=acc, value=1.0)\n    nisa.nc_matmul"
    )
    result = run(onto_ones, a, b, target="trn3").output
    assert np.abs(result - (a.astype(np.float64).T @ b + 1)).max() < 1e-3


DOUBLE_ROW = """
    x, y = load(a), load(b)
    acc = nl.ndarray((16, 32), nl.float32, nl.psum)
    nisa.nc_matmul(dst=acc, stationary=x, moving=y, perf_mode=nisa.matmul_perf_mode.double_row)
    return out(acc)
"""


def test_double_row():
    """One pass contracts 256 rows in the time of 128, and counts them all."""
    dtype = ml_dtypes.float8_e4m3
    a, b = values((128, 2, 16), dtype), values((128, 2, 32), dtype, 1)
    wanted = np.einsum("kim,kin->mn", a.astype(np.float64), b.astype(np.float64))
    double = run(DOUBLE_ROW, a, b, mode="full")
    assert np.abs(double.output - wanted).max() < 1e-3
    single = run(MATMUL, *(np.ascontiguousarray(side[:, 0]) for side in (a, b)), mode="full")
    assert double.profile.engine_busy_us["tensor"] == single.profile.engine_busy_us["tensor"]
    assert double.profile.flops == 2 * single.profile.flops


def test_row_tile():
    a, b = values((32, 64)), values((32, 100), seed=1)
    body = MATMUL.replace("moving=y)", "moving=y, tile_position=(64, 0), tile_size=(32, 128))")
    check(body, [a, b], a.astype(np.float64).T @ b, within=1e-4)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [*((dtype, "trn2") for dtype in (*DTYPES, np.int8, np.uint16, np.int32)), (DTYPES[-1], "trn1")],
)
@pytest.mark.parametrize("shape", [(128, 128), (1, 128), (31, 2, 3)])
def test_nc_transpose_tensor(dtype, shape, target):
    """fp8 comes out in every second element of trn2's transpose mode, of products in its own."""
    a = (values(shape) * 20).astype(dtype)
    apart = 2 if target == "trn2" and "float8" in np.dtype(dtype).name else 1
    body = f"""
        x = load(a)
        free = a.size // a.shape[0]
        r = nl.ndarray((free, a.shape[0], {apart}), a.dtype, nl.psum)[0:free, 0 : a.shape[0], 0]
        nisa.nc_transpose(dst=r, data=x, engine=nisa.engine.tensor)
        return out(r)
    """
    wanted = np.ascontiguousarray(a.reshape(a.shape[0], -1).T)
    assert run(body, a, target=target).output.tobytes() == wanted.tobytes()


def test_nc_transpose_vector_in_sbuf():
    a = values((32, 17))
    body = """
        x = load(a)
        r = nl.ndarray((17, 32), a.dtype, nl.sbuf)
        nisa.nc_transpose(dst=r, data=x)
        return out(r)
    """
    result = run(body, a)
    assert np.array_equal(result.output, a.T)
    assert [i.engine for i in result.trace.instructions if i.op == "nc_transpose"] == ["vector"]


@pytest.mark.parametrize("kind", ["float8_e4m3fn_x4", "float8_e5m2_x4"])
def test_mx_quantize_and_matmul(kind):
    a, b = (values((128, 4 * 16), ml_dtypes.bfloat16, s) for s in (0, 1))
    body = f"""
        sides = []
        for side in (a, b):
            x = load(side)
            q = nl.ndarray((128, 16), nl.{kind}, nl.sbuf)
            s = nl.ndarray((128, 16), nl.float8_e8m0fnu, nl.sbuf)
            nisa.quantize_mx(dst=q, src=x, dst_scale=s)
            sides.append((q, s))
        acc = nl.ndarray((16, 16), nl.float32, nl.psum)
        nisa.nc_matmul_mx(dst=acc, stationary=sides[0][0], moving=sides[1][0],
                          stationary_scale=sides[0][1], moving_scale=sides[1][1])
        return out(acc)
    """
    result = run(body, a, b, target="trn3").output
    x, y = (v.astype(np.float64).reshape(128, 16, 4) for v in (a, b))
    wanted = np.einsum("kmi,kni->mn", x, y)
    # one rounding to 3 (2) mantissa bits per factor; the block maximum loses one more bit
    unit = 2.0**-3 if kind == "float8_e4m3fn_x4" else 2.0**-2
    bound = 2.1 * unit * np.einsum("kmi,kni->mn", np.abs(x), np.abs(y))
    assert (np.abs(result - wanted) <= bound).all()
    assert np.abs(result - wanted).max() > 0


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
    assert slow.profile.compute_us / fast.profile.compute_us == pytest.approx(4)


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


@settings(deadline=None)
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
