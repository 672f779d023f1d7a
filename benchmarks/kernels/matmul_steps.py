"""Five steps of tiling one matrix product, lhsT [k, m] times rhs [k, n] to [m, n].

Written from the descriptions of public measurements, to predict them: each step moves its operands
in another way, so that DMA issue, row length, reuse and TensorE take turns as the bottleneck.
Tiles are 128 x 128 stationary and 128 x 512 moving throughout; sizes must be multiples.
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
    filled,
    load,
    load_rows,
    new,
    result_of_product,
    slices,
    store_product,
    summed,
    within,
)


@nki.jit
def loaded_inside(lhs_t, rhs, hoisted):
    """The tiles of rhs are loaded for every product.

    hoisted: the tiles of lhs_t are loaded once for a row of the result, else for every product too.
    """
    result, k, m, n = result_of_product(lhs_t, rhs)
    for rows in slices(m):
        lefts = load_rows(lhs_t, rows) if hoisted else None
        for columns in slices(n, COLUMNS):
            product = new(P, COLUMNS, buffer=nl.psum)
            for step, depth in enumerate(slices(k)):
                left = lefts[step] if hoisted else load(lhs_t[depth, rows])
                nisa.nc_matmul(dst=product, stationary=left, moving=load(rhs[depth, columns]))
            store_product(result, product, rows, columns)
    return result


@nki.jit
def free_dimensions_blocked(lhs_t, rhs, block_m, block_n, whole_rows):
    """Blocks of block_m x block_n tiles share their operands.

    whole_rows: one DMA loads the row of a whole block, else every tile is one.
    """

    def tiles(source, block, width):
        if whole_rows:
            rows = [columns_of(row, width) for row in load_rows(source, block)]
            return list(zip(*rows, strict=True))
        return [load_rows(source, columns) for columns in within(block, width)]

    result, _, m, n = result_of_product(lhs_t, rhs)
    for down in slices(m, P * block_m):
        lefts = tiles(lhs_t, down, P)
        for across in slices(n, COLUMNS * block_n):
            rights = tiles(rhs, across, COLUMNS)
            for left, rows in zip(lefts, within(down), strict=True):
                for right, columns in zip(rights, within(across, COLUMNS), strict=True):
                    store_product(result, summed(left, right), rows, columns)
    return result


@nki.jit
def all_dimensions_blocked(lhs_t, rhs, block_m, block_n, block_k):
    """The contraction is blocked too; partial sums wait in SBUF, in the dtype of lhs_t."""
    result, k, m, n = result_of_product(lhs_t, rhs, nl.float32)
    wide_m, wide_n, deep = P * block_m, COLUMNS * block_n, P * block_k
    for columns in slices(n, wide_n):
        sums = [filled(P, COLUMNS, dtype=lhs_t.dtype) for _ in range(m // P * block_n)]
        for depth in range(0, k, deep):
            rights = load_rows(rhs, columns, depth, depth + deep)
            for rows in slices(m, wide_m):
                lefts = load_rows(lhs_t, rows, depth, depth + deep)
                for j in range(block_n):
                    right = [columns_of(one, COLUMNS)[j] for one in rights]
                    for i in range(block_m):
                        product = summed([columns_of(one)[i] for one in lefts], right)
                        part = sums[(rows.start // P + i) * block_n + j]
                        both(part, product, nl.add, part)
        for row, rows in enumerate(slices(m)):
            packed = new(P, wide_n)
            for j, part in enumerate(columns_of(packed, COLUMNS)):
                copied(sums[row * block_n + j], part)
            nisa.dma_copy(dst=result[rows, columns], src=packed)
    return result
