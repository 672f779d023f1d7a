"""Dense product y = activation(x w + bias), in any layout of x, w and y.

The contraction lies on the partitions of both operands. For y the tokens are still and w moves;
for y^T tiles of w are still and the tokens move. Sums stay in PSUM over all of k.
"""

import nki
import nki.language as nl

from .parts import bias_columns, product_scales, spread_bias
from .stages import expand_columns, expand_rows


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

    for m0 in range(0, m, m_block):
        tokens = min(m_block, m - m0)
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
    return out
