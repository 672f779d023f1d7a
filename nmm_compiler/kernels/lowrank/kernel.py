"""Low-rank product y = activation(x w + scale (x u) v + bias), x w being optional.

A function may stand between the products: p = inner_activation(x u + inner_bias), or the RMS norm
of x u.

Stage 1 holds tiles of u stationary and moves x^T, so that (x u)^T comes out with the rank on the
partitions; stage 2 contracts over the rank and takes it as it lies, as the stationary operand (y)
or as the moving one (y^T). The intermediate never leaves the chip and is never transposed.

fp8 operands come with scales, which are multiplied in where sums leave PSUM. p is kept in the
operands' dtype, in bfloat16 or fp32, or quantized to fp8 by p_scale.
"""

import nki
import nki.language as nl

from ..pieces.between_ranks import rank_sums, sum_results, sum_strips
from ..pieces.few_tokens import expand_few, load_few, start_weights
from ..pieces.norms import add_squares, inverse_roots, load_normed, new_squares, norm_of_x
from ..pieces.product_in_sbuf import project
from ..pieces.product_to_hbm import expand_columns, expand_rows
from ..pieces.records import (
    Base,
    Block,
    Epilogue,
    Held,
    Product,
    Result,
    Rounding,
    Strip,
    Tokens,
    Weight,
)
from ..pieces.scales_and_biases import (
    bias_columns,
    load_scale,
    panel_scales,
    product_scales,
    reciprocal_of,
    spread_bias,
    times,
)
from ..pieces.token_blocks import over_blocks
from ..pieces.two_cores import (
    add_halves,
    add_halves_in_turns,
    add_up_halves,
    clear_tail,
    exchange,
    exchange_in_turns,
    half,
    half_row,
    half_sums,
    load_panel_rows,
    start_panel,
)


@nki.jit
def lowrank(x, u, v, spec, schedule, **others):
    """Return y."""
    m = spec.m  # tokens
    k = spec.k  # input features
    r = spec.r  # rank
    n = spec.n  # output features
    m_block = schedule.m_block
    aside = schedule.own_queue
    k_tiles = (k + 127) // 128
    r_tiles = (r + 127) // 128
    w_part = others.get("w")
    bias_part = others.get("bias")
    whole_residual = others.get("residual")
    of_v = others.get("v_scale")
    u_all = None
    v_all = None
    bias_sb = None
    inner_bias_sb = None
    p_scale_sb = None
    y_scale_sb = None
    second_row = schedule.double_row and spec.requantized
    y_dtype = x.dtype if spec.result_dtype == spec.dtype else getattr(nl, spec.result_dtype)
    m_all = 2 * m if schedule.split == "tokens" else m
    n_all = 2 * n if schedule.split == "outputs" or schedule.split == "weights" else n
    if spec.out_layout == "row":
        out = nl.ndarray((m_all, n_all), dtype=y_dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((n_all, m_all), dtype=y_dtype, buffer=nl.shared_hbm)
    part = out
    core = 0
    if schedule.split:
        core = nl.program_id(0)
    if schedule.split == "tokens":
        x = half(x, 0 if spec.x_layout == "row" else 1, core)
        part = half(out, 0 if spec.out_layout == "row" else 1, core)
        if spec.residual:
            whole_residual = half(whole_residual, 0 if spec.out_layout == "row" else 1, core)
    elif schedule.split:
        part = half(out, 1 if spec.out_layout == "row" else 0, core)
        if spec.residual:
            whole_residual = half(whole_residual, 1 if spec.out_layout == "row" else 0, core)
        v = half(v, 1 if spec.v_layout == "row" else 0, core)
        if spec.base:
            w_part = half(w_part, 1 if spec.w_layout == "row" else 0, core)
        if spec.bias:
            bias_part = half_row(bias_part, core)
        if spec.scales == "channel":
            of_v = half_row(of_v, core)
    if schedule.split == "weights":
        x = half(x, 1 if spec.x_layout == "row" else 0, core)
        u = half(u, 0 if spec.u_layout == "row" else 1, core)
    y = part
    if spec.tp_axis == "rank":
        # what this rank adds to y
        part = nl.ndarray(part.shape, dtype=y_dtype, buffer=nl.private_hbm)
    x_first = None
    u_first = None
    if schedule.starts:
        # the first weights come before the scales, which only the first sums need
        turned = schedule.x.load == "dma" or schedule.x.load == "dma16"
        x_first = load_few(
            x, schedule.x.load, k, schedule.k_order, Block(0, m), schedule.double_row or turned
        )
        product = Product(
            k, r, schedule.k_order, schedule.k_segment, schedule.double_row, False, 0
        )  # fmt: skip
        u_first = start_weights(
            Weight(u, None, schedule.u, 0, False, None), product, schedule.k_segment
        )
    elif schedule.u_aside:
        u_first = load_few(u, "rows", k, schedule.k_order, Block(0, r), schedule.double_row)
    if spec.bias:
        if spec.out_layout == "row":
            bias_sb = spread_bias(bias_part, n, aside)
        else:
            bias_sb = bias_columns(bias_part, n, aside)
    if spec.fp8:
        kept_scale = others.get("p_scale")
        p_scale_sb = product_scales(
            others.get("u_scale"), others.get("x_scale"), r, spec.scales, True, spec.fp8_x, aside
        )
        if spec.scale != 1.0:
            times(p_scale_sb, spec.scale)
        if spec.requantized:
            times(p_scale_sb, reciprocal_of(load_scale(kept_scale, aside)))
        if schedule.v_stationary and spec.out_layout == "row" and spec.scales == "channel":
            y_scale_sb = panel_scales(
                of_v, kept_scale, n, schedule.v.block, spec.requantized, aside
            )
        else:
            down = schedule.v_stationary or spec.out_layout == "col"
            y_scale_sb = product_scales(
                of_v, kept_scale, n, spec.scales, down, spec.requantized, aside
            )
    if schedule.u.resident:
        aligned = schedule.double_row or schedule.u.load == "dma"
        u_pitch = (r + 15) // 16 * 16 if aligned else r
        u_all = nl.ndarray((128, k_tiles, u_pitch), dtype=u.dtype, buffer=nl.sbuf)
    if schedule.v.resident:
        v_pitch = (n + 15) // 16 * 16 if second_row or schedule.v.load == "dma" else n
        v_dtype = nl.float32 if spec.wide else v.dtype
        v_all = nl.ndarray((128, r_tiles, v_pitch), dtype=v_dtype, buffer=nl.sbuf)
    if spec.inner_bias:
        inner_bias_sb = bias_columns(others.get("inner_bias"), r, aside)
    if spec.inner_norm:
        p_scale_sb = bias_columns(others.get("inner_gain"), r, aside)
    norm = norm_of_x(
        others.get("norm_gain"), others.get("norm_bias"), k, spec, schedule
    )  # fmt: skip
    held = Held(
        x_first, u, u_first, v, w_part, u_all, v_all, inner_bias_sb, bias_sb, p_scale_sb,
        y_scale_sb, norm, core,
    )  # fmt: skip
    tokens = Tokens(part, whole_residual, x, m, m_block)

    over_blocks(lowrank_block, tokens, held, spec, schedule)
    if spec.tp_axis == "rank":
        sum_results(y, part, spec.tp)
    return out


def lowrank_block(out, residual, x, held: Held, at: Block, spec, schedule):
    """Compute a block of tokens."""
    base_k = spec.k if spec.base else 0
    r_tiles = (spec.r + 127) // 128
    second_row = schedule.double_row and spec.requantized
    p_dtype = (
        x.dtype if spec.intermediate_dtype == spec.dtype else getattr(nl, spec.intermediate_dtype)
    )
    sums_dtype = nl.bfloat16 if spec.requantized else p_dtype
    turned = schedule.x.load == "dma" or schedule.x.load == "dma16"
    x_pitch = (at.tokens + 15) // 16 * 16 if schedule.double_row or turned else at.tokens
    p_pitch = (at.tokens + 15) // 16 * 16 if second_row else at.tokens

    # Stage 1: p^T = (x u)^T, summed in PSUM, rounded once on the way out.
    if schedule.starts:
        x_sb = held.x_first
    elif schedule.x.stream:
        x_sb = None
    else:
        k_tiles = (spec.k + 127) // 128
        x_sb = nl.ndarray((128, k_tiles, x_pitch), dtype=x.dtype, buffer=nl.sbuf)
    p_sb = nl.ndarray((128, r_tiles, p_pitch), dtype=p_dtype, buffer=nl.sbuf)
    squares = new_squares(spec.r, at.tokens) if spec.inner_norm else None
    rounding = Rounding(
        spec.scale, held.p_scale_sb, "channel" if spec.inner_norm else spec.scales,
        spec.requantized, held.inner_bias_sb,
        spec.inner_bias, spec.inner_activation, spec.inner_norm, squares,
    )  # fmt: skip
    first = Product(
        spec.k, spec.r, schedule.k_order, schedule.k_segment, schedule.double_row, False,
        schedule.warm,
    )  # fmt: skip
    product = Product(spec.r, spec.n, "strided_rows", spec.r, second_row, spec.wide, 0)
    v_panels = Weight(held.v, held.v_all, schedule.v, schedule.ahead, False, None)
    if spec.norm != "none":
        load_normed(x_sb, x, schedule.x.load, schedule.x.chunk, at, spec.k, held.norm)
    loaded = spec.norm != "none" or schedule.starts
    x_strip = Strip(x_sb, x, schedule.kept if loaded else schedule.x)
    begun = schedule.starts or schedule.u_aside
    u_panels = Weight(held.u, held.u_all, schedule.u, schedule.ahead, begun, held.u_first)
    over_ranks = spec.tp_axis == "rows"
    early = (schedule.split == "weights" or over_ranks) and schedule.ahead > 0
    v_sb = None
    if schedule.split == "weights":
        # this core sums over its half of k; v begins to arrive while the cores exchange the sums
        mine = half_sums(r_tiles, at.tokens)
        theirs = half_sums(r_tiles, at.tokens)
        clear_tail(mine, 0, spec.r)
        unrounded = Rounding(1.0, None, None, False, None, False, "identity", False, None)
        project(mine, x_strip, u_panels, at, first, unrounded)
        # sums of few tokens that nothing scales or shapes leave as soon as a group is made
        shaped = rounding.scales or rounding.factor != 1.0 or rounding.has_bias
        shaped = shaped or rounding.activation != "identity" or over_ranks
        turns = at.tokens <= 16 and schedule.u.group < r_tiles and not shaped
        sooner = min((3 if turns else 2) * schedule.v.chunk, spec.r)
        if early:
            v_sb = start_panel(v_panels, at, product, sooner)
        if turns:
            exchange_in_turns(theirs, mine, held.core, schedule.u.group)
        else:
            exchange(theirs, mine, held.core)
        if early:
            load_panel_rows(v_sb, v_panels, at, product, sooner, spec.r)
        if over_ranks:
            sums = rank_sums(r_tiles, at.tokens, sums_dtype)
            add_up_halves(sums, mine, theirs, at.tokens)
            sum_strips(p_sb, sums, spec.r, spec.tp, rounding)
        elif turns:
            add_halves_in_turns(p_sb, mine, theirs, at.tokens, schedule.u.group)
        else:
            add_halves(p_sb, mine, theirs, spec.r, at.tokens, rounding)
        if spec.inner_norm:
            for tile in range(r_tiles):
                rows = min(128, spec.r - 128 * tile)
                add_squares(squares, mine[0:rows, tile, 0 : at.tokens], tile, 0)
    elif over_ranks:
        # this rank sums over its part of k; v begins to arrive while the ranks exchange the sums
        sums = rank_sums(r_tiles, at.tokens, sums_dtype)
        if spec.r % 128 > 0:
            clear_tail(sums, 0, spec.r)
        unrounded = Rounding(1.0, None, None, False, None, False, "identity", False, None)
        project(sums, x_strip, u_panels, at, first, unrounded)
        sooner = min(2 * schedule.v.chunk, spec.r)
        if early:
            v_sb = start_panel(v_panels, at, product, sooner)
        sum_strips(p_sb, sums, spec.r, spec.tp, rounding)
        if early:
            load_panel_rows(v_sb, v_panels, at, product, sooner, spec.r)
    else:
        project(p_sb, x_strip, u_panels, at, first, rounding)

    left = Strip(p_sb, None, schedule.kept)
    right = Weight(held.v, held.v_all, schedule.v, schedule.ahead, early, v_sb)
    base = Base(x_sb, held.w, base_k, schedule.w_load, schedule.u.chunk, schedule.k_order)
    as_rows = spec.out_layout == "row" and not schedule.v_stationary
    y_scale = held.y_scale_sb
    if spec.inner_norm:
        y_scale = inverse_roots(squares, spec.r, at.tokens, spec.inner_eps, not as_rows)
    y_scales = "token" if spec.inner_norm else spec.scales
    epilogue = Epilogue(y_scale, held.bias_sb, y_scales, spec.bias, spec.activation)
    ends = schedule.own_queue and spec.n > 512
    # Stage 2: contracts over the rank, panel by panel of v.
    if schedule.v_added:
        as_rows = spec.out_layout == "row"
        result = Result(out, as_rows, schedule.own_queue, 0, None, False, ends, False)
        expand_few(result, left, right, at, product, epilogue)
    elif as_rows:
        whole = spec.n % 128 == 0 and not spec.bias and not spec.base and not spec.inner_norm
        moving = schedule.moving if whole and at.tokens % 128 > 0 else 0
        result = Result(
            out, False, schedule.own_queue, moving, residual, spec.residual, ends,
            ends and at.tokens > 128,
        )  # fmt: skip
        expand_rows(result, left, right, base, at, product, epilogue)
    else:
        as_rows = spec.out_layout == "row"
        result = Result(
            out, as_rows, schedule.own_queue, 0, residual, spec.residual, ends, False
        )  # fmt: skip
        expand_columns(result, left, right, base, at, product, epilogue)
