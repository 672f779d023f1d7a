"""Arithmetic of tiles, blocks and chunks that all families share."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nmm_compiler.targets import Target

LOADS = ("rows", "strided", "dma", "tensor", "tensor8")
# One long run per partition, the order that transposes produce, or long runs in partitions that
# are not all in use.
ORDERS = ("consecutive_rows", "strided_rows", "spread_rows")

# The description of each way of loading, for headers.
LOADED = {
    "rows": "as it lies",
    "strided": "in short runs",
    "dma": "through DMA transposes",
    "tensor": "through TensorE transposes",
    "tensor8": "through TensorE transposes",
}


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of an NKI dtype name (ml_dtypes for the ones NumPy lacks)."""
    return np.dtype(getattr(ml_dtypes, name, name))


def item_bytes(name: str) -> int:
    """Return the bytes of one element."""
    return numpy_dtype(name).itemsize


def tiles(size: int, tile: int) -> int:
    """Return how many tiles cover `size`."""
    return -(-size // tile)


def lay(shape: tuple[int, int], layout: str) -> tuple[int, int]:
    """Return the shape as passed: transposed when the layout is "col"."""
    return shape if layout == "row" else (shape[1], shape[0])


def blocks(size: int, steps: tuple[int, ...]) -> list[int]:
    """Return the steps below `size`, then `size` itself rounded up to whole tiles."""
    return [step for step in steps if step < size] + [128 * tiles(size, 128)]


def chunk_rows(rows: int, row_bytes: int, wanted_bytes: int = 8192) -> int:
    """Return contraction rows per load, in whole tiles of 128.

    Each partition gets about `wanted_bytes` at once; the chunks come out equal where they can.
    """
    total = tiles(rows, 128)
    most = max(1, min(16, wanted_bytes // max(row_bytes, 1), total))
    return 128 * tiles(total, tiles(total, most))


def chunks_of_k(spec: Any, u_bytes: int, w_bytes: int, few: bool, odd: bool) -> set[int]:
    """Return contraction rows per load that are worth trying, of rows of u of so many bytes.

    w_bytes: those of a row of a panel of w, of a base product: it is far larger than u.
    """
    short = spec.minimal_hbm_bytes() <= 7 * 2**20  # the first loads are a good part of the kernel
    wanted = (8192, 16384) if few else (8192, 2048) if short else (8192,)
    made = {chunk_rows(spec.k, u_bytes, each) for each in wanted}
    if odd and max(made) >= spec.k > 128:
        made |= {128 * tiles(part * tiles(spec.k, 128), 4) for part in (2, 3)}
    if few and spec.base:
        made |= {chunk_rows(spec.k, w_bytes, each) for each in (8192, 16384)}
    return made


def x_rows(m: int, contraction: int, k_chunk: int) -> int:
    """Return contraction rows per load of x: all at once for few tokens, else as the weight's."""
    return 128 * tiles(contraction, 128) if m <= 128 else k_chunk


def turned_loads(dtype: str, target: Target) -> list[str]:
    """Return the ways to load an operand whose contraction index is the inner one in HBM."""
    if item_bytes(dtype) == 2 and target.dma_transposes:
        return ["dma", "tensor"]
    if item_bytes(dtype) == 1 and target.tensor_transposes_fp8:
        return ["tensor8"]
    return ["tensor"]


def x_loads(m: int, layout: str, dtype: str, target: Target) -> list[str]:
    """Return the ways to load x; few tokens may come in short runs, without a transpose."""
    if layout == "col":
        return ["rows"]
    if m == 1:
        return ["strided"]
    return (["strided"] if m <= 32 else []) + turned_loads(dtype, target)


def chunk_order(contraction: int, loads: tuple[str, ...]) -> str:
    """Return the order with long runs, where the loads allow it and it makes a difference."""
    runs = contraction >= 256 and set(loads) <= {"rows", "strided"}
    return ORDERS[0] if runs else ORDERS[1]


def turning(*loads: str) -> int:
    """Return the PSUM banks of transposes on TensorE, if any of these loads needs them."""
    return 2 if by_tensor(*loads) else 0


def free_banks(target: Target, *loads: str) -> int:
    """Return the PSUM banks that are left for sums beside transposes on TensorE."""
    return target.psum_banks - turning(*loads)


def by_tensor(*loads: str) -> bool:
    """Return whether any of these loads transposes its operand on TensorE."""
    return any(load.startswith("tensor") for load in loads)


def flat_bytes(dtype: str, *loads: str) -> int:
    """Return bytes of an element in SBUF before TensorE transposes it; fp8 is widened."""
    return max(2, item_bytes(dtype)) if "tensor" in loads else item_bytes(dtype)


def bias_bytes(n: int, size: int, *, rows: bool) -> int:
    """Return bytes per partition of a bias in SBUF; rows: the outputs are along the free axis."""
    return 2 * n * size if rows else 6 * tiles(n, 128)


def result_elements(panel: int, tokens: int, *, rows: bool) -> int:
    """Return elements per partition of a panel of a result on its way to HBM."""
    return panel if rows else tiles(panel, 128) * tokens


def result_tiles(m: int, n: int, *, rows: bool, panel: int = 512) -> tuple[int, int]:
    """Return (tiles of PSUM that a result [m, n] or [n, m] leaves, columns of each).

    panel: outputs that are computed at a time.
    """
    if rows:
        columns = min(512, n, panel)
        return tiles(m, 128) * tiles(n, columns), columns
    count, columns = moves(m)
    return tiles(n, 128) * count, columns


def moves(m: int) -> tuple[int, int]:
    """Return (how often, columns): tokens move past stationary weights in about equal parts."""
    count = tiles(m, 512)
    return count, min(m, 16 * tiles(tiles(m, count), 16))


def normed_bytes(spec: Any, tokens: int, panel: int, size: int) -> dict[str, int]:
    """Return bytes per partition of the norm of x, and of the residual of a panel of the result."""
    held = {}
    if spec.norm != "none":
        deep = min(tiles(spec.k, 128), max(1, 1024 // tokens))
        # squares and sums of tokens, one over the roots, the mean; two strips of some tiles; ones
        held["norm"] = 4 * (4 * tokens + 2 * deep * tokens + 2 * 128 + 1)
        held["norm"] += 10 * tiles(spec.k, 128) * (spec.norm_gain + spec.norm_bias)
    if spec.residual:
        along = tiles(tokens, 128) * panel, tiles(panel, 128) * tokens
        held["residual"] = max(along) * size
    return held


def tally_normed(tally: Any, spec: Any, tokens: int, turns: int, runs: tuple[int, int]) -> None:
    """Add the work of the norm of x in blocks of `tokens`, and that of the residual.

    runs: the number of stores of the result, and the contiguous bytes of each.
    """
    if spec.norm != "none":
        wide = min(tokens, spec.m)
        rows = 2 if spec.norm == "layer" else 1
        tally.evictions.append((3 * rows * tiles(spec.k, 128) * turns, wide))
        if spec.norm == "layer":
            tally.matmuls.append((tiles(spec.k, 128) * turns, wide))
    if spec.residual:
        total = spec.outputs()[0].bytes
        tally.dmas.append((runs[0], total // runs[0], runs[1], "copy"))
        tally.evictions.append((tiles(spec.m, 128), spec.out_features))
