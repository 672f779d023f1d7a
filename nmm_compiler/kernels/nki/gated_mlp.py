"""Gated MLP: h = activation(x gate + b) * (x up + b), and with `down` also y = h down + b.

gate, up and down are each a dense weight or two factors. x is read once for both branches. The
branches meet in PSUM: the gate's sum leaves through the activation, the up sum leaves through the
multiplication. For the down projection h^T is kept in SBUF as it comes out, outputs on the
partitions, which is what the next contraction takes.

fp8 operands come with scales, which are multiplied in where sums leave PSUM. p and h are kept in
the operands' dtype, in bfloat16 or fp32, or quantized to fp8 by scales of their own (`kept_dtype`).
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .parts import (
    activate_scaled_with_bias_column,
    bias_columns,
    finish_columns,
    finish_rows,
    load,
    load_scale,
    product_scales,
    quantize,
    reciprocal_of,
    spread_bias,
    store_rows,
    times,
)
from .stages import expand_columns, expand_rows, project


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
    k_chunk=128,
    x_chunk=128,
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
    if kept_dtype == "bfloat16":
        p_dtype = nl.bfloat16
    elif kept_dtype == "float32":
        p_dtype = nl.float32
    else:
        p_dtype = x.dtype
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

    for m0 in range(0, m, m_block):
        tokens = min(m_block, m - m0)
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
                k_order, k_chunk, k, False, u_block, r_group, False, u_stream, 1.0,
                gate_p_scale_sb, scales, requantize, False, double_row,
            )  # fmt: skip
            gate = gate_v
        else:
            gate_sb = x_sb
            gate = gate_w
        if up_r > 0:
            up_sb = nl.ndarray(
                (128, (up_r + 127) // 128, kept_pitch), dtype=p_dtype, buffer=nl.sbuf
            )
            project(
                up_sb, x_sb, None, None, up_u, m0, tokens, k, up_r, "none", 128, w_load,
                k_order, k_chunk, k, False, u_block, r_group, False, u_stream, 1.0,
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
        if down:
            h_sb = nl.ndarray((128, (n + 127) // 128, kept_pitch), dtype=p_dtype, buffer=nl.sbuf)
        else:
            h_sb = None
        if columns_out:
            gate_columns(
                out, h_sb, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n,
                gate_k, up_k, w_load, gate_order, up_order, v_chunk, v_chunk, v_block, n_group,
                down, has_gate_bias, has_up_bias, activation, gate_scale_sb, up_scale_sb,
                h_inverse, scales, requantize, gate_wide, up_wide, gate_row, up_row,
            )  # fmt: skip
        else:
            gate_rows(
                out, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n, gate_k,
                up_k, w_load, gate_order, up_order, v_chunk, v_chunk, v_block, n_group,
                has_gate_bias, has_up_bias, activation, gate_scale_sb, up_scale_sb, scales,
                gate_wide, up_wide, gate_row, up_row,
            )  # fmt: skip

        # Down: h^T is in SBUF with its features on the partitions.
        if down:
            if down_r > 0:
                last_sb = nl.ndarray(
                    (128, (down_r + 127) // 128, kept_pitch), dtype=p_dtype, buffer=nl.sbuf
                )
                project(
                    last_sb, h_sb, None, None, down_u, m0, tokens, n, down_r, "none", 128, w_load,
                    "t", down_chunk, n, False, down_block, down_group, False, down_stream, 1.0,
                    down_p_scale_sb, scales, requantize, wide, kept_row,
                )  # fmt: skip
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
    return out


def gate_columns(
    out, h_sb, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n, gate_k, up_k,
    w_load, gate_order, up_order, gate_chunk, up_chunk, w_block, group_tiles, keep, has_gate_bias,
    has_up_bias, activation, gate_scale_sb, up_scale_sb, h_inverse, scales, requantize, gate_wide,
    up_wide, gate_row, up_row,
):  # fmt: skip
    """Compute h^T: weights still, tokens moving; into h_sb if it is kept, else stored to `out`."""
    m_tiles = (tokens + 511) // 512
    for n0 in range(0, n, w_block):
        columns = min(w_block, n - n0)
        n_tiles = (columns + 127) // 128
        gate_pitch = (columns + 15) // 16 * 16 if gate_row else columns
        up_pitch = (columns + 15) // 16 * 16 if up_row else columns
        gate_w_sb = nl.ndarray(
            (128, (gate_k + 127) // 128, gate_pitch), dtype=nl.float32 if gate_wide else gate.dtype
        )
        up_w_sb = nl.ndarray(
            (128, (up_k + 127) // 128, up_pitch), dtype=nl.float32 if up_wide else up.dtype
        )
        if keep:
            y_sb = h_sb[0:128, n0 // 128 : n0 // 128 + n_tiles, 0:tokens]
        else:
            y_sb = nl.ndarray((128, n_tiles, tokens), dtype=out.dtype, buffer=nl.sbuf)
        for n1 in range(0, n_tiles, group_tiles):
            group = min(group_tiles, n_tiles - n1)
            gates = []
            ups = []
            for _ in range(group * m_tiles):
                gates.append(nl.ndarray((128, min(512, tokens)), dtype=nl.float32, buffer=nl.psum))
                ups.append(nl.ndarray((128, min(512, tokens)), dtype=nl.float32, buffer=nl.psum))
            sum_columns(
                gates, gate_w_sb, gate_sb, gate, n0, columns, n1, group, tokens, gate_k,
                gate_chunk, w_load, gate_order, gate_row,
            )  # fmt: skip
            sum_columns(
                ups, up_w_sb, up_sb, up, n0, columns, n1, group, tokens, up_k, up_chunk, w_load,
                up_order, up_row,
            )  # fmt: skip
            for i in range(group):
                ns = 128 * (n1 + i)
                nw = min(128, columns - ns)
                nt = n0 // 128 + n1 + i
                st = nt if scales == "channel" else 0
                gate_bias = gate_bias_sb[0:nw, nt : nt + 1] if has_gate_bias else None
                up_bias = up_bias_sb[0:nw, nt : nt + 1] if has_up_bias else None
                gate_scale = gate_scale_sb[0:nw, st : st + 1] if scales != "none" else None
                up_scale = up_scale_sb[0:nw, st : st + 1] if scales != "none" else None
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    active = nl.ndarray((nw, mw), dtype=nl.float32, buffer=nl.sbuf)
                    finish_columns(
                        active, gates[i * m_tiles + mt][0:nw, 0:mw], gate_scale, gate_bias,
                        scales, has_gate_bias, activation, 1,
                    )  # fmt: skip
                    y_tile = y_sb[0:nw, n1 + i, ms : ms + mw]
                    up_sum = ups[i * m_tiles + mt][0:nw, 0:mw]
                    if keep and requantize:
                        h_tile = nl.ndarray((nw, mw), dtype=nl.float32, buffer=nl.sbuf)
                        multiply(h_tile, up_sum, up_scale, up_bias, active, scales, has_up_bias)
                        quantize(y_tile, h_tile, h_inverse[0:nw, 0:1])
                    else:
                        multiply(y_tile, up_sum, up_scale, up_bias, active, scales, has_up_bias)
        if not keep:
            store_rows(out, y_sb, n0, columns, m0, tokens)


def multiply(dst, up_sum, scale, bias, active, scales, has_bias):
    """Write (scale up_sum + bias) * active, outputs on the partitions."""
    if has_bias and scales != "none":
        up = nl.ndarray(up_sum.shape, dtype=nl.float32, buffer=nl.sbuf)
        activate_scaled_with_bias_column(up, up_sum, scale, bias, "identity")
        nisa.tensor_tensor(dst=dst, data1=up, data2=active, op=nl.multiply)
    elif has_bias:
        nisa.scalar_tensor_tensor(
            dst=dst, data=up_sum, op0=nl.add, operand0=bias, op1=nl.multiply, operand1=active
        )
    elif scales != "none":
        nisa.scalar_tensor_tensor(
            dst=dst, data=up_sum, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=active
        )
    else:
        nisa.tensor_tensor(dst=dst, data1=up_sum, data2=active, op=nl.multiply)


def sum_columns(
    sums, w_sb, s_sb, w, n0, columns, n1, group, tokens, k, k_chunk, w_load, order, double_row,
):  # fmt: skip
    """Sum (s w)^T over k into a group of PSUM tiles, outputs on the partitions; loads w once."""
    m_tiles = (tokens + 511) // 512
    for k0 in range(0, k, k_chunk):
        rows = min(k_chunk, k - k0)
        if n1 == 0:
            load(w_sb, k0 // 128, w, k0, rows, n0, columns, w_load, order, k)
        pairs = rows // 256 if double_row else 0
        for pair in range(pairs):
            kt = k0 // 128 + 2 * pair
            for i in range(group):
                ns = 128 * (n1 + i)
                nw = min(128, columns - ns)
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    nisa.nc_matmul(
                        dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                        stationary=w_sb[0:128, kt : kt + 2, ns : ns + nw],
                        moving=s_sb[0:128, kt : kt + 2, ms : ms + mw],
                        accumulate=kt > 0,
                        perf_mode=nisa.matmul_perf_mode.double_row,
                    )
        for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
            kp = min(128, k - 128 * kt)
            for i in range(group):
                ns = 128 * (n1 + i)
                nw = min(128, columns - ns)
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    nisa.nc_matmul(
                        dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                        stationary=w_sb[0:kp, kt, ns : ns + nw],
                        moving=s_sb[0:kp, kt, ms : ms + mw],
                        accumulate=kt > 0,
                    )


def gate_rows(
    out, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n, gate_k, up_k, w_load,
    gate_order, up_order, gate_chunk, up_chunk, w_block, group_tiles, has_gate_bias, has_up_bias,
    activation, gate_scale_sb, up_scale_sb, scales, gate_wide, up_wide, gate_row, up_row,
):  # fmt: skip
    """Store h [tokens, n]: tokens still, weights moving."""
    for n0 in range(0, n, w_block):
        columns = min(w_block, n - n0)
        gate_pitch = (columns + 15) // 16 * 16 if gate_row else columns
        up_pitch = (columns + 15) // 16 * 16 if up_row else columns
        gate_w_sb = nl.ndarray(
            (128, (gate_k + 127) // 128, gate_pitch), dtype=nl.float32 if gate_wide else gate.dtype
        )
        up_w_sb = nl.ndarray(
            (128, (up_k + 127) // 128, up_pitch), dtype=nl.float32 if up_wide else up.dtype
        )
        for mt in range((tokens + 127) // 128):
            ms = 128 * mt
            mw = min(128, tokens - ms)
            y_sb = nl.ndarray((mw, columns), dtype=out.dtype, buffer=nl.sbuf)
            for n1 in range(0, columns, 512 * group_tiles):
                group = (min(512 * group_tiles, columns - n1) + 511) // 512
                wide = min(512, columns)
                gates = []
                ups = []
                for _ in range(group):
                    gates.append(nl.ndarray((mw, wide), dtype=nl.float32, buffer=nl.psum))
                    ups.append(nl.ndarray((mw, wide), dtype=nl.float32, buffer=nl.psum))
                sum_rows(
                    gates, gate_w_sb, gate_sb, gate, n0, columns, n1, group, ms, mw, gate_k,
                    gate_chunk, w_load, gate_order, gate_row,
                )  # fmt: skip
                sum_rows(
                    ups, up_w_sb, up_sb, up, n0, columns, n1, group, ms, mw, up_k, up_chunk,
                    w_load, up_order, up_row,
                )  # fmt: skip
                for i in range(group):
                    ns = n1 + 512 * i
                    nw = min(512, columns - ns)
                    n_at = n0 + ns
                    gate_bias = gate_bias_sb[0:mw, n_at : n_at + nw] if has_gate_bias else None
                    up_bias = up_bias_sb[0:mw, n_at : n_at + nw] if has_up_bias else None
                    if scales == "channel":
                        gate_scale = gate_scale_sb[0:mw, n_at : n_at + nw]
                        up_scale = up_scale_sb[0:mw, n_at : n_at + nw]
                    elif scales == "tensor":
                        gate_scale = gate_scale_sb[0:mw, 0:1]
                        up_scale = up_scale_sb[0:mw, 0:1]
                    else:
                        gate_scale = None
                        up_scale = None
                    active = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.sbuf)
                    finish_rows(
                        active, gates[i][0:mw, 0:nw], gate_scale, gate_bias, scales,
                        has_gate_bias, activation, 1,
                    )  # fmt: skip
                    up_sum = ups[i][0:mw, 0:nw]
                    if has_up_bias or scales != "none":
                        shifted = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.sbuf)
                        finish_rows(
                            shifted, up_sum, up_scale, up_bias, scales, has_up_bias, "identity", 0
                        )
                        up_sum = shifted
                    nisa.tensor_tensor(
                        dst=y_sb[0:mw, ns : ns + nw], data1=up_sum, data2=active, op=nl.multiply
                    )
            nisa.dma_copy(dst=out[m0 + ms : m0 + ms + mw, n0 : n0 + columns], src=y_sb)


def sum_rows(
    sums, w_sb, s_sb, w, n0, columns, n1, group, ms, mw, k, k_chunk, w_load, order, double_row,
):  # fmt: skip
    """Sum s w over k into a group of PSUM tiles, tokens on the partitions; loads w once."""
    for k0 in range(0, k, k_chunk):
        rows = min(k_chunk, k - k0)
        if ms == 0 and n1 == 0:
            load(w_sb, k0 // 128, w, k0, rows, n0, columns, w_load, order, k)
        pairs = rows // 256 if double_row else 0
        for pair in range(pairs):
            kt = k0 // 128 + 2 * pair
            for i in range(group):
                ns = n1 + 512 * i
                nw = min(512, columns - ns)
                nisa.nc_matmul(
                    dst=sums[i][0:mw, 0:nw],
                    stationary=s_sb[0:128, kt : kt + 2, ms : ms + mw],
                    moving=w_sb[0:128, kt : kt + 2, ns : ns + nw],
                    accumulate=kt > 0,
                    perf_mode=nisa.matmul_perf_mode.double_row,
                )
        for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
            kp = min(128, k - 128 * kt)
            for i in range(group):
                ns = n1 + 512 * i
                nw = min(512, columns - ns)
                nisa.nc_matmul(
                    dst=sums[i][0:mw, 0:nw],
                    stationary=s_sb[0:kp, kt, ms : ms + mw],
                    moving=w_sb[0:kp, kt, ns : ns + nw],
                    accumulate=kt > 0,
                )
