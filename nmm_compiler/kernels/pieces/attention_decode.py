"""Decode: a few queries of a group of heads against its cache.

Keys lie on the partitions, 128 at a time, and the queries of all heads of the group are the columns
of a product: each tile of the cache is stationary once. Partition p holds neighbouring keys of a
chunk, so that keys [context, d] and values arrive in long runs; keys [d, context] are read with a
stride to the same order. Scores of the whole context stay in SBUF: the maximum is exact.

Groups come in sets: the maxima and sums over the partitions are those of all columns of a set. A
load brings the keys or values of several groups where they are short.

Heads of 64 or 32 fill half or a quarter of TensorE's rows, so one pass takes 2 or 4 tiles of the
cache, a pack: their keys are transposed together, q^T stands on the diagonal of zeros once for each
tile, and of the weighted values the blocks on the diagonal are added up. Tiles that fill no pack
are taken singly, after the packs, into the first block of their sums.
"""

import nki.isa as nisa
import nki.language as nl

from .attention_loads import make_identity, rotate
from .loads_and_stores import evict, move, turn_rows
from .new_tiles import copied, filled


def decode_groups(outs, qs, k, v, rope, spec, schedule):
    """Compute the heads of several groups, each [heads of a group, m, d]; queries come in sets."""
    groups = k.shape[0]
    each = groups // len(qs)
    at_a_time = spec.together if each > 1 else 1
    steps = list_chunks(groups, each, spec)
    chunks = len(steps) // (2 * groups)
    identity = make_identity()
    angles = spread_angles(rope, each * spec.group, spec) if spec.rope != "none" else None
    brought = []
    keys = []
    fetched = []
    queries = []
    scores = []
    tops = []
    weights = []
    for t in range(len(steps)):
        # loads of the next four chunks start early
        for place in range(len(brought), min(t + 4 + at_a_time, len(steps))):
            step = steps[place]
            if not step[1] and step[2] == spec.first_key and step[0] % each == 0:
                fetched.append(fetch_columns(qs[step[0] // each], spec))
            if step[0] % at_a_time > 0:
                # the load of the group before has brought it
                brought.append(brought[place - chunks])
            elif step[1]:
                brought.append(load_rows_of(v, at_a_time, step))
            else:
                brought.append(load_keys_of(k, at_a_time, step, spec))
        # keys of the next two chunks are turned before the products of this one
        for place in range(len(keys), min(t + 3, len(steps))):
            step = steps[place]
            tile = brought[place]
            own = tile[0:128, step[0] % at_a_time, 0 : tile.shape[2], 0 : tile.shape[3]]
            if step[1] or spec.k_layout == "col":
                keys.append(own)
            else:
                keys.append(turn_keys(own, step, spec, schedule))
        step = steps[t]
        g = step[0]
        begins = step[2] == spec.first_key
        if step[1] and begins and g % each == 0:
            diagonal = largest_of(tops[g // each], identity)
            soften(weights, scores[g : g + each], diagonal, qs[0].dtype, spec)
        if step[1]:
            if begins:
                shape = sums_shape(spec, schedule)
                sums = nl.ndarray((128, shape[0], shape[1]), dtype=nl.float32, buffer=nl.psum)
                if g % each == 0:
                    # the weighted values of a set
                    shape = (128, spec.parts, schedule.pack, each * spec.columns)
                    made = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            weigh_cache(sums, weights[g], keys[t], step, spec, schedule)
            if step[6]:
                add_sums(made, sums, g % each, spec, schedule)
                if (g + 1) % each == 0:
                    total = over_tiles(weights[g + 1 - each : g + 1], nl.add, spec)
                    finish_set(outs[g // each], made, total, spec, schedule)
        else:
            if begins:
                if g % each == 0:
                    queries.append(turn_columns(fetched[g // each], angles, spec, schedule))
                scores.append(make_scores(spec))
            score_chunk(scores[g], keys[t], queries[g // each], g % each, step, spec, schedule)
            hide_chunk(scores[g], step, spec)
            if step[6] and (g + 1) % each == 0:
                tops.append(over_tiles(scores[g + 1 - each : g + 1], nl.maximum, spec))


def list_chunks(groups, each, spec):
    """Return chunks of keys and of values, in the order of their use.

    Each is (group, whether it is of values, first key, tiles, tiles before it, keys of a tile,
    whether it is the last of its group). Keys of a set come before the values of the set before.
    """
    whole = spec.keys // 128
    rest = spec.keys % 128
    chunks = []
    for tile in range(0, whole, 32):
        count = min(32, whole - tile)
        chunks.append((spec.first_key + 128 * tile, count, tile, 128))
    if rest > 0:
        chunks.append((spec.context - rest, 1, whole, rest))
    steps = []
    for start in range(0, groups + each, each):
        for behind in range(2):
            first = start - each * behind
            for g in range(max(0, first), min(first + each, groups)):
                for i in range(len(chunks)):
                    chunk = chunks[i]
                    last = chunk[0] + chunk[1] * chunk[3] == spec.context
                    steps.append((g, behind == 1, chunk[0], chunk[1], chunk[2], chunk[3], last))
    return steps


def make_scores(spec):
    """Return room for the scores of a group: [128, tiles, columns]."""
    scores = nl.ndarray((128, spec.cache_tiles, spec.columns), dtype=nl.float32, buffer=nl.sbuf)
    if spec.keys % 128 > 0:
        nisa.memset(
            dst=scores[0:128, spec.cache_tiles - 1 : spec.cache_tiles, 0 : spec.columns], value=0.0
        )
    return scores


def list_passes(step, schedule):
    """Return (first tile, tiles) of each pass over a chunk: packs, then single tiles."""
    whole = step[3] // schedule.pack * schedule.pack
    passes = []
    for first in range(0, whole, schedule.pack):
        passes.append((first, schedule.pack))
    for first in range(whole, step[3]):
        passes.append((first, 1))
    return passes


def sums_shape(spec, schedule):
    """Return how many sums of weighted values take turns, and their parts of d x tiles x columns.

    Eight share a bank, or there are four in more banks.
    """
    room = spec.parts * schedule.pack * spec.pitch
    most = 8 if room <= 64 else 4
    turns = min(most, max(1, spec.keys // 128 // schedule.pack))
    return turns, room


def beside(tiles, wide, first, count, begin, width, schedule):
    """Return some columns of `count` tiles beside each other, [wide, count width]."""
    if schedule.pack > 1:
        some = tiles[0:wide, first : first + count, begin : begin + width]
        return some.reshape((wide, count * width))
    return tiles[0:wide, first, begin : begin + width]


def spread_angles(rope, heads, spec):
    """Return the angles of each query, [columns, 2, d / 2]: those of its token, for all heads."""
    half = spec.d // 2
    angles = nl.ndarray((heads * spec.m, 2, half), dtype=rope.dtype, buffer=nl.sbuf)
    if spec.m == 1:
        nisa.dma_copy(dst=angles, src=rope.reshape((1, 2, half)).broadcast(0, heads))
    else:
        for h in range(heads):
            own = rope[0:2, 0 : spec.m, 0:half].permute((1, 0, 2))
            nisa.dma_copy(dst=angles[spec.m * h : spec.m * (h + 1), 0:2, 0:half], src=own)
    return angles


def fetch_columns(q, spec):
    """Load the queries of a set as they lie, [columns, 1, d]."""
    columns = q.shape[0]
    natural = nl.ndarray((columns, 1, spec.d), dtype=q.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=natural[0:columns, 0, 0 : spec.d], src=q[0:columns, 0 : spec.d])
    return natural


def turn_columns(natural, angles, spec, schedule):
    """Return q^T [128, parts of d, columns], rotated; for packs as `spread_queries` says."""
    columns = natural.shape[0]
    turned = natural
    if spec.rope != "none":
        turned = rotate(natural, angles, columns, spec)
    shape = (128, spec.parts, schedule.pack * columns)
    q_t = nl.ndarray(shape, dtype=natural.dtype, buffer=nl.sbuf)
    if schedule.pack > 1:
        spread_queries(q_t, turned, columns, spec, schedule)
    else:
        turn_rows(q_t, turned[0:columns, 0, 0 : spec.d], "strided_rows", 0)
    return q_t


def spread_queries(q_t, natural, columns, spec, schedule):
    """Write q^T of each group on a diagonal, [pack d, pack columns], once for each tile of a
    pack."""
    pack = schedule.pack
    copies = copied(natural[0:columns, 0:1, 0 : spec.d].broadcast(1, pack), natural.dtype)
    side_by_side = copies.reshape((columns, pack * spec.d))
    flipped = nl.ndarray((pack * spec.d, columns), dtype=natural.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=flipped, data=side_by_side, engine=nisa.engine.tensor)
    nisa.memset(dst=q_t, value=0.0)
    for own in range(0, columns, spec.columns):
        for i in range(pack):
            left = pack * own + spec.columns * i
            block = q_t[spec.d * i : spec.d * (i + 1), 0, left : left + spec.columns]
            evict(block, flipped[spec.d * i : spec.d * (i + 1), own : own + spec.columns], i)


def load_rows_of(rows, count, step):
    """Return rows of a chunk of some groups [128, count, tiles, d]: neighbours on a partition."""
    g = step[0]
    tiles = step[3]
    wide = step[5]
    d = rows.shape[2]
    loaded = nl.ndarray((128, count, tiles, d), dtype=rows.dtype, buffer=nl.sbuf)
    block = rows[g : g + count, step[2] : step[2] + wide * tiles, 0:d]
    block = block.reshape_dim(1, (wide, tiles)).permute((1, 0, 2, 3))
    nisa.dma_copy(dst=loaded[0:wide, 0:count, 0:tiles, 0:d], src=block)
    return loaded


def load_keys_of(k, count, step, spec):
    """Return keys of a chunk as they lie: rows, or [128, count, parts of d, keys]."""
    if spec.k_layout == "row":
        return load_rows_of(k, count, step)
    g = step[0]
    keys = step[3] * step[5]
    flat = nl.ndarray((128, count, spec.parts, keys), dtype=k.dtype, buffer=nl.sbuf)
    for part in range(spec.parts):
        deep = min(128, spec.d - 128 * part)
        block = k[g : g + count, 128 * part : 128 * part + deep, step[2] : step[2] + keys]
        nisa.dma_copy(dst=flat[0:deep, 0:count, part, 0:keys], src=block.permute((1, 0, 2)))
    return flat


def turn_keys(natural, step, spec, schedule):
    """Return keys of a chunk with the head size on the partitions, [128, parts, passes, 128].

    The tiles of a pack are below each other.
    """
    passes = list_passes(step, schedule)
    k_t = nl.ndarray((128, spec.parts, len(passes), 128), dtype=natural.dtype, buffer=nl.sbuf)
    packs = step[3] // schedule.pack
    for part in range(spec.parts):
        for first in range(0, packs, spec.bank_tiles):
            stop = min(first + spec.bank_tiles, packs)
            turn_passes(k_t, natural, part, passes[first:stop], first, step, spec, schedule)
        if packs < len(passes):
            turn_passes(k_t, natural, part, passes[packs:], packs, step, spec, schedule)
    return k_t


def turn_passes(k_t, natural, part, passes, place, step, spec, schedule):
    """Transpose the tiles of some passes of equal height, the first of which is at `place`."""
    wide = step[5]
    deep = min(128, spec.d - 128 * part)
    height = passes[0][1] * deep
    count = len(passes)
    turned = nl.ndarray((128, count, 128), dtype=natural.dtype, buffer=nl.psum)
    for i in range(count):
        tiles = beside(natural, wide, passes[i][0], passes[i][1], 128 * part, deep, schedule)
        nisa.nc_transpose(dst=turned[0:height, i, 0:wide], data=tiles, engine=nisa.engine.tensor)
    evict(
        k_t[0:height, part, place : place + count, 0:wide],
        turned[0:height, 0:count, 0:wide],
        place // spec.bank_tiles,
    )


def score_chunk(scores, k_t, q_t, slot, step, spec, schedule):
    """Compute the scores of a chunk for a group of a set, [128 keys, tiles, columns]: before the
    scale, or capped."""
    tiles = step[3]
    wide = step[5]
    columns = spec.columns
    passes = list_passes(step, schedule)
    own = slot * schedule.pack * columns
    at_once = 512 // columns // schedule.pack
    for first in range(0, len(passes), at_once):
        some = passes[first : first + at_once]
        begin = some[0][0]
        count = some[len(some) - 1][0] + some[len(some) - 1][1] - begin
        sums = nl.ndarray((128, count, columns), dtype=nl.float32, buffer=nl.psum)
        for i in range(len(some)):
            into = beside(sums, wide, some[i][0] - begin, some[i][1], 0, columns, schedule)
            for part in range(spec.parts):
                height = some[i][1] * min(128, spec.d - 128 * part)
                if spec.k_layout == "col":
                    keys = k_t[0:height, part, 0 : wide * tiles]
                    keys = keys.reshape_dim(1, (wide, tiles)).select(2, some[i][0])
                else:
                    keys = k_t[0:height, part, first + i, 0:wide]
                nisa.nc_matmul(
                    dst=into,
                    stationary=keys,
                    moving=q_t[0:height, part, own : own + some[i][1] * columns],
                    accumulate=part > 0,
                )
        place = step[4] + begin
        part_of = scores[0:wide, place : place + count, 0:columns]
        evict(part_of, sums[0:wide, 0:count, 0:columns], 1)
        if spec.soft_cap:
            nisa.activation(dst=part_of, op=nl.tanh, data=part_of, scale=spec.tanh_scale)


def hide_chunk(scores, step, spec):
    """Mask scores of a chunk whose key a query of its column does not see, or that is none."""
    tiles = step[3]
    # the distance of the first query from the first key
    queries = spec.context - spec.m - step[2]
    tile = scores[0:128, step[4] : step[4] + tiles, 0 : spec.columns]
    tile = tile.reshape_dim(2, (spec.group, spec.m))
    if spec.causal and step[5] * tiles - 1 > queries:
        nisa.affine_select(
            dst=tile,
            pattern=[[-1, tiles], [0, spec.group], [1, spec.m]],
            channel_multiplier=-tiles,
            on_true_tile=tile,
            on_false_value=-1.0e30,
            cmp_op=nl.greater_equal,
            offset=queries,
        )
    if spec.window > 0 and spec.m > 1 and queries + spec.m > spec.window:
        nisa.affine_select(
            dst=tile,
            pattern=[[1, tiles], [0, spec.group], [-1, spec.m]],
            channel_multiplier=tiles,
            on_true_tile=tile,
            on_false_value=-1.0e30,
            cmp_op=nl.greater_equal,
            offset=spec.window - queries - 1,
        )
    if step[5] < 128:
        nisa.affine_select(
            dst=tile,
            pattern=[[0, tiles], [0, spec.group], [0, spec.m]],
            channel_multiplier=-1,
            on_true_tile=tile,
            on_false_value=-1.0e30,
            cmp_op=nl.greater_equal,
            offset=step[5] - 1,
        )


def over_tiles(strips, op, spec):
    """Return the maxima, or the sums, over the tiles of scores or weights of a set: of each
    partition, [128, columns]."""
    tiles = strips[0].shape[1]
    made = nl.ndarray((128, len(strips) * spec.columns), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(len(strips)):
        own = made[0:128, spec.columns * i : spec.columns * (i + 1)]
        by_column = strips[i][0:128, 0:tiles, 0 : spec.columns].permute((0, 2, 1))
        nisa.tensor_reduce(dst=own, op=op, data=by_column, axis=2)
    return made


def largest_of(tops, identity):
    """Return the maxima of columns over the partitions, on a diagonal: [columns, columns]."""
    columns = tops.shape[1]
    turned = nl.ndarray((columns, 128), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=tops, engine=nisa.engine.tensor)
    largest = nl.ndarray((columns, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=turned, axis=1)
    diagonal = nl.ndarray((columns, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=diagonal, data=identity[0:columns, 0:columns], op0=nl.multiply, operand0=largest
    )
    return diagonal


def soften(weights, scores, diagonal, dtype, spec):
    """Add exp of the scores of each group of a set less their maximum, [128, tiles, columns]."""
    columns = diagonal.shape[0]
    tiles = scores[0].shape[1]
    # a product with ones spreads the maxima over the partitions
    ones = filled((columns, 128), nl.float32, 1.0)
    spread = nl.ndarray((128, 1, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=spread[0:128, 0, 0:columns], stationary=ones, moving=diagonal)
    for i in range(len(scores)):
        own_weights = nl.ndarray((128, tiles, spec.columns), dtype=dtype, buffer=nl.sbuf)
        own = spread[0:128, 0:1, spec.columns * i : spec.columns * (i + 1)]
        part = scores[i][0:128, 0:tiles, 0 : spec.columns]
        top = own.broadcast(1, tiles)
        nisa.tensor_tensor(dst=part, data1=part, data2=top, op=nl.subtract)
        nisa.activation(dst=own_weights, op=nl.exp, data=part, scale=spec.factor)
        weights.append(own_weights)


def weigh_cache(sums, weights, v_sb, step, spec, schedule):
    """Add the weighted values of a chunk, [d, columns]; the sums in turn, as each one waits."""
    turns = sums.shape[1]
    passes = list_passes(step, schedule)
    before = step[4] // schedule.pack + step[4] % schedule.pack
    for i in range(len(passes)):
        first = passes[i][0]
        count = passes[i][1]
        for part in range(spec.parts):
            deep = min(128, spec.d - 128 * part)
            begin = part * schedule.pack * spec.columns
            stop = begin + count * spec.columns
            nisa.nc_matmul(
                dst=sums[0 : count * deep, (before + i) % turns, begin:stop],
                stationary=beside(v_sb, step[5], first, count, 128 * part, deep, schedule),
                moving=beside(
                    weights, step[5], step[4] + first, count, 0, spec.columns, schedule
                ),
                accumulate=before + i >= turns,
            )  # fmt: skip


def add_sums(made, sums, slot, spec, schedule):
    """Add up the sums of a group, in the columns of its set."""
    turns = sums.shape[1]
    columns = spec.columns
    width = schedule.pack * columns
    for part in range(spec.parts):
        height = schedule.pack * min(128, spec.d - 128 * part)
        own = made[0:height, part, 0 : schedule.pack, columns * slot : columns * (slot + 1)]
        every = sums[0:height, 0:turns, part * width : (part + 1) * width]
        every = every.reshape_dim(2, (schedule.pack, columns)).permute((0, 2, 3, 1))
        nisa.tensor_reduce(dst=own, op=nl.add, data=every, axis=3)


def finish_set(out, made, sums, spec, schedule):
    """Turn the weighted values, divide by the sums of the weights, and store y of a set."""
    columns = made.shape[3]
    ones = filled((128, 1), nl.float32, 1.0)
    total = nl.ndarray((columns, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=sums, moving=ones)
    inverse = nl.ndarray((columns, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    y_sb = nl.ndarray((columns, spec.d), dtype=out.dtype, buffer=nl.sbuf)
    for part in range(spec.parts):
        deep = min(128, spec.d - 128 * part)
        height = schedule.pack * deep
        before = None
        for i in range(schedule.pack):
            turned = nl.ndarray((columns, 128), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_transpose(
                dst=turned[0:columns, 0:height],
                data=made[0:height, part, i, 0:columns],
                engine=nisa.engine.tensor,
            )
            block = turned[0:columns, deep * i : deep * (i + 1)]
            if i == schedule.pack - 1:
                result = y_sb[0:columns, 128 * part : 128 * part + deep]
            else:
                result = nl.ndarray((columns, deep), dtype=nl.float32, buffer=nl.sbuf)
            if i == 0:
                nisa.tensor_scalar(dst=result, data=block, op0=nl.multiply, operand0=inverse)
            else:
                nisa.scalar_tensor_tensor(
                    dst=result, data=block, op0=nl.multiply, operand0=inverse, op1=nl.add,
                    operand1=before,
                )  # fmt: skip
            before = result
    move(out[0:columns, 0 : spec.d], y_sb, schedule.own_queue)
