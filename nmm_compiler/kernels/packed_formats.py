"""Weights [n, k] of eight bits or fewer: the table of formats, and how elements are packed.

A weight is `packed`, uint8 [n, k bits / 8], of which the lower four bits of a byte are the earlier
element, and `scales`: one for each block of consecutive elements along k, or for each row. MX
formats (OCP Microscaling Formats 1.0) have blocks of 32 and scales of powers of two, e8m0: the
exponent plus 127 in a byte. The others have scales of floats. None has a zero point.

`for_nki` gives both as nc_matmul_mx of trn3 reads them. An element of an x4 dtype is four
consecutive values along k, so that row p of the array holds k = 4 p .. 4 p + 3, and 8 rows share a
scale: a block of 32. In SBUF the scales of 32 rows of data are the first four rows of a quadrant.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from nmm_compiler.errors import ShapeError

_BLOCK_ELEMENTS = 1 << 20
"""Elements that are quantized at a time: 4 MiB of float32."""


@dataclass(frozen=True)
class PackedFormat:
    """One format of a weight.

    element: the dtype of an element. lowest, largest: its range. A scale of floats makes a block's
    largest magnitude `largest`, or `lowest` where that is farther from zero; the scale then may be
    negative. block: elements of one scale, None for a whole row. tries: multiples of this scale, of
    which each block takes the one with the least squared error.
    """

    name: str
    element: Any
    bits: int
    lowest: float
    largest: float
    block: int | None = None
    power_scales: bool = False
    tries: tuple[float, ...] = (1.0,)

    @property
    def element_name(self) -> str:
        """The name of an element's dtype."""
        return str(np.dtype(self.element).name)

    def stored_bytes(self, n: int, k: int, scale_bytes: int) -> int:
        """Return the bytes of a weight and its scales; scale_bytes: of a scale of floats."""
        scales = n * (k // self.block if self.block else 1)
        return n * k * self.bits // 8 + scales * (1 if self.power_scales else scale_bytes)


_MX: dict[str, Any] = {"block": 32, "power_scales": True, "tries": (1.0, 2.0)}
FORMATS = {
    made.name: made
    for made in (
        PackedFormat("mxfp4", ml_dtypes.float4_e2m1fn, 4, -6.0, 6.0, **_MX),
        PackedFormat("mxfp8", ml_dtypes.float8_e4m3fn, 8, -448.0, 448.0, **_MX),
        PackedFormat("mxfp8_e5m2", ml_dtypes.float8_e5m2, 8, -57344.0, 57344.0, **_MX),
        # NKI's float8_e4m3 ends at 240; up to there it has the bits of float8_e4m3fn.
        PackedFormat("fp8", ml_dtypes.float8_e4m3fn, 8, -240.0, 240.0),
        PackedFormat("int8", np.int8, 8, -127.0, 127.0),
        PackedFormat("int4", ml_dtypes.int4, 4, -8.0, 7.0, 32, tries=(1.0, 0.93, 0.86)),
    )
}

MX = {name: form for name, form in FORMATS.items() if form.power_scales}


def quantize(
    weight: np.ndarray,
    form: PackedFormat,
    scale_dtype: Any = np.float32,
    spread: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (packed, scales) of a weight [n, k] whose k is a multiple of the block.

    scales: uint8 for powers of two, else float32 values of scale_dtype. spread: upper triangular U
    [k, k] with U^T U = A^-1, for a format with blocks: the error of each column is then made up for
    in later ones, so that that of the outputs is small for inputs of moment A. Without it each
    element is rounded to the nearest.
    """
    n, k = weight.shape
    rows = max(1, _BLOCK_ELEMENTS // k)
    pieces = []
    for start in range(0, n, rows):
        part = weight[start : start + rows].astype(np.float32)
        if spread is None:
            pieces.append(_quantize(part, form, scale_dtype))
        else:
            pieces.append(_quantize_spread(part, form, scale_dtype, spread))
    packed, scales = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    return packed, scales


def _quantize(
    rows: np.ndarray, form: PackedFormat, scale_dtype: Any
) -> tuple[np.ndarray, np.ndarray]:
    blocks = rows.reshape(rows.shape[0], -1, form.block or rows.shape[1])
    ends = blocks.max(-1), blocks.min(-1)
    peaks = np.where(ends[0] >= -ends[1], *ends)
    scales = np.stack([_scales(peaks, step, form, scale_dtype) for step in form.tries])
    factors = scale_values(scales)[..., None]
    codes = _codes(blocks / factors, form)
    off = element_values(form)[codes] * factors - blocks
    errors = np.square(off / np.where(peaks == 0, 1, peaks)[..., None]).sum(-1)
    best = errors.argmin(0)[None]
    flat = np.take_along_axis(codes, best[..., None], 0).reshape(rows.shape)
    return _packed(flat, form), np.take_along_axis(scales, best, 0)[0]


def _quantize_spread(
    rows: np.ndarray, form: PackedFormat, scale_dtype: Any, spread: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """GPTQ (arXiv 2210.17323, its algorithm 1) with a block's scales chosen when it is reached."""
    assert form.block is not None
    left, codes, scales = rows.copy(), np.empty(rows.shape, np.uint8), []
    for start in range(0, rows.shape[1], form.block):
        end = start + form.block
        block, inner = left[:, start:end], spread[start:end, start:end]
        scales.append(_quantize(block, form, scale_dtype)[1])
        factors = scale_values(scales[-1])[:, 0]
        errors = np.empty_like(block)
        for i in range(form.block):
            code = _codes(block[:, i] / factors, form)
            errors[:, i] = (block[:, i] - element_values(form)[code] * factors) / inner[i, i]
            block[:, i + 1 :] -= errors[:, i : i + 1] * inner[i, i + 1 :]
            codes[:, start + i] = code
        left[:, end:] -= errors @ spread[start:end, end:]
    return _packed(codes, form), np.concatenate(scales, 1)


def _packed(codes: np.ndarray, form: PackedFormat) -> np.ndarray:
    """Return the bytes of codes [n, k]: two of four bits in each."""
    return codes if form.bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def _scales(peaks: np.ndarray, step: float, form: PackedFormat, dtype: Any) -> np.ndarray:
    """Return the scales of blocks whose elements of the largest magnitude are these."""
    if form.power_scales:
        _, exponents = np.frexp(peaks * np.float32(step))
        exponents = np.where(peaks == 0, -127, exponents - np.frexp(form.largest)[1])
        return (np.clip(exponents, -127, 127) + 127).astype(np.uint8)
    end = (np.abs(peaks), form.largest) if form.lowest == -form.largest else (peaks, form.lowest)
    scales = (end[0] / np.float32(end[1]) * np.float32(step)).astype(dtype).astype(np.float32)
    return np.where(scales == 0, np.float32(1.0), scales)


def _codes(steps: np.ndarray, form: PackedFormat) -> np.ndarray:
    """Return the code of each element, a byte, of multiples of the scale."""
    steps = np.clip(steps, form.lowest, form.largest)
    if np.dtype(form.element).name.startswith("int"):
        return np.rint(steps).astype(np.int8).view(np.uint8) & np.uint8(2**form.bits - 1)
    return steps.astype(form.element).view(np.uint8)


def dequantize(packed: np.ndarray, scales: np.ndarray, form: PackedFormat) -> np.ndarray:
    """Return the weight [n, k] in float32."""
    if form.bits == 4:
        packed = np.stack((packed & 0xF, packed >> 4), -1).reshape(packed.shape[0], -1)
    elements = element_values(form)[packed]
    blocks = elements.reshape(packed.shape[0], -1, form.block or packed.shape[1])
    return (blocks * scale_values(scales)[..., None]).reshape(packed.shape)


@functools.cache
def element_values(form: PackedFormat) -> np.ndarray:
    """Return the float32 value of each code."""
    codes = np.arange(2**form.bits, dtype=np.uint8)
    return codes.view(form.element).astype(np.float32)


def scale_values(scales: np.ndarray) -> np.ndarray:
    """Return scales in float32: those of uint8 are exponents plus 127."""
    if scales.dtype != np.uint8:
        return scales
    return np.ldexp(np.float32(1.0), scales.astype(np.int32) - 127).astype(np.float32)


def for_nki(
    packed: np.ndarray, scales: np.ndarray, form: PackedFormat
) -> tuple[np.ndarray, np.ndarray]:
    """Return the operands [k / 4, n] of nc_matmul_mx, as the integers that x4 dtypes are stored in,
    and their scales [k / 32, n], of an MX weight."""
    four = np.ascontiguousarray(packed).view(np.uint16 if form.bits == 4 else np.uint32)
    return np.ascontiguousarray(four.T), np.ascontiguousarray(scales.T)


def from_nki(data: np.ndarray, scales: np.ndarray, form: PackedFormat) -> np.ndarray:
    """Return the weight [k, n] in float32 of what `for_nki` made, its data as integers or bytes."""
    four = np.ascontiguousarray(data).view(np.uint16 if form.bits == 4 else np.uint32)
    packed = np.ascontiguousarray(four.T).view(np.uint8)
    return dequantize(packed, np.ascontiguousarray(scales.T), form).T


def rounding_of_x(x: np.ndarray) -> np.ndarray:
    """Return the largest error of quantize_mx, for x [m, k] in blocks of 32 to e4m3, the last of
    them filled up with zeros.

    Its scale is 2^(floor(log2 largest) - 7): half of the step of an element is 2^-4 of the power
    of two below it, and half of 2^-9 of the scale for the smallest.
    """
    filled = np.pad(np.abs(x), ((0, 0), (0, -x.shape[1] % 32)))
    blocks = filled.reshape(len(x), -1, 32)
    exponents = np.where(blocks == 0, -200, np.frexp(blocks)[1] - 1)
    least = exponents.max(-1, keepdims=True) - 7 - 10
    errors = np.ldexp(1.0, np.maximum(exponents - 4, least)).reshape(filled.shape)
    return np.asarray(errors[:, : x.shape[1]])


def check_blocks(k: int, format: str, name: str) -> PackedFormat:
    """Return a format; raise ShapeError where its blocks do not divide k input features."""
    form = FORMATS[format]
    if form.block and k % form.block:
        raise ShapeError(
            f"{name} has {k} input features, which blocks of {form.block} of {format} do not "
            f"divide: pass a rank or exclude= that leaves it out, or int8 or fp8 for all"
        )
    return form
