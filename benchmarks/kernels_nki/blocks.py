"""Blocks of several tiles of 128 rows, which may be cut at the edge."""

import nki.isa as nisa
import nki.language as nl


def parts(stop, step, start=0):
    """Return slices of `step` from start to stop; the last may be shorter."""
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def size(part):
    return part.stop - part.start


def load_block(source, rows, columns):
    """Return an SBUF block [128, tiles, columns] of slices of a matrix, a DMA a tile of rows."""
    tiles = parts(rows.stop, 128, rows.start)
    shape = (128, len(tiles), size(columns))
    block = nl.ndarray(shape, dtype=source.dtype, buffer=nl.sbuf)
    for index, tile in enumerate(tiles):
        nisa.dma_copy(dst=block[0 : size(tile), index, :], src=source[tile, columns])
    return block


def product(left, m, right, n, depth):
    """Return in PSUM the product of columns m (a slice) of one block with columns n of another."""
    sums = nl.ndarray((size(m), size(n)), dtype=nl.float32, buffer=nl.psum)
    for tile, rows in enumerate(parts(depth, 128)):
        height = size(rows)
        nisa.nc_matmul(
            dst=sums,
            stationary=left[0:height, tile, m],
            moving=right[0:height, tile, n],
            accumulate=tile > 0,
        )
    return sums


def zeros(rows, columns, dtype):
    """Return SBUF tiles of 128 rows and fewer, filled with zeros."""
    tiles = []
    for part in parts(rows, 128):
        tile = nl.ndarray((size(part), columns), dtype=dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=0.0)
        tiles.append(tile)
    return tiles
