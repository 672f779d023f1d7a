"""Adding two vectors, and transposing a matrix, in tiles of a chosen size.

Written from the descriptions of public measurements, to predict them: the smaller the tiles, the
more the time is that of issuing DMAs.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import P, copied, load, new


@nki.jit
def add_tiles(a, b, rows, columns):
    """Return a + b for 2-D arrays, one rows x columns tile at a time (three DMAs each)."""
    height, width = a.shape
    result = nl.ndarray((height, width), dtype=a.dtype, buffer=nl.shared_hbm)
    for row in range(0, height, rows):
        for column in range(0, width, columns):
            tile = (slice(row, row + rows), slice(column, column + columns))
            total = new(rows, columns, a.dtype)
            left, right = load(a[tile], rows, columns), load(b[tile], rows, columns)
            nisa.tensor_tensor(dst=total, data1=left, data2=right, op=nl.add)
            nisa.dma_copy(dst=result[tile], src=total)
    return result


@nki.jit
def copy_tiles(a, columns):
    """Copy a 128-row array through SBUF, `columns` at a time, over all descriptor modes.

    Then turn four blocks of 16 x 128 on the way in, and back again within SBUF.
    """
    rows, width = a.shape
    result = nl.ndarray((rows, width), dtype=a.dtype, buffer=nl.shared_hbm)
    turned = nl.ndarray((64, 128), dtype=a.dtype, buffer=nl.shared_hbm)
    modes = (
        nisa.dge_mode.none,
        nisa.dge_mode.swdge,
        nisa.dge_mode.hwdge,
        nisa.dge_mode.unknown,
    )
    for tile in range(width // columns):
        column = tile * columns
        mode = modes[tile * columns * 4 // width]
        held = new(rows, columns, a.dtype)
        nisa.dma_copy(dst=held, src=a[:, column : column + columns], dge_mode=mode)
        nisa.dma_copy(dst=result[:, column : column + columns], src=held, dge_mode=mode)
    for row in range(0, 64, 16):
        block, back = new(128, 16, a.dtype), new(16, 128, a.dtype)
        nisa.dma_transpose(dst=block, src=a[row : row + 16, 0:128])
        nisa.dma_transpose(dst=back, src=block)
        nisa.dma_copy(dst=turned[row : row + 16, :], src=back)
    return result, turned


@nki.jit
def transpose_tiles(a):
    """Transpose a matrix in 128 x 128 tiles on TensorE."""
    height, width = a.shape
    result = nl.ndarray((width, height), dtype=a.dtype, buffer=nl.shared_hbm)
    for row in range(0, height, P):
        for column in range(0, width, P):
            turned = new(P, P, a.dtype, nl.psum)
            nisa.nc_transpose(dst=turned, data=load(a[row : row + P, column : column + P], P, P))
            out = copied(turned, new(P, P, a.dtype))
            nisa.dma_copy(dst=result[column : column + P, row : row + P], src=out)
    return result
