"""Kernels bound by VectorE and ScalarE, as published with measured latencies.

Each is written anew from its public text (NKI Beta 1) or description and issues the same
instructions: tile sizes, engines left to the compiler and loads are those of the original.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import COLUMNS as HALF
from pieces import P, both, load, new, scaled, spread

WIDE = 1024


@nki.jit
def silu(x):
    """x / (1 + exp(-x)) in halves of 1,024 columns; rows of one tile are 32 rows apart."""
    rows, width = x.shape
    blocks = rows // P
    source = x.reshape((P, blocks, width))
    result = nl.ndarray((P, blocks, width), dtype=x.dtype, buffer=nl.shared_hbm)
    for block in range(blocks):
        for column in range(0, width, WIDE):
            tile = load(source[:, block, column : column + WIDE], P, WIDE)
            out = new(P, WIDE)
            for at in range(0, WIDE, HALF):
                part = tile[:, at : at + HALF]
                power, inverse = new(P, HALF), new(P, HALF)
                nisa.activation(dst=power, op=nl.exp, data=part, scale=-1.0)
                nisa.reciprocal(dst=inverse, data=scaled(power, nl.add, 1.0))
                nisa.tensor_tensor(
                    dst=out[:, at : at + HALF], data1=part, data2=inverse, op=nl.multiply
                )
            nisa.dma_copy(dst=result[:, block, column : column + WIDE], src=out)
    return result


@nki.jit
def adamw(theta, gradient, first, second):
    """One step of AdamW: seven tensor_scalar, six tensor_tensor, a square root, a reciprocal."""
    height, width = theta.shape
    result = nl.ndarray((height, width), dtype=theta.dtype, buffer=nl.shared_hbm)
    for row in range(0, height, P):
        rows = min(P, height - row)
        for column in range(0, width, WIDE):
            where = (slice(row, row + rows), slice(column, column + WIDE))
            tiles = [load(a[where], rows, WIDE) for a in (theta, first, second, gradient)]
            out = new(rows, WIDE)
            for at in range(0, WIDE, HALF):
                t, m, v, g = (tile[:, at : at + HALF] for tile in tiles)
                decayed = both(t, scaled(t, nl.multiply, 1e-5, rows=rows), nl.subtract, rows=rows)
                mean = both(
                    scaled(m, nl.multiply, 0.9, rows=rows),
                    scaled(g, nl.multiply, 0.1, rows=rows),
                    nl.add,
                    rows=rows,
                )
                step = scaled(mean, nl.multiply, 0.01, rows=rows)
                kept = scaled(v, nl.multiply, 0.999, rows=rows)
                square = both(scaled(g, nl.multiply, 0.001, rows=rows), g, nl.multiply, rows=rows)
                moment = both(kept, square, nl.add, rows=rows)
                root, inverse = new(rows, HALF), new(rows, HALF)
                nisa.activation(dst=root, op=nl.sqrt, data=moment, scale=1000.0)
                nisa.reciprocal(dst=inverse, data=scaled(root, nl.add, 1e-8, rows=rows))
                nisa.tensor_tensor(
                    dst=out[:, at : at + HALF],
                    data1=decayed,
                    data2=both(step, inverse, nl.multiply, rows=rows),
                    op=nl.subtract,
                )
            nisa.dma_copy(dst=result[where], src=out)
    return result


@nki.jit
def rope(x, cos, sin):
    """Rotary embedding of x [d, s] with cos, sin [d / 2, s], 512 positions at a time."""
    d, s = x.shape
    half = d // 2
    result = nl.ndarray((d, s), dtype=x.dtype, buffer=nl.shared_hbm)
    for at in range(0, s, HALF):
        part = slice(at, at + HALF)
        tile = load(x[:, part], d, HALF)
        factors = new(d, HALF)
        nisa.dma_copy(dst=factors[:half, :], src=cos[:, part])
        nisa.dma_copy(dst=factors[half:, :], src=sin[:, part])
        odd = new(half, HALF)
        nisa.tensor_copy(dst=odd, src=tile[half:, :])
        even_by, odd_by = new(d, HALF), new(d, HALF)
        for of in (slice(half), slice(half, d)):
            for by, side in ((even_by, tile[:half, :]), (odd_by, odd)):
                nisa.tensor_tensor(dst=by[of, :], data1=side, data2=factors[of, :], op=nl.multiply)
        out = new(d, HALF)
        nisa.tensor_tensor(
            dst=out[:half, :], data1=even_by[:half, :], data2=odd_by[half:, :], op=nl.subtract
        )
        nisa.tensor_tensor(
            dst=out[half:, :], data1=odd_by[:half, :], data2=even_by[half:, :], op=nl.add
        )
        nisa.dma_copy(dst=result[:, part], src=out)
    return result


@nki.jit
def depthwise_conv(image, taps, in_psum):
    """A window of 3 per output element: multiply three elements, add them up, store the row.

    image: [n, c, w], padded by one on each side; taps: [c, 3]. in_psum: the taps wait in PSUM.
    """
    n, channels, width = image.shape
    window = taps.shape[1]
    padded = width + window - 1
    result = nl.ndarray((n, channels, width), dtype=image.dtype, buffer=nl.shared_hbm)
    for channel in range(0, channels, P):
        rows = slice(channel, channel + P)
        tap = load(taps[rows, :], P, window)
        if in_psum:
            held = new(P, window, buffer=nl.psum)
            nisa.tensor_copy(dst=held, src=tap, engine=nisa.engine.vector)
            tap = held
        for one in range(n):
            row = new(P, padded)
            nisa.memset(dst=row, value=0.0)
            nisa.dma_copy(dst=row[:, 1 : 1 + width], src=image[one, rows, :])
            out = new(P, width)
            nisa.memset(dst=out, value=0.0)
            for at in range(width):
                product = both(row[:, at : at + window], tap, nl.multiply, window)
                nisa.tensor_reduce(dst=out[:, at : at + 1], op=nl.add, data=product, axis=1)
            nisa.dma_copy(dst=result[one, rows, :], src=out)
    return result


@nki.jit
def layer_norm(x, gamma, beta):
    """LayerNorm of rows: mean(x^2) - mean(x)^2, whole rows of 8,192 columns a tile."""
    height, width = x.shape
    result = nl.ndarray((height, width), dtype=x.dtype, buffer=nl.shared_hbm)
    scale = spread(load(gamma, 1, width), width)
    shift = spread(load(beta, 1, width), width)
    for row in range(0, height, P):
        tile = load(x[row : row + P, :], P, width)
        total, square_total, squares = new(P, 1), new(P, 1), new(P, width)
        nisa.tensor_reduce(dst=total, op=nl.add, data=tile, axis=1)
        mean = scaled(total, nl.multiply, 1.0 / width, 1)
        nisa.activation(dst=squares, op=nl.square, data=tile)
        nisa.tensor_reduce(dst=square_total, op=nl.add, data=squares, axis=1)
        square_mean = scaled(square_total, nl.multiply, 1.0 / width, 1)
        variance = both(square_mean, both(mean, mean, nl.multiply, 1), nl.subtract, 1)
        root = new(P, 1)
        nisa.activation(dst=root, op=nl.rsqrt, data=scaled(variance, nl.add, 1e-5, 1))
        centred = new(P, width)
        nisa.tensor_scalar(
            dst=centred, data=tile, op0=nl.subtract, operand0=mean, op1=nl.multiply, operand1=root
        )
        out = both(centred, scale, nl.multiply, width)
        out = both(out, shift, nl.add, width)
        nisa.dma_copy(dst=result[row : row + P, :], src=out)
    return result


@nki.jit
def max_pool(x):
    """3 x 3 maximum with stride 1: one reduction over the window of each output row."""
    height, width = x.shape
    result = nl.ndarray((height - 2, width - 2), dtype=x.dtype, buffer=nl.shared_hbm)
    for row in range(0, height - 2, P):
        rows = min(P, height - 2 - row)
        tile = nl.ndarray((rows, 3, width), dtype=x.dtype, buffer=nl.sbuf)
        for shift in range(3):
            nisa.dma_copy(dst=tile[:, shift, :], src=x[row + shift : row + shift + rows, :])
        out = new(rows, width - 2)
        windows = tile.ap(pattern=[[3 * width, rows], [1, width - 2], [width, 3], [1, 3]], offset=0)
        nisa.tensor_reduce(dst=out, op=nl.maximum, data=windows, axis=(2, 3))
        nisa.dma_copy(dst=result[row : row + rows, :], src=out)
    return result


@nki.jit
def max_pool_separable(x, rows_of_tile):
    """The same by four maxima of two tensors: two of rows, two of columns of the first result."""
    height, width = x.shape
    result = nl.ndarray((height - 2, width - 2), dtype=x.dtype, buffer=nl.shared_hbm)
    for row in range(0, height - 2, rows_of_tile):
        rows = min(rows_of_tile, height - 2 - row)
        strips = [load(x[row + i : row + i + rows, :], rows, width) for i in range(3)]
        tall = both(strips[0], strips[1], nl.maximum, width, rows)
        tall = both(tall, strips[2], nl.maximum, width, rows)
        out = both(tall[:, : width - 2], tall[:, 1 : width - 1], nl.maximum, width - 2, rows)
        out = both(out, tall[:, 2:], nl.maximum, width - 2, rows)
        nisa.dma_copy(dst=result[row : row + rows, :], src=out)
    return result


@nki.jit
def scalar_copies(x, count, stride):
    """`count` independent copies of 512 columns on ScalarE, every `stride`-th element read."""
    columns = 512
    result = nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = load(x, P, x.shape[1])
    for _ in range(count):
        out = new(P, columns)
        nisa.tensor_copy(
            dst=out, src=tile[:, 0 : columns * stride : stride], engine=nisa.engine.scalar
        )
    nisa.dma_copy(dst=result, src=out)
    return result
