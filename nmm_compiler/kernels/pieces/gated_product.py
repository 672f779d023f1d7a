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
    store,
    store_rows,
)
from .records import Block, Branch, Epilogue, Group, Kept, Operand, Panels, Part, Result


def load_gated_panel(branch: Branch, plan: Operand, n0, stop):
    """Return the weights of a branch for the outputs from n0 on, loaded."""
    columns = min(plan.block, stop - n0)
    aligned = branch.product.double_row or plan.load == "dma"
    pitch = (columns + 15) // 16 * 16 if aligned else columns
    w_sb = nl.ndarray(
        (128, (branch.product.k + 127) // 128, pitch),
        dtype=nl.float32 if branch.product.widen else branch.weight.dtype,
    )
    for k0 in range(0, branch.product.k, plan.chunk):
        rows = min(plan.chunk, branch.product.k - k0)
        part = Part(branch.weight, k0, rows, n0, columns)
        load(w_sb, k0 // 128, part, plan.load, branch.product.order, branch.product.k)
    return w_sb


def gate_columns(
    result: Result,
    gate: Branch,
    up: Branch,
    plan: Operand,
    at: Block,
    panels: Panels,
    kept: Kept,
):
    """Compute rows of h^T: weights stationary, tokens moving."""
    m_tiles = (at.tokens + 511) // 512
    m_step = ((at.tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16  # moved at a time
    gate_panels = []
    up_panels = []
    for n0 in range(
        panels.first, min(panels.stop, panels.first + plan.block * panels.ahead), plan.block
    ):
        gate_panels.append(load_gated_panel(gate, plan, n0, panels.stop))
        up_panels.append(load_gated_panel(up, plan, n0, panels.stop))
    for n0 in range(panels.first, panels.stop, plan.block):
        columns = min(plan.block, panels.stop - n0)
        n_tiles = (columns + 127) // 128
        # loads of later panels start before this one is stored
        following = n0 + plan.block * panels.ahead
        if following < panels.stop:
            gate_panels.append(load_gated_panel(gate, plan, following, panels.stop))
            up_panels.append(load_gated_panel(up, plan, following, panels.stop))
        gate_w_sb = gate_panels[(n0 - panels.first) // plan.block]
        up_w_sb = up_panels[(n0 - panels.first) // plan.block]
        if kept.keep:
            first = (n0 - panels.first) // 128
            y_sb = kept.strip[0:128, first : first + n_tiles, 0 : at.tokens]
        else:
            y_sb = nl.ndarray((128, n_tiles, at.tokens), dtype=result.out.dtype, buffer=nl.sbuf)
        # the gate of the whole panel first: while it is summed, the up weights arrive
        active_sb = nl.ndarray((128, n_tiles, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
        for n1 in range(0, n_tiles, plan.group):
            group = min(plan.group, n_tiles - n1)
            gates = []
            for _ in range(group * m_tiles):
                gates.append(
                    nl.ndarray((128, min(512, at.tokens)), dtype=nl.float32, buffer=nl.psum)
                )
            sum_columns(gates, gate_w_sb, gate, plan, Group(n0, columns, n1, group), at.tokens)
            for i in range(group):
                nw = min(128, columns - 128 * (n1 + i))
                nt = n0 // 128 + n1 + i
                for mt in range(m_tiles):
                    ms = m_step * mt
                    mw = min(m_step, at.tokens - ms)
                    gate_sum = gates[i * m_tiles + mt][0:nw, 0:mw]
                    finish_columns(
                        active_sb[0:nw, n1 + i, ms : ms + mw], gate_sum, gate.epilogue, nt, 1
                    )
        for n1 in range(0, n_tiles, plan.group):
            group = min(plan.group, n_tiles - n1)
            ups = []
            for _ in range(group * m_tiles):
                ups.append(nl.ndarray((128, min(512, at.tokens)), dtype=nl.float32, buffer=nl.psum))
            sum_columns(ups, up_w_sb, up, plan, Group(n0, columns, n1, group), at.tokens)
            for i in range(group):
                nw = min(128, columns - 128 * (n1 + i))
                nt = n0 // 128 + n1 + i
                for mt in range(m_tiles):
                    ms = m_step * mt
                    mw = min(m_step, at.tokens - ms)
                    active = active_sb[0:nw, n1 + i, ms : ms + mw]
                    y_tile = y_sb[0:nw, n1 + i, ms : ms + mw]
                    if kept.keep and kept.requantize:
                        h_tile = nl.ndarray((nw, mw), dtype=nl.float32, buffer=nl.sbuf)
                        multiply(h_tile, ups[i * m_tiles + mt][0:nw, 0:mw], active, up.epilogue, nt)
                        quantize(y_tile, h_tile, kept.inverse[0:nw, 0:1])
                    else:
                        multiply(y_tile, ups[i * m_tiles + mt][0:nw, 0:mw], active, up.epilogue, nt)
        if not kept.keep:
            store_rows(result, y_sb, n0, columns, at.m0, at.tokens)


def multiply(dst, up_sum, active, epilogue: Epilogue, tile):
    """Write the up sum times the active gate to dst: a tile of outputs on the partitions."""
    rows = up_sum.shape[0]
    b_tile = epilogue.bias[0:rows, tile : tile + 1] if epilogue.has_bias else None
    at = tile if epilogue.scales == "channel" else 0
    s_tile = epilogue.scale[0:rows, at : at + 1] if epilogue.scales else None
    if epilogue.has_bias and epilogue.scales:
        up = nl.ndarray(up_sum.shape, dtype=nl.float32, buffer=nl.sbuf)
        activate_scaled_with_bias_column(up, up_sum, s_tile, b_tile, "identity")
        nisa.tensor_tensor(dst=dst, data1=up, data2=active, op=nl.multiply)
    elif epilogue.has_bias:
        nisa.scalar_tensor_tensor(
            dst=dst,
            data=up_sum,
            op0=nl.add,
            operand0=b_tile,
            op1=nl.multiply,
            operand1=active,
        )
    elif epilogue.scales:
        nisa.scalar_tensor_tensor(
            dst=dst,
            data=up_sum,
            op0=nl.multiply,
            operand0=s_tile,
            op1=nl.multiply,
            operand1=active,
        )
    else:
        nisa.tensor_tensor(dst=dst, data1=up_sum, data2=active, op=nl.multiply)


def sum_columns(sums, w_sb, branch: Branch, plan: Operand, group: Group, tokens):
    """Sum (s w)^T into a group of PSUM tiles, outputs on the partitions."""
    m_tiles = (tokens + 511) // 512
    m_step = ((tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16
    for k0 in range(0, branch.product.k, plan.chunk):
        rows = min(plan.chunk, branch.product.k - k0)
        pairs = rows // 256 if branch.product.double_row else 0
        for pair in range(pairs):
            kt = k0 // 128 + 2 * pair
            for i in range(group.count):
                ns = 128 * (group.first + i)
                nw = min(128, group.columns - ns)
                for mt in range(m_tiles):
                    ms = m_step * mt
                    mw = min(m_step, tokens - ms)
                    nisa.nc_matmul(
                        dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                        stationary=w_sb[0:128, kt : kt + 2, ns : ns + nw],
                        moving=branch.strip[0:128, kt : kt + 2, ms : ms + mw],
                        accumulate=kt > 0,
                        perf_mode=nisa.matmul_perf_mode.double_row,
                    )
        for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
            kp = min(128, branch.product.k - 128 * kt)
            for i in range(group.count):
                ns = 128 * (group.first + i)
                nw = min(128, group.columns - ns)
                for mt in range(m_tiles):
                    ms = m_step * mt
                    mw = min(m_step, tokens - ms)
                    nisa.nc_matmul(
                        dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                        stationary=w_sb[0:kp, kt, ns : ns + nw],
                        moving=branch.strip[0:kp, kt, ms : ms + mw],
                        accumulate=kt > 0,
                    )


def gate_rows(result: Result, gate: Branch, up: Branch, plan: Operand, at: Block, ahead):
    """Store h of a block of tokens: tokens stationary, weights moving."""
    gate_panels = []
    up_panels = []
    for n0 in range(0, min(gate.product.n, plan.block * ahead), plan.block):
        gate_panels.append(load_gated_panel(gate, plan, n0, gate.product.n))
        up_panels.append(load_gated_panel(up, plan, n0, gate.product.n))
    for n0 in range(0, gate.product.n, plan.block):
        columns = min(plan.block, gate.product.n - n0)
        # loads of later panels start before this one is stored
        following = n0 + plan.block * ahead
        if following < gate.product.n:
            gate_panels.append(load_gated_panel(gate, plan, following, gate.product.n))
            up_panels.append(load_gated_panel(up, plan, following, gate.product.n))
        gate_w_sb = gate_panels[n0 // plan.block]
        up_w_sb = up_panels[n0 // plan.block]
        for mt in range((at.tokens + 127) // 128):
            ms = 128 * mt
            mw = min(128, at.tokens - ms)
            y_sb = nl.ndarray((mw, columns), dtype=result.out.dtype, buffer=nl.sbuf)
            for n1 in range(0, columns, 512 * plan.group):
                group = (min(512 * plan.group, columns - n1) + 511) // 512
                wide = min(512, columns)
                gates = []
                ups = []
                for _ in range(group):
                    gates.append(nl.ndarray((mw, wide), dtype=nl.float32, buffer=nl.psum))
                    ups.append(nl.ndarray((mw, wide), dtype=nl.float32, buffer=nl.psum))
                sum_rows(gates, gate_w_sb, gate, plan, Group(n0, columns, n1, group), ms, mw)
                sum_rows(ups, up_w_sb, up, plan, Group(n0, columns, n1, group), ms, mw)
                for i in range(group):
                    ns = n1 + 512 * i
                    nw = min(512, columns - ns)
                    active = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.sbuf)
                    finish_rows(active, gates[i][0:mw, 0:nw], gate.epilogue, n0 + ns, 1)
                    up_sum = ups[i][0:mw, 0:nw]
                    if up.epilogue.has_bias or gate.epilogue.scales:
                        shifted = nl.ndarray((mw, nw), dtype=nl.float32, buffer=nl.sbuf)
                        finish_rows(shifted, up_sum, up.epilogue, n0 + ns, 0)
                        up_sum = shifted
                    nisa.tensor_tensor(
                        dst=y_sb[0:mw, ns : ns + nw], data1=up_sum, data2=active, op=nl.multiply
                    )
            store(
                result.out[at.m0 + ms : at.m0 + ms + mw, n0 : n0 + columns], y_sb, result.own_queue
            )


def sum_rows(sums, w_sb, branch: Branch, plan: Operand, group: Group, ms, mw):
    """Sum s w into a group of PSUM tiles, tokens on the partitions."""
    for k0 in range(0, branch.product.k, plan.chunk):
        rows = min(plan.chunk, branch.product.k - k0)
        pairs = rows // 256 if branch.product.double_row else 0
        for pair in range(pairs):
            kt = k0 // 128 + 2 * pair
            for i in range(group.count):
                ns = group.first + 512 * i
                nw = min(512, group.columns - ns)
                nisa.nc_matmul(
                    dst=sums[i][0:mw, 0:nw],
                    stationary=branch.strip[0:128, kt : kt + 2, ms : ms + mw],
                    moving=w_sb[0:128, kt : kt + 2, ns : ns + nw],
                    accumulate=kt > 0,
                    perf_mode=nisa.matmul_perf_mode.double_row,
                )
        for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
            kp = min(128, branch.product.k - 128 * kt)
            for i in range(group.count):
                ns = group.first + 512 * i
                nw = min(512, group.columns - ns)
                nisa.nc_matmul(
                    dst=sums[i][0:mw, 0:nw],
                    stationary=branch.strip[0:kp, kt, ms : ms + mw],
                    moving=w_sb[0:kp, kt, ns : ns + nw],
                    accumulate=kt > 0,
                )
