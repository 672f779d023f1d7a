"""The gated product h = activation(s_gate gate + b) * (s_up up + b), for one block of tokens.

The gate's sum leaves PSUM through the activation, the up sum through the multiplication.
`gate_columns` gives h^T, kept in SBUF or stored; `gate_rows` stores h.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import (
    activate_scaled_with_bias_column,
    finish_columns,
    finish_rows,
    load,
    quantize,
    store_rows,
)


def gate_columns(
    out, h_sb, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n_first, n_stop,
    gate_k, up_k, w_load, gate_order, up_order, gate_chunk, up_chunk, w_block, group_tiles, keep,
    has_gate_bias, has_up_bias, activation, gate_scale_sb, up_scale_sb, h_inverse, scales,
    requantize, gate_wide, up_wide, gate_row, up_row,
):  # fmt: skip
    """Compute rows of h^T: weights still, tokens moving; into h_sb if kept, else into `out`."""
    m_tiles = (tokens + 511) // 512
    for n0 in range(n_first, n_stop, w_block):
        columns = min(w_block, n_stop - n0)
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
            first = (n0 - n_first) // 128
            y_sb = h_sb[0:128, first : first + n_tiles, 0:tokens]
        else:
            y_sb = nl.ndarray((128, n_tiles, tokens), dtype=out.dtype, buffer=nl.sbuf)
        # the gate of the whole panel first: while it is summed, the up weights arrive
        active_sb = nl.ndarray((128, n_tiles, tokens), dtype=nl.float32, buffer=nl.sbuf)
        for n1 in range(0, n_tiles, group_tiles):
            group = min(group_tiles, n_tiles - n1)
            gates = []
            for _ in range(group * m_tiles):
                gates.append(nl.ndarray((128, min(512, tokens)), dtype=nl.float32, buffer=nl.psum))
            sum_columns(
                gates, gate_w_sb, gate_sb, gate, n0, columns, n1, group, tokens, gate_k,
                gate_chunk, w_load, gate_order, gate_row,
            )  # fmt: skip
            for i in range(group):
                nw = min(128, columns - 128 * (n1 + i))
                nt = n0 // 128 + n1 + i
                st = nt if scales == "channel" else 0
                gate_bias = gate_bias_sb[0:nw, nt : nt + 1] if has_gate_bias else None
                gate_scale = gate_scale_sb[0:nw, st : st + 1] if scales != "none" else None
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    active = active_sb[0:nw, n1 + i, ms : ms + mw]
                    finish_columns(
                        active, gates[i * m_tiles + mt][0:nw, 0:mw], gate_scale, gate_bias,
                        scales, has_gate_bias, activation, 1,
                    )  # fmt: skip
        for n1 in range(0, n_tiles, group_tiles):
            group = min(group_tiles, n_tiles - n1)
            ups = []
            for _ in range(group * m_tiles):
                ups.append(nl.ndarray((128, min(512, tokens)), dtype=nl.float32, buffer=nl.psum))
            sum_columns(
                ups, up_w_sb, up_sb, up, n0, columns, n1, group, tokens, up_k, up_chunk, w_load,
                up_order, up_row,
            )  # fmt: skip
            for i in range(group):
                nw = min(128, columns - 128 * (n1 + i))
                nt = n0 // 128 + n1 + i
                st = nt if scales == "channel" else 0
                up_bias = up_bias_sb[0:nw, nt : nt + 1] if has_up_bias else None
                up_scale = up_scale_sb[0:nw, st : st + 1] if scales != "none" else None
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    active = active_sb[0:nw, n1 + i, ms : ms + mw]
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
