"""Dense product y = activation(x w + bias), in any layout of x, w and y.

The contraction lies on the partitions of both operands. For y the tokens are still and w moves;
for y^T tiles of w are still and the tokens move. Sums stay in PSUM over all of k.
"""

import nki
import nki.language as nl

from ..pieces.loads_and_stores import bias_columns, position, product_scales, split, spread_bias
from ..pieces.product_to_hbm import expand_columns, expand_rows


@nki.jit
def matmul(
    x,
    w,
    bias=None,
    x_scale=None,
    w_scale=None,
    m=1,  # tokens
    k=1,  # input features
    n=1,  # output features
    out_layout="row",
    has_bias=False,
    activation="identity",
    x_load="rows",
    w_load="rows",
    k_order="p",
    m_block=128,
    m_loop=False,
    x_by_features=False,  # x is passed k x m
    k_chunk=128,
    x_chunk=128,
    n_block=128,
    n_group=1,
    w_resident=False,
    w_stream=False,
    scales="none",  # of fp8 operands: "tensor" or "channel"
    out_dtype="operand",
    double_row=False,
):
    """Return y, [m, n], or [n, m] with out_layout "col"."""
    k_tiles = (k + 127) // 128
    w_all = None
    bias_sb = None
    scale_sb = None
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
        scale_sb = product_scales(w_scale, x_scale, n, scales, out_layout == "col", True)
    if w_resident:
        w_pitch = (n + 15) // 16 * 16 if double_row else n
        w_all = nl.ndarray((128, k_tiles, w_pitch), dtype=w.dtype, buffer=nl.sbuf)

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
            matmul_block(
                out_part, x_part, w, w_all, bias_sb, scale_sb, 0, m_block, k, n, out_layout,
                has_bias, activation, x_load, w_load, k_order, k_chunk, x_chunk, n_block, n_group,
                w_resident, w_stream, scales, double_row,
            )  # fmt: skip

        nl.fori_loop(0, m // m_block, body)
    for m0 in range(first, m, m_block):
        matmul_block(
            out, x, w, w_all, bias_sb, scale_sb, m0, min(m_block, m - m0), k, n, out_layout,
            has_bias, activation, x_load, w_load, k_order, k_chunk, x_chunk, n_block, n_group,
            w_resident, w_stream, scales, double_row,
        )  # fmt: skip
    return out


def matmul_block(
    out, x, w, w_all, bias_sb, scale_sb, m0, tokens, k, n, out_layout, has_bias, activation, x_load,
    w_load, k_order, k_chunk, x_chunk, n_block, n_group, w_resident, w_stream, scales, double_row,
):  # fmt: skip
    """Compute y of `tokens` tokens from m0 on."""
    k_tiles = (k + 127) // 128
    pitch = (tokens + 15) // 16 * 16 if double_row else tokens
    x_sb = nl.ndarray((128, k_tiles, pitch), dtype=x.dtype, buffer=nl.sbuf)
    if out_layout == "row":
        expand_rows(
            out,
            x_sb,
            w_all,
            None,
            bias_sb,
            x,
            w,
            None,
            m0,
            tokens,
            k,
            n,
            0,
            x_load,
            x_chunk,
            w_load,
            "rows",
            k_order,
            k_order,
            k_chunk,
            128,
            n_block,
            n_group,
            w_resident,
            w_stream,
            has_bias,
            activation,
            scale_sb,
            scales,
            False,
            double_row,
        )
    else:
        expand_columns(
            out,
            x_sb,
            w_all,
            None,
            bias_sb,
            x,
            w,
            None,
            m0,
            tokens,
            k,
            n,
            0,
            x_load,
            x_chunk,
            w_load,
            "rows",
            k_order,
            k_order,
            k_chunk,
            128,
            n_block,
            n_group,
            w_resident,
            w_stream,
            has_bias,
            activation,
            False,
            scale_sb,
            scales,
            False,
            double_row,
        )
