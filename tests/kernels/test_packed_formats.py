"""Weights of few bits: against torchao's MX, how far they are off, and as NKI's products read them.

torchao is an independent implementation of the OCP MX specification.
"""

import dataclasses

import numpy as np
import pytest

from nmm_compiler.kernels.packed_formats import (
    FORMATS,
    dequantize,
    element_values,
    for_nki,
    quantize,
)
from nmm_compiler.simulator.isa.tensor_engine import unpack

MX = [name for name, form in FORMATS.items() if form.power_scales]


def weight(n=48, k=128, seed=0):
    """Rows of very different sizes, one of zeros, and a block of zeros."""
    generator = np.random.default_rng(seed)
    sizes = generator.choice([1e-30, 1e-3, 1.0, 3.0, 1e20], (n, 1))
    made = (generator.standard_normal((n, k)) * sizes).astype(np.float32)
    made[3] = 0
    made[5, 32:64] = 0
    return made


@pytest.mark.parametrize("name", MX)
def test_mx_has_the_bits_of_torchao(name):
    torch = pytest.importorskip("torch")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    element = {
        "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp8": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
    }[name]
    form = dataclasses.replace(FORMATS[name], tries=(1.0,))  # its scales: the OCP's, no search
    values = weight()
    packed, scales = quantize(values, form)
    wanted_scales, wanted = mx.to_mx(torch.from_numpy(values), element, 32)
    assert np.array_equal(packed, wanted.view(torch.uint8).numpy())
    assert np.array_equal(scales, wanted_scales.view(torch.uint8).numpy())
    multiplied = mx.to_dtype(wanted, wanted_scales, element, 32, torch.float32)
    assert np.array_equal(dequantize(packed, scales, form), multiplied.numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_searching_for_scales_is_never_worse_than_the_first(name):
    form, values = FORMATS[name], weight()[:, :64]
    values = values[np.abs(values).max(1) < 1e10]  # squares of larger ones are infinite
    shape = (len(values), -1, form.block or 64)
    errors = [
        np.square(dequantize(*quantize(values, one), one) - values).reshape(shape).sum(-1)
        for one in (form, dataclasses.replace(form, tries=(1.0,)))
    ]
    # a sum of up to 64 squares of float32, each of a difference of two rounded numbers
    assert (errors[0] <= errors[1] * (1 + 66 * 2**-23) + 1e-37).all()
    assert len(form.tries) == 1 or errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize("name", FORMATS)
def test_elements_are_off_by_half_a_step(name):
    """Each element becomes the nearest value of its scale, or the end of the range."""
    form, values = FORMATS[name], weight(8, 64)
    packed, scales = quantize(values, form)
    made = dequantize(packed, scales, form)
    blocks = values.reshape(8, -1, form.block or 64)
    points = np.sort(element_values(form)[np.isfinite(element_values(form))])
    points = points[(points >= form.lowest) & (points <= form.largest)].astype(np.float64)
    factor = _factors(scales)[..., None]
    nearest = np.abs(blocks[..., None] / factor[..., None] - points).min(-1) * np.abs(factor)
    off = np.abs(made.reshape(blocks.shape).astype(np.float64) - blocks)
    # the quotient of an element and its scale is rounded to float32, which may decide a tie
    assert (off <= nearest * (1 + 2**-20) + np.abs(blocks) * 2.0**-22).all()
    assert packed.nbytes + scales.size * (1 if form.power_scales else 2) == form.stored_bytes(
        8, 64, 2
    )


def _factors(scales):
    if scales.dtype == np.uint8:
        return 2.0 ** (scales.astype(np.float64) - 127)
    return scales.astype(np.float64)


def test_scales_of_floats_have_the_dtype_that_they_are_stored_in():
    import ml_dtypes

    for name in ("int4", "int8", "fp8"):
        _, scales = quantize(weight(), FORMATS[name], ml_dtypes.bfloat16)
        assert np.array_equal(scales, scales.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("name", MX)
def test_nki_reads_four_consecutive_values_and_a_scale_of_eight_rows(name):
    form, values = FORMATS[name], weight(16, 512)
    packed, scales = quantize(values, form)
    data, factors = for_nki(packed, scales, form)
    assert (data.shape, factors.shape) == ((128, 16), (16, 16))
    dtype = {"mxfp4": "float4_e2m1fn_x4", "mxfp8": "float8_e4m3fn_x4"}.get(name, "float8_e5m2_x4")
    # the simulator's own unpacking, which knows nothing of this file: [K / 4, n, 4]
    elements = unpack(data, dtype) * _factors(np.repeat(factors, 8, axis=0))[..., None]
    assert np.array_equal(
        elements.transpose(1, 0, 2).reshape(16, 512), dequantize(packed, scales, form)
    )


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.block])
def test_columns_make_up_for_the_errors_of_those_before(name):
    """With a moment A less error in its norm; with the identity the elements nearest to each."""
    form, values = FORMATS[name], weight()[:, :96]
    values = values[np.abs(values).max(1) < 1e10]
    x = np.random.default_rng(1).standard_normal((96, 20))
    moment = x @ x.T + 0.1 * np.eye(96)
    spread = np.linalg.cholesky(np.linalg.inv(moment)).T.astype(np.float32)
    nearest, plain, fitted = (
        quantize(values, form, np.float32, one) for one in (None, np.eye(96, dtype="f4"), spread)
    )
    assert all(np.array_equal(*pair) for pair in zip(nearest, plain, strict=True))

    def off(made):
        error = (dequantize(*made, form) - values) / np.abs(values).max(1, keepdims=True).clip(
            1e-30
        )
        return np.einsum("ik,kl,il->", error, moment, error)

    assert off(fitted) < 0.6 * off(nearest)
