"""TensorE instructions: nc_matmul, nc_matmul_mx and nc_transpose (also on VectorE)."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import (
    EngineRuleError,
    KernelArgumentError,
    OperandValueError,
    TargetRuleError,
    TensorDtypeError,
    TensorShapeError,
)
from nmm_compiler.simulator.isa.enums import (
    engine,
    matmul_perf_mode,
)
from nmm_compiler.simulator.isa.instruction import (
    Call,
    Steps,
    instruction,
)
from nmm_compiler.simulator.isa.operands import (
    ON_CHIP,
    PSUM,
    SBUF,
    require,
)
from nmm_compiler.simulator.isa.psum import accumulate_product, check_bank
from nmm_compiler.simulator.isa.values import (
    f32,
    matmul_state,
    put,
    raw,
)
from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.dtypes import FLOAT8
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_OPERANDS = frozenset(
    {"float8_e4m3", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "tfloat32", "float32"}
)
_PLAIN = _OPERANDS - {"float8_e4m3fn"}
_WIDE = frozenset({"float32", "tfloat32"})
# Elements between the two rows of a double-row operand.
_PAIR_STEP = 16
_ATTRIBUTES: dict[tuple[Any, ...], dict[str, Any]] = {}
_NONE = matmul_perf_mode.none


def matmul_attributes(
    k: int, m: int, n: int, is_transpose: bool, mode: str, dtype: str, tile: Any, onezero: bool
) -> dict[str, Any]:
    """Return the attributes that the cost of a pass through TensorE depends on, shared."""
    key = (k, m, n, is_transpose, mode, dtype, tile, onezero)
    known = _ATTRIBUTES.get(key)
    if known is None:
        known = _ATTRIBUTES[key] = {
            "k": k, "m": m, "n": n, "is_transpose": is_transpose, "perf_mode": mode,
            "dtype": dtype, "tile": tile, "onezero": onezero,
        }  # fmt: skip
    return known


def check_tile(call: Call, position: Any, size: Any, k: int, m: int) -> Any:
    """Check tile_position and tile_size of a tiled matmul; return them as one tuple, or None."""
    if not position and not size:
        return None
    if not position or not size:
        raise call.error(TensorShapeError, "set both tile_position and tile_size, or neither")
    for role, pair in (("tile_position", position), ("tile_size", size)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise call.error(KernelArgumentError, f"{role}={pair!r:.40}; pass (rows, columns)")
    rows, columns = (call.integer("tile_size", n) for n in size)
    row, column = (call.integer("tile_position", n) for n in position)
    smallest = call.machine.target.matmul_tile_min_elements
    if rows not in (32, 64, 128) or columns not in (32, 64, 128) or min(size) < smallest:
        raise call.error(
            TensorShapeError,
            f"tile_size {tuple(size)}; rows and columns are {smallest}..128, powers of two",
        )
    if row % rows or column % columns or row + rows > 128 or column + columns > 128:
        raise call.error(
            TensorShapeError,
            f"tile_position {tuple(position)} is no multiple of tile_size {tuple(size)} inside "
            "128 x 128",
        )
    if k > rows or m > columns:
        raise call.error(TensorShapeError, f"stationary [{k}, {m}] exceeds tile_size {tuple(size)}")
    return (row, column, rows, columns)


def check_indirect_product(call: Call, tile: Any, *views: NkiTensor) -> None:
    """Check that a product of `.indirect()` views uses the whole array."""
    if tile is not None and tile[:2] != (0, 0) and any(v.indirection is not None for v in views):
        raise call.error(
            EngineRuleError,
            f"tile_position {tile[:2]} with an .indirect() view; tensor indirection takes "
            "(0, 0) or no tiles",
        )


@instruction(
    engines=("tensor",),
    writes={"dst": PSUM},
    reads={"stationary": SBUF, "moving": SBUF},
    indirect={"dst": ("tensor",), "stationary": ("tensor",), "moving": ("tensor",)},
    alike=True,
)
def nc_matmul(
    call: Call,
    dst: Any,
    stationary: Any,
    moving: Any,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: Any = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: Any = _NONE,
    name: str | None = None,
) -> Steps:
    """dst [M, N] (+)= stationary [K, M].T @ moving [K, N], accumulated in float32."""
    machine = call.machine
    double = perf_mode is not _NONE and perf_mode is not None and perf_mode != "none"
    k = stationary.shape[0]
    m = stationary.shape[1] if len(stationary.shape) == 2 else stationary.free_size
    n = moving.shape[1] if len(moving.shape) == 2 else moving.free_size
    left_dtype, right_dtype = stationary.dtype, moving.dtype
    if double:
        m, n = _check_double_row(call, stationary, moving, perf_mode, is_transpose)
    if left_dtype != right_dtype or left_dtype not in _PLAIN:
        _check_operand_dtypes(machine, stationary, moving, is_transpose)
    target = machine.target
    limit = target.moving_free_max_elements
    if target.matmul_psum_banks > 1:
        wide = 2 if dst.dtype == "bfloat16" else 4
        limit = target.matmul_psum_banks * target.psum_bank_bytes_per_partition // wide
    if moving.shape[0] != k or m > 128 or n > limit:
        raise call.error(
            TensorShapeError,
            f"stationary {stationary.shape} and moving {moving.shape}; both need "
            f"the same K on partitions, M <= 128 and N <= {limit}",
        )
    if dst.shape[0] != m or dst.free_size != n:
        raise call.error(
            TensorShapeError,
            f"dst {dst.name!r} {dst.shape}, but stationary {stationary.shape} and "
            f"moving {moving.shape} give ({m}, {n})",
        )
    if is_transpose:
        if dst.dtype != left_dtype and target.tensor_transpose_mode:
            raise machine.error(
                TensorDtypeError,
                f"nisa.nc_matmul(is_transpose=True): dst is {dst.dtype}, the data {left_dtype}; "
                "use the same dtype",
            )
    elif dst.dtype != "float32" and not (target.matmul_bfloat16_sums and dst.dtype == "bfloat16"):
        raise call.error(
            TensorDtypeError,
            f"dst {dst.name!r} is {dst.dtype}; PSUM accumulates in float32"
            + (" (or bfloat16)" if target.matmul_bfloat16_sums else ""),
        )
    check_bank(machine, "nc_matmul", dst, target.matmul_psum_banks)
    tile = None
    if tile_position or tile_size:
        tile = check_tile(call, tile_position, tile_size, k, m)
        if double and tile is not None and (tile[1] or tile[3] != 128):
            raise call.error(
                EngineRuleError,
                f"perf_mode=double_row with tile_size {tuple(tile_size)}; it cannot be combined "
                "with column tiles, use 128 columns at column 0",
            )
    if stationary.indirection is not None or moving.indirection is not None or dst.indirection:
        _check_indirect_operands(call, tile, dst, stationary, moving, is_transpose)
    if machine.data:
        a, b = f32(stationary), f32(moving)
        if is_stationary_onezero:
            _check_onezero(machine, "stationary", a)
        if is_moving_onezero:
            _check_onezero(machine, "moving", b)
        # without the mode the flag marks an instruction for profiles, and it may be a product
        turns = is_transpose and (target.tensor_transpose_mode or _one_hot(b.reshape(k, n)))
        if turns:
            moved = _pass_through(machine, stationary, moving.name, b, k, m, n)
    yield matmul_attributes(
        k,
        m,
        n,
        is_transpose,
        "double_row" if double else "none",
        left_dtype,
        tile,
        is_stationary_onezero or is_moving_onezero,
    )
    if turns:
        put(dst, moved)
        matmul_state(dst)[...] = 1
    else:
        if double:
            a, b = a.reshape(2 * k, m), b.reshape(2 * k, n)
        elif a.ndim != 2 or b.ndim != 2:
            a, b = a.reshape(k, m), b.reshape(k, n)
        # one term is not summed: -0.0 stays -0.0
        accumulate_product(machine, dst, a.T * b if len(a) == 1 else a.T @ b, accumulate)


def _check_indirect_operands(
    call: Call, tile: Any, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, turns: bool
) -> None:
    check_indirect_product(call, tile, dst, stationary, moving)
    if turns and moving.indirection is not None:
        raise call.error(
            EngineRuleError, f"moving {moving.name!r} of a transpose is an .indirect() view"
        )
    for view in (stationary, moving):
        if view.indirection is not None and view.dtype in _WIDE:
            raise call.error(
                TensorDtypeError,
                f"{view.name!r} is {view.dtype} and an .indirect() view; use a 16- or 8-bit float",
            )


def _check_onezero(machine: Machine, role: str, values: np.ndarray) -> None:
    """Refuse data that the fp32 fast path for ones and zeros would compute wrongly."""
    other = (values != 0) & (values != 1)
    if other.any():
        where = [int(i) for i in np.argwhere(other)[0]]
        raise machine.error(
            OperandValueError,
            f"nisa.nc_matmul(is_{role}_onezero=True): {role} holds {values[tuple(where)]!s} at "
            f"{where}; it may hold ones and zeros only, leave the flag unset",
        )


def _pass_through(
    machine: Machine,
    stationary: NkiTensor,
    moving: str,
    selector: np.ndarray,
    k: int,
    m: int,
    n: int,
) -> np.ndarray:
    """Return stationary.T with its columns placed by the one-hot moving matrix, bit for bit.

    Transpose mode moves elements and multiplies nothing: each column of moving picks one row of
    stationary (nki.isa.nc_transpose: the data is stationary and an identity matrix moves).
    """
    selector = selector.reshape(k, n)
    if not _one_hot(selector):
        raise machine.error(
            OperandValueError,
            f"nisa.nc_matmul(is_transpose=True): moving {moving!r} is no identity matrix; each of "
            "its columns must hold a single 1, use nl.shared_identity_matrix, or leave "
            "is_transpose unset for a product",
        )
    return raw(stationary).reshape(k, m)[(selector != 0).argmax(axis=0), :].T.copy()


def _one_hot(selector: np.ndarray) -> bool:
    """Return whether each column holds a single 1 and else zeros."""
    hot = selector != 0
    return bool((hot.sum(axis=0) == 1).all() and (selector[hot] == 1).all())


def _check_double_row(
    call: Call, stationary: NkiTensor, moving: NkiTensor, mode: Any, is_transpose: bool
) -> tuple[int, int]:
    machine = call.machine
    if mode is not matmul_perf_mode.double_row and mode != "double_row":
        raise call.error(
            KernelArgumentError, f"perf_mode={mode!r}; use a member of nisa.matmul_perf_mode"
        )
    require(machine, "nc_matmul(perf_mode=double_row)", lambda t: t.fp8_double_row)
    if is_transpose:
        raise call.error(
            EngineRuleError, "perf_mode=double_row with is_transpose; transpose without it"
        )
    for view in (stationary, moving):
        if view.dtype not in FLOAT8:
            raise machine.error(
                TensorDtypeError,
                f"nisa.nc_matmul(perf_mode=double_row): {view.name!r} is {view.dtype}; it takes "
                "float8 operands",
            )
        if len(view.shape) < 3 or view.shape[1] != 2:
            raise machine.error(
                TensorShapeError,
                f"nisa.nc_matmul(perf_mode=double_row): {view.name!r} {view.shape}; the first "
                "free dimension must be 2",
            )
        if view.strides[1] % _PAIR_STEP:
            # nki-library, output_projection_tkg.py and output_projection_cte_parameters.py: "double
            # row stride access"; AWS's own test of the mode pads a tile of one column to 16.
            machine.rule(
                TensorShapeError,
                f"nisa.nc_matmul(perf_mode=double_row): the two rows of {view.name!r} lie "
                f"{view.strides[1]} elements apart; the distance must be a multiple of "
                f"{_PAIR_STEP}, pad the tile's last dimension",
            )
    return stationary.free_size // 2, moving.free_size // 2


def _check_operand_dtypes(
    machine: Machine, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool
) -> None:
    left, right = stationary.dtype, moving.dtype
    for view in (stationary, moving):
        if view.dtype not in _OPERANDS and not (is_transpose and view.dtype.kind == "int"):
            raise machine.error(
                TensorDtypeError,
                f"nisa.nc_matmul: {view.name!r} is {view.dtype}; operands are "
                f"{', '.join(sorted(_OPERANDS))}",
            )
        if view.dtype == "float8_e4m3fn" and not machine.target.matmul_float8_e4m3fn:
            machine.rule(
                TargetRuleError,
                f"nisa.nc_matmul: float8_e4m3fn operands need trn3, the target is "
                f"{machine.target.name}; use float8_e4m3",
            )
    if is_transpose:
        return
    if (left in _WIDE) != (right in _WIDE):
        raise machine.error(
            TensorDtypeError,
            f"nisa.nc_matmul: stationary is {left} and moving {right}; a float32 operand needs "
            "the other to be float32 too",
        )
    if {left, right} == {"float8_e4m3", "float8_e4m3fn"}:
        raise machine.error(
            TensorDtypeError, "nisa.nc_matmul: float8_e4m3 and float8_e4m3fn cannot be mixed"
        )


@instruction(
    engines=("tensor", "vector"),
    writes={"dst": ON_CHIP},
    reads={"data": ON_CHIP},
    alike=True,
)
def nc_transpose(
    call: Call, dst: Any, data: Any, engine: Any = engine.unknown, name: str | None = None
) -> Steps:
    """dst [F, P] = data [P, F].T on TensorE (up to 128 x 128) or VectorE (up to 32 x 32)."""
    machine = call.machine
    p, f = data.shape[0], data.free_size
    small = p <= 32 and f <= 32
    fits_tensor = dst.memory == "psum" and data.memory == "sbuf"
    chosen = call.choose("tensor" if fits_tensor else "vector")
    if chosen == "tensor":
        if not fits_tensor:
            raise machine.error(
                EngineRuleError,
                f"nisa.nc_transpose on TensorE reads SBUF and writes PSUM; data {data.name!r} is "
                f"in {data.memory.upper()}, dst {dst.name!r} in {dst.memory.upper()}",
            )
        if p > 128 or f > 128:
            raise machine.error(
                TensorShapeError,
                f"nisa.nc_transpose on TensorE: data {data.shape}; at most [128, 128]",
            )
    elif not small:
        raise machine.error(
            TensorShapeError,
            f"nisa.nc_transpose on VectorE: data {data.shape} (in {data.memory.upper()}, dst in "
            f"{dst.memory.upper()}); at most [32, 32]; TensorE takes up to [128, 128] from "
            "SBUF to PSUM",
        )
    if dst.dtype != data.dtype:
        raise call.error(
            TensorDtypeError,
            f"dst {dst.name!r} is {dst.dtype}, data {data.dtype}; they must be the same",
        )
    if dst.shape[0] != f or dst.free_size != p:
        raise call.error(
            TensorShapeError,
            f"dst {dst.shape}, data {data.shape} transposes to ({f}, {p})",
        )
    apart = dst.strides[-1]
    spread = data.dtype in FLOAT8 and chosen == "tensor" and machine.target.tensor_transpose_mode
    if spread and p > 1 and apart != 2:
        # trainium2_arch, Built-in Transpose Support: fp8 data leaves 16-bit elements in PSUM
        machine.rule(
            TensorShapeError,
            f"nisa.nc_transpose on TensorE: elements of dst {dst.name!r} ({dst.dtype}) lie "
            f"{apart} apart; fp8 data comes out in 16-bit elements: give dst a last dimension "
            "of 2 and pass its element 0",
        )
    yield matmul_attributes(p, f, p, True, "none", data.dtype, None, False)
    put(dst, raw(data).reshape(p, f).T.copy())
    if dst.memory == "psum":
        matmul_state(dst)[...] = 1
