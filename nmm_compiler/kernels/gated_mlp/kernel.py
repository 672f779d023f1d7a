"""Gated MLP: h = activation(x gate + b) * (x up + b), and with `down` also y = h down + b.

gate, up and down are each a dense weight or two factors. x is read once for both branches. The
branches meet in PSUM: the gate's sum leaves through the activation, the up sum leaves through the
multiplication. For the down projection h^T is kept in SBUF as it comes out, outputs on the
partitions, which is what the next contraction takes.

fp8 operands come with scales, which are multiplied in where sums leave PSUM. p and h are kept in
the operands' dtype, in bfloat16 or fp32, or quantized to fp8 by scales of their own.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.gated_product import gate_columns, gate_rows
from ..pieces.loads_and_stores import (
    bias_columns,
    load,
    load_scale,
    position,
    product_scales,
    reciprocal_of,
    split,
    spread_bias,
    times,
)
from ..pieces.product_in_sbuf import project, project_segment
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
    Weight,
)


@nki.jit
def gated_mlp(x, spec, schedule, **others):
    """Return the result."""
    m = spec.m  # tokens
    k = spec.k  # features
    n = spec.n  # intermediate size
    m_block = schedule.m_block
    features = k if spec.down else n
    y_dtype = x.dtype if spec.result_dtype == spec.dtype else getattr(nl, spec.result_dtype)
    if spec.out_layout == "row":
        out = nl.ndarray((m, features), dtype=y_dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((features, m), dtype=y_dtype, buffer=nl.shared_hbm)
    gate_bias_sb = None
    up_bias_sb = None
    down_bias_sb = None
    columns_out = spec.down or spec.out_layout == "col"
    if spec.gate_bias:
        if columns_out:
            gate_bias_sb = bias_columns(others.get("gate_bias"), n)
        else:
            gate_bias_sb = spread_bias(others.get("gate_bias"), n)
    if spec.up_bias:
        if columns_out:
            up_bias_sb = bias_columns(others.get("up_bias"), n)
        else:
            up_bias_sb = spread_bias(others.get("up_bias"), n)
    if spec.down_bias:
        if spec.out_layout == "row":
            down_bias_sb = spread_bias(others.get("down_bias"), k)
        else:
            down_bias_sb = bias_columns(others.get("down_bias"), k)

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
                others.get("gate_u_scale"), of_x, spec.gate_r, spec.scales, True, True
            )
            if spec.requantized:
                times(gate_p_scale_sb, reciprocal_of(load_scale(gate_p)))
            gate_scale_sb = product_scales(
                others.get("gate_v_scale"), gate_p, n, spec.scales, columns_out, spec.requantized
            )
        else:
            gate_scale_sb = product_scales(
                others.get("gate_w_scale"), of_x, n, spec.scales, columns_out, True
            )
        if spec.up_r > 0:
            up_p = others.get("up_p_scale")
            up_p_scale_sb = product_scales(
                others.get("up_u_scale"), of_x, spec.up_r, spec.scales, True, True
            )
            if spec.requantized:
                times(up_p_scale_sb, reciprocal_of(load_scale(up_p)))
            up_scale_sb = product_scales(
                others.get("up_v_scale"), up_p, n, spec.scales, columns_out, spec.requantized
            )
        else:
            up_scale_sb = product_scales(
                others.get("up_w_scale"), of_x, n, spec.scales, columns_out, True
            )
        if spec.down:
            of_h = others.get("h_scale")
            y_down = spec.out_layout == "col"
            if spec.requantized:
                h_inverse = reciprocal_of(load_scale(of_h))
            if spec.down_r > 0:
                down_p = others.get("down_p_scale")
                down_p_scale_sb = product_scales(
                    others.get("down_u_scale"),
                    of_h,
                    spec.down_r,
                    spec.scales,
                    True,
                    spec.requantized,
                )
                if spec.requantized:
                    times(down_p_scale_sb, reciprocal_of(load_scale(down_p)))
                down_scale_sb = product_scales(
                    others.get("down_v_scale"), down_p, k, spec.scales, y_down, spec.requantized
                )
            else:
                down_scale_sb = product_scales(
                    others.get("down_w_scale"), of_h, k, spec.scales, y_down, spec.requantized
                )
    mlp = MLP(
        Projection(
            others.get("gate_u"), others.get("gate_v"), others.get("gate_w"),
            gate_bias_sb, gate_p_scale_sb, gate_scale_sb,
        ),
        Projection(
            others.get("up_u"), others.get("up_v"), others.get("up_w"),
            up_bias_sb, up_p_scale_sb, up_scale_sb,
        ),
        Projection(
            others.get("down_u"), others.get("down_v"), others.get("down_w"),
            down_bias_sb, down_p_scale_sb, down_scale_sb,
        ),
        h_inverse,
    )  # fmt: skip

    first = 0
    if schedule.m_loop:
        # on the device: the compiled program holds one block, whatever the number of tokens
        first = m - m % m_block
        x_dim = 1 if spec.x_layout == "col" else 0
        out_dim = 0 if spec.out_layout == "row" else 1
        x_blocks = split(x, x_dim, m // m_block, m_block)
        out_blocks = split(out, out_dim, m // m_block, m_block)

        def body(i):
            at = position(i)
            x_part = x_blocks.select(x_dim, at)
            out_part = out_blocks.select(out_dim, at)
            gated_block(out_part, x_part, mlp, Block(0, m_block), spec, schedule)

        # the loop variable is a register because its bound is one
        nl.fori_loop(0, nisa.register_alloc(m // m_block), body)
    for m0 in range(first, m, m_block):
        gated_block(out, x, mlp, Block(m0, min(m_block, m - m0)), spec, schedule)
    return out


def gated_block(out, x, mlp: MLP, at: Block, spec, schedule):
    """Compute a block of tokens."""
    k = spec.k
    n = spec.n
    order = schedule.k_order
    tail = schedule.tail if spec.k % 128 == 0 and not spec.down_bias else 0
    result = Result(out, False, schedule.own_queue, tail)
    double_row = schedule.double_row
    kept_row = double_row and spec.requantized
    p_dtype = (
        x.dtype if spec.intermediate_dtype == spec.dtype else getattr(nl, spec.intermediate_dtype)
    )
    turned = schedule.x.load == "dma" or schedule.x.load == "dma16"
    pitch = (at.tokens + 15) // 16 * 16 if double_row or turned else at.tokens
    kept_pitch = (at.tokens + 15) // 16 * 16 if kept_row else at.tokens
    x_sb = nl.ndarray((128, (k + 127) // 128, pitch), dtype=x.dtype, buffer=nl.sbuf)
    for k0 in range(0, k, schedule.x.chunk):
        part = Part(x, k0, min(schedule.x.chunk, k - k0), at.m0, at.tokens)
        load(x_sb, k0 // 128, part, schedule.x.load, order, k)

    # Up: the products that need a middle step first, (x u)^T with the rank on the partitions.
    if spec.gate_r > 0:
        gate_tiles = (spec.gate_r + 127) // 128
        gate_sb = nl.ndarray((128, gate_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        project(
            gate_sb, Strip(x_sb, None, schedule.kept),
            Weight(mlp.gate.u, None, schedule.u, schedule.ahead, False, None), at,
            Product(k, spec.gate_r, order, schedule.k_segment, double_row, False),
            Rounding(
                1.0, mlp.gate.p_scale, spec.scales, spec.requantized, None, False, "identity",
                False, None,
            ),
        )  # fmt: skip
        gate = mlp.gate.v
    else:
        gate_sb = x_sb
        gate = mlp.gate.w
    if spec.up_r > 0:
        up_tiles = (spec.up_r + 127) // 128
        up_sb = nl.ndarray((128, up_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        project(
            up_sb, Strip(x_sb, None, schedule.kept),
            Weight(mlp.up.u, None, schedule.u, schedule.ahead, False, None), at,
            Product(k, spec.up_r, order, schedule.k_segment, double_row, False),
            Rounding(
                1.0, mlp.up.p_scale, spec.scales, spec.requantized, None, False, "identity",
                False, None,
            ),
        )  # fmt: skip
        up = mlp.up.v
    else:
        up_sb = x_sb
        up = mlp.up.w
    gate_k = spec.gate_r if spec.gate_r > 0 else k
    up_k = spec.up_r if spec.up_r > 0 else k
    gate_order = "strided_rows" if spec.gate_r > 0 else order
    up_order = "strided_rows" if spec.up_r > 0 else order
    gate_row = kept_row if spec.gate_r > 0 else double_row
    up_row = kept_row if spec.up_r > 0 else double_row
    gate_branch = Branch(
        gate_sb, gate,
        Product(gate_k, n, gate_order, gate_k, gate_row, spec.wide and spec.gate_r > 0),
        Epilogue(mlp.gate.scale, mlp.gate.bias, spec.scales, spec.gate_bias, spec.activation),
    )  # fmt: skip
    up_branch = Branch(
        up_sb, up,
        Product(up_k, n, up_order, up_k, up_row, spec.wide and spec.up_r > 0),
        Epilogue(mlp.up.scale, mlp.up.bias, spec.scales, spec.up_bias, "identity"),
    )  # fmt: skip
    last_tiles = (spec.down_r + 127) // 128
    if spec.down_r > 0:
        last_sb = nl.ndarray((128, last_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
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
        if spec.down:
            h_sb = nl.ndarray((128, h_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        else:
            h_sb = None
        if spec.down or spec.out_layout == "col":
            gate_columns(
                result, gate_branch, up_branch, schedule.v, at, Panels(n1, n_stop, ahead),
                Kept(h_sb, mlp.h_inverse, spec.down, spec.requantized),
            )  # fmt: skip
        else:
            gate_rows(result, gate_branch, up_branch, schedule.v, at, schedule.ahead)
        if spec.down_r > 0:
            project_segment(
                last_sb, Strip(h_sb, None, schedule.kept_segment),
                Weight(mlp.down.u, None, schedule.down, schedule.ahead, False, None), at,
                Product(
                    n, spec.down_r, "strided_rows", schedule.n_segment, kept_row, spec.wide
                ),
                Rounding(
                    1.0, mlp.down.p_scale, spec.scales, spec.requantized, None, False, "identity",
                    False, None,
                ),
                Segment(n1, n_stop, schedule.n_segment < n, parts),
            )  # fmt: skip

    # Down: h^T is in SBUF with its features on the partitions.
    if spec.down:
        if spec.down_r > 0:
            last = mlp.down.v
        else:
            last_sb = h_sb
            last = mlp.down.w
        last_k = spec.down_r if spec.down_r > 0 else n
        left = Strip(last_sb, None, schedule.kept)
        right = Weight(last, None, schedule.out, schedule.ahead, False, None)
        base = Base(None, None, 0, "rows", 128, "strided_rows")
        product = Product(last_k, k, "strided_rows", last_k, kept_row, spec.wide)
        epilogue = Epilogue(mlp.down.scale, mlp.down.bias, spec.scales, spec.down_bias, "identity")
        if spec.out_layout == "row":
            expand_rows(result, left, right, base, at, product, epilogue)
        else:
            expand_columns(result, left, right, base, at, product, epilogue)
