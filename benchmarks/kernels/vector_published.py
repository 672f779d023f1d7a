"""Kernels bound by VectorE and ScalarE, as published with measured latencies.

Each is written anew from its public text (NKI Beta 1) or description and issues the same
instructions: tile sizes, engines left to the compiler and loads are those of the original.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import (
    COLUMNS as HALF,
    WIDE,
    P,
    activated,
    both,
    columns_of,
    copied,
    filled,
    inverse,
    load,
    new,
    reduced,
    scaled,
    sigmoid,
    slices,
    spread,
)


@nki.jit
def silu(x):
    """x / (1 + exp(-x)) in halves of 1,024 columns; rows of one tile are 32 rows apart."""
    rows, width = x.shape
    blocks = rows // P
    source = x.reshape((P, blocks, width))
    result = nl.ndarray((P, blocks, width), dtype=x.dtype, buffer=nl.shared_hbm)
    for block in range(blocks):
        for columns in slices(width, WIDE):
            tile, out = load(source[:, block, columns]), new(P, WIDE)
            for part, to in zip(columns_of(tile, HALF), columns_of(out, HALF), strict=True):
                both(part, sigmoid(part), nl.multiply, to)
            nisa.dma_copy(dst=result[:, block, columns], src=out)
    return result


@nki.jit
def adamw(theta, gradient, first, second):
    """One step of AdamW: seven tensor_scalar, six tensor_tensor, a square root, a reciprocal."""
    height, width = theta.shape
    result = nl.ndarray((height, width), dtype=theta.dtype, buffer=nl.shared_hbm)
    for rows in slices(height):
        for columns in slices(width, WIDE):
            tiles = [load(a[rows, columns]) for a in (theta, first, second, gradient)]
            out = new(*tiles[0].shape)
            for t, m, v, g, to in zip(
                *(columns_of(tile, HALF) for tile in (*tiles, out)), strict=True
            ):
                decayed = both(t, scaled(t, nl.multiply, 1e-5), nl.subtract)
                kept, added = scaled(m, nl.multiply, 0.9), scaled(g, nl.multiply, 0.1)
                step = scaled(both(kept, added, nl.add), nl.multiply, 0.01)
                kept = scaled(v, nl.multiply, 0.999)
                square = both(scaled(g, nl.multiply, 0.001), g, nl.multiply)
                root = activated(both(kept, square, nl.add), nl.sqrt, scale=1000.0)
                change = both(step, inverse(scaled(root, nl.add, 1e-8)), nl.multiply)
                both(decayed, change, nl.subtract, to)
            nisa.dma_copy(dst=result[rows, columns], src=out)
    return result


@nki.jit
def rope(x, cos, sin):
    """Rotary embedding of x [d, s] with cos, sin [d / 2, s], 512 positions at a time."""
    d, s = x.shape
    low, high = slice(d // 2), slice(d // 2, d)
    result = nl.ndarray((d, s), dtype=x.dtype, buffer=nl.shared_hbm)
    for part in slices(s, HALF):
        tile = load(x[:, part])
        factors = new(d, HALF)
        nisa.dma_copy(dst=factors[low, :], src=cos[:, part])
        nisa.dma_copy(dst=factors[high, :], src=sin[:, part])
        even, odd = tile[low, :], copied(tile[high, :])
        even_by, odd_by, out = new(d, HALF), new(d, HALF), new(d, HALF)
        for of in (low, high):
            both(even, factors[of, :], nl.multiply, even_by[of, :])
            both(odd, factors[of, :], nl.multiply, odd_by[of, :])
        both(even_by[low, :], odd_by[high, :], nl.subtract, out[low, :])
        both(odd_by[low, :], even_by[high, :], nl.add, out[high, :])
        nisa.dma_copy(dst=result[:, part], src=out)
    return result


@nki.jit
def depthwise_conv(image, taps, in_psum):
    """A window of 3 per output element: multiply three elements, add them up, store the row.

    image: [n, c, w], padded by one on each side; taps: [c, 3]. in_psum: the taps wait in PSUM.
    """
    n, channels, width = image.shape
    window = taps.shape[1]
    result = nl.ndarray((n, channels, width), dtype=image.dtype, buffer=nl.shared_hbm)
    for rows in slices(channels):
        tap = load(taps[rows, :])
        if in_psum:
            held = new(P, window, buffer=nl.psum)
            nisa.tensor_copy(dst=held, src=tap, engine=nisa.engine.vector)
            tap = held
        for one in range(n):
            row = filled(P, width + window - 1)
            nisa.dma_copy(dst=row[:, 1 : 1 + width], src=image[one, rows, :])
            out = filled(P, width)
            for at in range(width):
                product = both(row[:, at : at + window], tap, nl.multiply)
                reduced(product, nl.add, out[:, at : at + 1])
            nisa.dma_copy(dst=result[one, rows, :], src=out)
    return result


@nki.jit
def layer_norm(x, gamma, beta):
    """LayerNorm of rows: mean(x^2) - mean(x)^2, whole rows of 8,192 columns a tile."""
    height, width = x.shape
    result = nl.ndarray((height, width), dtype=x.dtype, buffer=nl.shared_hbm)
    scale, shift = spread(load(gamma)), spread(load(beta))
    for rows in slices(height):
        tile = load(x[rows, :])
        mean = scaled(reduced(tile, nl.add), nl.multiply, 1.0 / width)
        square_total = reduced(activated(tile, nl.square), nl.add)
        square_mean = scaled(square_total, nl.multiply, 1.0 / width)
        variance = both(square_mean, both(mean, mean, nl.multiply), nl.subtract)
        root = activated(scaled(variance, nl.add, 1e-5), nl.rsqrt)
        centred = scaled(tile, nl.subtract, mean, op1=nl.multiply, operand1=root)
        out = both(both(centred, scale, nl.multiply), shift, nl.add)
        nisa.dma_copy(dst=result[rows, :], src=out)
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
    for rows in slices(height - 2, rows_of_tile):
        tall, *strips = [load(x[rows.start + i : rows.stop + i, :]) for i in range(3)]
        for strip in strips:
            tall = both(tall, strip, nl.maximum)
        out = tall[:, : width - 2]
        for shift in (1, 2):
            out = both(out, tall[:, shift : width - 2 + shift], nl.maximum)
        nisa.dma_copy(dst=result[rows, :], src=out)
    return result


@nki.jit
def scalar_copies(x, count, stride):
    """`count` independent copies of 512 columns on ScalarE, every `stride`-th element read."""
    columns = 512
    result = nl.ndarray((P, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = load(x)
    for _ in range(count):
        out = new(P, columns)
        nisa.tensor_copy(
            dst=out, src=tile[:, 0 : columns * stride : stride], engine=nisa.engine.scalar
        )
    nisa.dma_copy(dst=result, src=out)
    return result
