"""Arithmetic of tiles, blocks and chunks that all families share."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.targets import Target

# One long run per partition, or the order that transposes produce.
# Or four consecutive rows a partition, as products of MX blocks want them.
STRIDED, FOURS = "strided_rows", "fours"
ORDERS = ("consecutive_rows", STRIDED, FOURS)
# Layouts of a first factor stored as one run of rows a partition: how many neighbours are in one.
RUNS = {STRIDED: 1, FOURS: 4}

# The description of each way of loading, for headers.
LOADED = {
    "rows": "as it lies",
    "dma": "through DMA transposes",
    "tensor": "through TensorE transposes",
}


def rows_in_runs(k: int, layout: str) -> np.ndarray:
    """Return the rows of a factor [k, rank] in the order in which a layout of RUNS stores them: all
    rows of partition 0, in the order in which products take them, then those of partition 1."""
    return np.arange(k).reshape(-1, 128, RUNS[layout]).swapaxes(0, 1).reshape(k)


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of an NKI dtype name (ml_dtypes for the ones NumPy lacks)."""
    return np.dtype(getattr(ml_dtypes, name, name))


def item_bytes(name: str) -> int:
    """Return the bytes of one element."""
    return numpy_dtype(name).itemsize


def weight_bytes(format: str, on_chip: bool = False) -> float:
    """Return the bytes of one element of a weight, with its scales where it is of MX blocks: one
    for 32 elements in HBM, on chip a byte of each partition for 512."""
    if format not in MX:
        return item_bytes(format)
    return MX[format].bits / 8 + (1 / 4 if on_chip else 1 / 32)


def tiles(size: int, tile: int) -> int:
    """Return how many tiles cover `size`."""
    return -(-size // tile)


def lay(shape: tuple[int, int], layout: str) -> tuple[int, int]:
    """Return the shape as passed: transposed when the layout is "col"."""
    return (shape[1], shape[0]) if layout == "col" else shape


def chunk_rows(rows: int, row_bytes: int, wanted_bytes: int = 8192) -> int:
    """Return contraction rows per load, in whole tiles of 128.

    Each partition gets about `wanted_bytes` at once; the chunks come out equal where they can.
    """
    total = tiles(rows, 128)
    most = max(1, min(16, wanted_bytes // max(row_bytes, 1), total))
    return 128 * tiles(total, tiles(total, most))


def turned_loads(dtype: str, target: Target) -> list[str]:
    """Return the ways to load an operand whose contraction index is the inner one in HBM."""
    if item_bytes(dtype) == 2 and target.dma_transposes:
        return ["dma", "tensor"]
    return ["tensor"]
