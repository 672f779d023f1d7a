"""Numbers that belong to features: scales of fp8 operands and biases, as the sums they meet lie.

They are few bytes, which no product waits for: with own_queue the sync engine's queue loads them,
idle until the first result leaves, so that x and the weights are not behind them. One scale of a
weight is [128, 1]; one per output is a column per 128 outputs, or with `by_rows` a row on every
partition, [128, n].
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, move
from .new_tiles import filled


def product_scales(scale, n, scales, by_rows, own_queue):
    """Return what the sums of a product are multiplied by, as its outputs lie."""
    if scales == "channel":
        return load_numbers(scale, n, by_rows, own_queue)
    return load_scale(scale, own_queue)


def load_numbers(vector, n, by_rows, own_queue):
    """Return a number of each output as sums lie."""
    if by_rows:
        return load_spread(vector, n, own_queue)
    return load_columns(vector, n, 1, 0, 1, own_queue)


def load_scale(scale, own_queue):
    """Load one number, [1], to every partition, [128, 1]."""
    column = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    move(column, scale.reshape((1, 1)).broadcast(0, 128), own_queue)
    return column


def times(numbers, factor):
    """Multiply numbers on every partition by one of a column [128, 1] in place."""
    nisa.tensor_scalar(dst=numbers, data=numbers, op0=nl.multiply, operand0=factor)


def load_columns(vector, n, step, first, lanes, own_queue):
    """Load numbers and return them as fp32 columns of 128: [128, tiles lanes], zeros behind them.

    Lanes are n numbers each that lie `step` apart, the first lane from `first` on: lane j has every
    column that is j behind a multiple of `lanes`.
    """
    whole = n // 128
    rest = n % 128
    columns = nl.ndarray((128, (n + 127) // 128 * lanes), dtype=nl.float32, buffer=nl.sbuf)
    for tile in range(0, whole, 128):
        stop = min(tile + 128, whole)
        run = vector[128 * step * tile : 128 * step * stop]
        turn_run(columns[0:128, tile * lanes : stop * lanes], run, step, first, lanes, own_queue)
    if rest > 0:
        last = columns[0:128, whole * lanes : (whole + 1) * lanes]
        nisa.memset(dst=last, value=0.0)
        run = vector[128 * step * whole : n * step]
        turn_run(last[0:rest, 0:lanes], run, step, first, lanes, own_queue)
    return columns


def turn_run(dst, run, step, first, lanes, own_queue):
    """Load a run of numbers in rows, long runs for a DMA; TensorE turns them bit for bit."""
    high = dst.shape[0]
    count = dst.shape[1] // lanes
    rows = nl.ndarray((count, high * step), dtype=run.dtype, buffer=nl.sbuf)
    lies = run[0 : count * high * step].reshape_dim(0, (count, high * step))
    move(rows, lies, own_queue)
    for j in range(lanes):
        turned = nl.ndarray((high, count), dtype=run.dtype, buffer=nl.psum)
        lane = rows[0:count, first + j : high * step : step]
        nisa.nc_transpose(dst=turned, data=lane, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=dst[0:high, j : count * lanes : lanes], src=turned)


def load_spread(vector, n, own_queue):
    """Load numbers, [n], and return them on every partition, [128, n]: ones times their row."""
    ones = filled((1, 128), vector.dtype, 1.0)
    spread = nl.ndarray((128, n), dtype=vector.dtype, buffer=nl.sbuf)
    for first in range(0, n, 4096):
        size = min(4096, n - first)
        row = nl.ndarray((1, size), dtype=vector.dtype, buffer=nl.sbuf)
        move(row, vector[first : first + size].reshape_dim(0, (1, size)), own_queue)
        for start in range(0, size, 512):
            width = min(512, size - start)
            copies = nl.ndarray((128, width), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=copies, stationary=ones, moving=row[0:1, start : start + width],
                is_stationary_onezero=True,
            )  # fmt: skip
            into = spread[0:128, first + start : first + start + width]
            evict(into, copies, start // 512)
    return spread
