"""Blocks of several tiles of 128 rows, which may be cut at the edge."""

import nki.isa as nisa
import nki.language as nl


def load_block(source, row, depth, column, columns):
    """Return an SBUF block [128, tiles, columns] of `depth` rows of a matrix, a DMA a tile."""
    tiles = (depth + 127) // 128
    block = nl.ndarray((128, tiles, columns), dtype=source.dtype, buffer=nl.sbuf)
    for tile in range(tiles):
        height = min(128, depth - 128 * tile)
        first = row + 128 * tile
        nisa.dma_copy(
            dst=block[0:height, tile, :],
            src=source[first : first + height, column : column + columns],
        )
    return block


def product(left, m, right, n, depth):
    """Return in PSUM the product of columns m (a slice) of one block with columns n of another."""
    sums = nl.ndarray((m.stop - m.start, n.stop - n.start), dtype=nl.float32, buffer=nl.psum)
    for tile in range((depth + 127) // 128):
        height = min(128, depth - 128 * tile)
        nisa.nc_matmul(
            dst=sums,
            stationary=left[0:height, tile, m],
            moving=right[0:height, tile, n],
            accumulate=tile > 0,
        )
    return sums


def parts(size, step):
    """Return slices of `step` that cover a size."""
    return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def zeros(rows, columns, dtype):
    """Return SBUF tiles of 128 rows and fewer, filled with zeros."""
    tiles = []
    for part in parts(rows, 128):
        tile = nl.ndarray((part.stop - part.start, columns), dtype=dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=0.0)
        tiles.append(tile)
    return tiles
