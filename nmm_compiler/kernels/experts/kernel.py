"""Gated MLPs that an index chooses for each token: y = sum of gate_j MLP_i(x), i = index[t, j].

All tokens move through every group that one of them chose, and each result is multiplied by the
token's gate, 0 for a token that chose others. So a group's weights, which a number in SBUF
addresses, are read once. The groups come one after another: a panel of weights is loaded before the
products of the panel before it. Features lie on the partitions from x^T to y^T.

Of one token the groups are its picks. Of several they are all groups, or those that some token
chose: GpSimd lists these, and a loop on the device takes some of them a turn.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.chosen_groups import (
    all_groups,
    chosen_of_token,
    groups_of_turn,
    list_groups,
    read_picks,
    turns_of,
)
from ..pieces.group_mlp import add_groups, load_tokens, store_sums
from ..pieces.groups import check_index
from ..pieces.two_cores import add_other_half


@nki.jit
def experts(x, spec, schedule, **others):
    """Return y."""
    core = nl.program_id(0) if spec.split != "" else 0
    out = nl.ndarray((spec.m, spec.k), dtype=x.dtype, buffer=nl.shared_hbm)
    operands = [
        others.get("gate_up"), others.get("down"),
        others.get("gate_up_bias"), others.get("down_bias"),
    ]  # fmt: skip
    for m0 in range(0, spec.m, 128):
        tokens = min(128, spec.m - m0)
        stop = m0 + tokens
        compute_tokens(
            out[m0:stop, 0 : spec.k], x[m0:stop, 0 : spec.k],
            others.get("index")[m0:stop, 0 : spec.top_k],
            others.get("gates")[m0:stop, 0 : spec.top_k], operands, core, tokens, spec,
        )  # fmt: skip
    return out


def compute_tokens(out, x, index, gates, operands, core, tokens, spec):
    """Compute y of a tile of tokens."""
    picks = tokens * spec.top_k
    numbers = read_picks(index, picks, nl.int32)
    weights = read_picks(gates, picks, nl.float32)
    x_tiles = (spec.k + 127) // 128
    x_sb = nl.ndarray((128, x_tiles, tokens), dtype=x.dtype, buffer=nl.sbuf)
    load_tokens(x_sb, x, spec.k, tokens, spec.up.order)
    total = nl.ndarray((128, x_tiles, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=total, value=0.0)
    if spec.way == "picks":
        ones = chosen_of_token(numbers, weights)
        add_groups(total, x_sb, ones, numbers, weights, operands, core, tokens, spec)
    else:
        table = operands[1].reshape((spec.count, spec.k * spec.width))
        check_index(index.reshape((picks,)), table[0 : spec.count, 0:1], 0, picks)
        if spec.way == "distinct":
            chosen = list_groups(numbers, spec.count, spec.at_once)
            bound = turns_of(chosen, spec.count, spec.at_once)

            def body(i):
                some = groups_of_turn(chosen, i, spec.count, spec.at_once)
                add_groups(total, x_sb, some, numbers, weights, operands, core, tokens, spec)

            # as many turns as the chosen groups need: known on the device only
            nl.fori_loop(0, bound, body)
        else:
            every = all_groups(spec.count)
            add_groups(total, x_sb, every, numbers, weights, operands, core, tokens, spec)
    if spec.split != "":
        both = nl.ndarray((128, x_tiles, tokens), dtype=nl.float32, buffer=nl.sbuf)
        add_other_half(both, total, core)
        store_sums(out, both, spec.k, tokens, core, 2)
    else:
        store_sums(out, total, spec.k, tokens, 0, 1)
