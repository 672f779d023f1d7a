"""Tokens that fill no tile of 128: they move past stationary weights.

A tile of a few stationary tokens takes TensorE as long as a whole one. Here the first tokens of a
block, one tile and what fills none, are the columns of passes over the weights: one token more is
one column more. y^T comes out, with the outputs on the partitions, and TensorE turns it.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, finish_columns, store
from .records import Epilogue, Part, Product, Result, Strip
from .residuals import load_tiles


def expand_moving(
    result: Result, left: Strip, w_sb, n0, columns, product: Product, epilogue: Epilogue
):
    """Return a panel of y^T for the first tokens of a block: weights stationary, four tiles of
    outputs at a time."""
    n_tiles = columns // 128
    y_sb = nl.ndarray((128, n_tiles, result.moving), dtype=result.out.dtype, buffer=nl.sbuf)
    for n1 in range(0, n_tiles, 4):
        group = min(4, n_tiles - n1)
        sums = []
        for _ in range(group):
            sums.append(nl.ndarray((128, result.moving), dtype=nl.float32, buffer=nl.psum))
        for kt in range((product.k + 127) // 128):
            kp = min(128, product.k - 128 * kt)
            for i in range(group):
                ns = 128 * (n1 + i)
                nisa.nc_matmul(
                    dst=sums[i],
                    stationary=w_sb[0:kp, kt, ns : ns + 128],
                    moving=left.strip[0:kp, kt, 0 : result.moving],
                    accumulate=kt > 0,
                )
        for i in range(group):
            tile = y_sb[0:128, n1 + i, 0 : result.moving]
            finish_columns(tile, sums[i], epilogue, n0 // 128 + n1 + i, i)
    return y_sb


def store_turned(result: Result, y_sb, part: Part, halved):
    """Store rows of y, from y^T in SBUF: TensorE turns it.

    halved: two engines share the last of it on its way out of PSUM.
    """
    n_tiles = part.columns // 128
    one = 1 if part.rows % 128 == 1 else 0
    whole = part.rows - one
    if result.has_residual and whole > 0:
        more = load_tiles(
            Part(result.residual, part.row, whole, part.column, part.columns), result.out.dtype
        )
    for ms in range(0, whole, 128):
        mw = min(128, whole - ms)
        rows_sb = nl.ndarray((mw, part.columns), dtype=result.out.dtype, buffer=nl.sbuf)
        for n1 in range(0, n_tiles, 4):
            count = min(4, n_tiles - n1)
            turned = nl.ndarray((mw, 128 * count), dtype=result.out.dtype, buffer=nl.psum)
            for i in range(count):
                nisa.nc_transpose(
                    dst=turned[0:mw, 128 * i : 128 * (i + 1)],
                    data=y_sb[0:128, n1 + i, ms : ms + mw],
                    engine=nisa.engine.tensor,
                )
            width = 64 * count if halved and n1 + count == n_tiles else 128 * count
            for start in range(0, 128 * count, width):
                at = 128 * n1 + start
                evict(
                    rows_sb[0:mw, at : at + width], turned[0:mw, start : start + width],
                    n1 // 4 + start // width,
                )  # fmt: skip
        if result.has_residual:
            tile = more[0:mw, ms // 128, 0 : part.columns]
            nisa.tensor_tensor(dst=rows_sb, data1=rows_sb, data2=tile, op=nl.add)
        row = part.row + ms
        rows = result.out[row : row + mw, part.column : part.column + part.columns]
        store(rows, rows_sb, result.own_queue)
    if one > 0:
        # one token beyond a tile: each partition gets 128 outputs of it
        for n1 in range(0, n_tiles, 128):
            count = min(128, n_tiles - n1)
            ns = part.column + 128 * n1
            turned = nl.ndarray((count, 128), dtype=result.out.dtype, buffer=nl.psum)
            nisa.nc_transpose(
                dst=turned, data=y_sb[0:128, n1 : n1 + count, whole], engine=nisa.engine.tensor
            )
            one_sb = nl.ndarray((count, 128), dtype=result.out.dtype, buffer=nl.sbuf)
            evict(one_sb, turned, 1)
            if result.has_residual:
                more_sb = nl.ndarray((count, 128), dtype=result.out.dtype, buffer=nl.sbuf)
                run = result.residual[part.row + whole, ns : ns + 128 * count]
                nisa.dma_copy(dst=more_sb, src=run.reshape_dim(0, (count, 128)))
                nisa.tensor_tensor(dst=one_sb, data1=one_sb, data2=more_sb, op=nl.add)
            run = result.out[part.row + whole, ns : ns + 128 * count]
            store(run.reshape_dim(0, (count, 128)), one_sb, result.own_queue)
