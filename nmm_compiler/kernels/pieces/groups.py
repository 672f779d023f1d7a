"""What an index of groups does to a kernel: masks of p, factors gathered by rows, checks of ranges.

An index is int32 in HBM, one number a token, -1 for none. A number that is no group makes a gather
leave its tensor, which the DMA engine reports: nothing clamps it.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import move, turn_rows
from .new_tiles import combined, copied, filled, loaded, ramp
from .records import Block, Epilogue, Left, Panel, Term
from .sums import make_columns


def index_columns(index, m0, tokens):
    """Return the index of tokens on the partitions, int32 [tokens, 1], 0 where it is -1."""
    given = loaded(index[m0 : m0 + tokens].reshape((tokens, 1)))
    some = nl.ndarray((tokens, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=some, data=given, op0=nl.equal, operand0=-1.0, op1=nl.add, operand1=given
    )
    return some


def check_index(index, table, m0, tokens):
    """Read a row of a table [groups, ...] for each token: there must be one."""
    gather(table, index_tiles(index, m0, tokens))


def index_tiles(index, m0, tokens):
    """Return the index of tokens in columns of 128 at most, as index_columns."""
    columns = []
    for first in range(0, tokens, 128):
        columns.append(index_columns(index, m0 + first, min(128, tokens - first)))
    return columns


def gather(table, columns):
    """Return the rows of a table that columns of an index name, [128, tiles of rows, n]."""
    n = table.shape[1]
    rows_sb = nl.ndarray((128, len(columns), n), dtype=table.dtype, buffer=nl.sbuf)
    for i in range(len(columns)):
        own = rows_sb[0 : columns[i].shape[0], i, 0:n]
        nisa.dma_copy(dst=own, src=table.vector_select(0, columns[i]))
    return rows_sb


def group_mask(index, gains, pair, at: Block, own_queue):
    """Return what multiplies p^T, [128, tiles, tokens]: the gain of a row of p, 0 for a token whose
    group is another one.

    gains: [128, tiles], of each row. Row i of p belongs to group i // rank, of gathered factors to
    token i // rank.
    """
    rank = pair.groups.rank
    tiles = (pair.u.n + 127) // 128
    on_all = nl.ndarray((128, at.tokens), dtype=nl.int32, buffer=nl.sbuf)
    span = index[at.m0 : at.m0 + at.tokens].reshape((1, at.tokens))
    move(on_all, span.broadcast(0, 128), own_queue)
    if pair.groups.slots > 0:
        begin = ramp((128, at.tokens), -rank, 0, 0)
    else:
        begin = combined(on_all, nl.multiply, -rank, nl.float32)
    rows = ramp((128, tiles), 128, 0, 1)
    mask = nl.ndarray((128, tiles, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
    for tile in range(tiles):
        deep = min(128, pair.u.n - 128 * tile)
        past = nl.ndarray((128, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
        place = past[0:deep, 0 : at.tokens]
        above = nl.ndarray((128, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
        gained = above[0:deep, 0 : at.tokens]
        nisa.tensor_scalar(
            dst=place, data=begin[0:deep, 0 : at.tokens], op0=nl.add,
            operand0=rows[0:deep, tile : tile + 1],
        )  # fmt: skip
        nisa.tensor_scalar(
            dst=gained, data=place, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply,
            operand1=gains[0:deep, tile : tile + 1],
        )  # fmt: skip
        nisa.scalar_tensor_tensor(
            dst=mask[0:deep, tile, 0 : at.tokens], data=place, op0=nl.less, operand0=rank,
            op1=nl.multiply, operand1=gained,
        )  # fmt: skip
        if pair.groups.slots > 0:
            nisa.scalar_tensor_tensor(
                dst=mask[0:deep, tile, 0 : at.tokens], data=on_all[0:deep, 0 : at.tokens],
                op0=nl.greater_equal, operand0=0.0, op1=nl.multiply,
                operand1=mask[0:deep, tile, 0 : at.tokens],
            )  # fmt: skip
    return mask


def gathered_rows(index, pair, at: Block):
    """Return the rows of stacked factors that tokens choose, as int32 columns [128, 1].

    Row i of what is gathered is row i % rank of the group of token i // rank. Ones times
    (row in the group + rank group), where token and row belong together, give it on TensorE.
    """
    rank = pair.groups.rank
    some = index_columns(index, at.m0, at.tokens)
    first = combined(some, nl.multiply, rank, nl.float32)
    ones = filled((at.tokens, 1), nl.float32, 1.0)
    place = ramp((at.tokens, pair.u.n), 1, 0, -rank)
    row = combined(place, nl.add, first, nl.float32)
    nisa.scalar_tensor_tensor(
        dst=row, data=place, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=row
    )
    nisa.scalar_tensor_tensor(
        dst=row, data=place, op0=nl.less, operand0=rank, op1=nl.multiply, operand1=row
    )
    columns = []
    for first_row in range(0, pair.u.n, 128):
        deep = min(128, pair.u.n - first_row)
        sums = nl.ndarray((deep, 1), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=row[0 : at.tokens, first_row : first_row + deep],
                       moving=ones)  # fmt: skip
        columns.append(copied(sums, nl.int32))
    return columns


def project_gathered(p_sb, left: Left, u, columns, mask, pair, at: Block, spec):
    """Compute p^T = (x u)^T of gathered rows of u^T, which TensorE turns, times a mask."""
    k_tiles = (pair.u.k + 127) // 128
    u_sb = nl.ndarray((128, k_tiles, pair.u.n), dtype=u.dtype, buffer=nl.sbuf)
    for tile in range((pair.u.n + 127) // 128):
        first = 128 * tile
        rows = min(128, pair.u.n - first)
        flat = loaded(u.vector_select(0, columns[tile]))
        strip = u_sb[0:128, 0:k_tiles, first : first + rows]
        turn_rows(strip, flat, pair.u.order, tile, 1)
    for r0 in range(0, pair.u.n, pair.u.block):
        wide = min(pair.u.block, pair.u.n - r0)
        make_columns(
            p_sb[0:128, r0 // 128 : r0 // 128 + (wide + 127) // 128, 0 : at.tokens],
            Term(Left(left.strip, None, "none"), u_sb, pair.u), [],
            Term(Left(None, None, "none"), None, spec.nothing), [],
            Panel(r0, wide, pair.u.group, 1, 1, wide, 0), at,
            Epilogue(mask, "group", None, False, "identity", nl.copy, None, False, None, False),
        )  # fmt: skip
