"""Numbers that belong to features: scales of fp8 operands and biases, as the sums they meet lie.

They are few bytes, which no product waits for: with own_queue the sync engine's queue loads them,
idle until the first result leaves, so that x and the weights are not behind them. One scale of a
weight is [128, 1]; one per output is a column per 128 outputs (`down`), or a row, [128, n].
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, evict_scaled


def load_vector(dst, src, own_queue):
    """Load a few numbers."""
    if own_queue:  # that of the sync engine
        nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)
    else:
        nisa.dma_copy(dst=dst, src=src)


def product_scales(scale, factor, n, scales, down, has_factor, own_queue):
    """Return what the sums of a product are multiplied by, as its outputs lie."""
    factor_sb = load_scale(factor, own_queue) if has_factor else None
    if scales == "channel" and not down:
        product = spread_scales(scale, factor_sb, n, has_factor, own_queue)
    else:
        if scales == "channel":
            product = scale_columns(scale, n, own_queue)
        else:
            product = load_scale(scale, own_queue)
        if has_factor:
            times(product, factor_sb)
    return product


def load_scale(scale, own_queue):
    """Load one number, [1], to every partition, [128, 1]."""
    column = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    copies = scale.reshape((1, 1)).broadcast(0, 128)
    if own_queue:
        nisa.dma_copy(dst=column, src=copies, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)
    else:
        nisa.dma_copy(dst=column, src=copies)
    return column


def times(column, factor):
    """Multiply [128, tiles] by a column [128, 1] in place."""
    nisa.tensor_scalar(dst=column, data=column, op0=nl.multiply, operand0=factor)


def scale_columns(scale, n, own_queue):
    """Load a scale per output, [n], and return it as [128, tiles]: a column per 128 outputs."""
    tiles = n // 128
    columns = nl.ndarray((128, (n + 127) // 128), dtype=nl.float32, buffer=nl.sbuf)
    if n % 128 > 0:
        nisa.memset(dst=columns, value=0.0)
    for first in range(0, tiles, 128):
        # rows of 128 are long runs for a DMA; TensorE transposes them bit for bit
        count = min(128, tiles - first)
        rows = nl.ndarray((count, 128), dtype=nl.float32, buffer=nl.sbuf)
        run = scale[128 * first : 128 * (first + count)]
        load_vector(rows, run.reshape((count, 128)), own_queue)
        turned = nl.ndarray((128, count), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=rows, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=columns[0:128, first : first + count], src=turned)
    if n % 128 > 0:
        load_vector(
            columns[0 : n % 128, tiles : tiles + 1],
            scale[128 * tiles : n].reshape((n % 128, 1)),
            own_queue,
        )
    return columns


def spread_scales(scale, factor, n, has_factor, own_queue):
    """Load a scale per output, [n], and return it on every partition, [128, n]."""
    row = nl.ndarray((1, n), dtype=nl.float32, buffer=nl.sbuf)
    load_vector(row, scale.reshape((1, n)), own_queue)
    ones = nl.ndarray((1, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    spread = nl.ndarray((128, n), dtype=nl.float32, buffer=nl.sbuf)
    for start in range(0, n, 512):
        width = min(512, n - start)
        copies = nl.ndarray((128, width), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=copies,
            stationary=ones,
            moving=row[0:1, start : start + width],
            is_stationary_onezero=True,
        )
        if has_factor:
            evict_scaled(spread[0:128, start : start + width], copies, factor, start // 512)
        else:
            evict(spread[0:128, start : start + width], copies, start // 512)
    return spread


def spread_bias(bias, n, own_queue):
    """Load a bias [n] and return it on every partition, by ones times the row on TensorE."""
    row = nl.ndarray((1, n), dtype=bias.dtype, buffer=nl.sbuf)
    load_vector(row, bias.reshape((1, n)), own_queue)
    return spread_row(row, n)


def spread_row(row, n):
    """Return a row [1, n] on every partition, [128, n]."""
    ones = nl.ndarray((1, 128), dtype=row.dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    spread = nl.ndarray((128, n), dtype=row.dtype, buffer=nl.sbuf)
    for start in range(0, n, 512):
        width = min(512, n - start)
        copies = nl.ndarray((128, width), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=copies, stationary=ones, moving=row[0:1, start : start + width])
        evict(spread[0:128, start : start + width], copies, start // 512)
    return spread


def bias_columns(bias, n, own_queue):
    """Load a bias [n] and return it in SBUF as fp32 [128, tiles]: one column per 128 outputs."""
    tiles = n // 128
    raw = nl.ndarray((128, (n + 127) // 128), dtype=bias.dtype, buffer=nl.sbuf)
    if tiles > 0:
        load_vector(
            raw[0:128, 0:tiles],
            bias[0 : 128 * tiles].reshape((tiles, 128)).permute((1, 0)),
            own_queue,
        )
    if n % 128 > 0:
        load_vector(
            raw[0 : n % 128, tiles : tiles + 1],
            bias[128 * tiles : n].reshape((n % 128, 1)),
            own_queue,
        )
    columns = nl.ndarray((128, (n + 127) // 128), dtype=nl.float32, buffer=nl.sbuf)
    if tiles > 0:
        nisa.tensor_copy(dst=columns[0:128, 0:tiles], src=raw[0:128, 0:tiles])
    if n % 128 > 0:
        nisa.tensor_copy(
            dst=columns[0 : n % 128, tiles : tiles + 1], src=raw[0 : n % 128, tiles : tiles + 1]
        )
    return columns
