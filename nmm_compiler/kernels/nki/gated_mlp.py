"""Gated MLP: h = activation(x gate + b) * (x up + b), and with `down` also y = h down + b.

gate, up and down are each a dense weight or two factors. x is read once for both branches. The
branches meet in PSUM: the gate's sum leaves through the activation, the up sum leaves through the
multiplication. For the down projection h^T is kept in SBUF as it comes out, outputs on the
partitions, which is what the next contraction takes.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .parts import activate, activate_with_bias_column, bias_columns, load, spread_bias, store_rows
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
):
    """Return h, [m, n], or y, [m, k]; turned with out_layout "col"."""
    features = k if down else n
    if out_layout == "row":
        out = nl.ndarray((m, features), dtype=x.dtype, buffer=nl.shared_hbm)
    else:
        out = nl.ndarray((features, m), dtype=x.dtype, buffer=nl.shared_hbm)
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

    for m0 in range(0, m, m_block):
        tokens = min(m_block, m - m0)
        x_sb = nl.ndarray((128, (k + 127) // 128, tokens), dtype=x.dtype, buffer=nl.sbuf)
        for k0 in range(0, k, x_chunk):
            load(x_sb, k0 // 128, x, k0, min(x_chunk, k - k0), m0, tokens, x_load, k_order, k)

        # Up: the products that need a middle step first, (x u)^T with the rank on the partitions.
        if gate_r > 0:
            gate_sb = nl.ndarray(
                (128, (gate_r + 127) // 128, tokens), dtype=x.dtype, buffer=nl.sbuf
            )
            project(
                gate_sb, x_sb, None, None, gate_u, m0, tokens, k, gate_r, "none", 128, w_load,
                k_order, k_chunk, k, False, u_block, r_group, False, u_stream, 1.0,
            )  # fmt: skip
            gate = gate_v
        else:
            gate_sb = x_sb
            gate = gate_w
        if up_r > 0:
            up_sb = nl.ndarray((128, (up_r + 127) // 128, tokens), dtype=x.dtype, buffer=nl.sbuf)
            project(
                up_sb, x_sb, None, None, up_u, m0, tokens, k, up_r, "none", 128, w_load,
                k_order, k_chunk, k, False, u_block, r_group, False, u_stream, 1.0,
            )  # fmt: skip
            up = up_v
        else:
            up_sb = x_sb
            up = up_w
        gate_k = gate_r if gate_r > 0 else k
        up_k = up_r if up_r > 0 else k
        gate_order = "t" if gate_r > 0 else k_order
        up_order = "t" if up_r > 0 else k_order
        if down:
            h_sb = nl.ndarray((128, (n + 127) // 128, tokens), dtype=x.dtype, buffer=nl.sbuf)
        else:
            h_sb = None
        if columns_out:
            gate_columns(
                out, h_sb, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n,
                gate_k, up_k, w_load, gate_order, up_order, v_chunk, v_chunk, v_block, n_group,
                down, has_gate_bias, has_up_bias, activation,
            )  # fmt: skip
        else:
            gate_rows(
                out, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n, gate_k,
                up_k, w_load, gate_order, up_order, v_chunk, v_chunk, v_block, n_group,
                has_gate_bias, has_up_bias, activation,
            )  # fmt: skip

        # Down: h^T is in SBUF with its features on the partitions.
        if down:
            if down_r > 0:
                last_sb = nl.ndarray(
                    (128, (down_r + 127) // 128, tokens), dtype=x.dtype, buffer=nl.sbuf
                )
                project(
                    last_sb, h_sb, None, None, down_u, m0, tokens, n, down_r, "none", 128, w_load,
                    "t", down_chunk, n, False, down_block, down_group, False, down_stream, 1.0,
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
                    False, False, has_down_bias, "identity",
                )  # fmt: skip
            else:
                expand_columns(
                    out, last_sb, None, None, down_bias_sb, None, last, None, m0, tokens, last_k, k,
                    0, "none", 128, w_load, "rows", "t", "t", out_chunk, 128, out_block, out_group,
                    False, False, has_down_bias, "identity", False,
                )  # fmt: skip
    return out


def gate_columns(
    out, h_sb, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n, gate_k, up_k,
    w_load, gate_order, up_order, gate_chunk, up_chunk, w_block, group_tiles, keep, has_gate_bias,
    has_up_bias, activation,
):  # fmt: skip
    """Compute h^T: weights still, tokens moving; into h_sb if it is kept, else stored to `out`."""
    m_tiles = (tokens + 511) // 512
    for n0 in range(0, n, w_block):
        columns = min(w_block, n - n0)
        n_tiles = (columns + 127) // 128
        gate_w_sb = nl.ndarray((128, (gate_k + 127) // 128, columns), dtype=gate.dtype)
        up_w_sb = nl.ndarray((128, (up_k + 127) // 128, columns), dtype=up.dtype)
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
            for k0 in range(0, gate_k, gate_chunk):
                rows = min(gate_chunk, gate_k - k0)
                if n1 == 0:
                    load(
                        gate_w_sb,
                        k0 // 128,
                        gate,
                        k0,
                        rows,
                        n0,
                        columns,
                        w_load,
                        gate_order,
                        gate_k,
                    )
                for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                    kp = min(128, gate_k - 128 * kt)
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        for mt in range(m_tiles):
                            ms = 512 * mt
                            mw = min(512, tokens - ms)
                            nisa.nc_matmul(
                                dst=gates[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=gate_w_sb[0:kp, kt, ns : ns + nw],
                                moving=gate_sb[0:kp, kt, ms : ms + mw],
                                accumulate=kt > 0,
                            )
            for k0 in range(0, up_k, up_chunk):
                rows = min(up_chunk, up_k - k0)
                if n1 == 0:
                    load(up_w_sb, k0 // 128, up, k0, rows, n0, columns, w_load, up_order, up_k)
                for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                    kp = min(128, up_k - 128 * kt)
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        for mt in range(m_tiles):
                            ms = 512 * mt
                            mw = min(512, tokens - ms)
                            nisa.nc_matmul(
                                dst=ups[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=up_w_sb[0:kp, kt, ns : ns + nw],
                                moving=up_sb[0:kp, kt, ms : ms + mw],
                                accumulate=kt > 0,
                            )
            for i in range(group):
                ns = 128 * (n1 + i)
                nw = min(128, columns - ns)
                nt = n0 // 128 + n1 + i
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    active = nl.ndarray((nw, mw), dtype=nl.float32, buffer=nl.sbuf)
                    gate_sum = gates[i * m_tiles + mt][0:nw, 0:mw]
                    if has_gate_bias:
                        activate_with_bias_column(
                            active, gate_sum, gate_bias_sb[0:nw, nt : nt + 1], activation
                        )
                    else:
                        activate(active, gate_sum, activation, 1)
                    y_tile = y_sb[0:nw, n1 + i, ms : ms + mw]
                    up_sum = ups[i * m_tiles + mt][0:nw, 0:mw]
                    if has_up_bias:
                        nisa.scalar_tensor_tensor(
                            dst=y_tile,
                            data=up_sum,
                            op0=nl.add,
                            operand0=up_bias_sb[0:nw, nt : nt + 1],
                            op1=nl.multiply,
                            operand1=active,
                        )
                    else:
                        nisa.tensor_tensor(dst=y_tile, data1=up_sum, data2=active, op=nl.multiply)
        if not keep:
            store_rows(out, y_sb, n0, columns, m0, tokens)


def gate_rows(
    out, gate_sb, up_sb, gate, up, gate_bias_sb, up_bias_sb, m0, tokens, n, gate_k, up_k, w_load,
    gate_order, up_order, gate_chunk, up_chunk, w_block, group_tiles, has_gate_bias, has_up_bias,
    activation,
):  # fmt: skip
    """Store h [tokens, n]: tokens still, weights moving."""
    for n0 in range(0, n, w_block):
        columns = min(w_block, n - n0)
        gate_w_sb = nl.ndarray((128, (gate_k + 127) // 128, columns), dtype=gate.dtype)
        up_w_sb = nl.ndarray((128, (up_k + 127) // 128, columns), dtype=up.dtype)
        for mt in range((tokens + 127) // 128):
            ms = 128 * mt
            mw = min(128, tokens - ms)
            y_sb = nl.ndarray((mw, columns), dtype=out.dtype, buffer=nl.sbuf)
            for n1 in range(0, columns, 512 * group_tiles):
                group = (min(512 * group_tiles, columns - n1) + 511) // 512
                gates = []
                ups = []
                for _ in range(group):
                    gates.append(
                        nl.ndarray((mw, min(512, columns)), dtype=nl.float32, buffer=nl.psum)
                    )
                    ups.append(
                        nl.ndarray((mw, min(512, columns)), dtype=nl.float32, buffer=nl.psum)
                    )
                for k0 in range(0, gate_k, gate_chunk):
                    rows = min(gate_chunk, gate_k - k0)
                    if mt == 0 and n1 == 0:
                        load(
                            gate_w_sb,
                            k0 // 128,
                            gate,
                            k0,
                            rows,
                            n0,
                            columns,
                            w_load,
                            gate_order,
                            gate_k,
                        )
                    for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                        kp = min(128, gate_k - 128 * kt)
                        for i in range(group):
                            ns = n1 + 512 * i
                            nw = min(512, columns - ns)
                            nisa.nc_matmul(
                                dst=gates[i][0:mw, 0:nw],
                                stationary=gate_sb[0:kp, kt, ms : ms + mw],
                                moving=gate_w_sb[0:kp, kt, ns : ns + nw],
                                accumulate=kt > 0,
                            )
                for k0 in range(0, up_k, up_chunk):
                    rows = min(up_chunk, up_k - k0)
                    if mt == 0 and n1 == 0:
                        load(up_w_sb, k0 // 128, up, k0, rows, n0, columns, w_load, up_order, up_k)
                    for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                        kp = min(128, up_k - 128 * kt)
                        for i in range(group):
                            ns = n1 + 512 * i
                            nw = min(512, columns - ns)
                            nisa.nc_matmul(
                                dst=ups[i][0:mw, 0:nw],
                                stationary=up_sb[0:kp, kt, ms : ms + mw],
                                moving=up_w_sb[0:kp, kt, ns : ns + nw],
                                accumulate=kt > 0,
                            )
                for i in range(group):
                    ns = n1 + 512 * i
                    nw = min(512, columns - ns)
                    n_at = n0 + ns
                    active = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.sbuf)
                    gate_sum = gates[i][0:mw, 0:nw]
                    up_sum = ups[i][0:mw, 0:nw]
                    if has_gate_bias:
                        nisa.tensor_tensor(
                            dst=active,
                            data1=gate_sum,
                            data2=gate_bias_sb[0:mw, n_at : n_at + nw],
                            op=nl.add,
                        )
                        activate(active, active, activation, 1)
                    else:
                        activate(active, gate_sum, activation, 1)
                    y_tile = y_sb[0:mw, ns : ns + nw]
                    if has_up_bias:
                        shifted = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.sbuf)
                        nisa.tensor_tensor(
                            dst=shifted,
                            data1=up_sum,
                            data2=up_bias_sb[0:mw, n_at : n_at + nw],
                            op=nl.add,
                        )
                        nisa.tensor_tensor(dst=y_tile, data1=shifted, data2=active, op=nl.multiply)
                    else:
                        nisa.tensor_tensor(dst=y_tile, data1=up_sum, data2=active, op=nl.multiply)
            nisa.dma_copy(dst=out[m0 + ms : m0 + ms + mw, n0 : n0 + columns], src=y_sb)
