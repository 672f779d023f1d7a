"""Several low-rank products of one x: y = activation((x u) v + bias) for every u and each v of it.

Stage 1 takes the columns of all u together: a chunk of x^T is loaded once and moves past the tiles
of every u. One strip holds all the intermediates, one after another in tiles of the rank; they
never leave the chip. Stage 2 is that of the single product, for each v on its part of the strip.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.loads_and_stores import (
    evict,
    load,
    round_to,
)
from ..pieces.norms import load_normed, norm_of_x
from ..pieces.product_to_hbm import expand_columns, expand_rows, load_panel
from ..pieces.records import (
    Base,
    Block,
    Epilogue,
    Part,
    Product,
    Result,
    Rounding,
    Strip,
    Tile,
    Weight,
)
from ..pieces.scales_and_biases import (
    bias_columns,
    load_scale,
    panel_scales,
    product_scales,
    reciprocal_of,
    spread_bias,
    times,
)
from ..pieces.two_cores import (
    add_up_halves,
    clear_tail,
    exchange,
    half,
    half_row,
    half_sums,
)
from ..pieces.warm_up import warm_up


@nki.jit
def lowrank_shared(x, us, vs, biases, scales, spec, schedule, **others):
    """Return every y."""
    m = spec.m  # tokens
    k = spec.k  # input features
    ranks = spec.ranks  # of every u
    starts = schedule.starts  # first rank tile of every u, then the number of tiles
    ns = spec.ns  # output features of every v
    pair_of = spec.pair_of  # the u that each v follows
    bias_of = spec.bias_of  # place among the biases, -1 for none
    activations = spec.activations
    out_layouts = spec.out_layouts
    stationary = schedule.stationary  # where stage 2 holds v stationary
    turns = schedule.turns
    u_chunks = schedule.u_chunks  # contraction rows per load of each u
    m_block = schedule.m_block
    aside = schedule.own_queue
    k_chunk = schedule.k_chunk
    x_chunk = schedule.x.chunk
    r_group = schedule.u.group
    k_tiles = (k + 127) // 128
    outs = []
    bias_sbs = []
    p_scale_sbs = []
    y_scale_sbs = []
    u_sbs = []
    v_alls = []
    core = 0
    second_row = schedule.double_row and spec.requantized
    x_aligned = schedule.double_row or schedule.x.load == "dma"
    y_dtype = x.dtype if spec.result_dtype == spec.dtype else getattr(nl, spec.result_dtype)
    p_dtype = (
        x.dtype if spec.intermediate_dtype == spec.dtype else getattr(nl, spec.intermediate_dtype)
    )
    u_dtype = us[0].dtype if spec.fp8 else x.dtype
    v_dtype = nl.float32 if spec.wide else u_dtype
    of_p0 = len(ranks) + len(ns)  # the scales are of every u, of every v, of every x u
    m_all = 2 * m if schedule.split == "tokens" else m
    n_times = 2 if schedule.split == "outputs" or schedule.split == "weights" else 1
    parts = [] if schedule.split else outs
    u_parts = [] if schedule.split == "weights" else us
    v_parts = [] if n_times == 2 else vs
    if schedule.split:
        core = nl.program_id(0)
    if schedule.split == "tokens":
        x = half(x, 0 if spec.x_layout == "row" else 1, core)
    elif schedule.split == "weights":
        x = half(x, 1 if spec.x_layout == "row" else 0, core)
    for j in range(len(ns)):
        if out_layouts[j] == "row":
            outs.append(nl.ndarray((m_all, n_times * ns[j]), dtype=y_dtype, buffer=nl.shared_hbm))
        else:
            outs.append(nl.ndarray((n_times * ns[j], m_all), dtype=y_dtype, buffer=nl.shared_hbm))
        if schedule.split == "tokens":
            parts.append(half(outs[j], 0 if out_layouts[j] == "row" else 1, core))
        elif schedule.split:
            parts.append(half(outs[j], 1 if out_layouts[j] == "row" else 0, core))
        if n_times == 2:
            v_parts.append(half(vs[j], 1 if spec.v_layout == "row" else 0, core))
        if bias_of[j] >= 0:
            bias = biases[bias_of[j]]
            if n_times == 2:
                bias = half_row(bias, core)
            if out_layouts[j] == "row":
                bias_sbs.append(spread_bias(bias, ns[j], aside))
            else:
                bias_sbs.append(bias_columns(bias, ns[j], aside))
        if spec.fp8:
            of_v = scales[len(ranks) + j]
            if n_times == 2 and spec.scales == "channel":
                of_v = half_row(of_v, core)
            of_p = scales[of_p0 + pair_of[j]] if spec.requantized else None
            if stationary[j] and out_layouts[j] == "row" and spec.scales == "channel":
                y_scale_sb = panel_scales(
                    of_v, of_p, ns[j], schedule.v.block, spec.requantized, aside
                )
            else:
                y_scale_sb = product_scales(
                    of_v, of_p, ns[j], spec.scales, stationary[j], spec.requantized, aside
                )
            y_scale_sbs.append(y_scale_sb)
        if schedule.v.resident:
            depth = (ranks[pair_of[j]] + 127) // 128
            v_pitch = (ns[j] + 15) // 16 * 16 if second_row or schedule.v.load == "dma" else ns[j]
            v_alls.append(nl.ndarray((128, depth, v_pitch), dtype=v_dtype, buffer=nl.sbuf))
    for i in range(len(ranks)):
        if schedule.split == "weights":
            u_parts.append(half(us[i], 0 if spec.u_layout == "row" else 1, core))
        if schedule.u.resident:
            aligned = schedule.double_row or schedule.u.load == "dma"
            u_pitch = (ranks[i] + 15) // 16 * 16 if aligned else ranks[i]
            u_sbs.append(nl.ndarray((128, k_tiles, u_pitch), dtype=u_dtype, buffer=nl.sbuf))
        else:
            u_sbs.append(None)
        if spec.fp8:
            p_scale_sb = product_scales(
                scales[i], others.get("x_scale"), ranks[i], spec.scales, True, spec.fp8_x, aside
            )
            if spec.requantized:
                times(p_scale_sb, reciprocal_of(load_scale(scales[of_p0 + i], aside)))
            p_scale_sbs.append(p_scale_sb)
    norm = norm_of_x(
        others.get("norm_gain"), others.get("norm_bias"), k, spec, schedule
    )  # fmt: skip

    for m0 in range(0, m, m_block):
        tokens = min(m_block, m - m0)
        m_tiles = (tokens + 511) // 512

        # Stage 1: every p^T = (x u)^T, summed over all of k in PSUM, rounded once on the way out.
        x_pitch = (tokens + 15) // 16 * 16 if x_aligned else tokens
        p_pitch = (tokens + 15) // 16 * 16 if second_row else tokens
        x_sb = nl.ndarray((128, k_tiles, x_pitch), dtype=x.dtype, buffer=nl.sbuf)
        if spec.norm != "none":
            at = Block(m0, tokens)
            load_normed(x_sb, x, schedule.x.load, schedule.x.chunk, at, k, norm)
        p_sb = nl.ndarray((128, starts[len(ranks)], p_pitch), dtype=p_dtype, buffer=nl.sbuf)
        made_sb = p_sb
        if schedule.split == "weights":
            # each core sums over its half of k
            made_sb = half_sums(starts[len(ranks)], tokens)
            theirs = half_sums(starts[len(ranks)], tokens)
            for i in range(len(ranks)):
                clear_tail(made_sb, starts[i], ranks[i])
        for t0 in range(0, starts[len(ranks)], r_group):
            t1 = min(t0 + r_group, starts[len(ranks)])
            sums = []
            for _ in range((t1 - t0) * m_tiles):
                sums.append(
                    nl.ndarray(
                        (128, 512 if schedule.warm > 0 else min(512, tokens)),
                        dtype=nl.float32,
                        buffer=nl.psum,
                    )
                )
            warm = schedule.warm > 0 and m0 + t0 == 0
            if warm:
                warm_up(sums[0], schedule.warm)
            for k0 in range(0, k, k_chunk):
                rows = min(k_chunk, k - k0)
                if t0 == 0 and k0 % x_chunk == 0 and spec.norm == "none":
                    x_rows = min(x_chunk, k - k0)
                    part = Part(x, k0, x_rows, m0, tokens)
                    load(x_sb, k0 // 128, part, schedule.x.load, schedule.k_order, k)
                for i in range(len(ranks)):
                    r0 = 128 * max(0, t0 - starts[i])  # its columns in tiles t0 to t1
                    r1 = min(ranks[i], 128 * (t1 - starts[i]))
                    if r0 < r1:
                        u_rows = min(u_chunks[i], k - k0)
                        u_deep = (u_rows + 127) // 128
                        if k0 % u_chunks[i] == 0:
                            if not schedule.u.resident:
                                if schedule.double_row or schedule.u.load == "dma":
                                    u_pitch = (r1 - r0 + 15) // 16 * 16
                                    u_sbs[i] = nl.ndarray((128, u_deep, u_pitch), dtype=u_dtype)
                                else:
                                    u_sbs[i] = nl.ndarray((128, u_deep, r1 - r0), dtype=u_dtype)
                                part = Part(u_parts[i], k0, u_rows, r0, r1 - r0)
                                load(u_sbs[i], 0, part, schedule.u.load, schedule.k_order, k)
                            elif m0 == 0 and r0 == 0:
                                part = Part(u_parts[i], k0, u_rows, 0, ranks[i])
                                load(
                                    u_sbs[i], k0 // 128, part, schedule.u.load, schedule.k_order, k
                                )
                # few tokens: the u take turns, since a sum waits for its previous product
                deep = (rows + 127) // 128
                pairs = rows // 256 if schedule.double_row else 0
                for step in range(pairs * len(ranks)):
                    i = step % len(ranks) if tokens < 512 else step // pairs
                    kt = 2 * (step // len(ranks)) if tokens < 512 else 2 * (step % pairs)
                    r0 = 128 * max(0, t0 - starts[i])
                    r1 = min(ranks[i], 128 * (t1 - starts[i]))
                    if r0 < r1:
                        u_tile = k0 // 128 if schedule.u.resident else k0 % u_chunks[i] // 128
                        pair = Tile(
                            u_sbs[i], u_tile + kt, r0 if schedule.u.resident else 0, r1 - r0,
                            starts[i] + r0 // 128, k0 // 128 + kt, 128,
                            k0 + rows == k and kt == deep - 2, False,
                        )  # fmt: skip
                        add_pair(sums, t0, pair, x_sb, tokens)
                        if k0 + rows == k and kt == deep - 2:
                            rounding = Rounding(
                                1.0, p_scale_sbs[i], spec.scales, spec.requantized, None, False,
                                "identity", False, None,
                            )  # fmt: skip
                            keep_tiles(made_sb, sums, t0, pair, tokens, r0, rounding)
                past = 2 * pairs
                for step in range((deep - past) * len(ranks)):
                    i = step % len(ranks) if tokens < 512 else step // (deep - past)
                    kt = past + step // len(ranks) if tokens < 512 else past + step % (deep - past)
                    r0 = 128 * max(0, t0 - starts[i])
                    r1 = min(ranks[i], 128 * (t1 - starts[i]))
                    if r0 < r1:
                        u_tile = k0 // 128 if schedule.u.resident else k0 % u_chunks[i] // 128
                        tile = Tile(
                            u_sbs[i], u_tile + kt, r0 if schedule.u.resident else 0, r1 - r0,
                            starts[i] + r0 // 128, k0 // 128 + kt, min(128, k - k0 - 128 * kt),
                            k0 + rows == k and kt == deep - 1, warm,
                        )  # fmt: skip
                        add_tile(made_sb, sums, t0, tile, x_sb, tokens, spec.fp8)
                        if spec.fp8 and k0 + rows == k and kt == deep - 1:
                            rounding = Rounding(
                                1.0, p_scale_sbs[i], spec.scales, spec.requantized, None, False,
                                "identity", False, None,
                            )  # fmt: skip
                            keep_tiles(made_sb, sums, t0, tile, tokens, r0, rounding)

        # Stage 2: contracts over the rank, panel by panel of every v.
        firsts = []
        if schedule.split == "weights" and schedule.ahead == 0:
            exchange(theirs, made_sb, core)
            add_up_halves(p_sb, made_sb, theirs, tokens)
        if schedule.ahead > 0:
            # the load of the first panel of every v starts before any store
            for place in range(len(ns)):
                j = turns[place] if schedule.narrow_first else place
                i = pair_of[j]
                v_all = None
                if schedule.v.resident:
                    v_all = v_alls[j]
                firsts.append(
                    load_panel(
                        Weight(v_parts[j], v_all, schedule.v, True, False, None),
                        Block(m0, tokens),
                        Product(
                            ranks[i], ns[j], "strided_rows", ranks[i], second_row, spec.wide, 0
                        ),
                        0,
                    )
                )
                if schedule.split == "weights" and place == 0:
                    # the first panel arrives while the cores exchange their sums
                    exchange(theirs, made_sb, core)
                    add_up_halves(p_sb, made_sb, theirs, tokens)
        for place in range(len(ns)):
            j = turns[place] if schedule.narrow_first else place
            i = pair_of[j]
            bias_sb = None
            if bias_of[j] >= 0:
                bias_sb = bias_sbs[bias_of[j]]
            v_all = None
            if schedule.v.resident:
                v_all = v_alls[j]
            left = Strip(p_sb[0:128, starts[i] : starts[i + 1], 0:p_pitch], None, schedule.kept)
            first_sb = firsts[place] if schedule.ahead > 0 else None
            right = Weight(
                v_parts[j], v_all, schedule.v, schedule.ahead, schedule.ahead > 0, first_sb
            )
            base = Base(None, None, 0, "rows", 128, "strided_rows")
            product = Product(ranks[i], ns[j], "strided_rows", ranks[i], second_row, spec.wide, 0)
            y_scale_sb = y_scale_sbs[j] if spec.fp8 else None
            epilogue = Epilogue(y_scale_sb, bias_sb, spec.scales, bias_of[j] >= 0, activations[j])
            at = Block(m0, tokens)
            ends = schedule.own_queue and place == len(ns) - 1 and (place > 0 or ns[j] > 512)
            if stationary[j]:
                result = Result(
                    parts[j], out_layouts[j] == "row", schedule.own_queue, 0, None, False,
                    ends, False,
                )  # fmt: skip
                expand_columns(result, left, right, base, at, product, epilogue)
            else:
                whole = ns[j] % 128 == 0 and bias_of[j] < 0
                moving = schedule.moving if whole and tokens % 128 > 0 else 0
                result = Result(
                    parts[j], False, schedule.own_queue, moving, None, False, ends,
                    ends and at.tokens <= 128,
                )  # fmt: skip
                expand_rows(result, left, right, base, at, product, epilogue)
    return tuple(outs)


def add_tile(p_sb, sums, t0, part: Tile, x_sb, tokens, scaled):
    """Add a tile of the contraction to the sums of one u's columns; the last one rounds them."""
    # t0: the first tile of the strip that the sums become
    m_tiles = (tokens + 511) // 512
    m_step = ((tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16  # moved at a time
    at = part.p_tile - t0
    for c in range(0, part.columns, 128):
        rp = min(128, part.columns - c)
        first = part.first + c
        for mt in range(m_tiles):
            ms = m_step * mt
            mw = min(m_step, tokens - ms)
            nisa.nc_matmul(
                dst=sums[(at + c // 128) * m_tiles + mt][0:rp, 0:mw],
                stationary=part.u_sb[0 : part.rows, part.u_tile, first : first + rp],
                moving=x_sb[0 : part.rows, part.k_tile, ms : ms + mw],
                accumulate=part.k_tile > 0 or (part.warmed and part.p_tile + c + mt == 0),
            )
    if part.last and not scaled:
        for c in range(0, part.columns, 128):
            rp = min(128, part.columns - c)
            for mt in range(m_tiles):
                ms = m_step * mt
                mw = min(m_step, tokens - ms)
                s = (at + c // 128) * m_tiles + mt
                evict(p_sb[0:rp, part.p_tile + c // 128, ms : ms + mw], sums[s][0:rp, 0:mw], s)


def add_pair(sums, t0, part: Tile, x_sb, tokens):
    """Add two tiles of the contraction to the sums of one u's columns in one pass."""
    m_tiles = (tokens + 511) // 512
    m_step = ((tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16  # as in add_tile
    at = part.p_tile - t0
    for c in range(0, part.columns, 128):
        rp = min(128, part.columns - c)
        first = part.first + c
        for mt in range(m_tiles):
            ms = m_step * mt
            mw = min(m_step, tokens - ms)
            nisa.nc_matmul(
                dst=sums[(at + c // 128) * m_tiles + mt][0:rp, 0:mw],
                stationary=part.u_sb[0:128, part.u_tile : part.u_tile + 2, first : first + rp],
                moving=x_sb[0:128, part.k_tile : part.k_tile + 2, ms : ms + mw],
                accumulate=part.k_tile > 0,
                perf_mode=nisa.matmul_perf_mode.double_row,
            )


def keep_tiles(p_sb, sums, t0, part: Tile, tokens, r0, rounding: Rounding):
    """Round the sums of one u's columns, from column r0 on, times their scales."""
    m_tiles = (tokens + 511) // 512
    m_step = ((tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16  # as in add_tile
    for c in range(0, part.columns, 128):
        rp = min(128, part.columns - c)
        tile = part.p_tile + c // 128
        at = (r0 + c) // 128 if rounding.scales == "channel" else 0
        for mt in range(m_tiles):
            ms = m_step * mt
            mw = min(m_step, tokens - ms)
            s = (tile - t0) * m_tiles + mt
            round_to(
                p_sb[0:rp, tile, ms : ms + mw], sums[s][0:rp, 0:mw],
                rounding.scale[0:rp, at : at + 1], rounding.requantize, True, s,
            )  # fmt: skip
