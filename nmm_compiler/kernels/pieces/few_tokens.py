"""The product of a few tokens that gives a result in HBM: weights stationary, tokens moving.

PSUM holds at most eight sums that are added to at once, one a bank, so a panel of more than eight
tiles of outputs would wait for its second eight until all of it is loaded. Here a sum takes one
pass: the products of 128 rows of the weights go to neighbouring places of one bank, and VectorE
adds them to those before, in fp32 in SBUF. TensorE is done with each load when the next arrives.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import (
    activate,
    evict,
    finish_columns,
    load,
    load_aside,
    store,
    store_last,
    store_rows,
)
from .packed_loads import load_packed
from .records import Block, Epilogue, Part, Product, Result, Strip, Weight
from .residuals import residual_columns


def load_few(x, how, size, order, at: Block, aligned):
    """Return x^T of a block of tokens in SBUF, loaded on the sync engine's queue if it can be."""
    pitch = (at.tokens + 15) // 16 * 16 if aligned else at.tokens
    tiles = (size + 127) // 128
    x_sb = nl.ndarray((128, tiles, pitch), dtype=x.dtype, buffer=nl.sbuf)
    part = Part(x, 0, size, at.m0, at.tokens)
    if how == "rows":
        # the first load of the weights does not stand behind it
        load(x_sb, 0, part, "aside", order, size)
    elif how == "packed" and size % 128 == 0:
        place = nl.ndarray((128, tiles, at.tokens), dtype=x.dtype, buffer=nl.sbuf)
        load_aside(place, 0, part, order, size)
        # now spaced for double rows
        nisa.tensor_copy(dst=x_sb[0:128, 0:tiles, 0 : at.tokens], src=place)
    elif how == "packed":
        load_packed(x_sb, 0, part, order, size)
    else:
        load(x_sb, 0, part, how, order, size)
    return x_sb


def start_weights(right: Weight, product: Product, rows):
    """Return a tile of so many rows, at least those of the first load, which is under way."""
    w_type = nl.float32 if product.widen else right.weight.dtype
    columns = min(right.plan.block, product.n)
    aligned = product.double_row or right.plan.load == "dma"
    pitch = (columns + 15) // 16 * 16 if aligned else columns
    w_sb = nl.ndarray((128, (rows + 127) // 128, pitch), dtype=w_type, buffer=nl.sbuf)
    part = Part(right.weight, 0, min(right.plan.chunk, product.k), 0, columns)
    load(w_sb, 0, part, right.plan.load, product.order, product.k)
    return w_sb


def expand_few(
    result: Result,
    left: Strip,
    right: Weight,
    at: Block,
    product: Product,
    epilogue: Epilogue,
):
    """Store the result of a block of tokens."""
    w_type = nl.float32 if product.widen else right.weight.dtype
    for n0 in range(0, product.n, right.plan.block):
        columns = min(right.plan.block, product.n - n0)
        aligned = product.double_row or right.plan.load == "dma"
        pitch = (columns + 15) // 16 * 16 if aligned else columns
        n_tiles = columns // 128
        totals = nl.ndarray((128, n_tiles, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
        if result.has_residual:
            more = residual_columns(result, right, at, product, n0)
        for k0 in range(0, product.k, right.plan.chunk):
            rows = min(right.plan.chunk, product.k - k0)
            if right.loaded and n0 == 0 and k0 == 0:
                w_sb = right.first
            else:
                # a tile for each load, so that its last read frees its memory
                w_sb = nl.ndarray((128, (rows + 127) // 128, pitch), dtype=w_type, buffer=nl.sbuf)
                part = Part(right.weight, k0, rows, n0, columns)
                load(w_sb, 0, part, right.plan.load, product.order, product.k)
            pairs = rows // 256 if product.double_row else 0
            for pair in range(pairs):
                kt = k0 // 128 + 2 * pair
                sums = nl.ndarray((128, n_tiles, at.tokens), dtype=nl.float32, buffer=nl.psum)
                for i in range(n_tiles):
                    if result.as_rows:
                        stationary = w_sb[0:128, 2 * pair : 2 * pair + 2, i:columns:n_tiles]
                    else:
                        stationary = w_sb[0:128, 2 * pair : 2 * pair + 2, 128 * i : 128 * i + 128]
                    nisa.nc_matmul(
                        dst=sums[0:128, i, 0 : at.tokens],
                        stationary=stationary,
                        moving=left.strip[0:128, kt : kt + 2, 0 : at.tokens],
                        accumulate=False,
                        perf_mode=nisa.matmul_perf_mode.double_row,
                    )
                add_sums(totals, sums, kt)
            for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
                kp = min(128, product.k - 128 * kt)
                wt = kt - k0 // 128
                sums = nl.ndarray((128, n_tiles, at.tokens), dtype=nl.float32, buffer=nl.psum)
                for i in range(n_tiles):
                    if result.as_rows:
                        stationary = w_sb[0:kp, wt, i:columns:n_tiles]
                    else:
                        stationary = w_sb[0:kp, wt, 128 * i : 128 * i + 128]
                    nisa.nc_matmul(
                        dst=sums[0:128, i, 0 : at.tokens],
                        stationary=stationary,
                        moving=left.strip[0:kp, kt, 0 : at.tokens],
                        accumulate=False,
                    )
                add_sums(totals, sums, kt)
        if result.as_rows:
            y_sb = nl.ndarray((128, at.tokens, n_tiles), dtype=result.out.dtype, buffer=nl.sbuf)
            finish_few(y_sb.permute((0, 2, 1)), totals, epilogue, n0 // 128)
            if result.has_residual:
                nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=more, op=nl.add)
            rows = result.out[at.m0 : at.m0 + at.tokens, n0 : n0 + columns]
            rows = rows.reshape_dim(1, (128, n_tiles))
            if result.ends and n0 + columns == product.n:
                store_last(rows.permute((1, 0, 2)), y_sb)
            else:
                store(rows.permute((1, 0, 2)), y_sb, result.own_queue)
        else:
            y_sb = nl.ndarray((128, n_tiles, at.tokens), dtype=result.out.dtype, buffer=nl.sbuf)
            finish_few(y_sb, totals, epilogue, n0 // 128)
            if result.has_residual:
                nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=more, op=nl.add)
            store_rows(result, y_sb, n0, columns, at.m0, at.tokens)


def add_sums(totals, sums, tile):
    """Add the products of a tile of rows to those of the tiles before it."""
    if tile == 0:
        evict(totals, sums, 0)
    else:
        nisa.tensor_tensor(dst=totals, data1=totals, data2=sums, op=nl.add)


def finish_few(dst, totals, epilogue: Epilogue, first):
    """Write sums to dst through the epilogue; the first of their tiles is `first` of all."""
    n_tiles = totals.shape[1]
    tokens = totals.shape[2]
    if not epilogue.has_bias and not epilogue.scales:
        activate(dst, totals, epilogue.activation, 0)
    elif not epilogue.has_bias and epilogue.scales == "channel" and tokens == 1:
        # one instruction for all tiles, as no feature has a second token
        whole = totals[0:128, 0:n_tiles, 0]
        scale = epilogue.scale[0:128, first : first + n_tiles]
        if epilogue.activation == "identity":
            nisa.tensor_tensor(
                dst=dst[0:128, 0:n_tiles, 0], data1=whole, data2=scale, op=nl.multiply
            )
        else:
            nisa.tensor_tensor(dst=whole, data1=whole, data2=scale, op=nl.multiply)
            activate(dst, totals, epilogue.activation, 0)
    else:
        for i in range(n_tiles):
            finish_columns(
                dst[0:128, i, 0:tokens], totals[0:128, i, 0:tokens], epilogue, first + i, i
            )
