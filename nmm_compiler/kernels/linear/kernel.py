"""Linear layers of one x: y = activation(x w + scale (x u) v + bias), several, or gated and a down.

x is read once. Of a low-rank product (x u)^T comes out with the rank on the partitions, which is
what the next product contracts over; it never leaves the chip and is never transposed. Two linears
that multiply meet in PSUM, and h^T stays in SBUF for the linear behind it.

fp8 operands come with scales, which are multiplied in where sums leave PSUM. Numbers that belong to
features are loaded as the sums that they meet lie in SBUF. Of a call with several results the loads
of the first panels start before any store.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.expand import combine, epilogue_of, expand, load_panels
from ..pieces.groups import (
    gather,
    gathered_rows,
    group_mask,
    index_tiles,
    project_gathered,
)
from ..pieces.loads_and_stores import block_of, position
from ..pieces.mx import quantize_strip
from ..pieces.norms import feature_columns, inverse_roots, load_normed, new_squares
from ..pieces.project import project
from ..pieces.records import Block, Ends, Left, Result
from ..pieces.scales_and_biases import (
    load_columns,
    load_numbers,
    product_scales,
    times,
)
from ..pieces.two_cores import exchange, own


@nki.jit
def linear(x, spec, schedule, **others):
    """Return every result."""
    core = nl.program_id(0) if spec.split != "" else 0
    if spec.x_cut >= 0:
        x = own(x, spec.x_cut, core)
    if spec.m == 1 and spec.x_load == "rows" and spec.x_layout == "row":
        x = x.reshape((spec.k, 1))  # a token lies alike by rows and by columns
    m_times = 2 if spec.split == "tokens" else 1
    n_times = 2 if spec.split == "weights" else 1
    outs = [None for y in spec.results]
    parts = [None for y in spec.results]
    for y in spec.results:
        outs[y.place] = nl.ndarray(
            (m_times * spec.m, n_times * y.n) if y.rows else (n_times * y.n, m_times * spec.m),
            dtype=getattr(nl, spec.result_dtype) if spec.fp8 else x.dtype, buffer=nl.shared_hbm,
        )  # fmt: skip
        parts[y.place] = own(outs[y.place], y.cut, core)
    more = own(others.get("residual"), spec.results[0].cut, core) if spec.residual else None

    bias_sbs = [None for y in spec.layers]
    scale_sbs = [None for y in spec.layers]
    for y in spec.layers:
        if y.bias != "":
            vector = own(others.get(y.bias), 0 if spec.split == "weights" else -1, core)
            bias_sbs[y.place] = load_numbers(
                vector, y.n, y.by_rows, schedule.own_queue
            )  # fmt: skip
        if spec.fp8:
            halved = spec.split == "weights" and spec.scales == "channel"
            scale_sbs[y.place] = product_scales(
                own(others.get(y.scaled.scale), 0 if halved else -1, core),
                y.n, spec.scales, y.by_rows, schedule.own_queue,
            )  # fmt: skip
    if spec.branch_tiles > 0:
        every = others.get("branch_scale")
        numbers = every.shape[0] * every.shape[1]
        branch_sb = load_columns(every.reshape((numbers,)), numbers, 1, 0, 1, "scalar")
    p_bias_sbs = [None for factors in spec.pairs]
    p_scales = [None for factors in spec.pairs]
    for factors in spec.pairs:
        if factors.bias != "":
            p_bias_sbs[factors.place] = load_columns(
                others.get(factors.bias), factors.u.n, 1, 0, 1, schedule.own_queue
            )  # fmt: skip
        if factors.numbers == "branch_scale":
            column = factors.place * spec.branch_tiles
            p_scales[factors.place] = branch_sb[0:128, column : column + spec.branch_tiles]
        elif factors.numbers != "":
            vector = others.get(factors.numbers)
            p_scales[factors.place] = load_columns(
                vector, factors.u.n, 1, 0, 1, schedule.own_queue
            )  # fmt: skip
        elif factors.scaled and factors.groups.slots == 0:
            p_scales[factors.place] = product_scales(
                others.get(factors.u.scale), factors.u.n, spec.scales, False, schedule.own_queue,
            )  # fmt: skip
            if factors.scale != 1.0:
                times(p_scales[factors.place], factors.scale)
    gain = None
    if spec.norm_gain:
        gain = feature_columns(others.get("norm_gain"), spec.k, spec.order, spec.norm_offset)
    shift = None
    if spec.norm_bias:
        shift = feature_columns(others.get("norm_bias"), spec.k, spec.order, 0.0)
    ends = Ends(scale_sbs, bias_sbs, p_scales, p_bias_sbs, None, gain, shift)

    first = 0
    if schedule.m_loop:
        # on the device: the compiled program holds one block, whatever the number of tokens
        blocks = spec.m // schedule.m_block
        first = blocks * schedule.m_block
        size = schedule.m_block

        def body(i):
            at = position(i)
            x_part = block_of(x, 1 if spec.x_layout == "col" else 0, blocks, size, at)
            y_parts = [None for y in spec.results]
            for y in spec.results:
                y_dim = 0 if y.rows else 1
                y_parts[y.place] = block_of(parts[y.place], y_dim, blocks, size, at)
            if spec.residual:
                y_dim = 0 if spec.results[0].rows else 1
                more_part = block_of(more, y_dim, blocks, size, at)
            else:
                more_part = None
            compute_block(
                y_parts, more_part, x_part, ends, Block(0, size, core), spec, schedule, others
            )  # fmt: skip

        nl.fori_loop(0, nisa.register_alloc(blocks), body)
    for m0 in range(first, spec.m, schedule.m_block):
        at = Block(m0, min(schedule.m_block, spec.m - m0), core)
        compute_block(parts, more, x, ends, at, spec, schedule, others)
    return outs[0] if len(spec.results) == 1 else tuple(outs)


def compute_block(
    outs, residual, x, ends: Ends, at: Block, spec, schedule, others
):  # fmt: skip
    """Compute a block of tokens."""
    p_factors = [None for pair in spec.pairs]
    for pair in spec.pairs:
        if pair.groups.count > 0:
            chosen = own(others.get("index"), 0 if spec.split == "tokens" else -1, at.core)
            if pair.groups.slots > 0:
                columns = gathered_rows(chosen, pair, at)
                table = others.get("row_scale")
                gathered = gather(table.reshape((table.shape[0], 1)), columns)
                gains = gathered.reshape((128, gathered.shape[1]))
            else:
                stacked = index_tiles(chosen, at.m0, at.tokens)
                gains = ends.p_scale[pair.place]
            p_factors[pair.place] = group_mask(chosen, gains, pair, at, schedule.own_queue)
        else:
            p_factors[pair.place] = ends.p_scale[pair.place]
    p_type = getattr(nl, spec.kept_dtype) if spec.fp8 else x.dtype
    x_pitch = (at.tokens + 15) // 16 * 16 if spec.x_aligned else at.tokens
    x_sb = nl.ndarray((128, spec.x_tiles, x_pitch), dtype=x.dtype, buffer=nl.sbuf)
    if spec.x_chunk > 0:
        load_normed(
            x_sb, x, at, ends.norm_gain, ends.norm_bias, spec,
            ("scalar" if spec.x_load == "rows" else not spec.mx) if schedule.own_queue else "",
        )  # fmt: skip
    p_sb = (
        nl.ndarray((128, spec.p_tiles, at.tokens), dtype=p_type, buffer=nl.sbuf)
        if spec.p_tiles > 0
        else None
    )
    x_how = spec.x_later if spec.p_tiles == 0 else "none"
    x_left = stored_left(x_sb, p_sb, x, x_how, spec.k, at.tokens, spec)
    squares = [None for pair in spec.pairs]
    for each in spec.pairs:
        squares[each.place] = new_squares(each.u.n, at.tokens) if each.gain != "" else None
    around = Ends(ends.scale, ends.bias, p_factors, ends.p_bias, squares, None, None)
    if spec.p_tiles > 0:
        # p^T = (x u)^T of every pair of factors, one after another in tiles of the rank
        x_first = Left(x_sb, x, spec.x_later)
        if spec.gathers:
            for pair in spec.pairs:
                project_gathered(
                    p_sb, x_first, others.get("u"), columns, p_factors[0], pair, at, spec
                )
        else:
            project(
                p_sb, x_first, spec.factors, spec.exchanges_p, spec.tp, around, at, spec, others
            )  # fmt: skip
    if spec.combine != "":
        if spec.exchanges_h:
            # both halves of h^T; this core makes its own
            h_all = nl.ndarray((128, 2 * spec.h_tiles, at.tokens), dtype=p_type, buffer=nl.sbuf)
            mine = at.core * spec.h_tiles
            h_sb = h_all[0:128, mine : mine + spec.h_tiles, 0 : at.tokens]
        elif spec.down.n > 0:
            h_sb = nl.ndarray((128, spec.h_tiles, at.tokens), dtype=p_type, buffer=nl.sbuf)
        else:
            h_sb = None
        h_result = Result(outs[0], None, False, schedule.own_queue, h_sb, spec.down.n > 0)
        combine(h_result, x_left, spec.linears[0], spec.linears[1], around, at, spec, others)
        if spec.exchanges_h:
            other = spec.h_tiles - at.core * spec.h_tiles
            exchange(h_all[0:128, other : other + spec.h_tiles, 0 : at.tokens], h_sb, at.core)
        h_strip = h_all if spec.exchanges_h else h_sb
    else:
        if spec.gathers:
            pair_of = spec.factors[0]
            v_sb = gather(own(others.get(pair_of.v.name), pair_of.v.cut, at.core), columns)
        else:
            v_sb = None
        first_panels = [None for one in spec.linears]
        for one in spec.linears:
            x_of = Left(
                x_left.strip, x, x_left.how if one.place == 0 else "none", x_left.left_scales, p_sb,
                v_sb,
            )  # fmt: skip
            first_panels[one.place] = load_panels(one, x_of, 0, at, others)
        for pair in spec.pairs:
            if pair.groups.count > 0 and pair.groups.slots == 0:
                # behind the first loads of weights, which do not wait for the index
                table = others.get("row_scale").reshape((pair.groups.count, pair.groups.rank))
                gather(table, stacked)
        for one in spec.linears:
            if one.normed:
                factor = inverse_roots(
                    squares[one.low_rank.place], one.low_rank.r, at.tokens, one.low_rank.eps,
                    not one.by_rows,
                )  # fmt: skip
            else:
                factor = ends.scale[one.place]
            ending = epilogue_of(one, factor, ends.bias[one.place], None, False, spec)
            x_of = Left(
                x_left.strip, x, x_left.how if one.place == 0 else "none", x_left.left_scales, p_sb,
                v_sb,
            )  # fmt: skip
            result = Result(
                outs[one.place], residual, spec.residual, schedule.own_queue, None, False
            )
            expand(result, first_panels[one.place], x_of, one, ending, at, others)
    if spec.down.n > 0:
        h_stored = stored_left(h_strip, None, None, "none", spec.down.weight.k, at.tokens, spec)
        if spec.down.low_rank.r > 0:
            down_sb = nl.ndarray(
                (128, spec.down.low_rank.tiles, at.tokens), dtype=p_type, buffer=nl.sbuf
            )
            h_plain = Left(h_strip, None, "none")
            project(
                down_sb, h_plain, spec.down_pairs, spec.exchanges_down, 1, around, at, spec, others
            )  # fmt: skip
        else:
            down_sb = None
        h_left = Left(h_stored.strip, None, "none", h_stored.left_scales, down_sb)
        h_panel = load_panels(spec.down, h_left, 0, at, others)
        last = epilogue_of(spec.down, ends.scale[2], ends.bias[2], None, False, spec)
        y_result = Result(outs[0], residual, spec.residual, schedule.own_queue, None, False)
        expand(y_result, h_panel, h_left, spec.down, last, at, others)


def stored_left(strip, p_sb, source, how, size, tokens, spec) -> Left:
    """Return a strip as the products with dense weights take it: those of MX blocks quantized,
    which comes before VectorE turns to the products with u."""
    if spec.mx:
        quantized = quantize_strip(strip, size, tokens)
        return Left(quantized[0], source, how, quantized[1], p_sb)
    return Left(strip, source, how, None, p_sb)
