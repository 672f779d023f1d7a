"""Pieces of kernels: tiles, loads, steps on one tile, sums of products, and blocks of tiles.

Blocks hold tiles of 128 rows, of which the last may be cut at the edge.
"""

import nki.isa as nisa
import nki.language as nl

P = 128
COLUMNS = 512
WIDE = 1024


def new(rows, columns, dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray((rows, columns), dtype=dtype, buffer=buffer)


def result_of_product(left, right, dtype=None, turned=True):
    """Return an HBM result [m, n] of left [k, m] and right [k, n], with k, m and n.

    turned=False: left is [m, k].
    """
    k, m = left.shape if turned else left.shape[::-1]
    n = right.shape[1]
    return nl.ndarray((m, n), dtype=dtype or left.dtype, buffer=nl.shared_hbm), k, m, n


def filled(rows, columns, value=0.0, dtype=nl.float32):
    tile = new(rows, columns, dtype)
    nisa.memset(dst=tile, value=value)
    return tile


def load(source, **how):
    """Return an SBUF tile with a copy of an HBM region."""
    tile = new(*source.shape, source.dtype)
    nisa.dma_copy(dst=tile, src=source, **how)
    return tile


def slices(stop, step=P, start=0):
    """Return slices of `step` from start to stop; the last may be shorter."""
    return [slice(at, min(at + step, stop)) for at in range(start, stop, step)]


def load_rows(source, columns, start=0, stop=None):
    """Return tiles of 128 rows from start to stop, of a slice of the columns: a DMA each."""
    return [load(source[rows, columns]) for rows in slices(stop or source.shape[0], P, start)]


def columns_of(tile, width=P):
    """Return a tile's views of `width` columns."""
    return [tile[:, columns] for columns in slices(tile.shape[1], width)]


def copied(product, out=None):
    """PSUM to SBUF; nl.copy of Beta 1, whose engine the compiler chooses."""
    out = new(*product.shape) if out is None else out
    nisa.tensor_copy(dst=out, src=product)
    return out


def summed(lefts, rights):
    """Return the sum of products in PSUM."""
    total = new(lefts[0].shape[1], rights[0].shape[1], buffer=nl.psum)
    for left, right in zip(lefts, rights, strict=True):
        nisa.nc_matmul(dst=total, stationary=left, moving=right)
    return total


def store_product(result, product, rows, columns):
    """Copy one PSUM tile out through SBUF, in the dtype of the result."""
    tile = copied(product, new(P, COLUMNS, result.dtype))
    nisa.dma_copy(dst=result[rows, columns], src=tile)


def row_of_sums(lefts, rights):
    """Return sums of products in SBUF, 512 columns at a time."""
    out = new(lefts[0].shape[1], rights[0].shape[1])
    for part in slices(out.shape[1], COLUMNS):
        copied(summed(lefts, [right[:, part] for right in rights]), out[:, part])
    return out


def spread(row, ones=None):
    """Return a tile with one row in all partitions: ones times the row.

    It stays in PSUM if one bank holds it; a longer one is copied to SBUF bank by bank, because no
    instruction reads across banks.
    """
    ones = filled(1, P, 1.0) if ones is None else ones
    return (summed if row.shape[1] <= COLUMNS else row_of_sums)([ones], [row])


def activated(data, op, **more):
    out = new(*data.shape)
    nisa.activation(dst=out, op=op, data=data, **more)
    return out


def inverse(data):
    out = new(*data.shape)
    nisa.reciprocal(dst=out, data=data)
    return out


def reduced(data, op, out=None, **more):
    """Return one number a row."""
    out = new(data.shape[0], 1) if out is None else out
    nisa.tensor_reduce(dst=out, op=op, data=data, axis=1, **more)
    return out


def scaled(data, op, number, out=None, **more):
    out = new(*data.shape) if out is None else out
    nisa.tensor_scalar(dst=out, data=data, op0=op, operand0=number, **more)
    return out


def both(left, right, op, out=None):
    out = new(*left.shape) if out is None else out
    nisa.tensor_tensor(dst=out, data1=left, data2=right, op=op)
    return out


def within(part, step=P):
    """Return slices of `step` of a slice."""
    return slices(part.stop, step, part.start)


def size(part):
    return part.stop - part.start


def load_block(source, rows, columns):
    """Return an SBUF block [128, tiles, columns] of slices of a matrix, a DMA a tile of rows."""
    tiles = within(rows)
    shape = (P, len(tiles), size(columns))
    block = nl.ndarray(shape, dtype=source.dtype, buffer=nl.sbuf)
    for index, tile in enumerate(tiles):
        nisa.dma_copy(dst=block[0 : size(tile), index, :], src=source[tile, columns])
    return block


def product(left, m, right, n, depth):
    """Return in PSUM the product of columns m (a slice) of one block with columns n of another."""
    tiles = list(enumerate(slices(depth)))
    return summed(
        [left[0 : size(rows), tile, m] for tile, rows in tiles],
        [right[0 : size(rows), tile, n] for tile, rows in tiles],
    )


def zeros(rows, columns, dtype):
    """Return SBUF tiles of 128 rows and fewer, filled with zeros."""
    return [filled(size(part), columns, dtype=dtype) for part in slices(rows)]


def sigmoid(x):
    """Return 1 / (1 + exp(-x)) as the published kernels compute it."""
    return inverse(scaled(activated(x, nl.exp, scale=-1.0), nl.add, 1.0))
