"""The gated MLPs of some groups, added up: panels of weights at an address of the device.

gate_up is one matrix a group, of gate's outputs and up's: one after the other, or in turns.
"""

import nki.isa as nisa
import nki.language as nl

from .chosen_groups import gates_of
from .expand import add_tiles
from .loads_and_stores import evict, load, store
from .records import Block, Epilogue, Left, Panel, Part, Plan, Result, Term
from .sums import make_columns, make_rows


def add_groups(total, x_sb, groups, numbers, weights, operands, core, m, spec):
    """Add to y^T, [128, tiles, tokens], what some groups make of the tokens that chose them."""
    ups = []
    downs = []
    at = Block(0, m, core)
    nothing = Term(Left(None, None, "none"), None, spec.nothing)
    ups.append(load_up(operands[0].select(0, groups[0][0:1, 0:1]), 0, core, spec))
    for s in range(spec.at_once):
        if spec.way == "picks":
            gates = weights[0:128, s : s + 1].reshape((128, 1, 1))
        else:
            group = groups[1][0:128, s : s + 1]
            gates = gates_of(group, numbers, weights, m, spec.top_k)
        biases = up_biases(operands, groups[0][0:1, s : s + 1], core, spec)
        if spec.has_down_bias:
            down_bias = bias_of(operands[3].select(0, groups[0][0:1, s : s + 1]), 0, spec.k, 1, 0)
            if spec.split == "weights":
                # each of two cores adds half of it
                nisa.tensor_scalar(dst=down_bias, data=down_bias, op0=nl.multiply, operand0=0.5)
        else:
            down_bias = None
        h_sb = make_h(ups, downs, x_sb, biases, groups[0], s, operands, core, spec)
        for k0 in range(0, spec.k, spec.down.block):
            outputs = min(spec.down.block, spec.k - k0)
            load_following(ups, downs, groups[0], s, k0, operands, core, spec)
            k_tiles = (outputs + 127) // 128
            made = nl.ndarray((128, k_tiles, m), dtype=nl.float32, buffer=nl.sbuf)
            make_columns(
                made, Term(Left(h_sb, None, "none"), None, spec.down),
                downs[s * spec.down_panels + k0 // spec.down.block],
                nothing, [],
                Panel(k0, outputs, spec.down.group, 1), at,
                Epilogue(
                    None, "", down_bias, spec.has_down_bias, "identity", nl.copy,
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
    ones = nl.ndarray((1, 1, m), dtype=x.dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    flats.append(gather_block(x, tokens, 0, spec))
    ups.append(load_up(operands[0].select(0, groups[0:1, 0:1]), 0, 0, spec))
    x_sb = turn_block(flats[0], spec)
    for s in range(spec.at_once):
        if s + 1 < spec.at_once:
            flats.append(gather_block(x, tokens, s + 1, spec))
        biases = up_biases(operands, groups[0:1, s : s + 1], 0, spec)
        h_sb = make_h(ups, downs, x_sb, biases, groups, s, operands, 0, spec)
        if s + 1 < spec.at_once:
            x_sb = turn_block(flats[s + 1], spec)
        for k0 in range(0, spec.k, spec.down.block):
            outputs = min(spec.down.block, spec.k - k0)
            if spec.has_down_bias:
                bias = [bias_row(operands[3], groups[0:1, s : s + 1], k0, outputs)]
            else:
                bias = []
            load_following(ups, downs, groups, s, k0, operands, 0, spec)
            make_rows(
                Result(out, None, False, False, None, False),
                Term(Left(h_sb, None, "none"), None, spec.down),
                downs[s * spec.down_panels + k0 // spec.down.block],
                Term(Left(ones, None, "none"), None, spec.down_bias), bias,
                Panel(k0, outputs, spec.down.group, spec.down.down), Block(s * m, m, 0),
                Epilogue(
                    None, "", None, False, "identity", nl.copy, None, False, None, False,
                ),
            )  # fmt: skip


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


def turn_block(flats, spec):
    """Return the rows of a block as x^T, [128, tiles, tokens]."""
    x_sb = nl.ndarray(
        (128, (spec.k + 127) // 128, spec.tokens), dtype=flats[0].dtype, buffer=nl.sbuf
    )
    for tile in range(len(flats)):
        high = flats[tile].shape[0]
        part = x_sb[0:128, 0 : x_sb.shape[1], 128 * tile : 128 * tile + high]
        turn_tokens(part, flats[tile], spec.up.order)
    return x_sb


def make_h(ups, downs, x_sb, biases, groups, s, operands, core, spec):
    """Return h^T of all tokens of a strip for group s; panels are loaded one ahead."""
    m = x_sb.shape[2]
    at = Block(0, m, core)
    one = groups[0:1, s : s + 1]
    nothing = Term(Left(None, None, "none"), None, spec.nothing)
    h_sb = nl.ndarray((128, (spec.n + 127) // 128, m), dtype=x_sb.dtype, buffer=nl.sbuf)
    for n0 in range(0, spec.n, spec.up.block):
        columns = min(spec.up.block, spec.n - n0)
        if n0 + spec.up.block < spec.n:
            ups.append(load_up(operands[0].select(0, one), n0 + spec.up.block, core, spec))
        else:
            downs.append(load_down(operands[1].select(0, one), 0, core, spec))
        panel = ups[s * spec.up_panels + n0 // spec.up.block]
        tiles = (columns + 127) // 128
        active = nl.ndarray((128, tiles, m), dtype=nl.float32, buffer=nl.sbuf)
        h_part = h_sb[0:128, n0 // 128 : n0 // 128 + tiles, 0:m]
        make_columns(
            active, Term(Left(x_sb, None, "none"), None, spec.up), panel[0], nothing, [],
            Panel(n0, columns, spec.up.group, 1), at,
            Epilogue(
                None, "", biases[0], spec.has_up_bias,
                "identity" if spec.clamped else spec.activation,
                getattr(nl, "copy" if spec.clamped else spec.op), None, False, None, False,
            ),
        )  # fmt: skip
        if spec.clamped:
            linear = nl.ndarray((128, tiles, m), dtype=nl.float32, buffer=nl.sbuf)
        else:
            linear = h_part
        make_columns(
            linear, Term(Left(x_sb, None, "none"), None, spec.up), panel[1], nothing, [],
            Panel(n0, columns, spec.up.group, 1), at,
            Epilogue(
                None, "", biases[1], spec.has_up_bias, "identity", nl.copy, active,
                not spec.clamped, None, False,
            ),
        )  # fmt: skip
        if spec.clamped:
            clamp_tiles(h_part, active, linear, columns, spec)
    return h_sb


def load_following(ups, downs, groups, s, k0, operands, core, spec):
    """Load the panel behind one of down: the next of down, or the first of the next group."""
    if k0 + spec.down.block < spec.k:
        matrix = operands[1].select(0, groups[0:1, s : s + 1])
        downs.append(load_down(matrix, k0 + spec.down.block, core, spec))
    elif s + 1 < spec.at_once:
        following = groups[0:1, s + 1 : s + 2]
        ups.append(load_up(operands[0].select(0, following), 0, core, spec))


def up_biases(operands, one, core, spec):
    """Return the biases of gate and of up of a group, as bias_of; None without them."""
    if not spec.has_up_bias:
        return [None, None]
    more = operands[2].select(0, one)
    first = core * spec.n * spec.step
    gate = bias_of(more, first, spec.n, spec.step, 0)
    return [gate, bias_of(more, spec.up_first + first, spec.n, spec.step, spec.step - 1)]


def bias_row(vectors, one, first, count):
    """Return a part of a group's bias as the only chunk of a weight of one row."""
    row = nl.ndarray((1, 1, count), dtype=vectors.dtype, buffer=nl.sbuf)
    own = vectors.select(0, one)[first : first + count]
    nisa.dma_copy(dst=row.reshape((1, count)), src=own.reshape_dim(0, (1, count)))
    return row


def bias_of(vector, first, n, step, offset):
    """Return every step-th number of a vector as fp32 [128, tiles], a column per 128 of them.

    Rows of 128 are long runs for a DMA; TensorE turns them.
    """
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


def load_up(matrix, n0, core, spec):
    """Return the chunks of a panel of gate, and those of the same panel of up."""
    columns = min(spec.up.block, spec.n - n0)
    first = (core * spec.n + n0) * spec.step
    if spec.step == 2:
        gate = []
        up = []
        both = load_columns(matrix, spec.up, first, 2 * columns)
        for i in range(len(both)):
            chunk = both[i]
            tiles = chunk.shape[1]
            gate.append(chunk[0:128, 0:tiles, 0 : 2 * columns : 2])
            up.append(chunk[0:128, 0:tiles, 1 : 2 * columns : 2])
    elif spec.one_load:
        # all of both halves: long runs, where a half has short ones
        gate = []
        up = []
        both = load_columns(matrix, spec.up, 0, 2 * columns)
        for i in range(len(both)):
            chunk = both[i]
            tiles = chunk.shape[1]
            gate.append(chunk[0:128, 0:tiles, 0:columns])
            up.append(chunk[0:128, 0:tiles, columns : 2 * columns])
    else:
        gate = load_columns(matrix, spec.up, first, columns)
        up = load_columns(matrix, spec.up, spec.up_first + first, columns)
    return [gate, up]


def load_down(matrix, k0, core, spec):
    """Return the chunks of a panel of down: the rows of this core's features of h."""
    if spec.down.layout == "row":
        own = matrix[core * spec.n : core * spec.n + spec.n, 0 : spec.k]
    else:
        own = matrix[0 : spec.k, core * spec.n : core * spec.n + spec.n]
    return load_columns(own, spec.down, k0, min(spec.down.block, spec.k - k0))


def load_columns(matrix, plan: Plan, first, columns):
    """Return some outputs of a weight in SBUF, in chunks of the contraction."""
    chunks = []
    for k0 in range(0, plan.k, plan.chunk):
        rows = min(plan.chunk, plan.k - k0)
        pitch = (columns + 15) // 16 * 16
        tile = nl.ndarray((128, (rows + 127) // 128, pitch), dtype=matrix.dtype, buffer=nl.sbuf)
        load(tile, 0, Part(matrix, k0, rows, first, columns), plan.load, plan.order, plan.k)
        chunks.append(tile)
    return chunks


def clamp_tiles(dst, gate, up, columns, spec):
    """Write g sigmoid(slope g) (u + plus) for g = min(gate, limit), u within both limits."""
    tiles = columns // 128
    rest = columns % 128
    if tiles > 0:
        clamped_product(
            dst[0:128, 0:tiles, 0 : dst.shape[2]], gate[0:128, 0:tiles, 0 : dst.shape[2]],
            up[0:128, 0:tiles, 0 : dst.shape[2]], spec,
        )  # fmt: skip
    if rest > 0:
        clamped_product(
            dst[0:rest, tiles, 0 : dst.shape[2]], gate[0:rest, tiles, 0 : dst.shape[2]],
            up[0:rest, tiles, 0 : dst.shape[2]], spec,
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
