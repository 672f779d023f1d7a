"""TensorE instructions, nc_matmul, nc_transpose (also on VectorE) and nc_matmul_mx; quantize_mx.

MX formats are trn3's. A packed element holds four values along the contraction; 8 partitions x 4
values share one power-of-two scale. Scales of a group of 8 partitions sit, inside each quadrant of
32 partitions, in partitions 0..3 (one per group).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nmm_compiler.errors import HazardError, KernelArgumentError
from nmm_compiler.simulator.isa import poison
from nmm_compiler.simulator.isa.enums import engine, matmul_perf_mode
from nmm_compiler.simulator.isa.instruction import Steps, instruction
from nmm_compiler.simulator.isa.operands import PSUM, SBUF, Issue
from nmm_compiler.simulator.isa.values import F32, accumulate_product, f32
from nmm_compiler.simulator.tensors.dtypes import FLOAT8, FLOATS
from nmm_compiler.simulator.tensors.elements import put, read
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_OPERANDS = FLOATS - {"float8_e8m0fnu"}
_WIDE = frozenset({"float32", "tfloat32"})
# Elements between the two rows of a double-row operand.
_PAIR_STEP = 16


def _check_tile(call: Issue, k: int, m: int, *views: NkiTensor, rows_alone: bool = False) -> None:
    """Check tile_position and tile_size of a tiled matmul.

    views: its operands. rows_alone: it takes row tiles, no column tiles.
    """
    position, size = call.arguments["tile_position"], call.arguments["tile_size"]
    if not position and not size:
        return
    call.need(position and size, "set both tile_position and tile_size, or neither")
    call.need(
        all(isinstance(p, (tuple, list)) and len(p) == 2 for p in (position, size)),
        "tile_position and tile_size are (rows, columns)",
        KernelArgumentError,
    )
    rows, columns = (call.integer("tile_size", n) for n in size)
    row, column = (call.integer("tile_position", n) for n in position)
    smallest = call.machine.target.matmul_tile_min_elements
    call.need(
        {rows, columns} <= {32, 64, 128} and min(size) >= smallest and k <= rows and m <= columns,
        f"a tile_size is {smallest}..128, powers of two, and stationary fits in it",
    )
    call.need(
        max(row + rows, column + columns) <= 128 and row % rows == column % columns == 0,
        "tile_position must be a multiple of tile_size, inside 128 x 128",
    )
    call.need(
        (column == 0 and columns == 128) or not rows_alone,
        "it is tiled by rows only; use 128 columns at column 0",
    )
    call.need(
        not (any(v.indirection is not None for v in views) and (row or column)),
        "an .indirect() view takes tile_position (0, 0) or no tiles",
    )


@instruction(
    engines="tensor",
    operands="stationary[K A], moving[K B] -> dst[M N]",
    memory=SBUF,
    memories={"dst": PSUM},
    limits={"M": range(1, 129)},
    indirect="dst stationary moving",
    flows=poison.PRODUCT,
)
def nc_matmul(
    call: Issue,
    dst: Any,
    stationary: Any,
    moving: Any,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: Any = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: Any = matmul_perf_mode.none,
) -> Steps:
    """dst [M, N] (+)= stationary [K, M].T @ moving [K, N], accumulated in float32."""
    machine, target = call.machine, call.machine.target
    double = perf_mode is matmul_perf_mode.double_row
    rows = 2 if double else 1
    k, m, n = stationary.shape[0], stationary.free_size // rows, moving.free_size // rows
    if double:
        _check_double_row(call, stationary, moving, is_transpose)
    _check_operand_dtypes(call, stationary, moving, is_transpose)
    limit, banks = target.moving_free_max_elements, target.matmul_psum_banks
    bank = target.psum_bank_bytes_per_partition
    if banks > 1:
        limit = banks * bank // (2 if dst.dtype == "bfloat16" else 4)
    call.need(
        n <= limit and (dst.shape[0], dst.free_size) == (m, n),
        f"dst must have the shape ({m}, {n}), N at most {limit}",
    )
    if is_transpose:
        call.need(
            dst.dtype == stationary.dtype or not target.tensor_transpose_mode,
            "is_transpose: dst and stationary must have one dtype",
        )
    else:
        sums = ("float32", "bfloat16") if target.matmul_bfloat16_sums else ("float32",)
        call.need(dst.dtype in sums, f"PSUM accumulates in {' or '.join(sums)}")
    access, (_, base) = dst.access(), dst.storage.address or (0, 0)
    first, last = (base + access.byte_start) // bank, (base + access.byte_stop - 1) // bank
    says = f"dst covers banks {first}..{last} of {bank} B; it may cover {banks}"
    call.need(last - first < banks, says)
    _check_tile(call, k, m, dst, stationary, moving, rows_alone=double)
    narrow = all(v.indirection is None or v.dtype not in _WIDE for v in (stationary, moving))
    call.need(
        narrow and not (is_transpose and moving.is_indirect()),
        "an .indirect() view must be a 16- or 8-bit float, and not moving of a transpose",
    )
    yield {
        "k": k,
        "m": m,
        "n": n,
        "is_transpose": is_transpose,
        "perf_mode": perf_mode.value,
        "onezero": is_stationary_onezero or is_moving_onezero,
    }
    a, b = f32(stationary).reshape(-1, m), f32(moving).reshape(-1, n)
    for role, values in (("stationary", a), ("moving", b)):
        if call.arguments[f"is_{role}_onezero"]:
            other = values[(values != 0) & (values != 1)]
            call.need(
                not other.size,
                f"is_{role}_onezero: {role} holds {other[:1]} and may hold ones and zeros only; "
                "leave the flag unset",
                HazardError,
            )
    if is_transpose:
        hot = b != 0
        one_hot = (hot.sum(axis=0) == 1).all() and (b[hot] == 1).all()
        # without the mode the flag marks an instruction for profiles, and it may be a product
        call.need(
            one_hot or not target.tensor_transpose_mode,
            "is_transpose: moving is no identity matrix; each column must hold a single 1, use "
            "nl.shared_identity_matrix, or leave is_transpose unset for a product",
            HazardError,
        )
        if one_hot:
            # transpose mode moves elements and multiplies nothing: each column of moving picks one
            # row of stationary (nki.isa.nc_transpose: the data is stationary and an identity matrix
            # moves)
            elements = stationary.load().reshape(k, m)
            put(dst, elements[hot.argmax(axis=0)].T, product=True)
            return
    # one term is not summed: -0.0 stays -0.0
    accumulate_product(machine, dst, a.T * b if len(a) == 1 else a.T @ b, accumulate)


def _check_double_row(
    call: Issue, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool
) -> None:
    call.machine.require("nc_matmul(perf_mode=double_row)", flag="fp8_double_row")
    call.need(not is_transpose, "perf_mode=double_row with is_transpose; transpose without it")
    for view in (stationary, moving):
        call.need(
            view.dtype in FLOAT8 and len(view.shape) > 2 and view.shape[1] == 2,
            "perf_mode=double_row takes float8 operands whose first free dimension is 2",
        )
        # nki-library, output_projection_tkg.py and output_projection_cte_parameters.py: "double
        # row stride access"; AWS's own test of the mode pads a tile of one column to 16.
        call.should(
            view.strides[1] % _PAIR_STEP == 0,
            f"perf_mode=double_row: the two rows of {view.name!r} lie {view.strides[1]} elements "
            f"apart; it must be a multiple of {_PAIR_STEP}, pad the tile's last dimension",
        )


def _check_operand_dtypes(
    call: Issue, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool
) -> None:
    kinds = {stationary.dtype, moving.dtype}
    call.need(
        all(d in _OPERANDS or (is_transpose and d.kind == "int") for d in kinds),
        f"operands are {', '.join(sorted(_OPERANDS))}",
    )
    if "float8_e4m3fn" in kinds:
        call.machine.require("nc_matmul of float8_e4m3fn", "use float8_e4m3")
    if not is_transpose:
        one_width = not kinds & _WIDE or kinds <= _WIDE
        call.need(
            one_width and kinds != {"float8_e4m3", "float8_e4m3fn"},
            "a float32 operand needs the other to be float32 too, float8_e4m3 cannot be mixed with "
            "float8_e4m3fn",
        )


@instruction(
    engines="tensor vector",
    operands="data[P F] -> dst[F P]",
    same_dtype="dst data",
    packed=True,
)
def nc_transpose(call: Issue, dst: Any, data: Any, engine: Any = engine.unknown) -> Steps:
    """dst [F, P] = data [P, F].T on TensorE (up to 128 x 128) or VectorE (up to 32 x 32)."""
    p, f = data.shape[0], data.free_size
    fits_tensor = dst.memory == "psum" and data.memory == "sbuf"
    chosen = call.choose("tensor" if fits_tensor else "vector")
    call.need(
        max(p, f) <= (128 if chosen == "tensor" else 32) and (chosen == "vector" or fits_tensor),
        "TensorE takes up to [128, 128] from SBUF to PSUM, VectorE [32, 32]",
    )
    if data.dtype in FLOAT8 and chosen == "tensor" and call.machine.target.tensor_transpose_mode:
        # trainium2_arch, Built-in Transpose Support: fp8 data leaves 16-bit elements in PSUM
        call.should(
            p == 1 or dst.strides[-1] == 2,
            "fp8 data comes out of TensorE in 16-bit elements: give dst a last dimension of 2 and "
            "pass its element 0",
        )
    yield {"k": p, "m": f, "n": p, "is_transpose": True}
    call.move = lambda values: values.reshape(p, f).T.reshape(dst.shape)
    put(dst, call.move(data.load()), exact=True, product=True)


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


def _scaled(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A group of 8 partitions x 4 values to its scale."""
    scales = np.zeros((dst.shape[0], dst.free_size), np.bool_)
    groups = mask.reshape(len(mask) // 8, 8, -1, 4)
    scales[scale_rows(len(mask))] = groups.any(axis=(1, 3))
    return scales.reshape(dst.shape)


def unpack(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 [P, F, 4] of packed [P, F]."""
    codes = np.ascontiguousarray(values)[..., None]
    if dtype == "float4_e2m1fn_x4":
        each = (codes >> np.arange(0, 16, 4, dtype=np.uint16) & 0xF).astype(np.uint8)
        return each.view(ml_dtypes.float4_e2m1fn).astype(F32)
    return codes.view(_ELEMENT[dtype][0]).astype(F32)


with np.errstate(over="ignore"):
    _POWERS = np.ldexp(F32(1.0), np.arange(256) - 127).astype(F32)
"""The value of each code of a scale; 255 overflows."""


def _check_scales(call: Issue, role: str, view: NkiTensor, scale: NkiTensor) -> None:
    """Check that the scales cover their data, and are indirect together with it."""
    index, of_scale = (getattr(v.indirection, "index", None) for v in (view, scale))
    call.need(
        index is of_scale,
        f"{role} and its data must be .indirect() views of the same index, or neither",
    )
    last = int(scale_rows(view.shape[0]).max())
    call.need(scale.shape[0] > last, f"{role} needs partitions up to {last}")


@instruction(
    engines="vector",
    operands="src[P 4*F] -> dst[P F], dst_scale[Q F]",
    memory=SBUF,
    limits={"P": range(32, 129, 32)},
    dtypes={
        "dst": frozenset(_ELEMENT),
        "dst_scale": _SCALES,
        "src": frozenset({"float16", "bfloat16"}),
    },
    packed=True,
    flows={"dst": poison.quantized, "dst_scale": _scaled},
)
def quantize_mx(call: Issue, dst: Any, src: Any, dst_scale: Any) -> Steps:
    """dst, dst_scale = MXFP8 of float16 or bfloat16 src, 8 partitions x 4 values per scale."""
    rows = scale_rows(src.shape[0])
    _check_scales(call, "dst_scale", dst, dst_scale)
    yield {}
    element, top = _ELEMENT[dst.dtype]
    values = f32(src).reshape(len(rows), 8, -1, 4)
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
    engines="tensor",
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
    indirect="dst stationary moving stationary_scale moving_scale",
    flows=poison.PRODUCT,
    packed=True,
)
def nc_matmul_mx(
    call: Issue,
    dst: Any,
    stationary: Any,
    moving: Any,
    stationary_scale: Any,
    moving_scale: Any,
    tile_position: Any = None,
    tile_size: Any = None,
    accumulate: Any = None,
) -> Steps:
    """dst (+)= (scaled stationary).T @ (scaled moving) of MX operands, on trn3."""
    k, m, n = stationary.shape[0], stationary.free_size, moving.free_size
    call.need(dst.dtype != "float32" or n <= 4096, "N is at most 4096 in float32")
    _check_tile(call, k, m, dst, stationary, moving, rows_alone=True)
    for side, view, scale in (
        ("stationary", stationary, stationary_scale), ("moving", moving, moving_scale),
    ):  # fmt: skip
        _check_scales(call, f"{side}_scale", view, scale)
    yield {"k": k, "m": m, "n": n, "perf_mode": "mx"}
    rows = scale_rows(k)
    sides = []
    for view, scale in ((stationary, stationary_scale), (moving, moving_scale)):
        values = unpack(view.load().reshape(k, -1), view.dtype).reshape(k // 8, 8, -1, 4)
        # nothing is read of the partitions between those of the scales: nobody has to write them
        held = np.isin(np.arange(scale.shape[0]), rows).reshape(-1, *[1] * (len(scale.shape) - 1))
        codes = read(scale, where=held)[0].view(np.uint8).reshape(scale.shape[0], -1)[rows]
        factor = _POWERS.take(codes)
        scaled = np.empty((k // 8, 8, 4, values.shape[2]), F32)
        np.multiply(values.transpose(0, 1, 3, 2), factor[:, None, None, :], out=scaled)
        sides.append(scaled.reshape(4 * k, -1))
    accumulate_product(call.machine, dst, sides[0].T @ sides[1], accumulate)
