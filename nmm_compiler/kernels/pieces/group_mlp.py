"""The gated MLPs of some groups, added up: panels of weights at an address of the device.

gate_up is one matrix a group, of gate's outputs and up's: one after the other, or in turns. A
weight is a matrix, two thin factors, or both in the same sums. A left factor is a list: its strip
as plain weights take it, as stored ones do, and the scales of that.

operands: gate_up, down, their biases, their scales, gate_up's u and v, down's u and v.
"""

import nki.isa as nisa
import nki.language as nl

from .chosen_groups import gates_of
from .expand import add_tiles
from .loads_and_stores import evict, load, store
from .mx import load_mx_chunk, quantize_strip
from .records import Block, Epilogue, Left, Panel, Part, Plan, Result, Term
from .scales_and_biases import spread_row
from .sums import make_columns, make_rows


def add_groups(total, left, groups, numbers, weights, operands, core, m, spec):
    """Add to y^T, [128, tiles, tokens], what some groups make of the tokens that chose them."""
    ups = []
    downs = []
    at = Block(0, m, core)
    ups.append(load_up(operands, groups[0][0:1, 0:1], 0, core, spec))
    for s in range(spec.at_once):
        if spec.way == "picks":
            gates = weights[0:128, s : s + 1].reshape((128, 1, 1))
        else:
            group = groups[1][0:128, s : s + 1]
            gates = gates_of(group, numbers, weights, m, spec.top_k)
        one = groups[0][0:1, s : s + 1]
        if spec.down_bias:
            down_bias = numbers_of(operands[3], one, 0, spec.k, 1, 0)
            if spec.split == "weights":
                # each of two cores adds half of it
                nisa.tensor_scalar(dst=down_bias, data=down_bias, op0=nl.multiply, operand0=0.5)
        else:
            down_bias = None
        down_scale = numbers_of(operands[5], one, 0, spec.k, 1, 0) if spec.scales != "" else None
        h = make_h(ups, downs, left, groups[0], s, operands, core, spec)
        from_h = stored_term(h, spec.down)
        from_q = plain_term(h[3], spec.down_v)
        for k0 in range(0, spec.k, spec.down_block):
            outputs = min(spec.down_block, spec.k - k0)
            load_following(ups, downs, groups[0], s, k0, operands, core, spec)
            panel = downs[s * spec.down_panels + k0 // spec.down_block]
            k_tiles = (outputs + 127) // 128
            made = nl.ndarray((128, k_tiles, m), dtype=nl.float32, buffer=nl.sbuf)
            make_columns(
                made, from_h, panel[0], from_q, panel[1],
                Panel(k0, outputs, spec.group, 1, outputs, 0), at,
                Epilogue(
                    down_scale, spec.scales, down_bias, spec.down_bias, "identity", nl.copy,
                    gates.broadcast(1, k_tiles), True, None, False,
                ),
            )  # fmt: skip
            y_part = total[0:128, k0 // 128 : k0 // 128 + k_tiles, 0:m]
            add_tiles(y_part, made, outputs)


def make_blocks(out, x, tokens, groups, operands, spec):
    """Store what the groups of some blocks make of their tokens, rows [blocks tokens, k].

    The tokens of a block are gathered before the products of the block before it, and turned behind
    them.
    """
    ups = []
    downs = []
    flats = []
    m = spec.tokens
    flats.append(gather_block(x, tokens, 0, spec))
    ups.append(load_up(operands, groups[0:1, 0:1], 0, 0, spec))
    left = strips_of(flats[0], m, spec)
    for s in range(spec.at_once):
        if s + 1 < spec.at_once:
            flats.append(gather_block(x, tokens, s + 1, spec))
        one = groups[0:1, s : s + 1]
        wide_bias = spread_of(operands[3], one, spec) if spec.down_bias else None
        wide_scale = spread_of(operands[5], one, spec) if spec.scales != "" else None
        h = make_h(ups, downs, left, groups, s, operands, 0, spec)
        from_h = stored_term(h, spec.down)
        from_q = plain_term(h[3], spec.down_v)
        if s + 1 < spec.at_once:
            left = strips_of(flats[s + 1], m, spec)
        for k0 in range(0, spec.k, spec.down_block):
            outputs = min(spec.down_block, spec.k - k0)
            load_following(ups, downs, groups, s, k0, operands, 0, spec)
            panel = downs[s * spec.down_panels + k0 // spec.down_block]
            make_rows(
                Result(out, None, False, False, None, False),
                from_h, panel[0], from_q, panel[1],
                Panel(k0, outputs, spec.group, spec.patch, outputs, 0), Block(s * m, m, 0),
                Epilogue(
                    wide_scale, spec.scales, wide_bias, spec.down_bias, "identity", nl.copy,
                    None, False, None, False,
                ),
            )  # fmt: skip


def stored_term(left, plan) -> Term:
    """Return the product with a matrix as it is stored; its panels are loaded ahead."""
    return Term(
        Left(left[1], None, "none", left[2]), None, plan, None,
        getattr(nl, plan.element) if plan.mx_bytes > 0 else None,
    )  # fmt: skip


def plain_term(strip, plan) -> Term:
    """Return the product of p with a second factor."""
    return Term(Left(strip, None, "none"), None, plan)


def gather_block(x, tokens, s, spec):
    """Return the rows of the tokens of block s, a list with those of each 128."""
    flats = []
    high = tokens.shape[0]
    for tile in range(spec.token_tiles):
        chosen = nl.ndarray((high, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=chosen, src=tokens[0:high, tile, s : s + 1])
        flat = nl.ndarray((high, spec.k), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=flat, src=x.vector_select(0, chosen))
        flats.append(flat)
    return flats


def strips_of(flats, tokens, spec):
    """Return rows of x, a list with those of each 128 tokens, as a left factor."""
    x_sb = nl.ndarray((128, spec.x_tiles, tokens), dtype=flats[0].dtype, buffer=nl.sbuf)
    if spec.mx and spec.up.k > spec.k:
        tile = spec.k // 512
        filled = min(128, (spec.up.k - 512 * tile) // 4)
        nisa.memset(dst=x_sb[0:filled, 4 * tile : 4 * tile + 4, 0:tokens], value=0.0)
    for tile in range(len(flats)):
        high = flats[tile].shape[0]
        part = x_sb[0:128, 0 : x_sb.shape[1], 128 * tile : 128 * tile + high]
        turn_tokens(part, flats[tile], spec.order)
    return as_left(x_sb, spec.up.k, tokens, spec)


def as_left(strip, size, tokens, spec):
    """Return a strip as a left factor: beside it what MX products take."""
    if spec.mx:
        columns = tokens + tokens % 2
        tiles = (size + 511) // 512
        data = nl.ndarray((128, tiles, columns), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
        scales = nl.ndarray((128, tiles, columns), dtype=nl.uint8, buffer=nl.sbuf)
        quantize_strip(data, scales, strip, size, tokens, columns)
        left = [strip, data, scales]
    else:
        left = [strip, strip, None]
    return left


def make_h(ups, downs, left, groups, s, operands, core, spec):
    """Return h^T of all tokens of a strip for group s, as a left factor, and its product with the
    first factor of down; panels are loaded one ahead."""
    m = left[0].shape[2]
    at = Block(0, m, core)
    one = groups[0:1, s : s + 1]
    first = core * spec.features * spec.step
    biases = halves_of(operands[2], one, first, spec) if spec.gate_up_bias else [None, None]
    scales = halves_of(operands[4], one, first, spec) if spec.scales != "" else [None, None]
    if spec.up_u.k > 0:
        p_sb = project_group(left[0], ups[s * spec.up_panels][4], spec.up_u, spec.up_u.n, at, spec)
    else:
        p_sb = None
    from_x = stored_term(left, spec.up)
    from_p = plain_term(p_sb, spec.up_v)
    h_sb = nl.ndarray((128, spec.h_tiles, m), dtype=left[0].dtype, buffer=nl.sbuf)
    joint = spec.mx and spec.one_load
    for n0 in range(0, spec.features, spec.up_block):
        columns = min(spec.up_block, spec.features - n0)
        if n0 + spec.up_block < spec.features:
            ups.append(load_up(operands, one, n0 + spec.up_block, core, spec))
        else:
            downs.append(load_down(operands, one, 0, core, spec))
        panel = ups[s * spec.up_panels + n0 // spec.up_block]
        tiles = (columns + 511) // 512 * 4 if spec.mx else (columns + 127) // 128
        active = nl.ndarray((128, tiles, m), dtype=nl.float32, buffer=nl.sbuf)
        h_part = h_sb[0:128, n0 // 128 : n0 // 128 + tiles, 0:m]
        make_columns(
            active, from_x, panel[0], from_p, panel[2],
            Panel(n0, columns, spec.group, 1, 2 * columns if joint else columns, 0), at,
            Epilogue(
                scales[0], spec.scales, biases[0], spec.gate_up_bias,
                "identity" if spec.clamped else spec.activation,
                getattr(nl, "copy" if spec.clamped else spec.op), None, False, None, False,
            ),
        )  # fmt: skip
        if spec.clamped:
            linear = nl.ndarray((128, tiles, m), dtype=nl.float32, buffer=nl.sbuf)
        else:
            linear = h_part
        make_columns(
            linear, from_x, panel[1], from_p, panel[3],
            Panel(
                n0, columns, spec.group, 1, 2 * columns if joint else columns,
                columns if joint else 0,
            ), at,
            Epilogue(
                scales[1], spec.scales, biases[1], spec.gate_up_bias, "identity", nl.copy, active,
                not spec.clamped, None, False,
            ),
        )  # fmt: skip
        if spec.clamped:
            clamp_tiles(h_part, active, linear, columns, spec)
    h = as_left(h_sb, spec.features, m, spec)
    if spec.down_u.k > 0:
        last_u = downs[s * spec.down_panels][2]
        q_sb = project_group(h_sb, last_u, spec.down_u, spec.down_u.n, at, spec)
    else:
        q_sb = None
    return [h[0], h[1], h[2], q_sb]


def project_group(strip, chunks, plan: Plan, rank, at: Block, spec):
    """Return p^T, [128, tiles of the rank, tokens], of a group's first factor."""
    p_sb = nl.ndarray((128, (rank + 127) // 128, at.tokens), dtype=strip.dtype, buffer=nl.sbuf)
    make_columns(
        p_sb, Term(Left(strip, None, "none"), None, plan), chunks,
        Term(Left(None, None, "none"), None, spec.nothing), [],
        Panel(0, rank, spec.group, 1, rank, 0), at,
        Epilogue(None, "", None, False, "identity", nl.copy, None, False, None, False),
    )  # fmt: skip
    return p_sb


def load_following(ups, downs, groups, s, k0, operands, core, spec):
    """Load the panel behind one of down: the next of down, or the first of the next group."""
    if k0 + spec.down_block < spec.k:
        one = groups[0:1, s : s + 1]
        downs.append(load_down(operands, one, k0 + spec.down_block, core, spec))
    elif s + 1 < spec.at_once:
        ups.append(load_up(operands, groups[0:1, s + 1 : s + 2], 0, core, spec))


def halves_of(vectors, one, first, spec):
    """Return the numbers of gate's outputs and of up's of a group, as numbers_of."""
    if spec.mx:
        gate = numbers_in_fours(vectors, one, first, spec.features)
        both = [gate, numbers_in_fours(vectors, one, spec.up_first + first, spec.features)]
    else:
        gate = numbers_of(vectors, one, first, spec.features, spec.step, 0)
        up_first = spec.up_first + first
        both = [gate, numbers_of(vectors, one, up_first, spec.features, spec.step, spec.step - 1)]
    return both


def spread_of(vectors, one, spec):
    """Return a number for each output of a group on every partition, [128, k]."""
    row = nl.ndarray((1, spec.k), dtype=vectors.dtype, buffer=nl.sbuf)
    own = vectors.select(0, one)[0 : spec.k]
    nisa.dma_copy(dst=row, src=own.reshape_dim(0, (1, spec.k)))
    return spread_row(row, spec.k)


def numbers_in_fours(vectors, one, first, n):
    """Return numbers of a vector, whole 128s, as fp32 [128, tiles]: every fourth of 512 in one."""
    vector = vectors.select(0, one)
    whole = n // 512
    rest = n % 512
    columns = nl.ndarray((128, (n + 511) // 512 * 4), dtype=nl.float32, buffer=nl.sbuf)
    if whole > 0:
        rows = nl.ndarray((whole, 512), dtype=vector.dtype, buffer=nl.sbuf)
        run = vector[first : first + 512 * whole]
        nisa.dma_copy(dst=rows, src=run.reshape_dim(0, (whole, 512)))
        for j in range(4):
            turned = nl.ndarray((128, whole), dtype=vector.dtype, buffer=nl.psum)
            picked = rows[0:whole, j:512:4]
            nisa.nc_transpose(dst=turned, data=picked, engine=nisa.engine.tensor)
            nisa.tensor_copy(dst=columns[0:128, j : 4 * whole : 4], src=turned)
    if rest > 0:
        last = nl.ndarray((1, rest), dtype=vector.dtype, buffer=nl.sbuf)
        tail = vector[first + 512 * whole : first + n]
        nisa.dma_copy(dst=last, src=tail.reshape_dim(0, (1, rest)))
        for j in range(4):
            short = nl.ndarray((rest // 4, 1), dtype=vector.dtype, buffer=nl.psum)
            alone = last[0:1, j:rest:4]
            nisa.nc_transpose(dst=short, data=alone, engine=nisa.engine.tensor)
            place = 4 * whole + j
            nisa.tensor_copy(dst=columns[0 : rest // 4, place : place + 1], src=short)
    return columns


def numbers_of(vectors, one, first, n, step, offset):
    """Return every step-th number of a group's vector as fp32 [128, tiles], a column per 128.

    Rows of 128 are long runs for a DMA; TensorE turns them.
    """
    vector = vectors.select(0, one)
    tiles = n // 128
    rest = n % 128
    columns = nl.ndarray((128, (n + 127) // 128), dtype=nl.float32, buffer=nl.sbuf)
    if tiles > 0:
        rows = nl.ndarray((tiles, 128 * step), dtype=vector.dtype, buffer=nl.sbuf)
        run = vector[first : first + 128 * step * tiles]
        nisa.dma_copy(dst=rows, src=run.reshape_dim(0, (tiles, 128 * step)))
        turned = nl.ndarray((128, tiles), dtype=vector.dtype, buffer=nl.psum)
        picked = rows[0:tiles, offset : 128 * step : step]
        nisa.nc_transpose(dst=turned, data=picked, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=columns[0:128, 0:tiles], src=turned)
    if rest > 0:
        last = nl.ndarray((1, rest * step), dtype=vector.dtype, buffer=nl.sbuf)
        start = first + 128 * step * tiles
        tail = vector[start : start + rest * step]
        nisa.dma_copy(dst=last, src=tail.reshape_dim(0, (1, rest * step)))
        short = nl.ndarray((rest, 1), dtype=vector.dtype, buffer=nl.psum)
        alone = last[0:1, offset : rest * step : step]
        nisa.nc_transpose(dst=short, data=alone, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=columns[0:rest, tiles : tiles + 1], src=short)
    return columns


def turn_tokens(dst, flat, order):
    """Write rows of a tile of tokens at most as x^T, [128, tiles, tokens]: TensorE turns them.

    order: which features share a partition, as in loads_and_stores.
    """
    m = flat.shape[0]
    k = flat.shape[1]
    if order == "fours":
        turn_in_fours(dst, flat, m, k)
    else:
        turn_in_tiles(dst, flat, m, k, order)


def turn_in_fours(dst, flat, m, k):
    """Write rows as x^T in order "fours"; a bank of PSUM takes the four tiles of 512 features."""
    for t in range((k + 511) // 512):
        deep = min(512, k - 512 * t)
        turned = nl.ndarray((deep // 4, 4, m), dtype=flat.dtype, buffer=nl.psum)
        for j in range(4):
            square = flat[0:m, 512 * t + j : 512 * t + deep : 4]
            nisa.nc_transpose(
                dst=turned[0 : deep // 4, j, 0:m], data=square, engine=nisa.engine.tensor
            )
        nisa.tensor_copy(dst=dst[0 : deep // 4, 4 * t : 4 * t + 4, 0:m], src=turned)


def turn_in_tiles(dst, flat, m, k, order):
    """Write rows as x^T, a tile of 128 features after the other."""
    depth = k // 128
    rest = k % 128
    many = max(1, 512 // m)
    for j0 in range(0, depth, many):
        count = min(many, depth - j0)
        turned = nl.ndarray((128, count, m), dtype=flat.dtype, buffer=nl.psum)
        for j in range(count):
            if order == "consecutive_rows":
                square = flat[0:m, j0 + j : 128 * depth : depth]
            else:
                square = flat[0:m, 128 * (j0 + j) : 128 * (j0 + j + 1)]
            nisa.nc_transpose(dst=turned[0:128, j, 0:m], data=square, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=dst[0:128, j0 : j0 + count, 0:m], src=turned)
    if rest > 0:
        tail = nl.ndarray((rest, m), dtype=flat.dtype, buffer=nl.psum)
        last = flat[0:m, 128 * depth : k]
        nisa.nc_transpose(dst=tail, data=last, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=dst[0:rest, depth, 0:m], src=tail)


def load_up(operands, one, n0, core, spec):
    """Return a panel of a group's gate and up: the chunks of their matrices, those of their second
    factors, and with the first panel the first factor, which they share."""
    columns = min(spec.up_block, spec.features - n0)
    first = (core * spec.features + n0) * spec.step
    if spec.up_u.k > 0 and n0 == 0:
        u = load_columns(operands[6].select(0, one), spec.up_u, 0, spec.up_u.n)
    else:
        u = []
    if spec.up_v.k > 0:
        v = load_halves(operands[7].select(0, one), spec.up_v, first, columns, spec)
    else:
        v = [[], []]
    if spec.mx:
        matrix = operands[0].select(0, one)
        own_scales = operands[4].select(0, one)
        if spec.one_load:
            gate = load_stored(matrix, own_scales, spec.up, 0, 2 * columns)
            up = gate
        else:
            gate = load_stored(matrix, own_scales, spec.up, first, columns)
            up = load_stored(matrix, own_scales, spec.up, spec.up_first + first, columns)
        both = [gate, up]
    elif spec.up.k > 0:
        both = load_halves(operands[0].select(0, one), spec.up, first, columns, spec)
    else:
        both = [[], []]
    return [both[0], both[1], v[0], v[1], u]


def load_halves(matrix, plan: Plan, first, columns, spec):
    """Return the chunks of a panel of gate, and those of the same panel of up."""
    if spec.step == 2:
        gate = []
        up = []
        both = load_columns(matrix, plan, first, 2 * columns)
        for i in range(len(both)):
            chunk = both[i]
            tiles = chunk.shape[1]
            gate.append(chunk[0:128, 0:tiles, 0 : 2 * columns : 2])
            up.append(chunk[0:128, 0:tiles, 1 : 2 * columns : 2])
    elif spec.one_load:
        # all of both halves: long runs, where a half has short ones
        gate = []
        up = []
        both = load_columns(matrix, plan, 0, 2 * columns)
        for i in range(len(both)):
            chunk = both[i]
            tiles = chunk.shape[1]
            gate.append(chunk[0:128, 0:tiles, 0:columns])
            up.append(chunk[0:128, 0:tiles, columns : 2 * columns])
    else:
        gate = load_columns(matrix, plan, first, columns)
        up = load_columns(matrix, plan, spec.up_first + first, columns)
    return [gate, up]


def load_down(operands, one, k0, core, spec):
    """Return a panel of a group's down: the rows of this core's features of h, the second factor,
    and with the first panel the first factor."""
    columns = min(spec.down_block, spec.k - k0)
    first = core * spec.features
    if spec.down_u.k > 0 and k0 == 0:
        rows = operands[8].select(0, one)[first : first + spec.down_u.k, 0 : spec.down_u.n]
        u = load_columns(rows, spec.down_u, 0, spec.down_u.n)
    else:
        u = []
    if spec.down_v.k > 0:
        v = load_columns(operands[9].select(0, one), spec.down_v, k0, columns)
    else:
        v = []
    if spec.mx:
        size = spec.down.mx_bytes
        data = operands[1].select(0, one)
        own_scales = operands[5].select(0, one)
        part = load_stored(
            data[first // 4 : (first + spec.features) // 4, 0 : size * spec.k],
            own_scales[first // 32 : (first + spec.features) // 32, 0 : spec.k],
            spec.down, k0, columns,
        )  # fmt: skip
    elif spec.down.k > 0:
        matrix = operands[1].select(0, one)
        if spec.down.layout == "row":
            own = matrix[first : first + spec.down.k, 0 : spec.k]
        else:
            own = matrix[0 : spec.k, first : first + spec.down.k]
        part = load_columns(own, spec.down, k0, columns)
    else:
        part = []
    return [part, v, u]


def load_stored(data, scales, plan: Plan, n0, columns):
    """Return some outputs of an MX weight in SBUF, in chunks of the contraction."""
    term = Term(Left(None, None, "none"), data, plan, scales)
    chunks = []
    for k0 in range(0, plan.k, plan.chunk):
        chunks.append(load_mx_chunk(term, k0, n0, columns))
    return chunks


def load_columns(matrix, plan: Plan, first, columns):
    """Return some outputs of a weight in SBUF, in chunks of the contraction."""
    chunks = []
    for k0 in range(0, plan.k, plan.chunk):
        rows = min(plan.chunk, plan.k - k0)
        pitch = (columns + 15) // 16 * 16
        deep = (rows + 511) // 512 * 4 if plan.order == "fours" else (rows + 127) // 128
        tile = nl.ndarray((128, deep, pitch), dtype=matrix.dtype, buffer=nl.sbuf)
        load(tile, 0, Part(matrix, k0, rows, first, columns), plan.load, plan.order, plan.k)
        chunks.append(tile)
    return chunks


def clamp_tiles(dst, gate, up, columns, spec):
    """Write g sigmoid(slope g) (u + plus) for g = min(gate, limit), u within both limits."""
    m = dst.shape[2]
    tiles = columns // 512 * 4 if spec.mx else columns // 128
    rest = columns % 512 // 4 if spec.mx else columns % 128
    last = dst.shape[1]
    if tiles > 0:
        clamped_product(
            dst[0:128, 0:tiles, 0:m], gate[0:128, 0:tiles, 0:m], up[0:128, 0:tiles, 0:m], spec
        )
    if rest > 0:
        clamped_product(
            dst[0:rest, tiles:last, 0:m], gate[0:rest, tiles:last, 0:m],
            up[0:rest, tiles:last, 0:m], spec,
        )  # fmt: skip


def clamped_product(dst, gate, up, spec):
    """Write the product of clamp_tiles for tiles of one height."""
    nisa.tensor_scalar(dst=gate, data=gate, op0=nl.minimum, operand0=spec.limit)
    shape = nl.ndarray(gate.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=shape, op=nl.sigmoid, data=gate, scale=spec.slope)
    nisa.tensor_tensor(dst=gate, data1=gate, data2=shape, op=nl.multiply)
    nisa.tensor_scalar(
        dst=up, data=up, op0=nl.minimum, operand0=spec.limit, op1=nl.maximum, operand1=-spec.limit
    )
    nisa.scalar_tensor_tensor(
        dst=dst, data=up, op0=nl.add, operand0=spec.plus, op1=nl.multiply, operand1=gate
    )


def store_sums(out, sums, k, m, core, cores):
    """Store the rows of y; y^T is in SBUF as sums, TensorE turns it, each core stores its part."""
    tiles = k // 128 // cores
    if m == 1 and 0 < tiles <= 128 and (cores == 1 or k % (128 * cores) == 0):
        store_row(out, sums, tiles, k % 128, core)
    else:
        store_rows(out, sums, k, m, core, cores)


def store_row(out, sums, tiles, rest, core):
    """Store the only row of y: a tile of outputs becomes a row in SBUF, all in one transpose."""
    turned = nl.ndarray((tiles, 128), dtype=nl.float32, buffer=nl.psum)
    first = core * tiles
    nisa.nc_transpose(
        dst=turned, data=sums[0:128, first : first + tiles, 0], engine=nisa.engine.tensor
    )
    rows_sb = nl.ndarray((tiles, 128), dtype=out.dtype, buffer=nl.sbuf)
    evict(rows_sb, turned, 0)
    place = out[0:1, 128 * first : 128 * (first + tiles)]
    store(place.reshape_dim(1, (tiles, 128)), rows_sb, False)
    if rest > 0:  # of one core
        last = nl.ndarray((1, rest), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=last, data=sums[0:rest, tiles, 0:1], engine=nisa.engine.tensor)
        last_sb = nl.ndarray((1, rest), dtype=out.dtype, buffer=nl.sbuf)
        evict(last_sb, last, 1)
        store(out[0:1, 128 * tiles : 128 * tiles + rest], last_sb, False)


def store_rows(out, sums, k, m, core, cores):
    """Store the rows of y, turned a tile of outputs at a time."""
    rows_sb = nl.ndarray((m, k), dtype=out.dtype, buffer=nl.sbuf)
    for k0 in range(0, k, 512):
        width = min(512, k - k0)
        turned = nl.ndarray((m, width), dtype=nl.float32, buffer=nl.psum)
        for k1 in range(0, width, 128):
            deep = min(128, width - k1)
            nisa.nc_transpose(
                dst=turned[0:m, k1 : k1 + deep], data=sums[0:deep, (k0 + k1) // 128, 0:m],
                engine=nisa.engine.tensor,
            )  # fmt: skip
        evict(rows_sb[0:m, k0 : k0 + width], turned, k0 // 512)
    part = k // cores
    store(
        out[0:m, core * part : core * part + part], rows_sb[0:m, core * part : core * part + part],
        False,
    )  # fmt: skip
