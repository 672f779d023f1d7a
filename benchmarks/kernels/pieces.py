"""Pieces of the published kernels: tiles, loads, and sums of products."""

import nki.isa as nisa
import nki.language as nl

P = 128
COLUMNS = 512


def new(rows, columns, dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray((rows, columns), dtype=dtype, buffer=buffer)


def load(source, rows, columns):
    """Return an SBUF tile with a copy of an HBM region."""
    tile = new(rows, columns, source.dtype)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def load_rows(source, first, width, start=0, stop=None):
    """Return tiles [128, width] of rows start to stop, from column `first` on: a DMA each."""
    rows = range(start, stop or source.shape[0], P)
    return [load(source[row : row + P, first : first + width], P, width) for row in rows]


def columns_of(tile, width):
    """Return a tile's views of `width` columns."""
    return [tile[:, at : at + width] for at in range(0, tile.shape[1], width)]


def copied(product, out):
    """PSUM to SBUF; nl.copy of Beta 1, whose engine the compiler chooses."""
    nisa.tensor_copy(dst=out, src=product)
    return out


def summed(lefts, rights):
    """Return the sum of products in PSUM."""
    total = new(lefts[0].shape[1], rights[0].shape[1], buffer=nl.psum)
    for left, right in zip(lefts, rights, strict=True):
        nisa.nc_matmul(dst=total, stationary=left, moving=right)
    return total


def row_of_sums(lefts, rights):
    """Return sums of products in SBUF, 512 columns at a time."""
    width = rights[0].shape[1]
    out = new(lefts[0].shape[1], width)
    for at in range(0, width, COLUMNS):
        part = slice(at, min(at + COLUMNS, width))
        copied(summed(lefts, [right[:, part] for right in rights]), out[:, part])
    return out


def spread(row, columns):
    """Return an SBUF tile with one row in all partitions, by products with ones."""
    ones = new(1, P)
    nisa.memset(dst=ones, value=1.0)
    return row_of_sums([ones], [row[:, :columns]])


def scaled(data, op, number, columns=COLUMNS, rows=P):
    out = new(rows, columns)
    nisa.tensor_scalar(dst=out, data=data, op0=op, operand0=number)
    return out


def both(left, right, op, columns=COLUMNS, rows=P):
    out = new(rows, columns)
    nisa.tensor_tensor(dst=out, data1=left, data2=right, op=op)
    return out
