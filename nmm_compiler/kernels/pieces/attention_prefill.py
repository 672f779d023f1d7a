"""Prefill: tiles of 128 queries against sections of keys, in three steps that overlap.

Scores have queries on the partitions. A section's scores leave PSUM through exp; the weights are
turned on TensorE, for v wants its keys on the partitions; v carries a column of ones, whose result
is the sum of the weights. The maximum and the result run along from section to section.
"""

import nki.isa as nisa
import nki.language as nl

from .attention_loads import (
    fetch_queries,
    keep_side,
    load_keys,
    load_values,
    make_band,
    make_identity,
    turn_queries,
)
from .loads_and_stores import evict, move


def prefill_groups(outs, qs, k, v, rope, spec, schedule):
    """Compute the heads of several groups, each [heads of a group, m, d]."""
    # what TensorE adds to scores: identity times a band, whose column 128 + i is key i of a tile
    banded = spec.causal and not spec.soft_cap
    identity = make_identity() if banded else None
    late = make_band(1, 128) if banded else None
    early = make_band(-1, -129) if banded and spec.window > 0 else None
    steps = list_steps(len(qs), spec)
    keys = [load_keys(k.select(0, 0), rope, spec)]
    values = [load_values(v.select(0, 0), spec)]
    fetched = [fetch_queries(qs[0], 0, spec)]
    queries = []
    scores = []
    turned = []
    sums = []
    shifts = []
    factors = []
    weights = []
    stacks = []
    totals = []
    for t in range(len(steps) + 7):
        # VectorE and ScalarE read results of the turn before; the turn after reads theirs
        if has_step(t, 0, steps) and steps[t][1] == 0 and steps[t][6]:
            g = steps[t][0]
            q0 = steps[t][2]
            # loads of the next queries start early, and with the first ones those of keys
            if q0 == 0 and g + 1 < len(qs):
                keys.append(load_keys(k.select(0, g + 1), rope, spec))
                values.append(load_values(v.select(0, g + 1), spec))
            if q0 + 128 < spec.m:
                fetched.append(fetch_queries(qs[g], q0 + 128, spec))
            elif g + 1 < len(qs):
                fetched.append(fetch_queries(qs[g + 1], 0, spec))
            queries.append(turn_queries(fetched[len(queries)], rope, q0, spec))
        if has_step(t, 4, steps):
            stacks.append(take_out(turned[t - 4], steps[t - 4]))
        if has_step(t, 1, steps):
            step = steps[t - 1]
            capped = cap(scores[t - 1], step, spec)
            shifts.append(find_shift(capped, shifts, step, spec))
            factors.append(find_factor(shifts, step))
            weights.append(find_weights(capped, shifts[t - 1], step, qs[0].dtype, spec))
        if has_step(t, 6, steps):
            step = steps[t - 6]
            totals.append(add_section(sums[t - 6], totals, factors[t - 6], step))
            if step[7]:
                finish(outs[step[0]], totals[t - 6], step, schedule)
        if has_step(t, 0, steps):
            scores.append(nl.ndarray((128, steps[t][5]), dtype=nl.float32, buffer=nl.psum))
        if has_step(t, 3, steps):
            bank = nl.ndarray((128, spec.bank_tiles, 128), dtype=qs[0].dtype, buffer=nl.psum)
            turned.append(bank)
        if has_step(t, 5, steps):
            sums.append(nl.ndarray((128, spec.d + 1), dtype=nl.float32, buffer=nl.psum))
        # one after the other, since a product waits for the one before it in the same sum
        for c1 in range(0, spec.section, 128):
            if has_keys(t, 5, c1, steps):
                step = steps[t - 5]
                width = min(128, step[5] - c1)
                nisa.nc_matmul(
                    dst=sums[t - 5][0 : step[3], 0 : spec.d + 1],
                    stationary=stacks[t - 5][0:width, c1 // 128, 0 : step[3]],
                    moving=values[step[0]][0:width, (step[4] + c1) // 128, 0 : spec.d + 1],
                    accumulate=c1 > 0,
                )
            if has_keys(t, 0, c1, steps):
                step = steps[t]
                score(scores[t], queries[len(queries) - 1], keys[step[0]], c1, step, spec)
            if has_keys(t, 3, c1, steps):
                step = steps[t - 3]
                keys_of = min(128, step[5] - c1)
                nisa.nc_transpose(
                    dst=turned[t - 3][0:keys_of, c1 // 128, 0 : step[3]],
                    data=weights[t - 3][0 : step[3], c1 : c1 + keys_of],
                    engine=nisa.engine.tensor,
                )
            if banded and has_keys(t, 0, c1, steps):
                mask(scores[t], identity, late, early, c1, steps[t], spec)


def has_step(t, lag, steps):
    """Return whether step t - lag is one."""
    return lag <= t and t - lag < len(steps)


def has_keys(t, lag, c1, steps):
    """Return whether step t - lag is one that has keys from the c1-th on."""
    return has_step(t, lag, steps) and c1 < steps[t - lag][5]


def list_steps(groups, spec):
    """Return sections of keys for tiles of queries.

    Each is (group, head, first query, queries, first key, keys, whether it is the tile's first
    section, whether it is the last).
    """
    steps = []
    for g in range(groups):
        for q0 in range(0, spec.m, 128):
            rows = min(128, spec.m - q0)
            place = spec.context - spec.m + q0
            stop = place + rows if spec.causal else spec.context
            start = max(0, place - spec.window + 1) // 128 * 128 if spec.window > 0 else 0
            # sections of about equal width
            count = (stop - start + spec.section - 1) // spec.section
            wide = ((stop - start + count - 1) // count + 127) // 128 * 128
            for h in range(spec.group):
                for c0 in range(start, stop, wide):
                    keys = min(wide, stop - c0)
                    steps.append((g, h, q0, rows, c0, keys, c0 == start, c0 + keys == stop))
    return steps


def score(scores, q_t, k_t, c1, step, spec):
    """Compute the scores of 128 keys of a section, before the scale."""
    rows = step[3]
    first = step[4] + c1
    width = min(128, step[5] - c1)
    for part in range(spec.parts):
        deep = min(128, spec.d - 128 * part)
        nisa.nc_matmul(
            dst=scores[0:rows, c1 : c1 + width],
            stationary=q_t[0:deep, part, step[1], 0:rows],
            moving=k_t[0:deep, part, first : first + width],
            accumulate=part > 0,
        )


def mask(scores, identity, late, early, c1, step, spec):
    """Add about -1e30 to the scores of 128 keys where their query does not see them.

    late, early: bands for keys after the query, and for those before the window.
    """
    width = min(128, step[5] - c1)
    ahead = step[4] + c1 - (spec.context - spec.m + step[2])
    if ahead + width > 1:
        add_band(scores, identity, late, c1, width, step[3], ahead)
    if spec.window > 0 and ahead + spec.window < step[3]:
        add_band(scores, identity, early, c1, width, step[3], ahead + spec.window)


def add_band(scores, identity, band, c1, width, rows, ahead):
    """Add a band to a tile of scores whose first key is `ahead` of the first query."""
    nisa.nc_matmul(
        dst=scores[0:rows, c1 : c1 + width],
        stationary=identity[0:rows, 0:rows],
        moving=band[0:rows, 128 + ahead : 128 + ahead + width],
        accumulate=True,
    )


def cap(scores, step, spec):
    """Return tanh of the scaled scores of a section, masked, where they are capped."""
    if not spec.soft_cap:
        return scores
    rows = step[3]
    capped = nl.ndarray((128, step[5]), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=capped[0:rows, 0 : step[5]],
        op=nl.tanh,
        data=scores[0:rows, 0 : step[5]],
        scale=spec.tanh_scale,
    )
    if spec.causal:
        for c1 in range(0, step[5], 128):
            width = min(128, step[5] - c1)
            ahead = step[4] + c1 - (spec.context - spec.m + step[2])
            tile = capped[0:rows, c1 : c1 + width]
            if ahead + width > 1:
                keep_side(tile, 1, -ahead, -1.0e30)
            if spec.window > 0 and ahead + spec.window < rows:
                keep_side(tile, -1, ahead + spec.window - 1, -1.0e30)
    return capped


def find_shift(scores, shifts, step, spec):
    """Return minus the maximum of each row so far, scaled."""
    rows = step[3]
    top = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(
        dst=top[0:rows, 0:1],
        op=nl.maximum,
        data=scores[0:rows, 0 : step[5]],
        axis=1,
        negate=True,
    )
    shift = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    if step[6]:
        nisa.tensor_scalar(
            dst=shift[0:rows, 0:1], data=top[0:rows, 0:1], op0=nl.multiply, operand0=spec.factor
        )
    else:
        nisa.tensor_scalar(
            dst=shift[0:rows, 0:1],
            data=top[0:rows, 0:1],
            op0=nl.multiply,
            operand0=spec.factor,
            op1=nl.minimum,
            operand1=shifts[len(shifts) - 1][0:rows, 0:1],
        )
    return shift


def find_factor(shifts, step):
    """Return what sums under the maximum before are worth under the last one."""
    rows = step[3]
    factor = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    if not step[6]:
        nisa.activation(
            dst=factor[0:rows, 0:1],
            op=nl.exp,
            data=shifts[len(shifts) - 2][0:rows, 0:1],
            scale=-1.0,
            bias=shifts[len(shifts) - 1][0:rows, 0:1],
        )
    return factor


def find_weights(scores, shift, step, dtype, spec):
    """Return the weights of a section, exp of scores less their maximum."""
    rows = step[3]
    weights = nl.ndarray((128, step[5]), dtype=dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=weights[0:rows, 0 : step[5]],
        op=nl.exp,
        data=scores[0:rows, 0 : step[5]],
        scale=spec.factor,
        bias=shift[0:rows, 0:1],
    )
    return weights


def take_out(bank, step):
    """Return the turned weights of a section in SBUF [128, tiles, 128]: keys on the partitions."""
    tiles = step[5] // 128
    rest = step[5] % 128
    rows = step[3]
    stack = nl.ndarray((128, (step[5] + 127) // 128, 128), dtype=bank.dtype, buffer=nl.sbuf)
    # VectorE takes three eighths of the tiles and ScalarE the others
    mine = (tiles * 3 + 4) // 8
    if mine > 0:
        evict(stack[0:128, 0:mine, 0:rows], bank[0:128, 0:mine, 0:rows], 0)
    if tiles > mine:
        evict(stack[0:128, mine:tiles, 0:rows], bank[0:128, mine:tiles, 0:rows], 1)
    if rest > 0:
        evict(stack[0:rest, tiles, 0:rows], bank[0:rest, tiles, 0:rows], 0)
    return stack


def add_section(sums, totals, factor, step):
    """Return the sums of a section and of those before it, which are worth less by a factor."""
    rows = step[3]
    columns = sums.shape[1]
    if step[6] and step[7]:
        return sums
    whole = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
    if step[6]:
        evict(whole[0:rows, 0:columns], sums[0:rows, 0:columns], 0)
    else:
        nisa.scalar_tensor_tensor(
            dst=whole[0:rows, 0:columns],
            data=totals[len(totals) - 1][0:rows, 0:columns],
            op0=nl.multiply,
            operand0=factor[0:rows, 0:1],
            op1=nl.add,
            operand1=sums[0:rows, 0:columns],
        )
    return whole


def finish(out, whole, step, schedule):
    """Divide by the sum of the weights, and store a tile of y."""
    d = whole.shape[1] - 1
    rows = step[3]
    inverse = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse[0:rows, 0:1], data=whole[0:rows, d : d + 1])
    y_sb = nl.ndarray((128, d), dtype=out.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=y_sb[0:rows, 0:d],
        data=whole[0:rows, 0:d],
        op0=nl.multiply,
        operand0=inverse[0:rows, 0:1],
    )
    move(out[step[1], step[2] : step[2] + rows, 0:d], y_sb[0:rows, 0:d], schedule.own_queue)
