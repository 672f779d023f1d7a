"""Five steps of tiling one matrix product, lhsT [k, m] times rhs [k, n] to [m, n].

Written from the descriptions of public measurements, to predict them: each step moves its operands
in another way, so that DMA issue, row length, reuse and TensorE take turns as the bottleneck.
Tiles are 128 x 128 stationary and 128 x 512 moving throughout; sizes must be multiples.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
COLUMNS = 512


def store_product(result, product, row, column):
    """Copy one PSUM tile out through SBUF, in the dtype of the result."""
    tile = nl.ndarray((P, COLUMNS), dtype=result.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=tile, src=product)
    nisa.dma_copy(dst=result[row : row + P, column : column + COLUMNS], src=tile)


@nki.jit
def both_loaded_inside(lhs_t, rhs):
    """Both operand tiles are loaded for every product."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    result = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for row in range(0, m, P):
        for column in range(0, n, COLUMNS):
            product = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for depth in range(0, k, P):
                left = nl.ndarray((P, P), dtype=lhs_t.dtype, buffer=nl.sbuf)
                right = nl.ndarray((P, COLUMNS), dtype=rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=left, src=lhs_t[depth : depth + P, row : row + P])
                nisa.dma_copy(dst=right, src=rhs[depth : depth + P, column : column + COLUMNS])
                nisa.nc_matmul(dst=product, stationary=left, moving=right)
            store_product(result, product, row, column)
    return result


@nki.jit
def left_hoisted(lhs_t, rhs):
    """The stationary tiles of a row of the result are loaded once and kept."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    result = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for row in range(0, m, P):
        lefts = []
        for depth in range(0, k, P):
            left = nl.ndarray((P, P), dtype=lhs_t.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=left, src=lhs_t[depth : depth + P, row : row + P])
            lefts.append(left)
        for column in range(0, n, COLUMNS):
            product = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
            for step in range(k // P):
                right = nl.ndarray((P, COLUMNS), dtype=rhs.dtype, buffer=nl.sbuf)
                depth = step * P
                nisa.dma_copy(dst=right, src=rhs[depth : depth + P, column : column + COLUMNS])
                nisa.nc_matmul(dst=product, stationary=lefts[step], moving=right)
            store_product(result, product, row, column)
    return result


@nki.jit
def free_dimensions_blocked(lhs_t, rhs, block_m, block_n):
    """Blocks of block_m x block_n tiles share their operands; every tile is one DMA."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    steps = k // P
    result = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for block_row in range(0, m, P * block_m):
        lefts = []
        for i in range(block_m):
            row = block_row + i * P
            for depth in range(0, k, P):
                left = nl.ndarray((P, P), dtype=lhs_t.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=left, src=lhs_t[depth : depth + P, row : row + P])
                lefts.append(left)
        for block_column in range(0, n, COLUMNS * block_n):
            rights = []
            for j in range(block_n):
                column = block_column + j * COLUMNS
                for depth in range(0, k, P):
                    right = nl.ndarray((P, COLUMNS), dtype=rhs.dtype, buffer=nl.sbuf)
                    nisa.dma_copy(dst=right, src=rhs[depth : depth + P, column : column + COLUMNS])
                    rights.append(right)
            for i in range(block_m):
                for j in range(block_n):
                    product = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for step in range(steps):
                        nisa.nc_matmul(
                            dst=product,
                            stationary=lefts[i * steps + step],
                            moving=rights[j * steps + step],
                        )
                    store_product(result, product, block_row + i * P, block_column + j * COLUMNS)
    return result


@nki.jit
def rows_of_blocks(lhs_t, rhs, block_m, block_n):
    """As free_dimensions_blocked, but one DMA loads the row of a whole block."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    steps = k // P
    wide_m, wide_n = P * block_m, COLUMNS * block_n
    result = nl.ndarray((m, n), dtype=lhs_t.dtype, buffer=nl.shared_hbm)
    for block_row in range(0, m, wide_m):
        lefts = []
        for depth in range(0, k, P):
            left = nl.ndarray((P, wide_m), dtype=lhs_t.dtype, buffer=nl.sbuf)
            nisa.dma_copy(dst=left, src=lhs_t[depth : depth + P, block_row : block_row + wide_m])
            lefts.append(left)
        for block_column in range(0, n, wide_n):
            rights = []
            for depth in range(0, k, P):
                right = nl.ndarray((P, wide_n), dtype=rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(
                    dst=right, src=rhs[depth : depth + P, block_column : block_column + wide_n]
                )
                rights.append(right)
            for i in range(block_m):
                for j in range(block_n):
                    product = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
                    for step in range(steps):
                        nisa.nc_matmul(
                            dst=product,
                            stationary=lefts[step][:, i * P : (i + 1) * P],
                            moving=rights[step][:, j * COLUMNS : (j + 1) * COLUMNS],
                        )
                    store_product(result, product, block_row + i * P, block_column + j * COLUMNS)
    return result


@nki.jit
def all_dimensions_blocked(lhs_t, rhs, block_m, block_n, block_k):
    """The contraction is blocked too; partial sums wait in SBUF, in the dtype of lhs_t."""
    k, m = lhs_t.shape
    n = rhs.shape[1]
    wide_m, wide_n = P * block_m, COLUMNS * block_n
    result = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.shared_hbm)
    for block_column in range(0, n, wide_n):
        sums = []
        for _ in range(m // P * block_n):
            part = nl.ndarray((P, COLUMNS), dtype=lhs_t.dtype, buffer=nl.sbuf)
            nisa.memset(dst=part, value=0.0)
            sums.append(part)
        for block_depth in range(0, k, P * block_k):
            rights = []
            for step in range(block_k):
                depth = block_depth + step * P
                right = nl.ndarray((P, wide_n), dtype=rhs.dtype, buffer=nl.sbuf)
                nisa.dma_copy(
                    dst=right, src=rhs[depth : depth + P, block_column : block_column + wide_n]
                )
                rights.append(right)
            for block_row in range(0, m, wide_m):
                lefts = []
                for step in range(block_k):
                    depth = block_depth + step * P
                    left = nl.ndarray((P, wide_m), dtype=lhs_t.dtype, buffer=nl.sbuf)
                    nisa.dma_copy(
                        dst=left, src=lhs_t[depth : depth + P, block_row : block_row + wide_m]
                    )
                    lefts.append(left)
                for j in range(block_n):
                    for i in range(block_m):
                        product = nl.ndarray((P, COLUMNS), dtype=nl.float32, buffer=nl.psum)
                        for step in range(block_k):
                            nisa.nc_matmul(
                                dst=product,
                                stationary=lefts[step][:, i * P : (i + 1) * P],
                                moving=rights[step][:, j * COLUMNS : (j + 1) * COLUMNS],
                            )
                        part = sums[(block_row // P + i) * block_n + j]
                        nisa.tensor_tensor(dst=part, data1=part, data2=product, op=nl.add)
        for row in range(0, m, P):
            packed = nl.ndarray((P, wide_n), dtype=nl.float32, buffer=nl.sbuf)
            for j in range(block_n):
                nisa.tensor_copy(
                    dst=packed[:, j * COLUMNS : (j + 1) * COLUMNS], src=sums[row // P * block_n + j]
                )
            nisa.dma_copy(
                dst=result[row : row + P, block_column : block_column + wide_n], src=packed
            )
    return result
