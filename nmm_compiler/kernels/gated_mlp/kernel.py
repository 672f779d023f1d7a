"""Gated MLP: h = activation(x gate + b) * (x up + b), and with `down` also y = h down + b.

gate, up and down are each a dense weight or two factors. x is read once for both branches. The
branches meet in PSUM: the gate's sum leaves through the activation, the up sum leaves through the
multiplication. For the down projection h^T is kept in SBUF as it comes out, outputs on the
partitions, which is what the next contraction takes.

fp8 operands come with scales, which are multiplied in where sums leave PSUM. p and h are kept in
the operands' dtype, in bfloat16 or fp32, or quantized to fp8 by scales of their own (`kept_dtype`).
"""

import nki
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


@nki.jit
def gated_mlp(
    x,
    gate_u=None,
    gate_v=None,
    gate_w=None,
    up_u=None,
    up_v=None,
    up_w=None,
    down_u=None,
    down_v=None,
    down_w=None,
    gate_bias=None,
    up_bias=None,
    down_bias=None,
    x_scale=None,
    gate_u_scale=None,
    gate_v_scale=None,
    gate_w_scale=None,
    up_u_scale=None,
    up_v_scale=None,
    up_w_scale=None,
    down_u_scale=None,
    down_v_scale=None,
    down_w_scale=None,
    gate_p_scale=None,
    up_p_scale=None,
    down_p_scale=None,
    h_scale=None,
    m=1,  # tokens
    k=1,  # features
    n=1,  # intermediate size
    gate_r=0,  # rank of the gate, 0 when it is dense
    up_r=0,  # rank of the up projection, 0 when it is dense
    down_r=0,  # rank of the down projection, 0 when it is dense
    down=False,
    out_layout="row",
    has_gate_bias=False,
    has_up_bias=False,
    has_down_bias=False,
    activation="silu",
    x_load="rows",
    w_load="rows",
    k_order="p",
    m_block=128,
    m_loop=False,
    x_by_features=False,  # x is passed k x m
    k_chunk=128,
    x_chunk=128,
    k_segment=128,
    n_segment=128,
    u_block=128,
    r_group=1,
    v_block=128,
    v_chunk=128,
    n_group=1,
    down_block=128,
    down_chunk=128,
    down_group=1,
    out_block=128,
    out_chunk=128,
    out_group=1,
    u_stream=False,
    down_stream=False,
    scales="none",  # of fp8 operands: "tensor" or "channel"
    kept_dtype="operand",
    out_dtype="operand",
    double_row=False,
):
    """Return h, [m, n], or y, [m, k]; turned with out_layout "col"."""
    features = k if down else n
    requantize = kept_dtype == "float8_e4m3"
    wide = kept_dtype == "float32"
    kept_row = double_row and requantize
    if out_dtype == "bfloat16":
        y_dtype = nl.bfloat16
    elif out_dtype == "float16":
        y_dtype = nl.float16
    elif out_dtype == "float32":
        y_dtype = nl.float32
    else:
        y_dtype = x.dtype
    if out_layout == "row":
        out = nl.ndarray((m, features), dtype=y_dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((features, m), dtype=y_dtype, buffer=nl.shared_hbm)
    gate_bias_sb = None
    up_bias_sb = None
    down_bias_sb = None
    columns_out = down or out_layout == "col"
    if has_gate_bias:
        if columns_out:
            gate_bias_sb = bias_columns(gate_bias, n)
        else:
            gate_bias_sb = spread_bias(gate_bias, n)
    if has_up_bias:
        if columns_out:
            up_bias_sb = bias_columns(up_bias, n)
        else:
            up_bias_sb = spread_bias(up_bias, n)
    if has_down_bias:
        if out_layout == "row":
            down_bias_sb = spread_bias(down_bias, k)
        else:
            down_bias_sb = bias_columns(down_bias, k)

    gate_p_scale_sb = None
    gate_scale_sb = None
    up_p_scale_sb = None
    up_scale_sb = None
    h_inverse = None
    down_p_scale_sb = None
    down_scale_sb = None
    if scales != "none":
        if gate_r > 0:
            gate_p_scale_sb = product_scales(gate_u_scale, x_scale, gate_r, scales, True, True)
            if requantize:
                times(gate_p_scale_sb, reciprocal_of(load_scale(gate_p_scale)))
            gate_scale_sb = product_scales(
                gate_v_scale, gate_p_scale, n, scales, columns_out, requantize
            )
        else:
            gate_scale_sb = product_scales(gate_w_scale, x_scale, n, scales, columns_out, True)
        if up_r > 0:
            up_p_scale_sb = product_scales(up_u_scale, x_scale, up_r, scales, True, True)
            if requantize:
                times(up_p_scale_sb, reciprocal_of(load_scale(up_p_scale)))
            up_scale_sb = product_scales(up_v_scale, up_p_scale, n, scales, columns_out, requantize)
        else:
            up_scale_sb = product_scales(up_w_scale, x_scale, n, scales, columns_out, True)
        if down:
            y_down = out_layout == "col"
            if requantize:
                h_inverse = reciprocal_of(load_scale(h_scale))
            if down_r > 0:
                down_p_scale_sb = product_scales(
                    down_u_scale, h_scale, down_r, scales, True, requantize
                )
                if requantize:
                    times(down_p_scale_sb, reciprocal_of(load_scale(down_p_scale)))
                down_scale_sb = product_scales(
                    down_v_scale, down_p_scale, k, scales, y_down, requantize
                )
            else:
                down_scale_sb = product_scales(down_w_scale, h_scale, k, scales, y_down, requantize)

    first = 0
    if m_loop:
        # on the device: the compiled program holds one block, whatever the number of tokens
        first = m - m % m_block
        x_dim = 1 if x_by_features else 0
        out_dim = 0 if out_layout == "row" else 1
        x_blocks = split(x, x_dim, m // m_block, m_block)
        out_blocks = split(out, out_dim, m // m_block, m_block)

        def body(i):
            at = position(i)
            x_part = x_blocks.select(x_dim, at)
            out_part = out_blocks.select(out_dim, at)
            gated_block(
                out_part, x_part, gate_u, gate_v, gate_w, up_u, up_v, up_w, down_u, down_v, down_w,
                gate_bias_sb, up_bias_sb, down_bias_sb, gate_p_scale_sb, gate_scale_sb,
                up_p_scale_sb, up_scale_sb, h_inverse, down_p_scale_sb, down_scale_sb, 0, m_block,
                k, n, gate_r, up_r, down_r, down, columns_out, out_layout, has_gate_bias,
                has_up_bias, has_down_bias, activation, x_load, w_load, k_order, k_chunk, x_chunk,
                k_segment, n_segment, u_block, r_group, v_block, v_chunk, n_group, down_block,
                down_chunk, down_group, out_block, out_chunk, out_group, u_stream, down_stream,
                scales, kept_dtype, requantize, wide, double_row, kept_row,
            )  # fmt: skip

        nl.fori_loop(0, m // m_block, body)
    for m0 in range(first, m, m_block):
        gated_block(
            out, x, gate_u, gate_v, gate_w, up_u, up_v, up_w, down_u, down_v, down_w, gate_bias_sb,
            up_bias_sb, down_bias_sb, gate_p_scale_sb, gate_scale_sb, up_p_scale_sb, up_scale_sb,
            h_inverse, down_p_scale_sb, down_scale_sb, m0, min(m_block, m - m0), k, n, gate_r, up_r,
            down_r, down, columns_out, out_layout, has_gate_bias, has_up_bias, has_down_bias,
            activation, x_load, w_load, k_order, k_chunk, x_chunk, k_segment, n_segment, u_block,
            r_group, v_block, v_chunk, n_group, down_block, down_chunk, down_group, out_block,
            out_chunk, out_group, u_stream, down_stream, scales, kept_dtype, requantize, wide,
            double_row, kept_row,
        )  # fmt: skip
    return out


def gated_block(
    out, x, gate_u, gate_v, gate_w, up_u, up_v, up_w, down_u, down_v, down_w, gate_bias_sb,
    up_bias_sb, down_bias_sb, gate_p_scale_sb, gate_scale_sb, up_p_scale_sb, up_scale_sb, h_inverse,
    down_p_scale_sb, down_scale_sb, m0, tokens, k, n, gate_r, up_r, down_r, down, columns_out,
    out_layout, has_gate_bias, has_up_bias, has_down_bias, activation, x_load, w_load, k_order,
    k_chunk, x_chunk, k_segment, n_segment, u_block, r_group, v_block, v_chunk, n_group, down_block,
    down_chunk, down_group, out_block, out_chunk, out_group, u_stream, down_stream, scales,
    kept_dtype, requantize, wide, double_row, kept_row,
):  # fmt: skip
    """Compute h, or y, of `tokens` tokens from m0 on."""
    if kept_dtype == "bfloat16":
        p_dtype = nl.bfloat16
    elif kept_dtype == "float32":
        p_dtype = nl.float32
    else:
        p_dtype = x.dtype
    pitch = (tokens + 15) // 16 * 16 if double_row else tokens
    kept_pitch = (tokens + 15) // 16 * 16 if kept_row else tokens
    x_sb = nl.ndarray((128, (k + 127) // 128, pitch), dtype=x.dtype, buffer=nl.sbuf)
    for k0 in range(0, k, x_chunk):
        load(x_sb, k0 // 128, x, k0, min(x_chunk, k - k0), m0, tokens, x_load, k_order, k)

    # Up: the products that need a middle step first, (x u)^T with the rank on the partitions.
    if gate_r > 0:
        gate_sb = nl.ndarray(
            (128, (gate_r + 127) // 128, kept_pitch), dtype=p_dtype, buffer=nl.sbuf
        )
        project(
            gate_sb, x_sb, None, None, gate_u, m0, tokens, k, gate_r, "none", 128, w_load,
            k_order, k_chunk, k_segment, False, u_block, r_group, False, u_stream, 1.0,
            gate_p_scale_sb, scales, requantize, False, double_row,
        )  # fmt: skip
        gate = gate_v
    else:
        gate_sb = x_sb
        gate = gate_w
    if up_r > 0:
        up_sb = nl.ndarray((128, (up_r + 127) // 128, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        project(
            up_sb, x_sb, None, None, up_u, m0, tokens, k, up_r, "none", 128, w_load,
            k_order, k_chunk, k_segment, False, u_block, r_group, False, u_stream, 1.0,
            up_p_scale_sb, scales, requantize, False, double_row,
        )  # fmt: skip
        up = up_v
    else:
        up_sb = x_sb
        up = up_w
    gate_k = gate_r if gate_r > 0 else k
    up_k = up_r if up_r > 0 else k
    gate_order = "t" if gate_r > 0 else k_order
    up_order = "t" if up_r > 0 else k_order
    gate_row = kept_row if gate_r > 0 else double_row
    up_row = kept_row if up_r > 0 else double_row
    gate_wide = wide and gate_r > 0
    up_wide = wide and up_r > 0
    last_tiles = (down_r + 127) // 128
    if down_r > 0:
        last_sb = nl.ndarray((128, last_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
    if down_r > 0 and n_segment < n:
        # fp32 sums of the segments
        parts = nl.ndarray((128, last_tiles, tokens), dtype=nl.float32, buffer=nl.sbuf)
    else:
        parts = None
    # h^T: a down projection of two factors takes it segment by segment.
    for n1 in range(0, n, n_segment):
        n_stop = min(n1 + n_segment, n)
        h_tiles = (min(n_segment, n) + 127) // 128
        if down:
            h_sb = nl.ndarray((128, h_tiles, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        else:
            h_sb = None
        if columns_out:
            gate_columns(
                out, h_sb, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n1,
                n_stop, gate_k, up_k, w_load, gate_order, up_order, v_chunk, v_chunk, v_block,
                n_group, down, has_gate_bias, has_up_bias, activation, gate_scale_sb, up_scale_sb,
                h_inverse, scales, requantize, gate_wide, up_wide, gate_row, up_row,
            )  # fmt: skip
        else:
            gate_rows(
                out, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n, gate_k,
                up_k, w_load, gate_order, up_order, v_chunk, v_chunk, v_block, n_group,
                has_gate_bias, has_up_bias, activation, gate_scale_sb, up_scale_sb, scales,
                gate_wide, up_wide, gate_row, up_row,
            )  # fmt: skip
        if down_r > 0:
            project_segment(
                last_sb, parts, h_sb, None, None, down_u, m0, tokens, n1, n_stop, n, down_r,
                "none", 128, w_load, "t", down_chunk, n_segment, n_segment < n, True, down_block,
                down_group, False, down_stream, 1.0, down_p_scale_sb, scales, requantize, wide,
                kept_row,
            )  # fmt: skip

    # Down: h^T is in SBUF with its features on the partitions.
    if down:
        if down_r > 0:
            last = down_v
        else:
            last_sb = h_sb
            last = down_w
        last_k = down_r if down_r > 0 else n
        if out_layout == "row":
            expand_rows(
                out, last_sb, None, None, down_bias_sb, None, last, None, m0, tokens, last_k, k,
                0, "none", 128, w_load, "rows", "t", "t", out_chunk, 128, out_block, out_group,
                False, False, has_down_bias, "identity", down_scale_sb, scales, wide, kept_row,
            )  # fmt: skip
        else:
            expand_columns(
                out, last_sb, None, None, down_bias_sb, None, last, None, m0, tokens, last_k, k,
                0, "none", 128, w_load, "rows", "t", "t", out_chunk, 128, out_block, out_group,
                False, False, has_down_bias, "identity", False, down_scale_sb, scales, wide,
                kept_row,
            )  # fmt: skip
