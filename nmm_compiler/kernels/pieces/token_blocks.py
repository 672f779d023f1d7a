"""Tokens sorted by the group that they chose, on the device: blocks of one group each.

The picks of all tokens are counted by group, groups on the partitions. A group gets as many blocks
of `tokens` picks as it needs, one behind the other, and a pick's place in them is its rank in the
group behind the blocks of the groups before. Sums over partitions are products with ones.

Row 0 of what the blocks make is zero, for picks of no group; row i + 1 belongs to place i.
"""

import nki.isa as nisa
import nki.language as nl

from .chosen_groups import picks_of_groups, read_picks
from .loads_and_stores import move
from .new_tiles import combined, copied, filled, loaded, ramp


def sort_tokens(index, spec):
    """Return the groups of all blocks, their tokens, and the row of each pick.

    Groups: int32 [1, blocks + 1], that of each block, the last one how many blocks there are.
    Tokens: int32 [128, tiles of a block, blocks], 0 where a block has fewer. Rows: a list with
    int32 [128, top_k] for each tile of tokens; behind the last row where a pick is no group.
    """
    ones = filled((128, 128 * spec.top_k), nl.float32, 1.0)
    needs = blocks_of_groups(index, spec)
    starts = starts_of_groups(needs, spec)
    groups = group_of_blocks(needs, starts, ones, spec)
    rows = []
    for _ in range((spec.m + 127) // 128):
        rows.append(nl.ndarray((128, spec.top_k), dtype=nl.int32, buffer=nl.sbuf))
    tokens = tokens_of_blocks(rows, index, starts, ones, spec)
    return [groups, tokens, rows]


def tile_picks(index, m0, spec):
    """Return the picks of a tile of tokens on every partition, fp32 [128, picks]."""
    tokens = min(128, spec.m - m0)
    part = index[m0 : m0 + tokens, 0 : spec.top_k]
    return read_picks(part, tokens * spec.top_k)


def blocks_of_groups(index, spec):
    """Return the blocks that each group needs: a list with fp32 [128, 1] for each 128 groups."""
    counts = []
    for _ in range((spec.groups + 127) // 128):
        counts.append(filled((128, 1), nl.float32, 0.0))
    for m0 in range(0, spec.m, 128):
        numbers = tile_picks(index, m0, spec)
        for first in range(0, spec.groups, 128):
            deep = min(128, spec.groups - first)
            more = nl.ndarray((deep, 1), dtype=nl.float32, buffer=nl.sbuf)
            same = picks_of_groups(numbers, first, deep)
            nisa.tensor_reduce(dst=more, op=nl.add, data=same, axis=1)
            count = counts[first // 128][0:deep, 0:1]
            nisa.tensor_tensor(dst=count, data1=count, data2=more, op=nl.add)
    needs = []
    for first in range(0, spec.groups, 128):
        whole = combined(counts[first // 128], nl.add, spec.tokens - 1, nl.int32)
        nisa.tensor_scalar(dst=whole, data=whole, op0=nl.right_shift, operand0=spec.token_bits)
        needs.append(copied(whole, nl.float32))
    return needs


def starts_of_groups(needs, spec):
    """Return the first block of each group, laid out as the blocks that each needs."""
    starts = []
    for first in range(0, spec.groups, 128):
        deep = min(128, spec.groups - first)
        before = nl.ndarray((deep, 1), dtype=nl.float32, buffer=nl.psum)
        for earlier in range(0, first + 1, 128):
            rows = min(128, spec.groups - earlier)
            apart = ramp((rows, deep), 1, first - earlier, -1)
            nisa.tensor_scalar(dst=apart, data=apart, op0=nl.greater, operand0=0.0)
            nisa.nc_matmul(
                dst=before, stationary=apart, moving=needs[earlier // 128][0:rows, 0:1],
                accumulate=earlier > 0,
            )  # fmt: skip
        start = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=start[0:deep, 0:1], src=before)
        starts.append(start)
    return starts


def group_of_blocks(needs, starts, ones, spec):
    """Return the group of each block: how many groups end before it. Last, how many blocks."""
    row = nl.ndarray((1, spec.blocks), dtype=nl.float32, buffer=nl.sbuf)
    for b0 in range(0, spec.blocks, 512):
        wide = min(512, spec.blocks - b0)
        ended = nl.ndarray((1, wide), dtype=nl.float32, buffer=nl.psum)
        for first in range(0, spec.groups, 128):
            deep = min(128, spec.groups - first)
            end = nl.ndarray((deep, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=end, data1=starts[first // 128][0:deep, 0:1],
                data2=needs[first // 128][0:deep, 0:1], op=nl.add,
            )  # fmt: skip
            past = ramp((deep, wide), 1, b0, 0)
            nisa.tensor_scalar(dst=past, data=past, op0=nl.greater_equal, operand0=end)
            nisa.nc_matmul(
                dst=ended, stationary=ones[0:deep, 0:1], moving=past, accumulate=first > 0
            )
        nisa.tensor_copy(dst=row[0:1, b0 : b0 + wide], src=ended)
    listed = nl.ndarray((1, spec.blocks + 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=listed[0:1, 0 : spec.blocks], src=row)
    # blocks behind the last one are behind all groups
    nisa.tensor_scalar(dst=row, data=row, op0=nl.less, operand0=spec.groups)
    every = listed[0:1, spec.blocks : spec.blocks + 1]
    nisa.tensor_reduce(dst=every, op=nl.add, data=row, axis=1)
    return listed


def tokens_of_blocks(rows, index, starts, ones, spec):
    """Return the tokens of each block, and write the row of each pick.

    A tile of tokens times its ones in the blocks, both chosen by comparison, adds the numbers of
    the tokens at their places.
    """
    taken = []
    for first in range(0, spec.groups, 128):
        taken.append(combined(starts[first // 128], nl.multiply, spec.tokens, nl.float32))
    high = min(128, spec.tokens)
    sums = []
    for _ in range((spec.blocks + 511) // 512 * spec.token_tiles):
        sums.append(nl.ndarray((high, min(512, spec.blocks)), dtype=nl.float32, buffer=nl.psum))
    line = ramp((128, max(spec.blocks, spec.tokens)), 1, 0, 0)
    for m0 in range(0, spec.m, 128):
        count = min(128, spec.m - m0)
        behind = place_picks(index, m0, taken, ones, spec)
        keep_rows(rows[m0 // 128], behind, index, m0, spec)
        whole = combined(behind, nl.add, -1.0, nl.int32)
        number = combined(whole, nl.right_shift, spec.token_bits, nl.int32)
        block = copied(number, nl.float32)
        nisa.tensor_scalar(dst=whole, data=whole, op0=nl.bitwise_and, operand0=spec.tokens - 1)
        slot = copied(whole, nl.float32)
        own = ramp((count, 1), 0, m0, 1)
        for j in range(spec.top_k):
            left = nl.ndarray((count, spec.tokens), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=left, data=line[0:count, 0 : spec.tokens], op0=nl.equal,
                operand0=slot[0:count, j : j + 1], op1=nl.multiply, operand1=own,
            )  # fmt: skip
            mine = block[0:count, j : j + 1]
            right = combined(line[0:count, 0 : spec.blocks], nl.equal, mine, nl.float32)
            for b0 in range(0, spec.blocks, 512):
                wide = min(512, spec.blocks - b0)
                for t0 in range(0, spec.tokens, 128):
                    nisa.nc_matmul(
                        dst=sums[b0 // 512 * spec.token_tiles + t0 // 128][0:high, 0:wide],
                        stationary=left[0:count, t0 : t0 + high],
                        moving=right[0:count, b0 : b0 + wide],
                        accumulate=m0 + j > 0,
                    )
    tokens = nl.ndarray((high, spec.token_tiles, spec.blocks), dtype=nl.int32, buffer=nl.sbuf)
    for b0 in range(0, spec.blocks, 512):
        wide = min(512, spec.blocks - b0)
        for t0 in range(0, spec.tokens, 128):
            nisa.tensor_copy(
                dst=tokens[0:high, t0 // 128, b0 : b0 + wide],
                src=sums[b0 // 512 * spec.token_tiles + t0 // 128][0:high, 0:wide],
            )
    return tokens


def place_picks(index, m0, taken, ones, spec):
    """Return 1 + the place of each pick of a tile of tokens, fp32 [tokens, top_k]; 0 for no group.

    taken: the first place of each group behind its picks in the tiles before; counts them on.
    """
    count = min(128, spec.m - m0)
    picks = count * spec.top_k
    numbers = tile_picks(index, m0, spec)
    behind = nl.ndarray((count, spec.top_k), dtype=nl.float32, buffer=nl.psum)
    for first in range(0, spec.groups, 128):
        deep = min(128, spec.groups - first)
        same = picks_of_groups(numbers, first, deep)
        rank = nl.ndarray((deep, picks), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor_scan(
            dst=rank, data0=ones[0:deep, 0:picks], data1=same,
            initial=taken[first // 128][0:deep, 0:1], op0=nl.multiply, op1=nl.add,
        )  # fmt: skip
        nisa.tensor_copy(dst=taken[first // 128][0:deep, 0:1], src=rank[0:deep, picks - 1 : picks])
        place = nl.ndarray((deep, picks), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=place, data1=rank, data2=same, op=nl.multiply)
        for j in range(spec.top_k):
            nisa.nc_matmul(
                dst=behind[0:count, j : j + 1], stationary=place[0:deep, j : picks : spec.top_k],
                moving=ones[0:deep, 0:1], accumulate=first > 0,
            )  # fmt: skip
    return copied(behind, nl.float32)


def keep_rows(rows, behind, index, m0, spec):
    """Write the row of each pick of a tile of tokens; a number that is no group has none."""
    count = min(128, spec.m - m0)
    given = loaded(index[m0 : m0 + count, 0 : spec.top_k])
    beyond = nl.ndarray((count, spec.top_k), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=beyond, data=given, op0=nl.not_equal, operand0=-1.0, op1=nl.multiply,
        operand1=spec.blocks * spec.tokens + 2,
    )  # fmt: skip
    nisa.scalar_tensor_tensor(
        dst=beyond, data=behind, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=beyond
    )
    nisa.tensor_tensor(dst=rows[0:count, 0 : spec.top_k], data1=behind, data2=beyond, op=nl.add)


def tokens_of_turn(tokens, i, core, spec):
    """Return the tokens of this core in turn i of the loop, int32 [128, tiles, at_once]."""
    high = tokens.shape[0]
    turn = spec.at_once * spec.cores
    first = core % spec.cores * spec.at_once
    mine = nl.ndarray((high, spec.token_tiles, spec.at_once), dtype=nl.int32, buffer=nl.sbuf)
    turns = tokens.reshape_dim(2, (spec.blocks // turn, turn))
    own = turns.select(2, i)[0:high, 0 : spec.token_tiles, first : first + spec.at_once]
    nisa.tensor_copy(dst=mine, src=own)
    return mine


def sum_rows_of_picks(out, made, rows, gates, core, spec):
    """Store the rows of y: those of the picks of each token times their gates."""
    part = spec.k // 2 if spec.split != "" else spec.k
    table = made[0 : spec.blocks * spec.tokens + 1, core * part : core * part + part]
    for m0 in range(0, spec.m, 128):
        count = min(128, spec.m - m0)
        own = loaded(gates[m0 : m0 + count, 0 : spec.top_k])
        total = filled((count, part), nl.float32, 0.0)
        for j in range(spec.top_k):
            chosen = copied(rows[m0 // 128][0:count, j : j + 1], nl.int32)
            row = loaded(table.vector_select(0, chosen))
            nisa.scalar_tensor_tensor(
                dst=total, data=row, op0=nl.multiply, operand0=own[0:count, j : j + 1],
                op1=nl.add, operand1=total,
            )  # fmt: skip
        y = copied(total, out.dtype)
        move(out[m0 : m0 + count, core * part : core * part + part], y, False)
