"""Decode: a few queries of a group of heads against its cache.

Keys lie on the partitions, and the queries of all heads of the group are the columns of a product:
each tile of the cache, of up to 128 keys, is stationary once. Partition p holds neighbouring keys
of a chunk, so that keys [context, d] and values arrive in long runs; keys [d, context] are read
with a stride to the same order. Tiles are of equal height; the few keys that do not divide so are
a tile of their own. Scores of the whole context stay in SBUF: the maximum is exact.

Groups come in sets. A step brings keys or values of several groups where they are short, and
instructions of VectorE and ScalarE take the scores of all groups of a step or a set.

Heads of 64 or 32 fill half or a quarter of TensorE's rows, so one pass takes 2 or 4 tiles of the
cache, a pack: their keys are transposed together, q^T stands on the diagonal of zeros once for each
tile, and of the weighted values the blocks on the diagonal are added up. The tile of what is left
is taken singly, into the first block of its sums.
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
    wide = spec.together if each > 1 else 1
    strips = each // wide
    steps = list_loads(groups // wide, strips, wide, spec)
    identity = make_identity()
    angles = spread_angles(rope, each * spec.group, spec) if spec.rope != "none" else None
    brought = []
    keys = []
    fetched = []
    queries = []
    scores = []
    tops = []
    diagonals = []
    weights = []
    results = []
    stored = 0
    for t in range(len(steps)):
        # loads of the next four steps start early
        for place in range(len(brought), min(t + 5, len(steps))):
            step = steps[place]
            if step[1]:
                brought.append(load_rows_of(v, wide, step, schedule.own_queue))
            else:
                if step[6] == 0:
                    fetched.append(fetch_columns(qs[step[0] // strips], spec))
                brought.append(load_keys_of(k, wide, step, spec, schedule))
        # keys of the next two steps are turned before the products of this one
        for place in range(len(keys), min(t + 3, len(steps))):
            step = steps[place]
            if step[6] == 0 and not step[1]:
                queries.append(turn_columns(fetched[step[0] // strips], angles, spec, schedule))
            if step[1] or spec.k_layout == "col":
                keys.append(brought[place])
            else:
                keys.append(turn_keys(brought[place], step, spec, schedule))
        known = (len(tops), len(diagonals), len(results))
        step = steps[t]
        strip = step[0]
        own = strip // strips
        place = strip % strips
        if step[1]:
            if step[2] == spec.first_key:
                sums = make_sums(wide, spec, schedule)
                if place == 0:
                    made = nl.ndarray(
                        (128, spec.parts, schedule.pack, each * spec.columns),
                        dtype=nl.float32,
                        buffer=nl.sbuf,
                    )
            weigh_cache(sums, weights[strip], keys[t], step, spec, schedule)
            if step[7]:
                add_sums(made, sums, wide * place * spec.columns, spec, schedule)
                if place == strips - 1:
                    results.append(
                        (made, over_tiles(weights[strip + 1 - strips : strip + 1], nl.add))
                    )
        else:
            if step[2] == spec.first_key:
                scores.append(make_scores(wide, spec))
            score_chunk(scores[strip], keys[t], queries[own], wide * place, step, spec, schedule)
            hide_chunk(scores[strip], step, spec)
            if step[7] and place == strips - 1:
                tops.append(over_tiles(scores[strip + 1 - strips : strip + 1], nl.maximum))
        # what a set goes on with waits for another step, if there is one before it is needed
        if len(qs) == 1 or len(steps) == 2 * len(qs) or t == len(steps) - 1:
            known = (len(tops), len(tops), len(results))
        for i in range(len(diagonals), known[0]):
            diagonals.append(largest_of(tops[i], identity))
        for i in range(len(weights) // strips, known[1]):
            some = scores[i * strips : (i + 1) * strips]
            soften(weights, some, diagonals[i], qs[0].dtype, spec)
        for i in range(stored, known[2]):
            finish_set(outs[i], results[i][0], results[i][1], spec, schedule)
            stored = i + 1


def list_loads(count, strips, wide, spec):
    """Return loads of keys and of values of `count` strips, in the order of their use.

    Each is (strip, whether it is of values, first key, tiles, tiles before it, keys of a tile, how
    many come before it in its set, whether it is the last of its strip). Keys of a set come before
    the values of the set before.
    """
    high = spec.keys // spec.cache_tiles
    rest = spec.keys % spec.cache_tiles
    chunks = []
    for tile in range(0, spec.cache_tiles, 32):
        some = min(32, spec.cache_tiles - tile)
        chunks.append((spec.first_key + high * tile, some, tile, high))
    if rest > 0:
        chunks.append((spec.context - rest, 1, spec.cache_tiles, rest))
    steps = []
    for start in range(0, count + strips, strips):
        for behind in range(2):
            first = start - strips * behind
            for strip in range(max(0, first), min(first + strips, count)):
                for i in range(len(chunks)):
                    begin, tiles, before, rows = chunks[i]
                    steps.append((
                        strip, behind == 1, begin, tiles, before, rows,
                        len(chunks) * (strip - first) + i, i == len(chunks) - 1,
                    ))  # fmt: skip
    return steps


def make_scores(groups, spec):
    """Return room for the scores of a strip: [128, groups, tiles, columns]."""
    scores = nl.ndarray(
        (128, groups, spec.score_tiles, spec.columns), dtype=nl.float32, buffer=nl.sbuf
    )
    if spec.keys < 128 * spec.score_tiles:
        # partitions without a key
        nisa.memset(dst=scores, value=-1.0e30)
    return scores


def make_sums(groups, spec, schedule):
    """Return room in a bank for the weighted values of a strip, [128, groups, turns, parts of d x
    tiles x columns]: sums take turns, as each one waits."""
    room = spec.parts * schedule.pack * spec.columns
    turns = max(1, min(8, 512 // (groups * room), spec.cache_tiles // schedule.pack))
    return nl.ndarray((128, groups, turns, room), dtype=nl.float32, buffer=nl.psum)


def list_blocks(groups, count, room):
    """Return (first group, groups, first, count) of blocks of up to `room` of the `count` things
    of each group."""
    deep = max(1, room // count)
    blocks = []
    for g in range(0, groups, deep):
        for first in range(0, count, room):
            blocks.append((g, min(deep, groups - g), first, min(room, count - first)))
    return blocks


def beside(tiles, wide, slot, first, count, begin, width, schedule):
    """Return columns of `count` tiles of a group beside each other, [wide, count width]."""
    if schedule.pack > 1:
        some = tiles[0:wide, slot, first : first + count, begin : begin + width]
        return some.reshape((wide, count * width))
    return tiles[0:wide, slot, first, begin : begin + width]


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
    q_t = nl.ndarray(
        (128, spec.parts, schedule.pack * columns), dtype=natural.dtype, buffer=nl.sbuf
    )
    if schedule.pack > 1:
        spread_queries(q_t, turned, columns, spec, schedule)
    else:
        turn_rows(q_t, turned[0:columns, 0, 0 : spec.d], "strided_rows", 0, 1)
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


def load_rows_of(rows, count, step, own_queue):
    """Return rows of a chunk of some groups [128, count, tiles, d]: neighbours on a partition.

    With own_queue the scalar engine issues the load, whose hardware moves runs of 256 bytes in less
    than half of the time.
    """
    g = count * step[0]
    tiles = step[3]
    wide = step[5]
    d = rows.shape[2]
    loaded = nl.ndarray((128, count, tiles, d), dtype=rows.dtype, buffer=nl.sbuf)
    block = rows[g : g + count, step[2] : step[2] + wide * tiles, 0:d]
    block = block.reshape_dim(1, (wide, tiles)).permute((1, 0, 2, 3))
    move(loaded[0:wide, 0:count, 0:tiles, 0:d], block, "scalar" if own_queue else False)
    return loaded


def load_keys_of(k, count, step, spec, schedule):
    """Return keys of a chunk as they lie: rows, or [128, count, parts of d, keys]."""
    if spec.k_layout == "row":
        return load_rows_of(k, count, step, schedule.own_queue)
    g = count * step[0]
    keys = step[3] * step[5]
    flat = nl.ndarray((128, count, spec.parts, keys), dtype=k.dtype, buffer=nl.sbuf)
    for part in range(spec.parts):
        deep = min(128, spec.d - 128 * part)
        block = k[g : g + count, 128 * part : 128 * part + deep, step[2] : step[2] + keys]
        nisa.dma_copy(dst=flat[0:deep, 0:count, part, 0:keys], src=block.permute((1, 0, 2)))
    return flat


def turn_keys(natural, step, spec, schedule):
    """Return keys of a chunk with the head size on the partitions, [128, groups, parts, passes,
    128].

    The tiles of a pack are below each other.
    """
    wide = step[5]
    pack = min(schedule.pack, step[3])
    passes = step[3] // pack
    shape = (128, natural.shape[1], spec.parts, passes, 128)
    k_t = nl.ndarray(shape, dtype=natural.dtype, buffer=nl.sbuf)
    blocks = list_blocks(natural.shape[1], passes, spec.bank_tiles)
    for part in range(spec.parts):
        deep = min(128, spec.d - 128 * part)
        height = pack * deep
        for b in range(len(blocks)):
            g0, groups, first, count = blocks[b]
            turned = nl.ndarray((128, groups, count, 128), dtype=natural.dtype, buffer=nl.psum)
            for g in range(groups):
                for i in range(count):
                    tile = pack * (first + i)
                    tiles = beside(natural, wide, g0 + g, tile, pack, 128 * part, deep, schedule)
                    nisa.nc_transpose(
                        dst=turned[0:height, g, i, 0:wide], data=tiles, engine=nisa.engine.tensor
                    )
            evict(
                k_t[0:height, g0 : g0 + groups, part, first : first + count, 0:wide],
                turned[0:height, 0:groups, 0:count, 0:wide],
                first // spec.bank_tiles,
            )
    return k_t


def score_chunk(scores, k_t, q_t, slot, step, spec, schedule):
    """Compute the scores of a chunk of a strip, [128 keys, groups, tiles, columns]: before the
    scale, or capped."""
    tiles = step[3]
    wide = step[5]
    pack = min(schedule.pack, tiles)
    columns = spec.columns
    blocks = list_blocks(k_t.shape[1], tiles // pack, 512 // columns // pack)
    for b in range(len(blocks)):
        g0, groups, first, count = blocks[b]
        sums = nl.ndarray((128, groups, pack * count, columns), dtype=nl.float32, buffer=nl.psum)
        for g in range(groups):
            own = (slot + g0 + g) * schedule.pack * columns
            for i in range(count):
                into = beside(sums, wide, g, pack * i, pack, 0, columns, schedule)
                for part in range(spec.parts):
                    height = pack * min(128, spec.d - 128 * part)
                    if spec.k_layout == "col":
                        keys = k_t[0:height, g0 + g, part, 0 : wide * tiles]
                        keys = keys.reshape_dim(1, (wide, tiles)).select(2, first + i)
                    else:
                        keys = k_t[0:height, g0 + g, part, first + i, 0:wide]
                    nisa.nc_matmul(
                        dst=into,
                        stationary=keys,
                        moving=q_t[0:height, part, own : own + pack * columns],
                        accumulate=part > 0,
                    )
        place = step[4] + pack * first
        part_of = scores[0:wide, g0 : g0 + groups, place : place + pack * count, 0:columns]
        evict(part_of, sums[0:wide, 0:groups, 0 : pack * count, 0:columns], 1)
        if spec.soft_cap:
            nisa.activation(dst=part_of, op=nl.tanh, data=part_of, scale=spec.tanh_scale)


def hide_chunk(scores, step, spec):
    """Mask scores of a chunk of some groups whose key a query of its column does not see."""
    groups = scores.shape[1]
    tiles = step[3]
    # the distance of the first query from the first key
    queries = spec.context - spec.m - step[2]
    every = scores[0:128, 0:groups, step[4] : step[4] + tiles, 0 : spec.columns]
    every = every.reshape_dim(3, (spec.group, spec.m))
    if spec.causal and step[5] * tiles - 1 > queries:
        nisa.affine_select(
            dst=every,
            pattern=[[0, groups], [-1, tiles], [0, spec.group], [1, spec.m]],
            channel_multiplier=-tiles,
            on_true_tile=every,
            on_false_value=-1.0e30,
            cmp_op=nl.greater_equal,
            offset=queries,
        )
    if spec.window > 0 and spec.m > 1 and queries + spec.m > spec.window:
        nisa.affine_select(
            dst=every,
            pattern=[[0, groups], [1, tiles], [0, spec.group], [-1, spec.m]],
            channel_multiplier=tiles,
            on_true_tile=every,
            on_false_value=-1.0e30,
            cmp_op=nl.greater_equal,
            offset=spec.window - queries - 1,
        )


def over_tiles(strips, op):
    """Return the maxima, or the sums, over the tiles of scores or weights of a set: of each
    partition, [128, columns]."""
    groups = strips[0].shape[1]
    tiles = strips[0].shape[2]
    columns = strips[0].shape[3]
    made = nl.ndarray((128, len(strips) * groups, columns), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(len(strips)):
        own = made[0:128, groups * i : groups * (i + 1), 0:columns]
        by_column = strips[i][0:128, 0:groups, 0:tiles, 0:columns].permute((0, 1, 3, 2))
        nisa.tensor_reduce(dst=own, op=op, data=by_column, axis=3)
    return made.reshape((128, len(strips) * groups * columns))


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
    """Add exp of the scores of each strip of a set less their maximum, [128, groups, tiles,
    columns]."""
    columns = diagonal.shape[0]
    groups = scores[0].shape[1]
    tiles = scores[0].shape[2]
    # a product with ones spreads the maxima over the partitions
    ones = filled((columns, 128), nl.float32, 1.0)
    spread = nl.ndarray(
        (128, len(scores) * groups, 1, spec.columns), dtype=nl.float32, buffer=nl.psum
    )
    nisa.nc_matmul(dst=spread.reshape((128, columns)), stationary=ones, moving=diagonal)
    for i in range(len(scores)):
        own = spread[0:128, groups * i : groups * (i + 1), 0:1, 0 : spec.columns]
        top = own.broadcast(2, tiles)
        part = scores[i][0:128, 0:groups, 0:tiles, 0 : spec.columns]
        made = nl.ndarray(part.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=part, data1=part, data2=top, op=nl.subtract)
        nisa.activation(dst=made, op=nl.exp, data=part, scale=spec.factor)
        weights.append(made)


def weigh_cache(sums, weights, v_sb, step, spec, schedule):
    """Add the weighted values of a chunk of a strip, [d, columns]."""
    turns = sums.shape[2]
    wide = step[5]
    pack = min(schedule.pack, step[3])
    for i in range(step[3] // pack):
        number = step[4] // schedule.pack + i
        for g in range(v_sb.shape[1]):
            moving = beside(weights, wide, g, step[4] + pack * i, pack, 0, spec.columns, schedule)
            for part in range(spec.parts):
                deep = min(128, spec.d - 128 * part)
                begin = part * schedule.pack * spec.columns
                nisa.nc_matmul(
                    dst=sums[
                        0 : pack * deep, g, number % turns, begin : begin + pack * spec.columns
                    ],
                    stationary=beside(v_sb, wide, g, pack * i, pack, 128 * part, deep, schedule),
                    moving=moving,
                    accumulate=number >= turns,
                )


def add_sums(made, sums, first, spec, schedule):
    """Add up the sums of a strip over their turns, in the columns of its set."""
    groups, turns = sums.shape[1:3]
    width = schedule.pack * spec.columns
    for part in range(spec.parts):
        height = schedule.pack * min(128, spec.d - 128 * part)
        own = made[
            0:height, part, 0 : schedule.pack, first : first + groups * spec.columns
        ].reshape_dim(2, (groups, spec.columns))
        every = sums[0:height, 0:groups, 0:turns, part * width : (part + 1) * width]
        every = every.reshape_dim(3, (schedule.pack, spec.columns)).permute((0, 3, 1, 4, 2))
        nisa.tensor_reduce(dst=own, op=nl.add, data=every, axis=4)


def finish_set(out, made, sums, spec, schedule):
    """Turn the weighted values, divide by the sums of the weights, and store y of a set."""
    columns = sums.shape[1]
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
