"""Adding two vectors, and transposing a matrix, in tiles of a chosen size.

Written from the descriptions of public measurements, to predict them: the smaller the tiles, the
more the time is that of issuing DMAs.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import P, both, copied, load, new, slices


@nki.jit
def add_tiles(a, b, rows, columns):
    """Return a + b for 2-D arrays, one rows x columns tile at a time (three DMAs each)."""
    height, width = a.shape
    result = nl.ndarray((height, width), dtype=a.dtype, buffer=nl.shared_hbm)
    for row in slices(height, rows):
        for column in slices(width, columns):
            total = both(load(a[row, column]), load(b[row, column]), nl.add)
            nisa.dma_copy(dst=result[row, column], src=total)
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
    for tile in slices(width, columns):
        mode = modes[tile.start * 4 // width]
        nisa.dma_copy(dst=result[:, tile], src=load(a[:, tile], dge_mode=mode), dge_mode=mode)
    for sixteen in slices(64, 16):
        block, back = new(128, 16, a.dtype), new(16, 128, a.dtype)
        nisa.dma_transpose(dst=block, src=a[sixteen, 0:128])
        nisa.dma_transpose(dst=back, src=block)
        nisa.dma_copy(dst=turned[sixteen, :], src=back)
    return result, turned


@nki.jit
def transpose_tiles(a):
    """Transpose a matrix in 128 x 128 tiles on TensorE."""
    height, width = a.shape
    result = nl.ndarray((width, height), dtype=a.dtype, buffer=nl.shared_hbm)
    for rows in slices(height):
        for columns in slices(width):
            turned = new(P, P, a.dtype, nl.psum)
            nisa.nc_transpose(dst=turned, data=load(a[rows, columns]))
            nisa.dma_copy(dst=result[columns, rows], src=copied(turned))
    return result
