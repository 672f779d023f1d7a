"""Gated MLPs that an index chooses for each token: y = sum of gate_j MLP_i(x), i = index[t, j].

Few tokens: all of them move through every group that one of them chose, and each result is
multiplied by the token's gate, 0 for a token that chose others. So a group's weights, which a
number in SBUF addresses, are read once. The groups come one after another: a panel of weights is
loaded before the products of the panel before it. Features lie on the partitions from x^T to y^T.

Of one token the groups are its picks. Of several they are those that some token chose: GpSimd lists
these, and a loop on the device takes some of them a turn.

Many tokens are sorted into blocks of one group each. A loop on the device takes some blocks a turn:
it gathers their tokens, and stores a row of y for each of their picks. At last each token's rows
are gathered, and added with its gates.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.chosen_groups import (
    chosen_of_token,
    groups_of_turn,
    list_groups,
    listed_in_turn,
    read_picks,
    turns_of,
)
from ..pieces.expand import store_turned
from ..pieces.group_mlp import run_groups, strips_of
from ..pieces.groups import check_index
from ..pieces.narrow_groups import add_narrow_groups
from ..pieces.new_tiles import combined, filled, loaded
from ..pieces.records import Block, Result
from ..pieces.token_blocks import sort_tokens, sum_rows_of_picks, tokens_of_turn
from ..pieces.two_cores import add_other_half, own


@nki.jit
def experts(x, spec, schedule, **others):
    """Return y."""
    core = nl.program_id(0) if spec.split != "" else 0
    out = nl.ndarray((spec.m, spec.k), dtype=x.dtype, buffer=nl.shared_hbm)
    operands = [
        others.get("gate_up"), others.get("down"),
        others.get("gate_up_bias"), others.get("down_bias"),
        others.get("gate_up_scale"), others.get("down_scale"),
        others.get("gate_up_u"), others.get("gate_up_v"),
        others.get("down_u"), others.get("down_v"),
    ]  # fmt: skip
    if spec.way == "blocks":
        compute_blocks(out, x, others.get("index"), others.get("gates"), operands, core, spec)
    else:
        compute_tokens(out, x, others.get("index"), others.get("gates"), operands, core, spec)
    return out


def compute_blocks(out, x, index, gates, operands, core, spec):
    """Compute y of tokens in blocks of one group each."""
    groups, tokens, rows = sort_tokens(index, spec)
    turn = spec.at_once * spec.cores
    bound = turns_of(groups, turn, spec.turn_bits)
    each = spec.blocks * spec.tokens + 1
    # the other core's zero, which nobody reads, is behind the rows of all blocks
    made = nl.ndarray((each + spec.cores - 1, spec.k), dtype=x.dtype, buffer=nl.shared_hbm)
    zero = filled((1, spec.k), x.dtype, 0.0)
    nisa.dma_copy(dst=made[core * each : core * each + 1, 0 : spec.k], src=zero)
    mine = made[1:each, 0 : spec.k]
    turns = mine.reshape_dim(0, (spec.blocks // turn, turn * spec.tokens))
    first = core % spec.cores * spec.at_once * spec.tokens
    last = first + spec.at_once * spec.tokens

    def body(i):
        listed = listed_in_turn(groups, i, core, spec)
        # behind the last block, the last group of all
        some = combined(listed, nl.minimum, spec.groups - 1, nl.int32)
        chosen = tokens_of_turn(tokens, i, core, spec)
        own_rows = turns.select(0, i)[first:last, 0 : spec.k]
        run_groups(own_rows, [x, chosen], [some, None], None, operands, 0, spec.tokens, spec)

    # as many turns as the blocks need: known on the device only
    nl.fori_loop(0, bound, body)
    if spec.split != "":
        nisa.core_barrier(made, (0, 1))
    sum_rows_of_picks(out, made, rows, gates, core, spec)


def compute_tokens(out, x, index, gates, operands, core, spec):
    """Compute y of a tile of tokens at most."""
    tokens = spec.m
    picks = tokens * spec.top_k
    half = core if spec.split == "weights" else 0
    if spec.way == "picks" and spec.split == "groups":
        index = own(index, 1, core)
        gates = own(gates, 1, core)
    numbers = read_picks(index, picks)
    weights = read_picks(gates, picks)
    flat = loaded(x)
    left = strips_of([flat], tokens, spec)
    y_tiles = (spec.k + 127) // 128
    total = filled((128, y_tiles, tokens), nl.float32, 0.0)
    if spec.way == "picks":
        ones = chosen_of_token(numbers, weights)
        add_some(total, left, ones, [numbers, weights], operands, half, tokens, spec)
    else:
        # the last weights of all groups, a row each
        last = operands[1] if spec.down.k > 0 else operands[9]
        table = last.reshape((spec.groups, last.shape[1] * last.shape[2]))
        check_index(index.reshape((picks,)), table[0 : spec.groups, 0:1], 0, picks)
        chosen = list_groups(numbers, spec.groups, spec.at_once * spec.cores)
        bound = turns_of(chosen, spec.at_once * spec.cores, spec.turn_bits)

        def body(i):
            some = groups_of_turn(chosen, i, core, spec)
            add_some(total, left, some, [numbers, weights], operands, half, tokens, spec)

        # as many turns as the chosen groups need: known on the device only
        nl.fori_loop(0, bound, body)
    result = Result(out, None, False, True, None, False)
    at = Block(0, tokens, core)
    if spec.split != "":
        both = nl.ndarray((128, y_tiles, tokens), dtype=nl.float32, buffer=nl.sbuf)
        add_other_half(both, total, core)
        store_turned(result, both, 0, spec.k, core, 2, at)
    else:
        store_turned(result, total, 0, spec.k, 0, 1, at)


def add_some(total, left, some, picks, operands, half, tokens, spec):
    """Add to y^T what some groups make: in stacks where they are narrow."""
    if spec.stack > 1:
        add_narrow_groups(total, left[0], some, picks, operands, tokens, spec)
    else:
        run_groups(total, left, some, picks, operands, half, tokens, spec)
