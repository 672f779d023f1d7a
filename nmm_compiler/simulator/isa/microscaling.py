"""MX instructions of trn3: quantize_mx and nc_matmul_mx.

A packed element holds four values along the contraction; 8 partitions x 4 values share one
power-of-two scale. Scales of a group of 8 partitions sit, inside each quadrant of 32
partitions, in partitions 0..3 (one per group).
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from nmm_compiler.errors import OperandError
from nmm_compiler.simulator.isa.instruction import NO_ATTRIBUTES, Call, Steps, instruction
from nmm_compiler.simulator.isa.operands import PSUM, SBUF
from nmm_compiler.simulator.isa.tensor_engine import (
    check_indirect_product,
    check_tile,
    matmul_attributes,
)
from nmm_compiler.simulator.isa.values import F32, accumulate_product, check_bank, f32, put, raw
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_ELEMENT = {
    "float8_e4m3fn_x4": (np.dtype(ml_dtypes.float8_e4m3fn), 8),
    "float8_e5m2_x4": (np.dtype(ml_dtypes.float8_e5m2), 15),
}
_PACKED = frozenset({*_ELEMENT, "float4_e2m1fn_x4"})
_SCALES = frozenset({"float8_e8m0fnu", "uint8"})


def scale_rows(partitions: int) -> np.ndarray:
    """Return the scale's partition for each group of 8 partitions."""
    groups = np.arange(partitions // 8)
    return groups // 4 * 32 + groups % 4


@functools.cache
def _values_of_codes(dtype: str) -> np.ndarray:
    """Return the float32 value of each code: of a byte, or the four values of a code of fp4."""
    if dtype == "float4_e2m1fn_x4":
        codes = np.arange(1 << 16)
        table = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)
        return np.stack([table[codes >> (4 * i) & 0xF] for i in range(4)], axis=-1)
    return np.arange(256, dtype=np.uint8).view(_ELEMENT[dtype][0]).astype(F32)


def unpack(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 [P, F, 4] of packed [P, F]."""
    codes = np.ascontiguousarray(values)
    if dtype != "float4_e2m1fn_x4":
        codes = codes[..., None].view(np.uint8)
    return _values_of_codes(dtype).take(codes, axis=0)


with np.errstate(over="ignore"):
    _POWERS = np.ldexp(F32(1.0), np.arange(256) - 127).astype(F32)
"""The value of each code of a scale; 255 overflows."""


def _scales(view: NkiTensor) -> np.ndarray:
    return _POWERS.take(raw(view).view(np.uint8).reshape(view.shape[0], -1))


def _scales_of_groups(scale: NkiTensor, rows: np.ndarray) -> np.ndarray:
    """Return the scales of each group of 8 partitions; `rows` says which partitions hold them.

    Nothing is read of the partitions between them: nobody has to write those.
    """
    if scale.indirection is not None:
        return _scales(scale)[rows]
    mask = scale.unwritten_view()
    if mask is not None and mask[rows].any():  # each partition's read is noted by itself
        return np.stack([_scales(scale[int(r) : int(r) + 1])[0] for r in rows])
    return _POWERS.take(scale.array()[rows].view(np.uint8).reshape(len(rows), -1))


def _check_scales(call: Call, role: str, view: NkiTensor, scale: NkiTensor) -> None:
    """Check that the scales cover their data, and are indirect together with it."""
    indices = [v.indirection.index if v.indirection is not None else None for v in (view, scale)]
    if indices[0] is not indices[1]:
        raise call.error(
            OperandError,
            f"{role} {scale.name!r} and its data {view.name!r} must be .indirect() views of the "
            "same index, or neither",
        )
    last = int(scale_rows(view.shape[0]).max())
    if scale.shape[0] <= last:
        raise call.error(
            OperandError,
            f"{role} {scale.shape} for data {view.shape}; it needs partitions up to {last}",
        )


@instruction(
    engines=("vector",),
    operands="src[P 4*F] -> dst[P F], dst_scale[Q F]",
    memory=SBUF,
    limits={"P": range(32, 129, 32)},
    dtypes={
        "dst": frozenset(_ELEMENT),
        "dst_scale": _SCALES,
        "src": frozenset({"float16", "bfloat16"}),
    },
)
def quantize_mx(call: Call, dst: Any, src: Any, dst_scale: Any, name: str | None = None) -> Steps:
    """dst, dst_scale = MXFP8 of float16 or bfloat16 src, 8 partitions x 4 values per scale."""
    p = src.shape[0]
    rows = scale_rows(p)
    _check_scales(call, "dst_scale", dst, dst_scale)
    yield NO_ATTRIBUTES
    element, top = _ELEMENT[dst.dtype]
    values = f32(src).reshape(p // 8, 8, -1, 4)
    largest = np.abs(values).max(axis=(1, 3))
    exponent = np.frexp(largest)[1] - 1 - (top - 1)
    exponent = np.where(largest == 0, -127, np.clip(exponent, -127, 127))
    scaled = values * np.ldexp(F32(1.0), -exponent)[:, None, :, None].astype(F32)
    packed = np.ascontiguousarray(scaled.astype(element)).view(np.uint32)
    put(dst, packed, exact=True)
    bits = (exponent + 127).astype(np.uint8)
    for group, row in enumerate(rows):
        view = dst_scale[int(row) : int(row) + 1]
        put(view, bits[group].view(view.dtype.numpy), exact=True)


@instruction(
    engines=("tensor",),
    operands="stationary[K M], moving[K N], stationary_scale[A M], moving_scale[B N] -> dst[M N]",
    memory=SBUF,
    memories={"dst": PSUM},
    limits={"K": range(32, 129, 32), "M": range(2, 129, 2), "N": range(1, 8193)},
    dtypes={
        "dst": frozenset({"float32", "bfloat16"}),
        "stationary": _PACKED,
        "moving": _PACKED,
        "stationary_scale": _SCALES,
        "moving_scale": _SCALES,
    },
    indirect=(
        "dst",
        "stationary",
        "moving",
        "stationary_scale",
        "moving_scale",
    ),
)
def nc_matmul_mx(
    call: Call,
    dst: Any,
    stationary: Any,
    moving: Any,
    stationary_scale: Any,
    moving_scale: Any,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: Any = None,
    name: str | None = None,
) -> Steps:
    """dst (+)= (scaled stationary).T @ (scaled moving) of MX operands, on trn3."""
    k, m, n = stationary.shape[0], stationary.free_size, moving.free_size
    if dst.dtype == "float32" and n > 4096:
        raise call.error(OperandError, f"moving {moving.shape}; N is at most 4096 in float32")
    check_bank(call, dst, 8)
    tile = check_tile(call, tile_position, tile_size, k, m)
    if tile is not None and (tile[1] or tile[3] != 128):
        raise call.error(
            OperandError,
            f"tile_position {tuple(tile_position)}, tile_size {tuple(tile_size)}; MX products are "
            "tiled by rows only, use 128 columns at column 0",
        )
    check_indirect_product(call, tile, dst, stationary, moving)
    for side, view, scale in (
        ("stationary", stationary, stationary_scale), ("moving", moving, moving_scale),
    ):  # fmt: skip
        _check_scales(call, f"{side}_scale", view, scale)
    yield matmul_attributes(k, m, n, False, "mx", stationary.dtype, tile, False)
    rows = scale_rows(k)
    sides = []
    for view, scale in ((stationary, stationary_scale), (moving, moving_scale)):
        values = unpack(raw(view).reshape(k, -1), view.dtype).reshape(k // 8, 8, -1, 4)
        factor = _scales_of_groups(scale, rows)
        scaled = np.empty((k // 8, 8, 4, values.shape[2]), F32)
        np.multiply(values.transpose(0, 1, 3, 2), factor[:, None, None, :], out=scaled)
        sides.append(scaled.reshape(4 * k, -1))
    accumulate_product(call.machine, dst, sides[0].T @ sides[1], accumulate)
