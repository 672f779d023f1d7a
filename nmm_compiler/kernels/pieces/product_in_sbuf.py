"""The product that stays on chip, for one block of tokens: p^T = (s w)^T, its features on the
partitions, for the next product to use as it lies.

The left factor s is a strip [128, tiles, tokens] with its contraction index on the partitions:
loaded here on its first use (s_load), or already there ("none"). The contraction may be cut into
segments, whose sums are added in fp32 in SBUF.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, load, round_to


def project(
    p_sb,
    s_sb,
    w_all,
    s,
    w,
    m0,
    tokens,
    k,  # contraction length
    r,  # features of p
    s_load,
    s_chunk,
    w_load,
    order,
    k_chunk,
    k_segment,
    s_stream,
    w_block,
    group_tiles,
    resident,
    stream,
    scale,
    scale_sb,  # fp8: [128, 1] or a column per tile of r, multiplied in
    scales,
    requantize,
    widen,  # w is widened to fp32 on its way in
    double_row,  # pairs of tiles of the contraction in one pass
):
    """Compute p_sb [128, tiles of r, tokens] = scale (s w)^T, rounded once to p_sb's dtype."""
    if k_segment < k:
        # fp32 sums of the segments: with them s and w are read once, whatever PSUM holds
        parts = nl.ndarray((128, (r + 127) // 128, tokens), dtype=nl.float32, buffer=nl.sbuf)
    else:
        parts = None
    for k1 in range(0, k, k_segment):
        k_stop = min(k1 + k_segment, k)
        if s_stream:
            segment_tiles = (min(k_segment, k) + 127) // 128
            s_pitch = (tokens + 15) // 16 * 16 if double_row else tokens
            s_sb = nl.ndarray((128, segment_tiles, s_pitch), dtype=s.dtype, buffer=nl.sbuf)
        project_segment(
            p_sb, parts, s_sb, w_all, s, w, m0, tokens, k1, k_stop, k, r, s_load, s_chunk, w_load,
            order, k_chunk, k_segment, k_segment < k, s_stream, w_block, group_tiles, resident,
            stream, scale, scale_sb, scales, requantize, widen, double_row,
        )  # fmt: skip


def project_segment(
    p_sb,
    parts,  # fp32 sums of all segments, None if there is one
    s_sb,
    w_all,
    s,
    w,
    m0,
    tokens,
    k1,  # the segment: contraction rows k1 to k_stop of k
    k_stop,
    k,
    r,
    s_load,
    s_chunk,
    w_load,
    order,
    k_chunk,
    k_segment,
    several,  # segments
    s_stream,  # s_sb holds this segment alone
    w_block,
    group_tiles,
    resident,
    stream,
    scale,
    scale_sb,
    scales,
    requantize,
    widen,
    double_row,
):
    """Sum scale (s w)^T [128, tiles of r, tokens] over a segment; the last rounds it to p_sb."""
    m_tiles = (tokens + 511) // 512
    k_tiles = (k + 127) // 128
    scaled = scales != "none" or scale != 1.0
    segment_tiles = (min(k_segment, k) + 127) // 128
    for r0 in range(0, r, w_block):
        columns = min(w_block, r - r0)
        pitch = (columns + 15) // 16 * 16 if double_row else columns
        if resident:
            w_sb = w_all[0:128, 0:k_tiles, r0 : r0 + columns]
        elif not stream:
            w_sb = nl.ndarray(
                (128, segment_tiles, pitch),
                dtype=nl.float32 if widen else w.dtype,
                buffer=nl.sbuf,
            )
        for r1 in range(0, columns, 128 * group_tiles):
            group = (min(128 * group_tiles, columns - r1) + 127) // 128
            wide = min(512, tokens)
            sums = []
            for _ in range(group * m_tiles):
                sums.append(nl.ndarray((128, wide), dtype=nl.float32, buffer=nl.psum))
            for k0 in range(k1, k_stop, k_chunk):
                rows = min(k_chunk, k_stop - k0)
                w_first = k0 // 128 if stream else k1 // 128
                s_first = k1 // 128 if s_stream else 0
                if stream:
                    # one pass over k uses each chunk once: it needs no panel to stay in
                    w_sb = nl.ndarray(
                        (128, (rows + 127) // 128, pitch),
                        dtype=nl.float32 if widen else w.dtype,
                        buffer=nl.sbuf,
                    )
                if stream or (r1 == 0 and (m0 == 0 or not resident)):
                    load(w_sb, k0 // 128 - w_first, w, k0, rows, r0, columns, w_load, order, k)
                if s_load != "none" and r0 == 0 and r1 == 0 and k0 % s_chunk == 0:
                    s_rows = min(s_chunk, k - k0)
                    s_tile = k0 // 128 - s_first
                    load(s_sb, s_tile, s, k0, s_rows, m0, tokens, s_load, order, k)
                pairs = rows // 256 if double_row else 0
                for pair in range(pairs):
                    kt = k0 // 128 + 2 * pair
                    wt = kt - w_first
                    st = kt - s_first
                    for i in range(group):
                        rs = r1 + 128 * i
                        rp = min(128, columns - rs)
                        for mt in range(m_tiles):
                            ms = 512 * mt
                            mw = min(512, tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:rp, 0:mw],
                                stationary=w_sb[0:128, wt : wt + 2, rs : rs + rp],
                                moving=s_sb[0:128, st : st + 2, ms : ms + mw],
                                accumulate=kt > k1 // 128,
                                perf_mode=nisa.matmul_perf_mode.double_row,
                            )
                for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
                    kp = min(128, k - 128 * kt)
                    for i in range(group):
                        rs = r1 + 128 * i
                        rp = min(128, columns - rs)
                        for mt in range(m_tiles):
                            ms = 512 * mt
                            mw = min(512, tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:rp, 0:mw],
                                stationary=w_sb[0:kp, kt - w_first, rs : rs + rp],
                                moving=s_sb[0:kp, kt - s_first, ms : ms + mw],
                                accumulate=kt > k1 // 128,
                            )
            for i in range(group):
                rs = r1 + 128 * i
                rp = min(128, columns - rs)
                for mt in range(m_tiles):
                    ms = 512 * mt
                    mw = min(512, tokens - ms)
                    p_tile = p_sb[0:rp, (r0 + rs) // 128, ms : ms + mw]
                    p_sum = sums[i * m_tiles + mt][0:rp, 0:mw]
                    rt = (r0 + rs) // 128 if scales == "channel" else 0
                    p_scale = scale_sb[0:rp, rt : rt + 1] if scales != "none" else scale
                    turn = i * m_tiles + mt
                    if several:
                        part = parts[0:rp, (r0 + rs) // 128, ms : ms + mw]
                        if k1 == 0:
                            evict(part, p_sum, turn)
                        elif k_stop < k or scaled:
                            nisa.tensor_tensor(dst=part, data1=part, data2=p_sum, op=nl.add)
                        else:
                            nisa.tensor_tensor(dst=p_tile, data1=part, data2=p_sum, op=nl.add)
                        if k_stop == k and scaled:
                            round_to(p_tile, part, p_scale, requantize, scaled, turn)
                    else:
                        round_to(p_tile, p_sum, p_scale, requantize, scaled, turn)
