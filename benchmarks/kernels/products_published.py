"""Kernels around matrix products, as published with measured latencies.

Each is written anew from its public text (NKI Beta 1) or description and issues the same
instructions. Loads that the published run was seen to make once (its profile counts the bytes of
HBM) are made once here.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
COLUMNS = 512


def new(rows, columns, dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray((rows, columns), dtype=dtype, buffer=buffer)


def load(source, rows, columns):
    tile = new(rows, columns, source.dtype)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def copied(product, out):
    """PSUM to SBUF; nl.copy of Beta 1, whose engine the compiler chooses."""
    nisa.tensor_copy(dst=out, src=product)
    return out


def transposed(tile, identity, rows, columns, out):
    """Transpose a float32 tile by a product with the identity, and copy it out of PSUM."""
    turned = new(columns, rows, buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=tile, moving=identity, is_moving_onezero=True)
    return copied(turned, out)


@nki.jit
def grouped(lhs_t, rhs, group_m, group_n, loads_m, loads_n):
    """Groups of group_m x group_n tiles accumulate together; tiles are loaded per depth.

    loads_m, loads_n: how many tiles one DMA brings (the published steps fuse loads).
    """
    k, m = lhs_t.shape
    n = rhs.shape[1]
    result = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for row in range(0, m, P * group_m):
        for column in range(0, n, COLUMNS * group_n):
            sums = [new(P, COLUMNS, buffer=nl.psum) for _ in range(group_m * group_n)]
            for depth in range(0, k, P):
                rows = slice(depth, depth + P)
                rights = []
                for j in range(0, group_n, loads_n):
                    first, width = column + j * COLUMNS, loads_n * COLUMNS
                    wide = load(rhs[rows, first : first + width], P, width)
                    rights += [wide[:, i * COLUMNS : (i + 1) * COLUMNS] for i in range(loads_n)]
                lefts = []
                for j in range(0, group_m, loads_m):
                    first, width = row + j * P, loads_m * P
                    wide = load(lhs_t[rows, first : first + width], P, width)
                    lefts += [wide[:, i * P : (i + 1) * P] for i in range(loads_m)]
                for i in range(group_m):
                    for j in range(group_n):
                        nisa.nc_matmul(
                            dst=sums[i * group_n + j], stationary=lefts[i], moving=rights[j]
                        )
            for i in range(group_m):
                for j in range(group_n):
                    out = copied(sums[i * group_n + j], new(P, COLUMNS, result.dtype))
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
        rights = [
            load(rhs[depth : depth + P, column : column + wide], P, wide)
            for depth in range(0, k, P)
        ]
        for row in range(0, m, P):
            turned = []
            for depth in range(0, k, wide):
                tile = load(lhs[row : row + P, depth : depth + wide], P, wide)
                out = new(P, wide)
                for at in range(0, wide, P):
                    transposed(tile[:, at : at + P], one, P, P, out[:, at : at + P])
                    turned.append(out[:, at : at + P])
            out = new(P, wide)
            for at in range(0, wide, COLUMNS):
                total = new(P, COLUMNS, buffer=nl.psum)
                for step, right in enumerate(rights):
                    nisa.nc_matmul(
                        dst=total, stationary=turned[step], moving=right[:, at : at + COLUMNS]
                    )
                copied(total, out[:, at : at + COLUMNS])
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
                squares, means = new(P, COLUMNS), new(P, COLUMNS)
                nisa.activation(dst=squares, op=nl.square, data=tile[:, at])
                nisa.tensor_scalar(dst=means, data=squares, op0=nl.multiply, operand0=1.0 / k)
                nisa.tensor_reduce(dst=sums[:, half : half + 1], op=nl.add, data=means, axis=1)
            total, root = new(P, 1), new(P, 1)
            nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
            nisa.activation(dst=root, op=nl.rsqrt, data=total)
            again = load(x[row : row + P, :], P, k)
            columns = new(P, k)
            for half in range(2):
                at = slice(half * COLUMNS, (half + 1) * COLUMNS)
                normed = new(P, COLUMNS)
                nisa.tensor_scalar(dst=normed, data=again[:, at], op0=nl.multiply, operand0=root)
                for step in range(4):
                    place = half * COLUMNS + step * P
                    transposed(
                        normed[:, step * P : (step + 1) * P], one, P, P,
                        columns[:, place : place + P],
                    )  # fmt: skip
            turned.append(columns)
        for column in range(0, n, wide):
            rights = [
                load(w[depth : depth + P, column : column + wide], P, wide)
                for depth in range(0, k, P)
            ]
            for index, columns in enumerate(turned):
                out = new(P, wide)
                for at in range(0, wide, COLUMNS):
                    total = new(P, COLUMNS, buffer=nl.psum)
                    for step, right in enumerate(rights):
                        nisa.nc_matmul(
                            dst=total,
                            stationary=columns[:, step * P : (step + 1) * P],
                            moving=right[:, at : at + COLUMNS],
                        )
                    copied(total, out[:, at : at + COLUMNS])
                row = block + index * P
                nisa.dma_copy(dst=result[row : row + P, column : column + wide], src=out)
    return result


def spread(row, columns):
    """Return an SBUF tile with one row in all partitions, by products with ones."""
    ones = new(1, P)
    nisa.memset(dst=ones, value=1.0)
    wide = new(P, columns)
    for at in range(0, columns, COLUMNS):
        product = new(P, COLUMNS, buffer=nl.psum)
        nisa.nc_matmul(dst=product, stationary=ones, moving=row[:, at : at + COLUMNS])
        copied(product, wide[:, at : at + COLUMNS])
    return wide


def rms_normed(data, width, gain):
    """RMSNorm of a tile [128, width] and its gain, in whole rows as the nl functions do it."""
    squares, total, mean, root = new(P, width), new(P, 1), new(P, 1), new(P, 1)
    nisa.activation(dst=squares, op=nl.square, data=data)
    nisa.tensor_reduce(dst=total, op=nl.add, data=squares, axis=1)
    nisa.tensor_scalar(
        dst=mean, data=total, op0=nl.multiply, operand0=1.0 / width, op1=nl.add, operand1=1e-5
    )
    nisa.activation(dst=root, op=nl.rsqrt, data=mean)
    normed, out = new(P, width), new(P, width)
    nisa.tensor_scalar(dst=normed, data=data, op0=nl.multiply, operand0=root)
    nisa.tensor_tensor(dst=out, data1=normed, data2=gain, op=nl.multiply)
    return out


def times(tile, weights, identity, k, n, keep):
    """Yield (column, PSUM tile) of tile [128, k] times weights(step, column); nl.matmul transposes.

    keep: the transposed tiles are made once and not for each 512 columns of the result.
    """
    turned = []
    for column in range(0, n, COLUMNS):
        total = new(P, COLUMNS, buffer=nl.psum)
        for step in range(k // P):
            if column == 0 or not keep:
                part = tile[:, step * P : (step + 1) * P]
                turned.append(transposed(part, identity, P, P, new(P, P)))
            nisa.nc_matmul(
                dst=total,
                stationary=turned[step] if keep else turned[-1],
                moving=weights(step, column),
            )
        yield column, total


def weights_of(w, inside):
    """Return (step, column) -> tile [128, 512] of w: from rows loaded once, or loaded at each use.

    inside: the published text loads where it multiplies; the profiles of trn1 count one load.
    """
    if inside:
        return lambda step, column: load(
            w[step * P : (step + 1) * P, column : column + COLUMNS], P, COLUMNS
        )
    rows = [load(w[depth : depth + P, :], P, w.shape[1]) for depth in range(0, w.shape[0], P)]
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
        total = new(P, k)
        nisa.tensor_tensor(
            dst=total, data1=load(x[row : row + P, :], P, k), data2=load(z[row : row + P, :], P, k),
            op=nl.add,
        )  # fmt: skip
        normed = rms_normed(total, k, gain)
        for column, product in times(normed, weights, one, k, n, False):
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
        for column, product in times(tile, weights, one, k, n, False):
            copied(product, products[:, column : column + COLUMNS])
        total = new(P, n)
        nisa.tensor_tensor(
            dst=total, data1=products, data2=load(z[row : row + P, :], P, n), op=nl.add
        )
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
                    out = new(P, wide)
                    for half in range(0, wide, COLUMNS):
                        product = new(P, COLUMNS, buffer=nl.psum)
                        nisa.nc_matmul(
                            dst=product, stationary=turned[:, at : at + P],
                            moving=right[:, half : half + COLUMNS],
                        )  # fmt: skip
                        copied(product, out[:, half : half + COLUMNS])
                    row = block + at
                    if softmax:
                        scores[row, column] = out
                    else:
                        nisa.dma_copy(dst=result[b, row : row + P, column : column + wide], src=out)
        for row in range(0, m, P) if softmax else ():
            tops, top, sums, total, inverse = (new(P, c) for c in (8, 1, 8, 1, 1))
            halves = [
                scores[row, column][:, half : half + COLUMNS]
                for column in range(0, n, wide)
                for half in range(0, wide, COLUMNS)
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
                out = new(P, width)
                for at in range(0, width, COLUMNS):
                    part = min(COLUMNS, width - at)
                    total = new(P, part, buffer=nl.psum)
                    for step in range(steps):
                        nisa.nc_matmul(
                            dst=total, stationary=lefts[step][:, row : row + P],
                            moving=rights[step][:, at : at + part],
                        )  # fmt: skip
                    copied(total, out[:, at : at + part])
                place = block + row
                nisa.dma_copy(dst=result[place : place + P, column : column + width], src=out)
    return result


def turned_rows(x, row, identity):
    """Transpose 512 rows of x [m, 1024]; return eight tiles [128, 512]."""
    out = [new(P, COLUMNS) for _ in range(8)]
    for i in range(4):
        tile = load(x[row + i * P : row + (i + 1) * P, :], P, 1024)
        for step in range(8):
            part = tile[:, step * P : (step + 1) * P]
            transposed(part, identity, P, P, out[step][:, i * P : (i + 1) * P])
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
            total = new(P, COLUMNS, buffer=nl.psum)
            for step in range(k // P):
                nisa.nc_matmul(
                    dst=total, stationary=weights[step][:, piece : piece + P], moving=rows[step]
                )
            yield (column + piece) // P, total

    for column in range(0, hidden, wide):
        weights = [load(gate[d : d + P, column : column + wide], P, wide) for d in range(0, k, P)]
        for block in range(m // COLUMNS):
            rows = turned_rows(x, block * COLUMNS, one)
            for piece, total in products(weights, column, rows):
                gates[piece, block] = copied(total, new(P, COLUMNS))
    for column in range(0, hidden, wide):
        weights = [load(up[d : d + P, column : column + wide], P, wide) for d in range(0, k, P)]
        for block in range(m // COLUMNS):
            rows = turned_rows(x, block * COLUMNS, one)
            for piece, total in products(weights, column, rows):
                held = gates[piece, block]
                power, added, inverse, silu, out = (new(P, COLUMNS) for _ in range(5))
                nisa.activation(dst=power, op=nl.exp, data=held, scale=-1.0)
                nisa.tensor_scalar(dst=added, data=power, op0=nl.add, operand0=1.0)
                nisa.reciprocal(dst=inverse, data=added)
                nisa.tensor_tensor(dst=silu, data1=held, data2=inverse, op=nl.multiply)
                nisa.tensor_tensor(dst=out, data1=silu, data2=total, op=nl.multiply)
                nisa.dma_copy(dst=middle[piece, block], src=out)
    weights = [load(down[d : d + P, :], P, k) for d in range(0, hidden, P)]
    for block in range(m // COLUMNS):
        parts = [load(middle[piece, block], P, COLUMNS) for piece in range(hidden // P)]
        for i in range(4):
            out = new(P, k)
            for at in range(0, k, COLUMNS):
                total = new(P, COLUMNS, buffer=nl.psum)
                for part, weight in zip(parts, weights, strict=True):
                    nisa.nc_matmul(
                        dst=total, stationary=part[:, i * P : (i + 1) * P],
                        moving=weight[:, at : at + COLUMNS],
                    )  # fmt: skip
                copied(total, out[:, at : at + COLUMNS])
            row = block * COLUMNS + i * P
            nisa.dma_copy(dst=result[row : row + P, :], src=out)
    return result
