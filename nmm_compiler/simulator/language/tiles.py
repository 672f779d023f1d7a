"""`nki.language` functions that make, fill, move and multiply whole tiles."""

from __future__ import annotations

from typing import Any

from nmm_compiler.errors import TensorShapeError, UnsupportedInstructionError
from nmm_compiler.simulator.isa import dma, elementwise, gather, tensor_engine
from nmm_compiler.simulator.isa.enums import engine as engines
from nmm_compiler.simulator.language.base import (
    MemoryRegion,
    dtype_of,
    ndarray,
    psum,
    sbuf,
)
from nmm_compiler.simulator.language.exports import exported
from nmm_compiler.simulator.language.math import (
    FUNCTIONS,
    copy,
    need_tile,
    new_tile,
    stretch,
)
from nmm_compiler.simulator.language.partition_broadcast import EXACT_DTYPES, spread_by_product
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.dtypes import float32
from nmm_compiler.simulator.tensors.tensor import NkiTensor


@exported
def load(src: Any, dtype: Any = None) -> NkiTensor:
    """Return an SBUF copy of an HBM tensor."""
    tile = need_tile("load", src)
    result = new_tile(tile, dtype, tile.shape if len(tile.shape) > 1 else (1, *tile.shape))
    dma.dma_copy(result, tile)
    return result


@exported
def store(dst: Any, value: Any) -> None:
    """Copy an SBUF tile to an HBM tensor."""
    dma.dma_copy(dst, value)


def assign(tensor: NkiTensor, key: Any, value: Any) -> None:
    """Do `tensor[key] = value`: a copy on chip, or a DMA when one side is in HBM."""
    if not isinstance(value, NkiTensor):
        raise current().error(
            UnsupportedInstructionError,
            f"assignment of {type(value).__name__} to a part of {tensor.name!r}; use "
            "nisa.memset, nisa.tensor_copy or nisa.dma_copy",
        )
    if tensor.memory == "hbm" or value.memory == "hbm":
        dma.dma_copy(tensor[key], value)
    else:
        elementwise.tensor_copy(tensor[key], value)


@exported
def load_transpose2d(src: Any, dtype: Any = None) -> NkiTensor:
    """Return an SBUF tile with the transpose of a 2-D HBM tensor."""
    tile = need_tile("load_transpose2d", src)
    if len(tile.shape) != 2:
        raise current().error(
            TensorShapeError, f"nl.load_transpose2d: src {tile.shape}; it must be 2-D"
        )
    result = ndarray((tile.shape[1], tile.shape[0]), tile.dtype, sbuf, "")
    dma.dma_transpose(result, tile, (1, 0))
    return _converted(result, dtype)


def _converted(tile: NkiTensor, dtype: Any) -> NkiTensor:
    """Return the tile, or a copy if another dtype is asked for."""
    return tile if dtype is None or dtype == tile.dtype else copy(tile, dtype)


@exported
def transpose(x: Any, dtype: Any = None) -> NkiTensor:
    """Return the transpose of a 2-D tile, in PSUM."""
    tile = need_tile("transpose", x)
    result = ndarray((tile.free_size, tile.shape[0]), tile.dtype, psum, "")
    tensor_engine.nc_transpose(result, tile, engine=engines.tensor)
    return _converted(result, dtype and dtype_of(current(), dtype))


@exported
def matmul(x: Any, y: Any, transpose_x: bool = False) -> NkiTensor:
    """Return x @ y, or x.T @ y with transpose_x, in PSUM (float32)."""
    need_tile("matmul", x)
    need_tile("matmul", y)
    if not transpose_x:
        x = copy(transpose(x))
    result = ndarray((x.free_size, y.free_size), float32, psum, "")
    tensor_engine.nc_matmul(result, x, y)
    return result


@exported
def expand_dims(x: Any, axis: int) -> NkiTensor:
    """Return a view with a dimension of size 1 at `axis`."""
    return need_tile("expand_dims", x).expand_dim(axis)


@exported
def broadcast_to(x: Any, shape: Any, dtype: Any = None) -> NkiTensor:
    """Return x broadcast to `shape`, in SBUF; over partitions by TensorE, other dtypes by DMA."""
    machine, tile, shape = current(), need_tile("broadcast_to", x), tuple(shape)
    if len(shape) != len(tile.shape):
        raise machine.error(
            TensorShapeError, f"nl.broadcast_to: {tile.shape} to {shape}; keep the rank"
        )
    whole = True
    if tile.shape[0] != shape[0]:
        if tile.shape[0] != 1:
            raise machine.error(
                TensorShapeError, f"nl.broadcast_to: {tile.shape} to {shape} does not broadcast"
            )
        if tile.memory == "psum":
            tile = copy(tile)
        spread = new_tile(tile, None, (shape[0], *tile.shape[1:]))
        on_chip = tile.memory == "sbuf" and tile.access().partition_start == 0
        if on_chip and tile.dtype in EXACT_DTYPES:
            spread_by_product(machine, spread, tile, FUNCTIONS["copy"])
        else:
            whole = False
            for partition in range(shape[0]):
                dma.dma_copy(spread[partition], tile)
        tile = spread
    if whole and tile.shape == shape and (dtype is None or dtype == tile.dtype):
        return tile
    result = new_tile(tile, dtype, shape)
    elementwise.tensor_copy(result, stretch("broadcast_to", tile, shape))
    return result


@exported
def gather_flattened(data: Any, indices: Any, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """Return data gathered along its flattened free dimensions, per partition."""
    if axis not in (0, 1, -1):
        raise current().error(
            UnsupportedInstructionError, f"nl.gather_flattened: axis {axis}; only the free axis"
        )
    wide = indices if indices.dtype == "uint32" else copy(indices, "uint32")
    result = ndarray(indices.shape, data.dtype, sbuf, "")
    gather.nc_n_gather(result, data, wide)
    return _converted(result, dtype)


@exported
def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor filled with a constant."""
    tensor = ndarray(shape, dtype, buffer, name)
    value = int(fill_value) if tensor.dtype.kind in ("int", "bool") else fill_value
    if tensor.memory == "hbm":
        _fill_hbm(tensor, value)
    else:
        elementwise.memset(tensor, value)
    return tensor


def _fill_hbm(tensor: NkiTensor, value: Any) -> None:
    """Fill HBM from a constant tile, 128 partitions at a time."""
    flat = tensor.reshape((tensor.size,))
    width = min(tensor.size, 2048)
    rows = min(128, max(tensor.size // width, 1))
    tile = ndarray((rows, width), tensor.dtype, sbuf, "")
    elementwise.memset(tile, value)
    done = 0
    while done < tensor.size:
        left = tensor.size - done
        whole = left >= rows * width
        count = rows * width if whole else min(left, width)
        dma.dma_copy(flat[done : done + count], tile if whole else tile[0:1, 0:count])
        done += count


@exported
def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


@exported
def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def _region(x: NkiTensor, buffer: Any) -> Any:
    if buffer is not None:
        return buffer
    return x.buffer if isinstance(x.buffer, MemoryRegion) else sbuf


@exported
def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Return zeros of the shape and dtype of x."""
    return full(x.shape, 0, dtype or x.dtype, _region(x, buffer), name)


@exported
def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Return an unwritten tensor of the shape and dtype of x."""
    return ndarray(x.shape, dtype or x.dtype, _region(x, buffer), name)
