"""Low-rank product y = activation(x w + scale (x u) v + bias), x w being optional.

Stage 1 holds tiles of u still and moves x^T, so that (x u)^T comes out with the rank on the
partitions; stage 2 contracts over the rank and takes it as it lies, as the still operand (y) or as
the moving one (y^T). The intermediate never leaves the chip and is never transposed.

fp8 operands come with scales, which are multiplied in where sums leave PSUM. p is kept in the
operands' dtype, in bfloat16 or fp32, or quantized to fp8 by p_scale (`kept_dtype`).
"""

import nki
import nki.language as nl

from ..pieces.loads_and_stores import (
    bias_columns,
    load_scale,
    panel_scales,
    position,
    product_scales,
    reciprocal_of,
    split,
    spread_bias,
    times,
)
from ..pieces.product_in_sbuf import project
from ..pieces.product_to_hbm import expand_columns, expand_rows


@nki.jit
def lowrank(
    x,
    u,
    v,
    w=None,
    bias=None,
    x_scale=None,
    u_scale=None,
    v_scale=None,
    p_scale=None,
    m=1,  # tokens
    k=1,  # input features
    r=1,  # rank
    n=1,  # output features
    out_layout="row",
    base_k=0,
    has_bias=False,
    scale=1.0,
    activation="identity",
    x_load="rows",
    u_load="rows",
    v_load="rows",
    w_load="rows",
    k_order="p",
    m_block=128,
    m_loop=False,
    x_by_features=False,  # x is passed k x m
    k_chunk=128,
    x_chunk=128,
    k_segment=128,
    x_stream=False,
    u_block=128,
    r_group=1,
    v_block=128,
    v_chunk=128,
    n_group=1,
    u_resident=False,
    v_resident=False,
    u_stream=False,
    v_stream=False,
    v_still=False,
    scales="none",  # of fp8 operands: "tensor" or "channel"
    kept_dtype="operand",
    out_dtype="operand",
    double_row=False,
):
    """Return y, [m, n], or [n, m] with out_layout "col"."""
    k_tiles = (k + 127) // 128
    r_tiles = (r + 127) // 128
    u_all = None
    v_all = None
    bias_sb = None
    p_scale_sb = None
    y_scale_sb = None
    down = v_still or out_layout == "col"
    requantize = kept_dtype == "float8_e4m3"
    wide = kept_dtype == "float32"
    second_row = double_row and requantize
    if out_dtype == "bfloat16":
        y_dtype = nl.bfloat16
    elif out_dtype == "float16":
        y_dtype = nl.float16
    elif out_dtype == "float32":
        y_dtype = nl.float32
    else:
        y_dtype = x.dtype
    if out_layout == "row":
        out = nl.ndarray((m, n), dtype=y_dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((n, m), dtype=y_dtype, buffer=nl.shared_hbm)
    if has_bias:
        if out_layout == "row":
            bias_sb = spread_bias(bias, n)
        else:
            bias_sb = bias_columns(bias, n)
    if scales != "none":
        p_scale_sb = product_scales(u_scale, x_scale, r, scales, True, True)
        if scale != 1.0:
            times(p_scale_sb, scale)
        if requantize:
            times(p_scale_sb, reciprocal_of(load_scale(p_scale)))
        if v_still and out_layout == "row" and scales == "channel":
            y_scale_sb = panel_scales(v_scale, n, v_block)
            if requantize:
                times(y_scale_sb, load_scale(p_scale))
        else:
            y_scale_sb = product_scales(v_scale, p_scale, n, scales, down, requantize)
    if u_resident:
        u_pitch = (r + 15) // 16 * 16 if double_row else r
        u_all = nl.ndarray((128, k_tiles, u_pitch), dtype=u.dtype, buffer=nl.sbuf)
    if v_resident:
        v_pitch = (n + 15) // 16 * 16 if second_row else n
        v_dtype = nl.float32 if wide else v.dtype
        v_all = nl.ndarray((128, r_tiles, v_pitch), dtype=v_dtype, buffer=nl.sbuf)

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
            lowrank_block(
                out_part, x_part, u, v, w, u_all, v_all, bias_sb, p_scale_sb, y_scale_sb, 0,
                m_block, k, r, n, out_layout, base_k, has_bias, scale, activation, x_load, u_load,
                v_load, w_load, k_order, k_chunk, x_chunk, k_segment, x_stream, u_block, r_group,
                v_block, v_chunk, n_group, u_resident, v_resident, u_stream, v_stream, v_still,
                scales, kept_dtype, requantize, wide, double_row, second_row,
            )  # fmt: skip

        nl.fori_loop(0, m // m_block, body)
    for m0 in range(first, m, m_block):
        lowrank_block(
            out, x, u, v, w, u_all, v_all, bias_sb, p_scale_sb, y_scale_sb, m0, min(m_block, m -
            m0), k, r, n, out_layout, base_k, has_bias, scale, activation, x_load, u_load, v_load,
            w_load, k_order, k_chunk, x_chunk, k_segment, x_stream, u_block, r_group, v_block,
            v_chunk, n_group, u_resident, v_resident, u_stream, v_stream, v_still, scales,
            kept_dtype, requantize, wide, double_row, second_row,
        )  # fmt: skip
    return out


def lowrank_block(
    out, x, u, v, w, u_all, v_all, bias_sb, p_scale_sb, y_scale_sb, m0, tokens, k, r, n, out_layout,
    base_k, has_bias, scale, activation, x_load, u_load, v_load, w_load, k_order, k_chunk, x_chunk,
    k_segment, x_stream, u_block, r_group, v_block, v_chunk, n_group, u_resident, v_resident,
    u_stream, v_stream, v_still, scales, kept_dtype, requantize, wide, double_row, second_row,
):  # fmt: skip
    """Compute y of `tokens` tokens from m0 on."""
    k_tiles = (k + 127) // 128
    r_tiles = (r + 127) // 128
    if kept_dtype == "bfloat16":
        p_dtype = nl.bfloat16
    elif kept_dtype == "float32":
        p_dtype = nl.float32
    else:
        p_dtype = x.dtype
    x_pitch = (tokens + 15) // 16 * 16 if double_row else tokens
    p_pitch = (tokens + 15) // 16 * 16 if second_row else tokens

    # Stage 1: p^T = (x u)^T, summed in PSUM, rounded once on the way out.
    if x_stream:
        x_sb = None
    else:
        x_sb = nl.ndarray((128, k_tiles, x_pitch), dtype=x.dtype, buffer=nl.sbuf)
    p_sb = nl.ndarray((128, r_tiles, p_pitch), dtype=p_dtype, buffer=nl.sbuf)
    project(
        p_sb,
        x_sb,
        u_all,
        x,
        u,
        m0,
        tokens,
        k,
        r,
        x_load,
        x_chunk,
        u_load,
        k_order,
        k_chunk,
        k_segment,
        x_stream,
        u_block,
        r_group,
        u_resident,
        u_stream,
        scale,
        p_scale_sb,
        scales,
        requantize,
        False,
        double_row,
    )

    # Stage 2: contracts over the rank, panel by panel of v.
    if out_layout == "row" and not v_still:
        expand_rows(
            out,
            p_sb,
            v_all,
            x_sb,
            bias_sb,
            p_sb,
            v,
            w,
            m0,
            tokens,
            r,
            n,
            base_k,
            "none",
            128,
            v_load,
            w_load,
            "t",
            k_order,
            v_chunk,
            k_chunk,
            v_block,
            n_group,
            v_resident,
            v_stream,
            has_bias,
            activation,
            y_scale_sb,
            scales,
            wide,
            second_row,
        )
    else:
        expand_columns(
            out,
            p_sb,
            v_all,
            x_sb,
            bias_sb,
            p_sb,
            v,
            w,
            m0,
            tokens,
            r,
            n,
            base_k,
            "none",
            128,
            v_load,
            w_load,
            "t",
            k_order,
            v_chunk,
            k_chunk,
            v_block,
            n_group,
            v_resident,
            v_stream,
            has_bias,
            activation,
            out_layout == "row",
            y_scale_sb,
            scales,
            wide,
            second_row,
        )
