"""What two cores of a logical core do together: each takes its half, and gives what it has made.

Both run the same program, `core` being 0 on one and 1 on the other, and share HBM. A half is a view
whose place depends on `core`; sizes and control flow do not.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import finish_columns, load, round_to
from .records import Block, Epilogue, Part, Product, Rounding, Weight


def half(tensor, dim, core):
    """Return this core's half of an HBM matrix."""
    size = tensor.shape[dim] // 2
    if dim == 0:
        return tensor[core * size : core * size + size, 0 : tensor.shape[1]]
    return tensor[0 : tensor.shape[0], core * size : core * size + size]


def half_row(row, core):
    """Return this core's half of a vector in HBM."""
    size = row.shape[0] // 2
    return row[core * size : core * size + size]


def half_sums(tiles, tokens):
    """Return a strip for fp32 sums over half of a contraction."""
    return nl.ndarray((128, tiles, tokens), dtype=nl.float32, buffer=nl.sbuf)


def clear_tail(sums, first, n):
    """Clear the last of the tiles of n features: the exchange takes all its partitions."""
    if n % 128 > 0:
        nisa.memset(dst=sums[0:128, first + n // 128, 0 : sums.shape[2]], value=0.0)


def exchange(theirs, mine, core):
    """Send this core's sums to the other one, and receive its."""
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)


def exchange_in_turns(theirs, mine, core, at_once):
    """Send and receive so many tiles of sums at a time: the first leave while others are summed."""
    for first in range(0, mine.shape[1], at_once):
        stop = min(first + at_once, mine.shape[1])
        exchange(
            theirs[0:128, first:stop, 0 : mine.shape[2]],
            mine[0:128, first:stop, 0 : mine.shape[2]],
            core,
        )


def add_halves_in_turns(p_sb, mine, theirs, tokens, at_once):
    """Round the sums of both cores to p^T, so many tiles at a time, as they come."""
    for first in range(0, mine.shape[1], at_once):
        stop = min(first + at_once, mine.shape[1])
        nisa.tensor_tensor(
            dst=p_sb[0:128, first:stop, 0:tokens],
            data1=mine[0:128, first:stop, 0:tokens],
            data2=theirs[0:128, first:stop, 0:tokens],
            op=nl.add,
        )


def add_halves(p_sb, mine, theirs, n, tokens, rounding: Rounding):
    """Round the sums of both cores to p^T, n features of so many tokens."""
    scaled = rounding.scales or rounding.factor != 1.0
    shaped = rounding.has_bias or rounding.activation != "identity"
    if scaled or shaped:
        nisa.tensor_tensor(dst=mine, data1=mine, data2=theirs, op=nl.add)
        finish_sums(p_sb, mine, n, tokens, rounding)
    else:
        add_up_halves(p_sb, mine, theirs, tokens)


def finish_sums(p_sb, sums, n, tokens, rounding: Rounding):
    """Scale or shape sums of n features, and round them to p^T."""
    scaled = rounding.scales or rounding.factor != 1.0
    shaped = rounding.has_bias or rounding.activation != "identity"
    inner = Epilogue(None, rounding.bias, None, rounding.has_bias, rounding.activation)
    for rt in range((n + 127) // 128):
        rp = min(128, n - 128 * rt)
        p_tile = p_sb[0:rp, rt, 0:tokens]
        at_scale = rt if rounding.scales == "channel" else 0
        p_scale = (
            rounding.scale[0:rp, at_scale : at_scale + 1] if rounding.scales else rounding.factor
        )
        part = sums[0:rp, rt, 0:tokens]
        if shaped:
            finish_columns(p_tile, part, inner, rt, rt)
        else:
            round_to(p_tile, part, p_scale, rounding.requantize, scaled, rt)


def add_up_halves(p_sb, mine, theirs, tokens):
    """Round the sums of both cores to the dtype of p, for so many tokens."""
    tiles = mine.shape[1]
    nisa.tensor_tensor(dst=p_sb[0:128, 0:tiles, 0:tokens], data1=mine, data2=theirs, op=nl.add)


def start_panel(right: Weight, at: Block, product: Product, rows):
    """Return the place of the first outputs' weights, the first rows of which are loaded."""
    w_type = nl.float32 if product.widen else right.weight.dtype
    k_tiles = (product.k + 127) // 128
    columns = min(right.plan.block, product.n)
    aligned = product.double_row or right.plan.load == "dma"
    pitch = (columns + 15) // 16 * 16 if aligned else columns
    if right.plan.resident:
        w_sb = right.whole[0:128, 0:k_tiles, 0:columns]
    else:
        w_sb = nl.ndarray((128, k_tiles, pitch), dtype=w_type, buffer=nl.sbuf)
    load_panel_rows(w_sb, right, at, product, 0, rows)
    return w_sb


def load_panel_rows(w_sb, right: Weight, at: Block, product: Product, first, stop):
    """Load the rows of the first outputs' weights from `first` to `stop`."""
    columns = min(right.plan.block, product.n)
    for k0 in range(first, stop, right.plan.chunk):
        rows = min(right.plan.chunk, product.k - k0)
        if at.m0 == 0 or not right.plan.resident:
            part = Part(right.weight, k0, rows, 0, columns)
            load(w_sb, k0 // 128, part, right.plan.load, product.order, product.k)
