"""Low-rank product y = activation(x w + scale (x u) v + bias), x w being optional.

Stage 1 holds tiles of u still and moves x^T, so that (x u)^T comes out with the rank on the
partitions; stage 2 contracts over the rank and takes it as it lies, as the still operand (y) or as
the moving one (y^T). The intermediate never leaves the chip and is never transposed.
"""

import nki
import nki.language as nl

from .parts import bias_columns, spread_bias
from .stages import expand_columns, expand_rows, project


@nki.jit
def lowrank(
    x,
    u,
    v,
    w=None,
    bias=None,
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
):
    """Return y, [m, n], or [n, m] with out_layout "col"."""
    k_tiles = (k + 127) // 128
    r_tiles = (r + 127) // 128
    u_all = None
    v_all = None
    bias_sb = None
    if out_layout == "row":
        out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((n, m), dtype=x.dtype, buffer=nl.shared_hbm)
    if has_bias:
        if out_layout == "row":
            bias_sb = spread_bias(bias, n)
        else:
            bias_sb = bias_columns(bias, n)
    if u_resident:
        u_all = nl.ndarray((128, k_tiles, r), dtype=u.dtype, buffer=nl.sbuf)
    if v_resident:
        v_all = nl.ndarray((128, r_tiles, n), dtype=v.dtype, buffer=nl.sbuf)

    for m0 in range(0, m, m_block):
        tokens = min(m_block, m - m0)

        # Stage 1: p^T = (x u)^T, summed over all of k in PSUM, rounded once on the way out.
        if x_stream:
            x_sb = None
        else:
            x_sb = nl.ndarray((128, k_tiles, tokens), dtype=x.dtype, buffer=nl.sbuf)
        p_sb = nl.ndarray((128, r_tiles, tokens), dtype=v.dtype, buffer=nl.sbuf)
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
            )
    return out
