"""Operands of Beta 1 as those of the current instructions: tiles, numbers, copies that are needed.

The compiler of that version copied what an engine could not read as it lay. Here that is a PSUM
tile for an engine that reads SBUF, a vector of another dtype, one of two tiles that do not start at
the same partition, and a tile of more dimensions than an instruction walks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nmm_compiler.errors import EngineRuleError, TensorShapeError
from nmm_compiler.simulator.beta1.index import Index, Mask, Part
from nmm_compiler.simulator.beta1.pending import as_number, read, written
from nmm_compiler.simulator.beta1.tensor import Masked, Tensor, fail
from nmm_compiler.simulator.isa import names as current_isa
from nmm_compiler.simulator.language.base import ndarray, sbuf
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.data import MAX_FREE_DIMS, out_of_reach
from nmm_compiler.simulator.tensors.tensor import NkiTensor

ISSUE: dict[str, Callable[..., Any]] = current_isa.NAMES
_WRITTEN = ("reduce_res", "dst", "dst_idx")


def tensor(name: str, role: str, value: Any) -> Tensor:
    """Return `value` as a tensor; raise TensorShapeError when it is none."""
    if not isinstance(value, Tensor):
        what = f"{type(value).__name__}; pass a tile"
        if isinstance(value, (Index, Mask)):
            what = "an index expression; make a tile of it with nisa.iota(expr, dtype)"
        if isinstance(value, Masked):
            what = (
                "a tile with an operand mask, which nisa.nc_matmul and nl.matmul(transpose_x=True) "
                "alone take (NKI API Masking); pass mask="
            )
        raise fail(TensorShapeError, f"{name}: {role} is {what}")
    if value.memory == "hbm":
        raise fail(
            EngineRuleError,
            f"{name}: {role} {value!r} is in HBM (err_unsupported_memory); nl.load it first",
        )
    return value


def in_sbuf(view: NkiTensor) -> NkiTensor:
    """Return the view, or a copy in SBUF of one in PSUM."""
    if view.memory == "sbuf":
        return view
    copied = ndarray(view.shape, view.dtype, sbuf)
    ISSUE["tensor_copy"](copied, view)
    return copied


def in_float32(view: NkiTensor) -> NkiTensor:
    """Return the view, or its float32 copy, from which an engine reads one number per partition."""
    if view.dtype in ("float32", "tfloat32", "int32", "uint32"):
        return view
    copied = ndarray(view.shape, dtypes.float32, sbuf)
    ISSUE["tensor_copy"](copied, view)
    return copied


def rows_of(box: Part) -> tuple[int, int] | None:
    """Return (start, stop) of the partitions of a box, None for all of them."""
    return box[0] if isinstance(box, tuple) else None


def operand(name: str, role: str, value: Any, box: Part) -> Any:
    """Return an argument for the current instructions; of a tile, the rows of the box."""
    number = as_number(value)
    if number is not None and not isinstance(value, (bool, int, float)):
        return number
    if not isinstance(value, Tensor):
        return value
    tile = tensor(name, role, value)
    part: Part = True
    rows = rows_of(box)
    if rows is not None and tile.shape[0] >= rows[1]:
        part = (rows, *((0, size) for size in tile.shape[1:]))
    return written(tile, part) if role in _WRITTEN else read(tile, part)


def nothing(dst: NkiTensor) -> None:
    """Issue nothing: the mask is false everywhere."""


def at_equal_partitions(first: NkiTensor, second: NkiTensor) -> tuple[NkiTensor, NkiTensor]:
    """Return two inputs that an engine reads at once, copied to partition 0 if they start apart.

    The documentation of Beta 1 has no rule for where two inputs start; the hardware has one.
    """
    starts = {v.access().partition_start for v in (first, second) if v.memory == "sbuf"}
    if len(starts) < 2:
        return first, second
    return _at_partition_0(first), _at_partition_0(second)


def _at_partition_0(view: NkiTensor) -> NkiTensor:
    if not view.access().partition_start:
        return view
    copied = ndarray(view.shape, view.dtype, sbuf)
    ISSUE["tensor_copy"](copied, view)
    return copied


def issued(instruction: str, dst: NkiTensor, *given: Any, **options: Any) -> None:
    """Issue an elementwise instruction, or one for each index of an outer free dimension.

    Tiles of nki.language may have any number of dimensions, an instruction's access pattern four.
    """
    tiles = [dst, *(value for value in given if isinstance(value, NkiTensor))]
    if not any(
        len(tile.shape) > 1 + MAX_FREE_DIMS and out_of_reach(tile.shape[1:], tile.strides[1:])
        for tile in tiles
    ):
        ISSUE[instruction](dst, *given, **options)
        return
    for at in range(dst.shape[1]):
        parts = [v[:, min(at, v.shape[1] - 1)] if isinstance(v, NkiTensor) else v for v in given]
        issued(instruction, dst[:, at], *parts, **options)
