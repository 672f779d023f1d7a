"""TensorE: nc_matmul, its accumulation and tiling modes, nc_transpose, MX."""

import ml_dtypes
import numpy as np
import pytest
from simulator_kernels import run, values

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
    three, one, two = run(body, a, b).outputs
    wanted = a.astype(np.float64).T @ b
    for count, result in ((3, three), (1, one), (2, two)):
        assert np.abs(result - count * wanted).max() < 1e-3


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
    assert np.abs(run(body, a, b).output - wanted).max() < 1e-3


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
    nisa.nc_matmul(dst=acc, stationary=x, moving=y,
                   perf_mode=nisa.matmul_perf_mode.double_row)
    return out(acc)
"""


def test_double_row():
    """One pass contracts 256 rows in the time of 128, and counts them all."""
    dtype = ml_dtypes.float8_e4m3
    a, b = values((128, 2, 16), dtype), values((128, 2, 32), dtype, 1)
    wanted = np.einsum("kim,kin->mn", a.astype(np.float64), b.astype(np.float64))
    double = run(DOUBLE_ROW, a, b, mode="full")
    assert np.abs(double.output - wanted).max() < 1e-3
    single = run(
        """
        x, y = load(a), load(b)
        acc = nl.ndarray((16, 32), nl.float32, nl.psum)
        nisa.nc_matmul(dst=acc, stationary=x, moving=y)
        return out(acc)
        """,
        np.ascontiguousarray(a[:, 0]),
        np.ascontiguousarray(b[:, 0]),
        mode="full",
    )
    assert double.profile.engine_busy_us["tensor"] == single.profile.engine_busy_us["tensor"]
    assert double.profile.flops == 2 * single.profile.flops


def test_row_tile():
    a, b = values((32, 64)), values((32, 100), seed=1)
    body = MATMUL.replace("moving=y)", "moving=y, tile_position=(64, 0), tile_size=(32, 128))")
    assert np.abs(run(body, a, b).output - a.astype(np.float64).T @ b).max() < 1e-4


@pytest.mark.parametrize("dtype", [*DTYPES, np.int8, np.uint16, np.int32])
@pytest.mark.parametrize("shape", [(128, 128), (1, 128), (31, 2, 3)])
def test_nc_transpose_tensor(dtype, shape):
    a = (values(shape) * 20).astype(dtype)
    body = """
        x = load(a)
        free = a.size // a.shape[0]
        r = nl.ndarray((free, a.shape[0], STEP), a.dtype, nl.psum)[0:free, 0 : a.shape[0], 0]
        nisa.nc_transpose(dst=r, data=x, engine=nisa.engine.tensor)
        return out(r)
    """.replace("STEP", "2" if "float8" in np.dtype(dtype).name else "1")
    wanted = a.reshape(a.shape[0], -1).T
    assert run(body, a).output.tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_fp8_comes_out_of_products_that_transpose_in_its_own_elements():
    body = """
        x = load(a)
        r = nl.ndarray((8, 16), a.dtype, nl.psum)
        nisa.nc_transpose(dst=r, data=x, engine=nisa.engine.tensor)
        return out(r)
    """
    a = values((16, 8), ml_dtypes.float8_e4m3)
    assert run(body, a, target="trn1").output.tobytes() == np.ascontiguousarray(a.T).tobytes()


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
