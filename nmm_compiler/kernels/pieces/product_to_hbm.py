"""The products that give a result in HBM, for one block of tokens: y or y^T.

The left factor s is a strip [128, tiles, tokens] with its contraction index on the partitions:
loaded here on its first use (s_load), or already there ("none"). A weight is loaded in panels, or
once (w_all).
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import finish_columns, finish_rows, load, store_rows


def expand_rows(
    out,
    s_sb,
    w_all,
    x_sb,
    bias_sb,
    s,
    w,
    base_w,
    m0,
    tokens,
    k,  # contraction length
    n,  # outputs
    base_k,  # contraction length of a second product into the same sums, 0 for none
    s_load,
    s_chunk,
    w_load,
    base_load,
    order,
    base_order,
    k_chunk,
    base_chunk,
    w_block,
    group_tiles,
    resident,
    stream,
    has_bias,
    activation,
    scale_sb,  # fp8: [128, 1], or with scales "channel" [128, n], multiplied in
    scales,
    widen,  # w is widened to fp32 on its way in
    double_row,  # pairs of tiles of the contraction in one pass
):
    """Store y [tokens, n] = activation(s w + x base_w + bias): tokens still, weights moving."""
    k_tiles = (k + 127) // 128
    base_tiles = (base_k + 127) // 128
    for n0 in range(0, n, w_block):
        columns = min(w_block, n - n0)
        pitch = (columns + 15) // 16 * 16 if double_row else columns
        if resident:
            w_sb = w_all[0:128, 0:k_tiles, n0 : n0 + columns]
        elif not stream:
            w_sb = nl.ndarray(
                (128, k_tiles, pitch), dtype=nl.float32 if widen else w.dtype, buffer=nl.sbuf
            )
        if base_k > 0:
            base_sb = nl.ndarray((128, base_tiles, columns), dtype=base_w.dtype, buffer=nl.sbuf)
        for mt in range((tokens + 127) // 128):
            ms = 128 * mt
            mw = min(128, tokens - ms)
            y_sb = nl.ndarray((mw, columns), dtype=out.dtype, buffer=nl.sbuf)
            for n1 in range(0, columns, 512 * group_tiles):
                group = (min(512 * group_tiles, columns - n1) + 511) // 512
                sums = []
                for _ in range(group):
                    sums.append(
                        nl.ndarray((mw, min(512, columns)), dtype=nl.float32, buffer=nl.psum)
                    )
                for k0 in range(0, base_k, base_chunk):
                    rows = min(base_chunk, base_k - k0)
                    if mt == 0 and n1 == 0:
                        load(
                            base_sb,
                            k0 // 128,
                            base_w,
                            k0,
                            rows,
                            n0,
                            columns,
                            base_load,
                            base_order,
                            base_k,
                        )
                    for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                        kp = min(128, base_k - 128 * kt)
                        for i in range(group):
                            ns = n1 + 512 * i
                            nw = min(512, columns - ns)
                            nisa.nc_matmul(
                                dst=sums[i][0:mw, 0:nw],
                                stationary=x_sb[0:kp, kt, ms : ms + mw],
                                moving=base_sb[0:kp, kt, ns : ns + nw],
                                accumulate=kt > 0,
                            )
                for k0 in range(0, k, k_chunk):
                    rows = min(k_chunk, k - k0)
                    if s_load != "none" and n0 == 0 and mt == 0 and n1 == 0 and k0 % s_chunk == 0:
                        s_rows = min(s_chunk, k - k0)
                        load(s_sb, k0 // 128, s, k0, s_rows, m0, tokens, s_load, order, k)
                    first = k0 // 128
                    if stream:
                        w_sb = nl.ndarray(
                            (128, (rows + 127) // 128, pitch),
                            dtype=nl.float32 if widen else w.dtype,
                            buffer=nl.sbuf,
                        )
                        load(w_sb, 0, w, k0, rows, n0, columns, w_load, order, k)
                    elif mt == 0 and n1 == 0 and (m0 == 0 or not resident):
                        load(w_sb, first, w, k0, rows, n0, columns, w_load, order, k)
                    pairs = rows // 256 if double_row else 0
                    for pair in range(pairs):
                        kt = k0 // 128 + 2 * pair
                        at = kt - first if stream else kt
                        for i in range(group):
                            ns = n1 + 512 * i
                            nw = min(512, columns - ns)
                            nisa.nc_matmul(
                                dst=sums[i][0:mw, 0:nw],
                                stationary=s_sb[0:128, kt : kt + 2, ms : ms + mw],
                                moving=w_sb[0:128, at : at + 2, ns : ns + nw],
                                accumulate=base_k > 0 or kt > 0,
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
                                moving=w_sb[0:kp, kt - first if stream else kt, ns : ns + nw],
                                accumulate=base_k > 0 or kt > 0,
                            )
                for i in range(group):
                    ns = n1 + 512 * i
                    nw = min(512, columns - ns)
                    y_tile = y_sb[0:mw, ns : ns + nw]
                    y_sum = sums[i][0:mw, 0:nw]
                    n_at = n0 + ns
                    b_tile = bias_sb[0:mw, n_at : n_at + nw] if has_bias else None
                    if scales == "channel":
                        scale = scale_sb[0:mw, n_at : n_at + nw]
                    elif scales == "tensor":
                        scale = scale_sb[0:mw, 0:1]
                    else:
                        scale = None
                    turn = i + mt + n0 // 512
                    finish_rows(y_tile, y_sum, scale, b_tile, scales, has_bias, activation, turn)
            nisa.dma_copy(dst=out[m0 + ms : m0 + ms + mw, n0 : n0 + columns], src=y_sb)


def expand_columns(
    out,
    s_sb,
    w_all,
    x_sb,
    bias_sb,
    s,
    w,
    base_w,
    m0,
    tokens,
    k,  # contraction length
    n,  # outputs
    base_k,  # contraction length of a second product into the same sums, 0 for none
    s_load,
    s_chunk,
    w_load,
    base_load,
    order,
    base_order,
    k_chunk,
    base_chunk,
    w_block,
    group_tiles,
    resident,
    stream,
    has_bias,
    activation,
    as_rows,
    scale_sb,  # fp8: [128, 1] or a column per tile of n, multiplied in
    scales,
    widen,  # w is widened to fp32 on its way in
    double_row,  # pairs of tiles of the contraction in one pass
):
    """Store y^T [n, tokens] = activation(s w + x base_w + bias)^T: weights still, tokens moving.

    as_rows: store y [tokens, n] instead. Partition p then holds n_tiles neighbouring outputs of a
    panel, so that what it stores per token is a short run.
    """
    k_tiles = (k + 127) // 128
    base_tiles = (base_k + 127) // 128
    m_tiles = (tokens + 511) // 512
    for n0 in range(0, n, w_block):
        columns = min(w_block, n - n0)
        pitch = (columns + 15) // 16 * 16 if double_row else columns
        n_tiles = (columns + 127) // 128
        if resident:
            w_sb = w_all[0:128, 0:k_tiles, n0 : n0 + columns]
        elif not stream:
            w_sb = nl.ndarray(
                (128, k_tiles, pitch), dtype=nl.float32 if widen else w.dtype, buffer=nl.sbuf
            )
        if base_k > 0:
            base_sb = nl.ndarray((128, base_tiles, columns), dtype=base_w.dtype, buffer=nl.sbuf)
        if as_rows:
            y_sb = nl.ndarray((128, tokens, n_tiles), dtype=out.dtype, buffer=nl.sbuf)
        else:
            y_sb = nl.ndarray((128, n_tiles, tokens), dtype=out.dtype, buffer=nl.sbuf)
        for n1 in range(0, n_tiles, group_tiles):
            group = min(group_tiles, n_tiles - n1)
            sums = []
            for _ in range(group * m_tiles):
                sums.append(nl.ndarray((128, min(512, tokens)), dtype=nl.float32, buffer=nl.psum))
            for k0 in range(0, base_k, base_chunk):
                rows = min(base_chunk, base_k - k0)
                if n1 == 0:
                    load(
                        base_sb,
                        k0 // 128,
                        base_w,
                        k0,
                        rows,
                        n0,
                        columns,
                        base_load,
                        base_order,
                        base_k,
                    )
                for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                    kp = min(128, base_k - 128 * kt)
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        if as_rows:
                            still = base_sb[0:kp, kt, n1 + i : columns : n_tiles]
                        else:
                            still = base_sb[0:kp, kt, ns : ns + nw]
                        for mt in range(m_tiles):
                            ms = 512 * mt
                            mw = min(512, tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=still,
                                moving=x_sb[0:kp, kt, ms : ms + mw],
                                accumulate=kt > 0,
                            )
            for k0 in range(0, k, k_chunk):
                rows = min(k_chunk, k - k0)
                if s_load != "none" and n0 == 0 and n1 == 0 and k0 % s_chunk == 0:
                    s_rows = min(s_chunk, k - k0)
                    load(s_sb, k0 // 128, s, k0, s_rows, m0, tokens, s_load, order, k)
                first = k0 // 128
                if stream:
                    w_sb = nl.ndarray(
                        (128, (rows + 127) // 128, pitch),
                        dtype=nl.float32 if widen else w.dtype,
                        buffer=nl.sbuf,
                    )
                    load(w_sb, 0, w, k0, rows, n0, columns, w_load, order, k)
                elif n1 == 0 and (m0 == 0 or not resident):
                    load(w_sb, first, w, k0, rows, n0, columns, w_load, order, k)
                pairs = rows // 256 if double_row else 0
                for pair in range(pairs):
                    kt = k0 // 128 + 2 * pair
                    at = kt - first if stream else kt
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        if as_rows:
                            still = w_sb[0:128, at : at + 2, n1 + i : columns : n_tiles]
                        else:
                            still = w_sb[0:128, at : at + 2, ns : ns + nw]
                        for mt in range(m_tiles):
                            ms = 512 * mt
                            mw = min(512, tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=still,
                                moving=s_sb[0:128, kt : kt + 2, ms : ms + mw],
                                accumulate=base_k > 0 or kt > 0,
                                perf_mode=nisa.matmul_perf_mode.double_row,
                            )
                for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
                    kp = min(128, k - 128 * kt)
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        at = kt - first if stream else kt
                        if as_rows:
                            still = w_sb[0:kp, at, n1 + i : columns : n_tiles]
                        else:
                            still = w_sb[0:kp, at, ns : ns + nw]
                        for mt in range(m_tiles):
                            ms = 512 * mt
                            mw = min(512, tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=still,
                                moving=s_sb[0:kp, kt, ms : ms + mw],
                                accumulate=base_k > 0 or kt > 0,
                            )
            for i in range(group):
                ns = 128 * (n1 + i)
                nw = min(128, columns - ns)
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    if as_rows:
                        y_tile = y_sb[0:nw, ms : ms + mw, n1 + i]
                    else:
                        y_tile = y_sb[0:nw, n1 + i, ms : ms + mw]
                    y_sum = sums[i * m_tiles + mt][0:nw, 0:mw]
                    nt = n0 // 128 + n1 + i
                    st = nt if scales == "channel" else 0
                    b_tile = bias_sb[0:nw, nt : nt + 1] if has_bias else None
                    scale = scale_sb[0:nw, st : st + 1] if scales != "none" else None
                    finish_columns(
                        y_tile, y_sum, scale, b_tile, scales, has_bias, activation, i + mt
                    )
        if as_rows:
            view = out[m0 : m0 + tokens, n0 : n0 + columns].reshape_dim(1, (128, n_tiles))
            # many short runs: the hardware writes their descriptors
            nisa.dma_copy(
                dst=view.permute((1, 0, 2)),
                src=y_sb,
                dge_mode=nisa.dge_mode.hwdge,
                engine=nisa.engine.sync,
            )
        else:
            store_rows(out, y_sb, n0, columns, m0, tokens)
