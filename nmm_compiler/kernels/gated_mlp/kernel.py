"""Gated MLP: h = activation(x gate + b) * (x up + b), and with `down` also y = h down + b.

gate, up and down are each a dense weight or two factors. x is read once for both branches. The
branches meet in PSUM: the gate's sum leaves through the activation, the up sum leaves through the
multiplication. For the down projection h^T is kept in SBUF as it comes out, outputs on the
partitions, which is what the next contraction takes.

fp8 operands come with scales, which are multiplied in where sums leave PSUM. p and h are kept in
the operands' dtype, in bfloat16 or fp32, or quantized to fp8 by scales of their own.
"""

import nki
import nki.language as nl

from ..pieces.few_tokens import expand_few
from ..pieces.gated_few import gate_few
from ..pieces.gated_product import gate_columns, gate_rows
from ..pieces.norms import load_normed, norm_of_x
from ..pieces.packed_loads import load_packed
from ..pieces.product_in_sbuf import project, project_in_turns, project_segment
from ..pieces.product_to_hbm import expand_columns, expand_rows
from ..pieces.records import (
    MLP,
    Base,
    Block,
    Branch,
    Epilogue,
    Kept,
    Panels,
    Part,
    Product,
    Projection,
    Result,
    Rounding,
    Segment,
    Strip,
    Tokens,
    Weight,
)
from ..pieces.scales_and_biases import (
    bias_columns,
    load_scale,
    product_scales,
    reciprocal_of,
    spread_bias,
    times,
)
from ..pieces.token_blocks import over_blocks
from ..pieces.two_cores import (
    add_halves,
    clear_tail,
    exchange,
    half,
    half_row,
    half_sums,
    load_panel_rows,
    start_panel,
)


@nki.jit
def gated_mlp(x, spec, schedule, **others):
    """Return the result."""
    m = spec.m  # tokens
    k = spec.k  # features
    n = spec.n  # intermediate size
    m_block = schedule.m_block
    aside = schedule.own_queue
    outputs = schedule.split == "outputs"
    weights = schedule.split == "weights"
    halved = outputs or weights
    k_out = k // 2 if outputs else k  # features of y that a core computes
    features = k_out if spec.down else n
    m_all = 2 * m if schedule.split == "tokens" else m
    features_all = 2 * features if halved else features
    y_dtype = x.dtype if spec.result_dtype == spec.dtype else getattr(nl, spec.result_dtype)
    if spec.out_layout == "row":
        out = nl.ndarray((m_all, features_all), dtype=y_dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((features_all, m_all), dtype=y_dtype, buffer=nl.shared_hbm)
    part = out
    whole_residual = others.get("residual")
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
    if weights:
        x = half(x, 1 if spec.x_layout == "row" else 0, core)
    first_dim = 0 if spec.weight_layout == "row" else 1  # of the contraction
    last_dim = 1 - first_dim
    gate_u_part = others.get("gate_u")
    gate_v_part = others.get("gate_v")
    gate_w_part = others.get("gate_w")
    gate_bias_part = others.get("gate_bias")
    gate_v_scale_part = others.get("gate_v_scale")
    gate_w_scale_part = others.get("gate_w_scale")
    up_u_part = others.get("up_u")
    up_v_part = others.get("up_v")
    up_w_part = others.get("up_w")
    up_bias_part = others.get("up_bias")
    up_v_scale_part = others.get("up_v_scale")
    up_w_scale_part = others.get("up_w_scale")
    down_u_part = others.get("down_u")
    down_v_part = others.get("down_v")
    down_w_part = others.get("down_w")
    down_bias_part = others.get("down_bias")
    down_v_scale_part = others.get("down_v_scale")
    down_w_scale_part = others.get("down_w_scale")
    if weights and spec.gate_r > 0:
        gate_u_part = half(gate_u_part, first_dim, core)
    if halved and spec.gate_r > 0:
        gate_v_part = half(gate_v_part, last_dim, core)
        if spec.scales == "channel":
            gate_v_scale_part = half_row(gate_v_scale_part, core)
    elif halved:
        gate_w_part = half(gate_w_part, last_dim, core)
        if spec.scales == "channel":
            gate_w_scale_part = half_row(gate_w_scale_part, core)
    if halved and spec.gate_bias:
        gate_bias_part = half_row(gate_bias_part, core)
    if weights and spec.up_r > 0:
        up_u_part = half(up_u_part, first_dim, core)
    if halved and spec.up_r > 0:
        up_v_part = half(up_v_part, last_dim, core)
        if spec.scales == "channel":
            up_v_scale_part = half_row(up_v_scale_part, core)
    elif halved:
        up_w_part = half(up_w_part, last_dim, core)
        if spec.scales == "channel":
            up_w_scale_part = half_row(up_w_scale_part, core)
    if halved and spec.up_bias:
        up_bias_part = half_row(up_bias_part, core)
    if weights and spec.down and spec.down_r > 0:
        down_u_part = half(down_u_part, first_dim, core)
    if halved and spec.down and spec.down_r > 0:
        down_v_part = half(down_v_part, last_dim, core)
        if spec.scales == "channel":
            down_v_scale_part = half_row(down_v_scale_part, core)
    elif halved and spec.down:
        down_w_part = half(down_w_part, last_dim, core)
        if spec.scales == "channel":
            down_w_scale_part = half_row(down_w_scale_part, core)
    if halved and spec.down_bias:
        down_bias_part = half_row(down_bias_part, core)
    gate_bias_sb = None
    up_bias_sb = None
    down_bias_sb = None
    columns_out = spec.down or spec.out_layout == "col"
    if spec.gate_bias:
        if columns_out:
            gate_bias_sb = bias_columns(gate_bias_part, n, aside)
        else:
            gate_bias_sb = spread_bias(gate_bias_part, n, aside)
    if spec.up_bias:
        if columns_out:
            up_bias_sb = bias_columns(up_bias_part, n, aside)
        else:
            up_bias_sb = spread_bias(up_bias_part, n, aside)
    if spec.down_bias:
        if spec.out_layout == "row":
            down_bias_sb = spread_bias(down_bias_part, k_out, aside)
        else:
            down_bias_sb = bias_columns(down_bias_part, k_out, aside)

    gate_p_scale_sb = None
    gate_scale_sb = None
    up_p_scale_sb = None
    up_scale_sb = None
    h_inverse = None
    down_p_scale_sb = None
    down_scale_sb = None
    if spec.fp8:
        of_x = others.get("x_scale")
        if spec.gate_r > 0:
            gate_p = others.get("gate_p_scale")
            gate_p_scale_sb = product_scales(
                others.get("gate_u_scale"), of_x, spec.gate_r, spec.scales, True, spec.fp8_x, aside
            )
            if spec.requantized:
                times(gate_p_scale_sb, reciprocal_of(load_scale(gate_p, aside)))
            gate_scale_sb = product_scales(
                gate_v_scale_part, gate_p, n, spec.scales, columns_out, spec.requantized, aside
            )
        else:
            gate_scale_sb = product_scales(
                gate_w_scale_part, of_x, n, spec.scales, columns_out, spec.fp8_x, aside
            )
        if spec.up_r > 0:
            up_p = others.get("up_p_scale")
            up_p_scale_sb = product_scales(
                others.get("up_u_scale"), of_x, spec.up_r, spec.scales, True, spec.fp8_x, aside
            )
            if spec.requantized:
                times(up_p_scale_sb, reciprocal_of(load_scale(up_p, aside)))
            up_scale_sb = product_scales(
                up_v_scale_part, up_p, n, spec.scales, columns_out, spec.requantized, aside
            )
        else:
            up_scale_sb = product_scales(
                up_w_scale_part, of_x, n, spec.scales, columns_out, spec.fp8_x, aside
            )
        if spec.down:
            of_h = others.get("h_scale")
            y_down = spec.out_layout == "col"
            if spec.requantized:
                h_inverse = reciprocal_of(load_scale(of_h, aside))
            if spec.down_r > 0:
                down_p = others.get("down_p_scale")
                down_p_scale_sb = product_scales(
                    others.get("down_u_scale"),
                    of_h,
                    spec.down_r,
                    spec.scales,
                    True,
                    spec.requantized,
                    aside,
                )
                if spec.requantized:
                    times(down_p_scale_sb, reciprocal_of(load_scale(down_p, aside)))
                down_scale_sb = product_scales(
                    down_v_scale_part, down_p, k_out, spec.scales, y_down, spec.requantized, aside
                )
            else:
                down_scale_sb = product_scales(
                    down_w_scale_part, of_h, k_out, spec.scales, y_down, spec.requantized, aside
                )
    norm = norm_of_x(
        others.get("norm_gain"), others.get("norm_bias"), k, spec, schedule
    )  # fmt: skip
    mlp = MLP(
        Projection(
            gate_u_part, gate_v_part, gate_w_part,
            gate_bias_sb, gate_p_scale_sb, gate_scale_sb,
        ),
        Projection(
            up_u_part, up_v_part, up_w_part,
            up_bias_sb, up_p_scale_sb, up_scale_sb,
        ),
        Projection(
            down_u_part, down_v_part, down_w_part,
            down_bias_sb, down_p_scale_sb, down_scale_sb,
        ),
        h_inverse,
        norm,
        core,
    )  # fmt: skip
    tokens = Tokens(part, whole_residual, x, m, m_block)

    over_blocks(gated_block, tokens, mlp, spec, schedule)
    return out


def gated_block(out, residual, x, mlp: MLP, at: Block, spec, schedule):
    """Compute a block of tokens."""
    k = spec.k
    n = spec.n
    outputs = schedule.split == "outputs"
    weights = schedule.split == "weights"
    k_out = k // 2 if outputs else k
    order = schedule.k_order
    whole = k_out % 128 == 0 and not spec.down_bias
    moving = schedule.moving if whole and at.tokens % 128 > 0 else 0
    as_rows = schedule.v_added and spec.out_layout == "row"
    ends = schedule.own_queue and spec.down and k_out > 512
    result = Result(out, as_rows, schedule.own_queue, moving, residual, spec.residual, ends, False)
    double_row = schedule.double_row
    kept_row = double_row and spec.requantized
    p_dtype = (
        x.dtype if spec.intermediate_dtype == spec.dtype else getattr(nl, spec.intermediate_dtype)
    )
    turned = schedule.x.load == "dma" or schedule.x.load == "dma16"
    pitch = (at.tokens + 15) // 16 * 16 if double_row or turned else at.tokens
    kept_pitch = (at.tokens + 15) // 16 * 16 if kept_row else at.tokens
    x_sb = nl.ndarray((128, (k + 127) // 128, pitch), dtype=x.dtype, buffer=nl.sbuf)
    if schedule.x.load == "packed":
        for k0 in range(0, k, schedule.x.chunk):
            part = Part(x, k0, min(schedule.x.chunk, k - k0), at.m0, at.tokens)
            load_packed(x_sb, k0 // 128, part, order, k)
    else:
        load_normed(x_sb, x, schedule.x.load, schedule.x.chunk, at, k, mlp.norm)
    gate_tiles = (spec.gate_r + 127) // 128
    up_tiles = (spec.up_r + 127) // 128
    unrounded = Rounding(1.0, None, None, False, None, False, "identity", False, None)
    gate_rounding = Rounding(
        1.0, mlp.gate.p_scale, spec.scales, spec.requantized, None, False, "identity",
        False, None,
    )  # fmt: skip
    up_rounding = Rounding(
        1.0, mlp.up.p_scale, spec.scales, spec.requantized, None, False, "identity",
        False, None,
    )  # fmt: skip
    if weights:
        # this core sums over its half of k
        mine = half_sums(gate_tiles + up_tiles, at.tokens)
        theirs = half_sums(gate_tiles + up_tiles, at.tokens)
        clear_tail(mine, 0, spec.gate_r)
        clear_tail(mine, gate_tiles, spec.up_r)

    # Up: the products that need a middle step first, (x u)^T with the rank on the partitions.
    if spec.gate_r > 0:
        gate_sb = nl.ndarray((128, gate_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        product_of_gate = Product(k, spec.gate_r, order, schedule.k_segment, double_row, False, 0)
        by_gate = Weight(mlp.gate.u, None, schedule.u, schedule.ahead, False, None)
        if weights:
            gate_mine = mine[0:128, 0:gate_tiles, 0 : at.tokens]
            project(
                gate_mine, Strip(x_sb, None, schedule.kept), by_gate, at, product_of_gate,
                unrounded,
            )  # fmt: skip
        else:
            project(
                gate_sb, Strip(x_sb, None, schedule.kept), by_gate, at, product_of_gate,
                gate_rounding,
            )  # fmt: skip
        gate = mlp.gate.v
    else:
        gate_sb = x_sb
        gate = mlp.gate.w
    if spec.up_r > 0:
        up_sb = nl.ndarray((128, up_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        product_of_up = Product(k, spec.up_r, order, schedule.k_segment, double_row, False, 0)
        by_up = Weight(mlp.up.u, None, schedule.u, schedule.ahead, False, None)
        if weights:
            up_mine = mine[0:128, gate_tiles : gate_tiles + up_tiles, 0 : at.tokens]
            project(
                up_mine, Strip(x_sb, None, schedule.kept), by_up, at, product_of_up, unrounded
            )  # fmt: skip
        else:
            project(
                up_sb, Strip(x_sb, None, schedule.kept), by_up, at, product_of_up, up_rounding
            )  # fmt: skip
        up = mlp.up.v
    else:
        up_sb = x_sb
        up = mlp.up.w
    if weights:
        exchange(theirs, mine, mlp.core)
        add_halves(
            gate_sb, gate_mine, theirs[0:128, 0:gate_tiles, 0 : at.tokens],
            spec.gate_r, at.tokens, gate_rounding,
        )  # fmt: skip
        add_halves(
            up_sb, up_mine, theirs[0:128, gate_tiles : gate_tiles + up_tiles, 0 : at.tokens],
            spec.up_r, at.tokens, up_rounding,
        )  # fmt: skip
    gate_k = spec.gate_r if spec.gate_r > 0 else k
    up_k = spec.up_r if spec.up_r > 0 else k
    gate_order = "strided_rows" if spec.gate_r > 0 else order
    up_order = "strided_rows" if spec.up_r > 0 else order
    gate_row = kept_row if spec.gate_r > 0 else double_row
    up_row = kept_row if spec.up_r > 0 else double_row
    gate_branch = Branch(
        gate_sb, gate,
        Product(gate_k, n, gate_order, gate_k, gate_row, spec.wide and spec.gate_r > 0, 0),
        Epilogue(mlp.gate.scale, mlp.gate.bias, spec.scales, spec.gate_bias, spec.activation),
    )  # fmt: skip
    up_branch = Branch(
        up_sb, up,
        Product(up_k, n, up_order, up_k, up_row, spec.wide and spec.up_r > 0, 0),
        Epilogue(mlp.up.scale, mlp.up.bias, spec.scales, spec.up_bias, "identity"),
    )  # fmt: skip
    last_tiles = (spec.down_r + 127) // 128
    if spec.down_r > 0:
        last_sb = nl.ndarray((128, last_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
    if spec.down_r > 0 and weights:
        down_mine = half_sums(last_tiles, at.tokens)
        down_theirs = half_sums(last_tiles, at.tokens)
        clear_tail(down_mine, 0, spec.down_r)
    if spec.down_r > 0 and schedule.n_segment < n:
        # fp32 sums of the segments
        parts = nl.ndarray((128, last_tiles, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
    else:
        parts = None
    # h^T: a down projection of two factors takes it segment by segment.
    ahead = min(schedule.ahead, 1) if spec.down else schedule.ahead
    for n1 in range(0, n, schedule.n_segment):
        n_stop = min(n1 + schedule.n_segment, n)
        h_tiles = (min(schedule.n_segment, n) + 127) // 128
        if spec.down and outputs:
            # both halves of h; this core makes its own
            h_all = nl.ndarray((128, 2 * h_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
            h_sb = h_all[0:128, mlp.core * h_tiles : mlp.core * h_tiles + h_tiles, 0:kept_pitch]
        elif spec.down:
            h_sb = nl.ndarray((128, h_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        else:
            h_sb = None
        kept = Kept(h_sb, mlp.h_inverse, spec.down, spec.requantized)
        panels = Panels(n1, n_stop, ahead)
        if schedule.v_added:
            gate_few(result, gate_branch, up_branch, schedule.v, at, panels, kept)
        elif spec.down or spec.out_layout == "col":
            gate_columns(result, gate_branch, up_branch, schedule.v, at, panels, kept)
        else:
            gate_rows(result, gate_branch, up_branch, schedule.v, at, schedule.ahead)
        if spec.down_r > 0:
            h_strip = Strip(h_sb, None, schedule.kept_segment)
            by_down = Weight(mlp.down.u, None, schedule.down, schedule.ahead, False, None)
            first_down = Product(
                n, spec.down_r, "strided_rows", schedule.n_segment, kept_row, spec.wide, 0
            )  # fmt: skip
            segment = Segment(n1, n_stop, schedule.n_segment < n, parts)
            # h of few tokens is there before its last product: nothing else is left to wait for
            in_turns = (
                at.tokens <= 128 and spec.down_r <= 256 and spec.down_r <= schedule.down.block
            )
            in_turns = in_turns and schedule.n_segment >= n and n > 640 and not spec.fp8
            if weights:
                project_segment(
                    down_mine, h_strip, by_down, at, first_down, unrounded, segment
                )  # fmt: skip
            elif in_turns:
                project_in_turns(last_sb, h_strip, by_down, at, first_down)
            else:
                project_segment(
                    last_sb, h_strip, by_down, at, first_down,
                    Rounding(
                        1.0, mlp.down.p_scale, spec.scales, spec.requantized, None, False,
                        "identity", False, None,
                    ),
                    segment,
                )  # fmt: skip

    # Down: h^T is in SBUF with its features on the partitions.
    if spec.down:
        if spec.down_r > 0:
            last = mlp.down.v
        else:
            last_sb = h_sb
            last = mlp.down.w
        last_k = spec.down_r if spec.down_r > 0 else n
        if outputs:
            last_sb = h_all
            last_k = 2 * n
        left = Strip(last_sb, None, schedule.kept)
        base = Base(None, None, 0, "rows", 128, "strided_rows")
        product = Product(last_k, k_out, "strided_rows", last_k, kept_row, spec.wide, 0)
        panels = Weight(last, None, schedule.out, schedule.ahead, False, None)
        early = schedule.split and schedule.split != "tokens" and schedule.ahead > 0
        w_sb = None
        sooner = min(2 * schedule.out.chunk, last_k)
        if early:
            # the weights begin to arrive while the cores exchange what they have made
            w_sb = start_panel(panels, at, product, sooner)
        if outputs:
            theirs_at = h_tiles - mlp.core * h_tiles
            exchange(
                h_all[0:128, theirs_at : theirs_at + h_tiles, 0 : at.tokens],
                h_all[0:128, mlp.core * h_tiles : mlp.core * h_tiles + h_tiles, 0 : at.tokens],
                mlp.core,
            )
        elif weights:
            exchange(down_theirs, down_mine, mlp.core)
        if early:
            load_panel_rows(w_sb, panels, at, product, sooner, last_k)
        if weights:
            add_halves(
                last_sb, down_mine, down_theirs, spec.down_r, at.tokens,
                Rounding(
                    1.0, mlp.down.p_scale, spec.scales, spec.requantized, None, False, "identity",
                    False, None,
                ),
            )  # fmt: skip
        right = Weight(last, None, schedule.out, schedule.ahead, early, w_sb)
        epilogue = Epilogue(mlp.down.scale, mlp.down.bias, spec.scales, spec.down_bias, "identity")
        if schedule.v_added:
            expand_few(result, left, right, at, product, epilogue)
        elif spec.out_layout == "row":
            expand_rows(result, left, right, base, at, product, epilogue)
        else:
            expand_columns(result, left, right, base, at, product, epilogue)
