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
    WIDE,
    P,
    activated,
    both,
    columns_of,
    copied,
    inverse,
    load,
    load_rows,
    new,
    reduced,
    result_of_product,
    row_of_sums,
    scaled,
    sigmoid,
    slices,
    spread,
    store_product,
    summed,
    within,
)


def transposed(tile, identity, out=None):
    """Transpose a float32 tile by a product with the identity, and copy it out of PSUM."""
    turned = new(tile.shape[1], tile.shape[0], buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=tile, moving=identity, is_moving_onezero=True)
    return copied(turned, out)


def loaded_together(rows, first, count, together, width):
    """Return views of `count` tiles of 128 rows, of which one DMA brings some."""
    tiles = []
    for columns in slices(first + count * width, together * width, first):
        tiles += columns_of(load(rows[:, columns]), width)
    return tiles


def turned_columns(tile, identity, out=None):
    """Transpose each 128 columns of a tile; return the tiles."""
    outs = columns_of(new(*tile.shape) if out is None else out)
    return [transposed(p, identity, to) for p, to in zip(columns_of(tile), outs, strict=True)]


@nki.jit
def grouped(lhs_t, rhs, group_m, group_n, loads_m, loads_n):
    """Groups of group_m x group_n tiles accumulate together; tiles are loaded per depth.

    loads_m, loads_n: how many tiles one DMA brings (the published steps fuse loads).
    """
    result, k, m, n = result_of_product(lhs_t, rhs)
    places = [(i, j) for i in range(group_m) for j in range(group_n)]
    for row in range(0, m, P * group_m):
        for column in range(0, n, COLUMNS * group_n):
            sums = {place: new(P, COLUMNS, buffer=nl.psum) for place in places}
            for rows in slices(k):
                rights = loaded_together(rhs[rows, :], column, group_n, loads_n, COLUMNS)
                lefts = loaded_together(lhs_t[rows, :], row, group_m, loads_m, P)
                for i, j in places:
                    nisa.nc_matmul(dst=sums[i, j], stationary=lefts[i], moving=rights[j])
            for i, j in places:
                at, to = row + i * P, column + j * COLUMNS
                store_product(result, sums[i, j], slice(at, at + P), slice(to, to + COLUMNS))
    return result


@nki.jit
def resident(lhs_t, rhs, kinds):
    """2,048 products of resident bf16 tiles; kinds: 1 all full, 4 a quarter each of four kinds.

    The kinds: M = 32, N = 64, K = 32, and full (K = M = 128, N = 512), 512 products each.
    """
    result = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.shared_hbm)
    left, right = load(lhs_t), load(rhs)
    sizes = [(32, 512, 128), (128, 64, 128), (128, 512, 32), (128, 512, 128)]
    for m, n, k in sizes if kinds == 4 else sizes[3:] * 4:
        total = new(P, COLUMNS, buffer=nl.psum)
        for _ in range(512):
            nisa.nc_matmul(dst=total[:m, :n], stationary=left[:k, :m], moving=right[:k, :n])
        nisa.dma_copy(dst=result[:m, :n], src=copied(total[:m, :n]))
    return result


@nki.jit
def transposing(lhs, rhs, identity):
    """float32 lhs [m, k] times rhs [k, n]: rows of lhs are transposed for each 1,024 columns."""
    result, k, m, n = result_of_product(lhs, rhs, turned=False)
    one = load(identity)
    for columns in slices(n, WIDE):
        rights = load_rows(rhs, columns)
        for rows in slices(m):
            turned = []
            for depth in slices(k, WIDE):
                turned += turned_columns(load(lhs[rows, depth]), one)
            nisa.dma_copy(dst=result[rows, columns], src=row_of_sums(turned, rights))
    return result


@nki.jit
def rmsnorm_then_product(x, w, identity):
    """RMSNorm of rows of x [m, 1024], transposed on TensorE, times w [1024, n]."""
    result, k, m, n = result_of_product(x, w, turned=False)
    one = load(identity)
    for block in slices(m, 8 * P):
        blocks, turned = within(block), []
        for rows in blocks:
            sums, columns = new(P, 2), new(P, k)
            halves = columns_of(load(x[rows, :]), COLUMNS)
            for half, total in zip(halves, columns_of(sums, 1), strict=True):
                means = scaled(activated(half, nl.square), nl.multiply, 1.0 / k)
                reduced(means, nl.add, total)
            root = activated(reduced(sums, nl.add), nl.rsqrt)
            again = columns_of(load(x[rows, :]), COLUMNS)
            turned.append([])
            for half, out in zip(again, columns_of(columns, COLUMNS), strict=True):
                turned[-1] += turned_columns(scaled(half, nl.multiply, root), one, out)
        for across in slices(n, WIDE):
            rights = load_rows(w, across)
            for rows, lefts in zip(blocks, turned, strict=True):
                nisa.dma_copy(dst=result[rows, across], src=row_of_sums(lefts, rights))
    return result


def rms_normed(data, gain):
    """RMSNorm of a tile and its gain, in whole rows as the nl functions do it."""
    total = reduced(activated(data, nl.square), nl.add)
    mean = scaled(total, nl.multiply, 1.0 / data.shape[1], op1=nl.add, operand1=1e-5)
    normed = scaled(data, nl.multiply, activated(mean, nl.rsqrt))
    return both(normed, gain, nl.multiply)


def times(tile, weights, identity):
    """Yield (slice of columns, PSUM tile) of a tile [128, k] times rows of weights in SBUF.

    nl.matmul transposes the tile for each 512 columns of the result.
    """
    for at in slices(weights[0].shape[1], COLUMNS):
        total = new(P, COLUMNS, buffer=nl.psum)
        for part, row in zip(columns_of(tile), weights, strict=True):
            turned = transposed(part, identity)
            nisa.nc_matmul(dst=total, stationary=turned, moving=row[:, at])
        yield at, total


@nki.jit
def add_rmsnorm_then_product(x, z, g, w, identity):
    """(x + z) normed and scaled, times w, which the profiles of trn1 count as loaded once."""
    result, _, m, n = result_of_product(x, w, turned=False)
    one, gain, weights = load(identity), spread(load(g)), load_rows(w, slice(0, n))
    for rows in slices(m):
        normed = rms_normed(both(load(x[rows, :]), load(z[rows, :]), nl.add), gain)
        for at, product in times(normed, weights, one):
            nisa.dma_copy(dst=result[rows, at], src=copied(product))
    return result


@nki.jit
def product_then_add_rmsnorm(x, w, z, g, identity):
    """x times w, which is loaded once, plus z, normed and scaled."""
    result, _, m, n = result_of_product(x, w, turned=False)
    one, gain, weights = load(identity), spread(load(g)), load_rows(w, slice(0, n))
    for rows in slices(m):
        products = new(P, n)
        for at, product in times(load(x[rows, :]), weights, one):
            copied(product, products[:, at])
        total = both(products, load(z[rows, :]), nl.add)
        nisa.dma_copy(dst=result[rows, :], src=rms_normed(total, gain))
    return result


@nki.jit
def batched(lhs, rhs, identity, softmax):
    """float32 lhs [b, m, 64] times rhs [b, 64, n], the left tiles transposed on TensorE.

    softmax: of each row of the result; all of a batch's rows wait on chip for it.
    """
    batches, m, k = lhs.shape
    n = rhs.shape[2]
    result = nl.ndarray((batches, m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    one = load(identity)
    for b in range(batches):
        scores = [[] for _ in range(m // P)]
        for columns in slices(n, WIDE):
            right = load(rhs[b, :, columns])
            for block in slices(m, WIDE):
                turned = columns_of(new(k, WIDE))
                blocks = within(block)
                for rows, to in zip(blocks, turned, strict=True):
                    transposed(load(lhs[b, rows, :]), one, to)
                for rows, left in zip(blocks, turned, strict=True):
                    out = row_of_sums([left], [right])
                    scores[rows.start // P] += columns_of(out, COLUMNS)
                    if not softmax:
                        nisa.dma_copy(dst=result[b, rows, columns], src=out)
        for rows, parts in zip(slices(m), scores, strict=True) if softmax else ():
            for columns, out in zip(slices(n, WIDE), softmax_of(parts), strict=True):
                nisa.dma_copy(dst=result[b, rows, columns], src=out)
    return result


def softmax_of(parts):
    """Yield the softmax of rows that lie in eight tiles of 512 columns, two tiles at a time."""
    tops, sums = new(P, 8), new(P, 8)
    for part, top in zip(parts, columns_of(tops, 1), strict=True):
        reduced(part, nl.maximum, top)
    top = reduced(tops, nl.maximum, negate=True)
    powers = [new(P, COLUMNS) for _ in parts]
    for part, power, total in zip(parts, powers, columns_of(sums, 1), strict=True):
        nisa.activation(dst=power, op=nl.exp, data=part, bias=top)
        reduced(power, nl.add, total)
    share = inverse(reduced(sums, nl.add))
    for pair in zip(powers[::2], powers[1::2], strict=True):
        out = new(P, WIDE)
        for power, half in zip(pair, columns_of(out, COLUMNS), strict=True):
            scaled(power, nl.multiply, share, half)
        yield out


@nki.jit
def left_transposed(lhs_t, rhs):
    """float32 lhs_t [k, m] times rhs [k, n]; rows of one tile are k / 128 rows apart in HBM."""
    result, k, m, n = result_of_product(lhs_t, rhs)
    steps = range(k // P)
    lefts_of, rights_of = lhs_t.reshape((P, k // P, m)), rhs.reshape((P, k // P, n))
    for block in slices(m, WIDE):
        lefts = [columns_of(load(lefts_of[:, s, block])) for s in steps]
        for columns in slices(n, WIDE):
            rights = [load(rights_of[:, s, columns]) for s in steps]
            for rows, *tiles in zip(within(block), *lefts, strict=True):
                nisa.dma_copy(dst=result[rows, columns], src=row_of_sums(tiles, rights))
    return result


def turned_rows(x, block, identity):
    """Transpose a slice of 512 rows of x [m, 1024]; return eight tiles [128, 512]."""
    out = [new(P, COLUMNS) for _ in range(8)]
    for i, rows in enumerate(within(block)):
        tile = load(x[rows, :])
        for part, turned in zip(columns_of(tile), out, strict=True):
            transposed(part, identity, columns_of(turned)[i])
    return out


@nki.jit
def swiglu(x, up, down, gate, identity):
    """float32: x [m, 1024], gate and up [1024, 3072], down [3072, 1024]; the middle goes to HBM."""
    m, k = x.shape
    hidden = up.shape[1]
    one = load(identity)
    middle = nl.ndarray((hidden // P, m // COLUMNS, P, COLUMNS), x.dtype, buffer=nl.private_hbm)
    result = nl.ndarray((m, k), dtype=x.dtype, buffer=nl.shared_hbm)
    blocks, gates = slices(m, COLUMNS), {}

    def products(weights):
        """Yield ((piece of the hidden features, block of tokens), x times weights in PSUM)."""
        for columns in slices(hidden, WIDE):
            lefts = [columns_of(rows) for rows in load_rows(weights, columns)]
            for index, block in enumerate(blocks):
                rights = turned_rows(x, block, one)
                for piece, tiles in enumerate(zip(*lefts, strict=True), columns.start // P):
                    yield (piece, index), summed(tiles, rights)

    for place, total in products(gate):
        gates[place] = copied(total)
    for place, total in products(up):
        held = gates[place]
        out = both(both(held, sigmoid(held), nl.multiply), total, nl.multiply)
        nisa.dma_copy(dst=middle[place], src=out)
    weights = load_rows(down, slice(0, k))
    for index, block in enumerate(blocks):
        parts = [columns_of(load(middle[piece, index])) for piece in range(hidden // P)]
        for rows, *tiles in zip(within(block), *parts, strict=True):
            nisa.dma_copy(dst=result[rows, :], src=row_of_sums(tiles, weights))
    return result
