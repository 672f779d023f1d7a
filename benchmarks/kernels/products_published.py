"""Kernels around matrix products, as published with measured latencies.

Each is written anew from its public text (NKI Beta 1) or description and issues the same
instructions. Loads that the published run was seen to make once (its profile counts the bytes of
HBM) are made once here.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import (
    COLUMNS,
    P,
    both,
    columns_of,
    copied,
    load,
    load_rows,
    new,
    row_of_sums,
    scaled,
    spread,
    summed,
)


def transposed(tile, identity, rows, columns, out):
    """Transpose a float32 tile by a product with the identity, and copy it out of PSUM."""
    turned = new(columns, rows, buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=tile, moving=identity, is_moving_onezero=True)
    return copied(turned, out)


def loaded_together(rows, first, count, together, width):
    """Return views of `count` tiles of 128 rows, of which one DMA brings some."""
    tiles = []
    for column in range(first, first + count * width, together * width):
        wide = load(rows[:, column : column + together * width], P, together * width)
        tiles += columns_of(wide, width)
    return tiles


def turned_columns(tile, identity, out=None):
    """Transpose each 128 columns of a tile."""
    out = new(P, tile.shape[1]) if out is None else out
    for part, to in zip(columns_of(tile, P), columns_of(out, P), strict=True):
        transposed(part, identity, P, P, to)
    return out


@nki.jit
def grouped(lhs_t, rhs, group_m, group_n, loads_m, loads_n):
    """Groups of group_m x group_n tiles accumulate together; tiles are loaded per depth.

    loads_m, loads_n: how many tiles one DMA brings (the published steps fuse loads).
    """
    k, m = lhs_t.shape
    n = rhs.shape[1]
    result = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    places = [(i, j) for i in range(group_m) for j in range(group_n)]
    for row in range(0, m, P * group_m):
        for column in range(0, n, COLUMNS * group_n):
            sums = {place: new(P, COLUMNS, buffer=nl.psum) for place in places}
            for depth in range(0, k, P):
                rows = slice(depth, depth + P)
                rights = loaded_together(rhs[rows, :], column, group_n, loads_n, COLUMNS)
                lefts = loaded_together(lhs_t[rows, :], row, group_m, loads_m, P)
                for i, j in places:
                    nisa.nc_matmul(dst=sums[i, j], stationary=lefts[i], moving=rights[j])
            for i, j in places:
                out = copied(sums[i, j], new(P, COLUMNS, result.dtype))
                at, to = row + i * P, column + j * COLUMNS
                nisa.dma_copy(dst=result[at : at + P, to : to + COLUMNS], src=out)
    return result


@nki.jit
def resident(lhs_t, rhs, kinds):
    """2,048 products of resident bf16 tiles; kinds: 1 all full, 4 a quarter each of four kinds.

    The kinds: M = 32, N = 64, K = 32, and full (K = M = 128, N = 512), 512 products each.
    """
    result = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.shared_hbm)
    left, right = load(lhs_t, P, P), load(rhs, P, COLUMNS)
    sizes = [(32, 512, 128), (128, 64, 128), (128, 512, 32), (128, 512, 128)]
    for kind in range(4):
        m, n, k = sizes[kind] if kinds == 4 else sizes[3]
        total = new(P, COLUMNS, buffer=nl.psum)
        for _ in range(512):
            nisa.nc_matmul(dst=total[:m, :n], stationary=left[:k, :m], moving=right[:k, :n])
        out = copied(total[:m, :n], new(m, n))
        nisa.dma_copy(dst=result[:m, :n], src=out)
    return result


@nki.jit
def transposing(lhs, rhs, identity):
    """float32 lhs [m, k] times rhs [k, n]: rows of lhs are transposed for each 1,024 columns."""
    m, k = lhs.shape
    n = rhs.shape[1]
    wide = 1024
    result = nl.ndarray((m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    one = load(identity, P, P)
    for column in range(0, n, wide):
        rights = load_rows(rhs, column, wide)
        for row in range(0, m, P):
            turned = []
            for depth in range(0, k, wide):
                tile = load(lhs[row : row + P, depth : depth + wide], P, wide)
                turned += columns_of(turned_columns(tile, one), P)
            out = row_of_sums(turned, rights)
            nisa.dma_copy(dst=result[row : row + P, column : column + wide], src=out)
    return result


@nki.jit
def rmsnorm_then_product(x, w, identity):
    """RMSNorm of rows of x [m, 1024], transposed on TensorE, times w [1024, n]."""
    m, k = x.shape
    n = w.shape[1]
    wide = 1024
    result = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    one = load(identity, P, P)
    for block in range(0, m, 8 * P):
        turned = []
        for row in range(block, block + 8 * P, P):
            tile = load(x[row : row + P, :], P, k)
            sums = new(P, 2)
            for half in range(2):
                at = slice(half * COLUMNS, (half + 1) * COLUMNS)
                squares = new(P, COLUMNS)
                nisa.activation(dst=squares, op=nl.square, data=tile[:, at])
                means = scaled(squares, nl.multiply, 1.0 / k)
                nisa.tensor_reduce(dst=sums[:, half : half + 1], op=nl.add, data=means, axis=1)
            total, root = new(P, 1), new(P, 1)
            nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
            nisa.activation(dst=root, op=nl.rsqrt, data=total)
            again = load(x[row : row + P, :], P, k)
            columns = new(P, k)
            for half in range(2):
                at = slice(half * COLUMNS, (half + 1) * COLUMNS)
                normed = scaled(again[:, at], nl.multiply, root)
                turned_columns(normed, one, columns[:, at])
            turned.append(columns)
        for column in range(0, n, wide):
            rights = load_rows(w, column, wide)
            for index, columns in enumerate(turned):
                out = row_of_sums(columns_of(columns, P), rights)
                row = block + index * P
                nisa.dma_copy(dst=result[row : row + P, column : column + wide], src=out)
    return result


def rms_normed(data, width, gain):
    """RMSNorm of a tile [128, width] and its gain, in whole rows as the nl functions do it."""
    squares, total, mean, root = new(P, width), new(P, 1), new(P, 1), new(P, 1)
    nisa.activation(dst=squares, op=nl.square, data=data)
    nisa.tensor_reduce(dst=total, op=nl.add, data=squares, axis=1)
    nisa.tensor_scalar(
        dst=mean, data=total, op0=nl.multiply, operand0=1.0 / width, op1=nl.add, operand1=1e-5
    )
    nisa.activation(dst=root, op=nl.rsqrt, data=mean)
    normed = scaled(data, nl.multiply, root, width)
    return both(normed, gain, nl.multiply, width)


def times(tile, weights, identity, k, n):
    """Yield (column, PSUM tile) of tile [128, k] times weights(step, column).

    nl.matmul transposes the tile for each 512 columns of the result.
    """
    for column in range(0, n, COLUMNS):
        total = new(P, COLUMNS, buffer=nl.psum)
        for step in range(k // P):
            part = tile[:, step * P : (step + 1) * P]
            turned = transposed(part, identity, P, P, new(P, P))
            nisa.nc_matmul(dst=total, stationary=turned, moving=weights(step, column))
        yield column, total


def weights_of(w, inside):
    """Return (step, column) -> tile [128, 512] of w: from rows loaded once, or loaded at each use.

    inside: the published text loads where it multiplies; the profiles of trn1 count one load.
    """
    if inside:
        return lambda step, column: load(
            w[step * P : (step + 1) * P, column : column + COLUMNS], P, COLUMNS
        )
    rows = load_rows(w, 0, w.shape[1])
    return lambda step, column: rows[step][:, column : column + COLUMNS]


@nki.jit
def add_rmsnorm_then_product(x, z, g, w, identity, inside=False):
    """(x + z) normed and scaled, times w; inside: `weights_of` says."""
    m, k = x.shape
    n = w.shape[1]
    result = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    one = load(identity, P, P)
    gain = spread(load(g, 1, k), k)
    weights = weights_of(w, inside)
    for row in range(0, m, P):
        total = both(load(x[row : row + P, :], P, k), load(z[row : row + P, :], P, k), nl.add, k)
        normed = rms_normed(total, k, gain)
        for column, product in times(normed, weights, one, k, n):
            out = copied(product, new(P, COLUMNS))
            nisa.dma_copy(dst=result[row : row + P, column : column + COLUMNS], src=out)
    return result


@nki.jit
def product_then_add_rmsnorm(x, w, z, g, identity, inside=False):
    """x times w, plus z, normed and scaled; inside: `weights_of` says."""
    m, k = x.shape
    n = w.shape[1]
    result = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    one = load(identity, P, P)
    gain = spread(load(g, 1, n), n)
    weights = weights_of(w, inside)
    for row in range(0, m, P):
        tile = load(x[row : row + P, :], P, k)
        products = new(P, n)
        for column, product in times(tile, weights, one, k, n):
            copied(product, products[:, column : column + COLUMNS])
        total = both(products, load(z[row : row + P, :], P, n), nl.add, n)
        nisa.dma_copy(dst=result[row : row + P, :], src=rms_normed(total, n, gain))
    return result


@nki.jit
def batched(lhs, rhs, identity, softmax):
    """float32 lhs [b, m, 64] times rhs [b, 64, n], the left tiles transposed on TensorE.

    softmax: of each row of the result; all of a batch's rows wait on chip for it.
    """
    batches, m, k = lhs.shape
    n = rhs.shape[2]
    wide = 1024
    result = nl.ndarray((batches, m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    one = load(identity, P, P)
    for b in range(batches):
        scores = {}
        for column in range(0, n, wide):
            right = load(rhs[b, :, column : column + wide], k, wide)
            for block in range(0, m, wide):
                turned = new(k, wide)
                for at in range(0, wide, P):
                    row = block + at
                    left = load(lhs[b, row : row + P, :], P, k)
                    transposed(left, one, P, k, turned[:, at : at + P])
                for at in range(0, wide, P):
                    out = row_of_sums([turned[:, at : at + P]], [right])
                    row = block + at
                    if softmax:
                        scores[row, column] = out
                    else:
                        nisa.dma_copy(dst=result[b, row : row + P, column : column + wide], src=out)
        for row in range(0, m, P) if softmax else ():
            tops, top, sums, total, inverse = (new(P, c) for c in (8, 1, 8, 1, 1))
            halves = [
                part
                for column in range(0, n, wide)
                for part in columns_of(scores[row, column], COLUMNS)
            ]
            for i, part in enumerate(halves):
                nisa.tensor_reduce(dst=tops[:, i : i + 1], op=nl.maximum, data=part, axis=1)
            nisa.tensor_reduce(dst=top, op=nl.maximum, data=tops, axis=1, negate=True)
            powers = [new(P, COLUMNS) for _ in halves]
            for i, part in enumerate(halves):
                nisa.activation(dst=powers[i], op=nl.exp, data=part, bias=top)
                nisa.tensor_reduce(dst=sums[:, i : i + 1], op=nl.add, data=powers[i], axis=1)
            nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
            nisa.reciprocal(dst=inverse, data=total)
            for column in range(0, n, wide):
                out = new(P, wide)
                for half in range(2):
                    nisa.tensor_scalar(
                        dst=out[:, half * COLUMNS : (half + 1) * COLUMNS],
                        data=powers[column // COLUMNS + half], op0=nl.multiply, operand0=inverse,
                    )  # fmt: skip
                nisa.dma_copy(dst=result[b, row : row + P, column : column + wide], src=out)
    return result


@nki.jit
def left_transposed(lhs_t, rhs):
    """float32 lhs_t [k, m] times rhs [k, n]; rows of one tile are k / 128 rows apart in HBM."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    wide, steps = 1024, k // P
    lefts_of, rights_of = lhs_t.reshape((P, steps, m)), rhs.reshape((P, steps, n))
    result = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for block in range(0, m, wide):
        lefts = [load(lefts_of[:, s, block : block + wide], P, wide) for s in range(steps)]
        for column in range(0, n, wide):
            width = min(wide, n - column)
            rights = [
                load(rights_of[:, s, column : column + width], P, width) for s in range(steps)
            ]
            for row in range(0, wide, P):
                out = row_of_sums([left[:, row : row + P] for left in lefts], rights)
                place = block + row
                nisa.dma_copy(dst=result[place : place + P, column : column + width], src=out)
    return result


def turned_rows(x, row, identity):
    """Transpose 512 rows of x [m, 1024]; return eight tiles [128, 512]."""
    out = [new(P, COLUMNS) for _ in range(8)]
    for i in range(4):
        tile = load(x[row + i * P : row + (i + 1) * P, :], P, 1024)
        for part, turned in zip(columns_of(tile, P), out, strict=True):
            transposed(part, identity, P, P, turned[:, i * P : (i + 1) * P])
    return out


@nki.jit
def swiglu(x, up, down, gate, identity):
    """float32: x [m, 1024], gate and up [1024, 3072], down [3072, 1024]; the middle goes to HBM."""
    m, k = x.shape
    hidden = up.shape[1]
    wide = 1024
    one = load(identity, P, P)
    middle = nl.ndarray((hidden // P, m // COLUMNS, P, COLUMNS), x.dtype, buffer=nl.private_hbm)
    result = nl.ndarray((m, k), dtype=x.dtype, buffer=nl.shared_hbm)
    gates = {}

    def products(weights, column, rows):
        for piece in range(0, wide, P):
            total = summed([weight[:, piece : piece + P] for weight in weights], rows)
            yield (column + piece) // P, total

    for column in range(0, hidden, wide):
        weights = load_rows(gate, column, wide)
        for block in range(m // COLUMNS):
            rows = turned_rows(x, block * COLUMNS, one)
            for piece, total in products(weights, column, rows):
                gates[piece, block] = copied(total, new(P, COLUMNS))
    for column in range(0, hidden, wide):
        weights = load_rows(up, column, wide)
        for block in range(m // COLUMNS):
            rows = turned_rows(x, block * COLUMNS, one)
            for piece, total in products(weights, column, rows):
                held = gates[piece, block]
                power, inverse = new(P, COLUMNS), new(P, COLUMNS)
                nisa.activation(dst=power, op=nl.exp, data=held, scale=-1.0)
                nisa.reciprocal(dst=inverse, data=scaled(power, nl.add, 1.0))
                out = both(both(held, inverse, nl.multiply), total, nl.multiply)
                nisa.dma_copy(dst=middle[piece, block], src=out)
    weights = load_rows(down, 0, k)
    for block in range(m // COLUMNS):
        parts = [load(middle[piece, block], P, COLUMNS) for piece in range(hidden // P)]
        for i in range(4):
            out = row_of_sums([part[:, i * P : (i + 1) * P] for part in parts], weights)
            row = block * COLUMNS + i * P
            nisa.dma_copy(dst=result[row : row + P, :], src=out)
    return result
