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
from .loads_and_stores import turn_rows
from .mx import quantize_strip
from .new_tiles import copied, loaded
from .project import project_few
from .records import Block, Epilogue, Left, Panel, Result, Term
from .scales_and_biases import load_columns, load_spread
from .sums import load_panel, make_columns, make_rows
from .weight_plan import WeightPlan


def run_groups(out, source, groups, picks, operands, core, m, spec):
    """Add to y^T, or store in rows of y, what some groups make of their tokens.

    source: these as a left factor, or x and the tokens of blocks. picks: their numbers and gates.
    """
    ups = []
    downs = []
    flats = []
    blocks = spec.way == "blocks"
    if blocks:
        flats.append(gather_block(source[0], source[1], 0, spec))
    ups.append(load_up(operands, groups[0][0:1, 0:1], 0, core, spec))
    left = strips_of(flats[0], m, spec) if blocks else source
    for s in range(spec.at_once):
        if blocks and s + 1 < spec.at_once:
            flats.append(gather_block(source[0], source[1], s + 1, spec))
        if spec.way == "picks":
            gates = picks[1][0:128, s : s + 1].reshape((128, 1, 1))
        elif spec.way == "distinct":
            group = groups[1][0:128, s : s + 1]
            gates = gates_of(group, picks[0], picks[1], m, spec.top_k)
        one = groups[0][0:1, s : s + 1]
        bias = down_numbers(operands[3].select(0, one), spec) if spec.down_bias else None
        if spec.down_bias and spec.split == "weights":
            # each of two cores adds half of it
            nisa.tensor_scalar(dst=bias, data=bias, op0=nl.multiply, operand0=0.5)
        scale = down_numbers(operands[5].select(0, one), spec) if spec.scales != "" else None
        h = make_h(ups, downs, left, groups[0], s, operands, core, spec)
        from_h = stored_term(h, spec.down)
        from_q = plain_term(h[3], spec.down_v)
        if blocks and s + 1 < spec.at_once:
            left = strips_of(flats[s + 1], m, spec)
        for k0 in range(0, spec.k, spec.down_block):
            outputs = min(spec.down_block, spec.k - k0)
            load_following(ups, downs, groups[0], s, k0, operands, core, spec)
            panel = downs[s * spec.down_panels + k0 // spec.down_block]
            part = Panel(k0, outputs, spec.group, spec.patch, 1, outputs, 0)
            if blocks:
                make_rows(
                    Result(out, None, False, False, None, False), from_h, panel[0], from_q,
                    panel[1], part, Block(s * m, m, 0),
                    Epilogue(
                        scale, spec.scales, bias, spec.down_bias, "identity", nl.copy, None, False,
                        None, False,
                    ),
                )  # fmt: skip
            else:
                k_tiles = (outputs + 127) // 128
                made = nl.ndarray((128, k_tiles, m), dtype=nl.float32, buffer=nl.sbuf)
                make_columns(
                    made, from_h, panel[0], from_q, panel[1], part, Block(0, m, core),
                    Epilogue(
                        scale, spec.scales, bias, spec.down_bias, "identity", nl.copy,
                        gates.broadcast(1, k_tiles), True, None, False,
                    ),
                )  # fmt: skip
                y_part = out[0:128, k0 // 128 : k0 // 128 + k_tiles, 0:m]
                add_tiles(y_part, made, outputs)


def down_numbers(vector, spec):
    """Return a number of each output of down, as its sums lie."""
    if spec.way == "blocks":
        return load_spread(vector, spec.k, False)
    return load_columns(vector, spec.k, 1, 0, 1, False)


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
        chosen = copied(tokens[0:high, tile, s : s + 1], nl.int32)
        flats.append(loaded(x.vector_select(0, chosen)))
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
        turn_rows(part, flats[tile], spec.order, tile, 1)
    return as_left(x_sb, spec.up.k, tokens, spec)


def as_left(strip, size, tokens, spec):
    """Return a strip as a left factor: beside it what MX products take."""
    stored = quantize_strip(strip, size, tokens) if spec.mx else [strip, None]
    return [strip, stored[0], stored[1]]


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
        first_u = ups[s * spec.up_panels][4]
        p_sb = project_group(left[0], first_u, spec.up_u, spec.up_v, spec.up_u.n, at, spec)
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
            Panel(
                n0, columns, spec.group, 1, spec.up.apart, 2 * columns if joint else columns, 0
            ), at,
            Epilogue(
                scales[0], spec.scales, biases[0], spec.gate_up_bias,
                "identity" if spec.limit else spec.activation,
                getattr(nl, "copy" if spec.limit else spec.op), None, False, None, False,
            ),
        )  # fmt: skip
        if spec.limit:
            linear = nl.ndarray((128, tiles, m), dtype=nl.float32, buffer=nl.sbuf)
        else:
            linear = h_part
        make_columns(
            linear, from_x, panel[1], from_p, panel[3],
            Panel(
                n0, columns, spec.group, 1, spec.up.apart, 2 * columns if joint else columns,
                columns if joint else 0,
            ), at,
            Epilogue(
                scales[1], spec.scales, biases[1], spec.gate_up_bias, "identity", nl.copy, active,
                not spec.limit, None, False,
            ),
        )  # fmt: skip
        if spec.limit:
            clamp_tiles(h_part, active, linear, columns, spec)
    h = as_left(h_sb, spec.features, m, spec)
    if spec.down_u.k > 0:
        last_u = downs[s * spec.down_panels][2]
        q_sb = project_group(h_sb, last_u, spec.down_u, spec.down_v, spec.down_u.n, at, spec)
    else:
        q_sb = None
    return [h[0], h[1], h[2], q_sb]


def project_group(strip, chunks, plan: WeightPlan, second: WeightPlan, rank, at: Block, spec):
    """Return p^T, [128, tiles of the rank, tokens], of a group's first factor."""
    p_sb = nl.ndarray((128, (rank + 127) // 128, at.tokens), dtype=strip.dtype, buffer=nl.sbuf)
    term = Term(Left(strip, None, "none"), None, plan)
    if plan.few_sums:
        project_few(p_sb, term, chunks, 0, rank, second.parts, None, False, at)
    else:
        make_columns(
            p_sb, term, chunks, Term(Left(None, None, "none"), None, spec.nothing), [],
            Panel(0, rank, spec.group, 1, 1, rank, 0), at,
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
    """Return the numbers of gate's outputs and of up's of a group, as the sums lie."""
    lanes = 4 if spec.mx else 1
    step = lanes * spec.step
    n = spec.features // lanes
    up_first = spec.up_first + first
    vector = vectors.select(0, one)
    gate = load_columns(vector[first : first + n * step], n, step, 0, lanes, False)
    up = load_columns(vector[up_first : up_first + n * step], n, step, spec.step - 1, lanes, False)
    return [gate, up]


def load_up(operands, one, n0, core, spec):
    """Return a panel of a group's gate and up: the chunks of their matrices, those of their second
    factors, and with the first panel the first factor, which they share."""
    columns = min(spec.up_block, spec.features - n0)
    first = (core * spec.features + n0) * spec.step
    u = []
    v = [[], []]
    both = [[], []]
    if spec.up_u.k > 0 and n0 == 0:
        u = load_outputs(operands[6].select(0, one), None, spec.up_u, 0, spec.up_u.n)
    if spec.up_v.k > 0:
        v = load_halves(operands[7].select(0, one), None, spec.up_v, first, columns, spec)
    if spec.up.k > 0:
        scales = operands[4].select(0, one) if spec.mx else None
        both = load_halves(operands[0].select(0, one), scales, spec.up, first, columns, spec)
    return [both[0], both[1], v[0], v[1], u]


def load_halves(matrix, scales, plan: WeightPlan, first, columns, spec):
    """Return the chunks of a panel of gate, and those of the same panel of up."""
    if plan.mx_bytes > 0 and spec.one_load:
        gate = load_outputs(matrix, scales, plan, 0, 2 * columns)
        up = gate
    elif spec.step == 2 or spec.one_load:
        # all of both halves: long runs, where a half has short ones
        gate = []
        up = []
        both = load_outputs(matrix, None, plan, first, 2 * columns)
        begin = 1 if spec.step == 2 else columns
        for i in range(len(both)):
            chunk = both[i]
            tiles = chunk.shape[1]
            gate.append(chunk[0:128, 0:tiles, 0 : spec.step * columns : spec.step])
            up.append(chunk[0:128, 0:tiles, begin : 2 * columns : spec.step])
    else:
        gate = load_outputs(matrix, scales, plan, first, columns)
        up = load_outputs(matrix, scales, plan, spec.up_first + first, columns)
    return [gate, up]


def load_down(operands, one, k0, core, spec):
    """Return a panel of a group's down: the rows of this core's features of h, the second factor,
    and with the first panel the first factor."""
    columns = min(spec.down_block, spec.k - k0)
    first = core * spec.features
    part = []
    v = []
    u = []
    if spec.down_u.k > 0 and k0 == 0:
        rows = operands[8].select(0, one)[first : first + spec.down_u.k, 0 : spec.down_u.n]
        u = load_outputs(rows, None, spec.down_u, 0, spec.down_u.n)
    if spec.down_v.k > 0:
        v = load_outputs(operands[9].select(0, one), None, spec.down_v, k0, columns)
    if spec.down.k > 0:
        matrix = operands[1].select(0, one)
        own_scales = None
        if spec.mx:
            last = first + spec.features
            own = matrix[first // 4 : last // 4, 0 : spec.down.mx_bytes * spec.k]
            own_scales = operands[5].select(0, one)[first // 32 : last // 32, 0 : spec.k]
        elif spec.down.layout == "row":
            own = matrix[first : first + spec.down.k, 0 : spec.k]
        else:
            own = matrix[0 : spec.k, first : first + spec.down.k]
        part = load_outputs(own, own_scales, spec.down, k0, columns)
    return [part, v, u]


def load_outputs(weight, scales, plan: WeightPlan, n0, columns):
    """Return some outputs of a weight in SBUF, in chunks of the contraction."""
    term = Term(Left(None, None, "none"), weight, plan, scales)
    return load_panel(term, n0, columns, Block(0, 0, 0))


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
