"""The product that stays on chip, for one block of tokens: p^T = (s w)^T, its features on the
partitions, for the next product to use as it lies.

The contraction may be cut into segments, whose sums are added in fp32 in SBUF.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, finish_columns, load, round_to
from .norms import add_squares
from .packed_loads import load_packed
from .records import Block, Epilogue, Part, Product, Rounding, Segment, Strip, Weight
from .warm_up import warm_up


def project(p_sb, left: Strip, right: Weight, at: Block, product: Product, rounding: Rounding):
    """Compute p^T of a block of tokens, rounded once."""
    several = product.segment < product.k
    plain = not rounding.scales and rounding.factor == 1.0 and not rounding.norm
    unshaped = not rounding.has_bias and rounding.activation == "identity"
    kept = not right.plan.resident and not right.plan.stream and not left.plan.stream
    one_tile = product.n <= 128 and kept
    few = at.tokens <= 448 and product.k > 640 and not several and not product.double_row
    if one_tile and few and plain and unshaped:
        project_in_turns(p_sb, left, right, at, product)
        return
    if several:
        # sums of the segments in fp32, so that s and w are read once however large PSUM is
        r_tiles = (product.n + 127) // 128
        parts = nl.ndarray((128, r_tiles, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
    else:
        parts = None
    for k1 in range(0, product.k, product.segment):
        k_stop = min(k1 + product.segment, product.k)
        if left.plan.stream:
            segment_tiles = (min(product.segment, product.k) + 127) // 128
            turned = left.plan.load == "dma" or left.plan.load == "dma16"
            s_pitch = (at.tokens + 15) // 16 * 16 if product.double_row or turned else at.tokens
            s_sb = nl.ndarray(
                (128, segment_tiles, s_pitch), dtype=left.source.dtype, buffer=nl.sbuf
            )
        else:
            s_sb = left.strip
        project_segment(
            p_sb, Strip(s_sb, left.source, left.plan), right, at, product, rounding,
            Segment(k1, k_stop, several, parts),
        )  # fmt: skip


def project_in_turns(p_sb, left: Strip, right: Weight, at: Block, product: Product):
    """Compute p^T of one or two tiles for few tokens in two to four sums, which take turns.

    A pass of few columns takes less time than the pass before it, whose sum it would wait for.
    """
    w_type = nl.float32 if product.widen else right.weight.dtype
    k_tiles = (product.k + 127) // 128
    n_tiles = (product.n + 127) // 128
    turns = 4 if n_tiles == 1 and at.tokens <= 64 else 2
    pitch = (product.n + 15) // 16 * 16 if right.plan.load == "dma" else product.n
    if right.loaded:
        w_sb = right.first
    elif not right.plan.stream:
        w_sb = nl.ndarray((128, k_tiles, pitch), dtype=w_type, buffer=nl.sbuf)
    sums = []
    wide = 512 if product.warm > 0 else at.tokens
    for _ in range(turns * n_tiles):
        sums.append(nl.ndarray((128, wide), dtype=nl.float32, buffer=nl.psum))
    if product.warm > 0 and at.m0 == 0:
        warm_up(sums[0], product.warm)
    for k0 in range(0, product.k, right.plan.chunk):
        rows = min(right.plan.chunk, product.k - k0)
        w_first = k0 // 128 if right.plan.stream else 0
        if right.plan.stream:
            w_sb = nl.ndarray((128, (rows + 127) // 128, pitch), dtype=w_type, buffer=nl.sbuf)
        if right.plan.load != "none" and (k0 > 0 or not right.loaded):
            panel = Part(right.weight, k0, rows, 0, product.n)
            load(w_sb, k0 // 128 - w_first, panel, right.plan.load, product.order, product.k)
        if left.plan.load != "none" and k0 % left.plan.chunk == 0:
            s_rows = min(left.plan.chunk, product.k - k0)
            part = Part(left.source, k0, s_rows, at.m0, at.tokens)
            load(left.strip, k0 // 128, part, left.plan.load, product.order, product.k)
        for kt in range(k0 // 128, (k0 + rows + 127) // 128):
            kp = min(128, product.k - 128 * kt)
            if product.order == "spread_rows":
                kp = (product.k - kt + k_tiles - 1) // k_tiles
            for i in range(n_tiles):
                rp = min(128, product.n - 128 * i)
                nisa.nc_matmul(
                    dst=sums[kt % turns * n_tiles + i][0:rp, 0 : at.tokens],
                    stationary=w_sb[0:kp, kt - w_first, 128 * i : 128 * i + rp],
                    moving=left.strip[0:kp, kt, 0 : at.tokens],
                    accumulate=kt >= turns or (product.warm > 0 and at.m0 == 0 and kt + i == 0),
                )
    for i in range(n_tiles):
        rows = min(128, product.n - 128 * i)
        for ms in range(0, at.tokens, 128):
            # tokens of the next product's first tile are there first
            mw = min(128, at.tokens - ms)
            p_tile = p_sb[0:rows, i, ms : ms + mw]
            half = nl.ndarray((rows, mw), dtype=nl.float32, buffer=nl.sbuf)
            evict(half, sums[i][0:rows, ms : ms + mw], i + ms // 128)
            more = sums[n_tiles + i][0:rows, ms : ms + mw]
            if turns == 2:
                nisa.tensor_tensor(dst=p_tile, data1=half, data2=more, op=nl.add)
            else:
                other = nl.ndarray((rows, mw), dtype=nl.float32, buffer=nl.sbuf)
                evict(other, more, 1)
                last = sums[3][0:rows, ms : ms + mw]
                nisa.tensor_tensor(
                    dst=half, data1=half, data2=sums[2][0:rows, ms : ms + mw], op=nl.add
                )
                nisa.tensor_tensor(dst=other, data1=other, data2=last, op=nl.add)
                nisa.tensor_tensor(dst=p_tile, data1=half, data2=other, op=nl.add)


def project_segment(
    p_sb,
    left: Strip,
    right: Weight,
    at: Block,
    product: Product,
    rounding: Rounding,
    segment: Segment,
):
    """Sum (s w)^T of a block of tokens over a segment of the contraction."""
    w_type = nl.float32 if product.widen else right.weight.dtype
    m_tiles = (at.tokens + 511) // 512
    m_step = ((at.tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16  # moved at a time
    k_tiles = (product.k + 127) // 128
    scaled = rounding.scales or rounding.factor != 1.0
    shaped = rounding.has_bias or rounding.activation != "identity"
    segment_tiles = (min(product.segment, product.k) + 127) // 128
    for r0 in range(0, product.n, right.plan.block):
        columns = min(right.plan.block, product.n - r0)
        aligned = product.double_row or right.plan.load == "dma"
        pitch = (columns + 15) // 16 * 16 if aligned else columns
        if right.plan.resident:
            w_sb = right.whole[0:128, 0:k_tiles, r0 : r0 + columns]
        elif right.plan.load == "none" or (right.loaded and r0 == 0 and segment.first == 0):
            w_sb = right.first
        elif not right.plan.stream:
            w_sb = nl.ndarray((128, segment_tiles, pitch), dtype=w_type, buffer=nl.sbuf)
        for r1 in range(0, columns, 128 * right.plan.group):
            group = (min(128 * right.plan.group, columns - r1) + 127) // 128
            wide = 512 if product.warm > 0 else min(512, at.tokens)
            sums = []
            for _ in range(group * m_tiles):
                sums.append(nl.ndarray((128, wide), dtype=nl.float32, buffer=nl.psum))
            if product.warm > 0 and segment.first + at.m0 + r0 + r1 == 0:
                warm_up(sums[0], product.warm)
            for k0 in range(segment.first, segment.stop, right.plan.chunk):
                rows = min(right.plan.chunk, segment.stop - k0)
                w_first = k0 // 128 if right.plan.stream else segment.first // 128
                if right.plan.load == "none":
                    w_first = 0
                s_first = segment.first // 128 if left.plan.stream else 0
                if right.plan.stream:
                    # one pass over k reads each chunk once, so no panel is kept
                    w_sb = nl.ndarray(
                        (128, (rows + 127) // 128, pitch), dtype=w_type, buffer=nl.sbuf
                    )
                begun = right.loaded and r0 == 0 and k0 == 0
                due = r1 == 0 and (at.m0 == 0 or not right.plan.resident) and not begun
                if right.plan.load != "none" and (right.plan.stream or due):
                    panel = Part(right.weight, k0, rows, r0, columns)
                    load(
                        w_sb, k0 // 128 - w_first, panel, right.plan.load, product.order, product.k
                    )
                if left.plan.load != "none" and r0 == 0 and r1 == 0 and k0 % left.plan.chunk == 0:
                    s_rows = min(left.plan.chunk, product.k - k0)
                    s_tile = k0 // 128 - s_first
                    s_part = Part(left.source, k0, s_rows, at.m0, at.tokens)
                    if left.plan.load == "packed":
                        load_packed(left.strip, s_tile, s_part, product.order, product.k)
                    else:
                        load(left.strip, s_tile, s_part, left.plan.load, product.order, product.k)
                pairs = rows // 256 if product.double_row else 0
                for pair in range(pairs):
                    kt = k0 // 128 + 2 * pair
                    wt = kt - w_first
                    st = kt - s_first
                    for i in range(group):
                        rs = r1 + 128 * i
                        rp = min(128, columns - rs)
                        for mt in range(m_tiles):
                            ms = m_step * mt
                            mw = min(m_step, at.tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:rp, 0:mw],
                                stationary=w_sb[0:128, wt : wt + 2, rs : rs + rp],
                                moving=left.strip[0:128, st : st + 2, ms : ms + mw],
                                accumulate=kt > segment.first // 128,
                                perf_mode=nisa.matmul_perf_mode.double_row,
                            )
                for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
                    kp = min(128, product.k - 128 * kt)
                    if product.order == "spread_rows":
                        kp = (product.k - kt + k_tiles - 1) // k_tiles
                    for i in range(group):
                        rs = r1 + 128 * i
                        rp = min(128, columns - rs)
                        for mt in range(m_tiles):
                            ms = m_step * mt
                            mw = min(m_step, at.tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:rp, 0:mw],
                                stationary=w_sb[0:kp, kt - w_first, rs : rs + rp],
                                moving=left.strip[0:kp, kt - s_first, ms : ms + mw],
                                accumulate=kt > segment.first // 128
                                or (product.warm > 0 and at.m0 + r0 + r1 + kt + i + mt == 0),
                            )
            for i in range(group):
                rs = r1 + 128 * i
                rp = min(128, columns - rs)
                rt = (r0 + rs) // 128
                for mt in range(m_tiles):
                    ms = m_step * mt
                    mw = min(m_step, at.tokens - ms)
                    p_tile = p_sb[0:rp, rt, ms : ms + mw]
                    p_sum = sums[i * m_tiles + mt][0:rp, 0:mw]
                    at_scale = rt if rounding.scales == "channel" else 0
                    p_scale = (
                        rounding.scale[0:rp, at_scale : at_scale + 1]
                        if rounding.scales
                        else rounding.factor
                    )
                    turn = i * m_tiles + mt
                    inner = Epilogue(
                        None, rounding.bias, None, rounding.has_bias, rounding.activation
                    )
                    if rounding.norm and not segment.several:
                        add_squares(rounding.squares, p_sum, rt, ms)
                    if segment.several:
                        part = segment.parts[0:rp, rt, ms : ms + mw]
                        if segment.first == 0:
                            evict(part, p_sum, turn)
                        elif segment.stop < product.k or scaled or shaped:
                            nisa.tensor_tensor(dst=part, data1=part, data2=p_sum, op=nl.add)
                        else:
                            nisa.tensor_tensor(dst=p_tile, data1=part, data2=p_sum, op=nl.add)
                        if segment.stop == product.k and rounding.norm:
                            add_squares(rounding.squares, part, rt, ms)
                        if segment.stop == product.k and shaped:
                            finish_columns(p_tile, part, inner, rt, turn)
                        elif segment.stop == product.k and scaled:
                            round_to(p_tile, part, p_scale, rounding.requantize, scaled, turn)
                    elif shaped:
                        finish_columns(p_tile, p_sum, inner, rt, turn)
                    elif product.n <= 128 and at.tokens > 128 and m_tiles == 1:
                        # the next product begins with the first tile of tokens
                        for ts in range(0, mw, 128):
                            stop = min(ts + 128, mw)
                            round_to(
                                p_tile[0:rp, ts:stop], p_sum[0:rp, ts:stop], p_scale,
                                rounding.requantize, scaled, turn + ts // 128,
                            )  # fmt: skip
                    else:
                        round_to(p_tile, p_sum, p_scale, rounding.requantize, scaled, turn)
