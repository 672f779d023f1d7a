"""Several low-rank products of one x: y = activation((x u) v + bias) for every u and each v of it.

Stage 1 takes the columns of all u together: a chunk of x^T is loaded once and moves past the tiles
of every u. One strip holds all the intermediates, one after another in tiles of the rank; they
never leave the chip. Stage 2 is that of the single product, for each v on its part of the strip.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .parts import bias_columns, evict, load, spread_bias
from .stages import expand_columns, expand_rows


@nki.jit
def lowrank_shared(
    x,
    us,
    vs,
    biases,
    m=1,  # tokens
    k=1,  # input features
    ranks=(1,),  # of every u
    starts=(0, 1),  # first rank tile of every u, then the number of tiles
    ns=(1,),  # output features of every v
    pair_of=(0,),  # the u that each v follows
    bias_of=(-1,),  # place among the biases, -1 for none
    activations=("identity",),
    out_layouts=("row",),
    stills=(False,),  # where stage 2 holds v still
    x_load="rows",
    u_load="rows",
    v_load="rows",
    k_order="p",
    m_block=128,
    k_chunk=128,
    x_chunk=128,
    r_group=1,
    v_block=128,
    v_chunk=128,
    n_group=1,
    u_resident=False,
    v_resident=False,
):
    """Return every y, [m, n], or [n, m] where its layout is "col"."""
    k_tiles = (k + 127) // 128
    r_tiles = starts[len(ranks)]
    outs = []
    bias_sbs = []
    u_alls = []
    v_alls = []
    for j in range(len(ns)):
        if out_layouts[j] == "row":
            outs.append(nl.ndarray((m, ns[j]), dtype=x.dtype, buffer=nl.shared_hbm))
        else:
            outs.append(nl.ndarray((ns[j], m), dtype=x.dtype, buffer=nl.shared_hbm))
        if bias_of[j] >= 0:
            if out_layouts[j] == "row":
                bias_sbs.append(spread_bias(biases[bias_of[j]], ns[j]))
            else:
                bias_sbs.append(bias_columns(biases[bias_of[j]], ns[j]))
        if v_resident:
            depth = (ranks[pair_of[j]] + 127) // 128
            v_alls.append(nl.ndarray((128, depth, ns[j]), dtype=x.dtype, buffer=nl.sbuf))
    if u_resident:
        for i in range(len(ranks)):
            u_alls.append(nl.ndarray((128, k_tiles, ranks[i]), dtype=x.dtype, buffer=nl.sbuf))

    for m0 in range(0, m, m_block):
        tokens = min(m_block, m - m0)
        m_tiles = (tokens + 511) // 512

        # Stage 1: every p^T = (x u)^T, summed over all of k in PSUM, rounded once on the way out.
        x_sb = nl.ndarray((128, k_tiles, tokens), dtype=x.dtype, buffer=nl.sbuf)
        p_sb = nl.ndarray((128, r_tiles, tokens), dtype=x.dtype, buffer=nl.sbuf)
        for t0 in range(0, r_tiles, r_group):
            t1 = min(t0 + r_group, r_tiles)
            sums = []
            for _ in range((t1 - t0) * m_tiles):
                sums.append(nl.ndarray((128, min(512, tokens)), dtype=nl.float32, buffer=nl.psum))
            for k0 in range(0, k, k_chunk):
                rows = min(k_chunk, k - k0)
                depth = (rows + 127) // 128
                kt = k0 // 128
                if t0 == 0 and k0 % x_chunk == 0:
                    load(x_sb, kt, x, k0, min(x_chunk, k - k0), m0, tokens, x_load, k_order, k)
                x_tiles = x_sb[0:128, kt : kt + depth, 0:tokens]
                for i in range(len(ranks)):
                    # the columns of this u in tiles t0 to t1
                    r0 = 128 * max(0, t0 - starts[i])
                    r1 = min(ranks[i], 128 * (t1 - starts[i]))
                    if r0 < r1:
                        if u_resident:
                            if m0 == 0 and r0 == 0:
                                u_all = u_alls[i]
                                load(u_all, kt, us[i], k0, rows, 0, ranks[i], u_load, k_order, k)
                            u_sb = u_alls[i][0:128, kt : kt + depth, r0:r1]
                        else:
                            u_sb = nl.ndarray(
                                (128, depth, r1 - r0), dtype=x.dtype, buffer=nl.sbuf
                            )
                            load(u_sb, 0, us[i], k0, rows, r0, r1 - r0, u_load, k_order, k)
                        tile = starts[i] + r0 // 128
                        add_chunk(sums, tile - t0, u_sb, x_tiles, k0, rows, r1 - r0, tokens)
                        if k0 + rows == k:
                            round_sums(p_sb, tile, sums, tile - t0, r1 - r0, tokens)

        # Stage 2: contracts over the rank, panel by panel of every v.
        for j in range(len(ns)):
            i = pair_of[j]
            bias_sb = None
            if bias_of[j] >= 0:
                bias_sb = bias_sbs[bias_of[j]]
            v_all = None
            if v_resident:
                v_all = v_alls[j]
            p_part = p_sb[0:128, starts[i] : starts[i + 1], 0:tokens]
            if stills[j]:
                expand_columns(
                    out=outs[j],
                    s_sb=p_part,
                    w_all=v_all,
                    x_sb=None,
                    bias_sb=bias_sb,
                    s=None,
                    w=vs[j],
                    base_w=None,
                    m0=m0,
                    tokens=tokens,
                    k=ranks[i],
                    n=ns[j],
                    base_k=0,
                    s_load="none",
                    s_chunk=128,
                    w_load=v_load,
                    base_load="rows",
                    order="t",
                    base_order="t",
                    k_chunk=v_chunk,
                    base_chunk=128,
                    w_block=v_block,
                    group_tiles=n_group,
                    resident=v_resident,
                    stream=False,
                    has_bias=bias_of[j] >= 0,
                    activation=activations[j],
                    as_rows=out_layouts[j] == "row",
                )
            else:
                expand_rows(
                    out=outs[j],
                    s_sb=p_part,
                    w_all=v_all,
                    x_sb=None,
                    bias_sb=bias_sb,
                    s=None,
                    w=vs[j],
                    base_w=None,
                    m0=m0,
                    tokens=tokens,
                    k=ranks[i],
                    n=ns[j],
                    base_k=0,
                    s_load="none",
                    s_chunk=128,
                    w_load=v_load,
                    base_load="rows",
                    order="t",
                    base_order="t",
                    k_chunk=v_chunk,
                    base_chunk=128,
                    w_block=v_block,
                    group_tiles=n_group,
                    resident=v_resident,
                    stream=False,
                    has_bias=bias_of[j] >= 0,
                    activation=activations[j],
                )
    return tuple(outs)


def add_chunk(sums, first, u_sb, x_sb, k0, rows, columns, tokens):
    """Add a chunk of the contraction to the sums of one u's columns, from `first` on."""
    m_tiles = (tokens + 511) // 512
    for kt in range((rows + 127) // 128):
        kp = min(128, rows - 128 * kt)
        for c in range(0, columns, 128):
            rp = min(128, columns - c)
            for mt in range(m_tiles):
                ms = 512 * mt
                mw = min(512, tokens - ms)
                nisa.nc_matmul(
                    dst=sums[(first + c // 128) * m_tiles + mt][0:rp, 0:mw],
                    stationary=u_sb[0:kp, kt, c : c + rp],
                    moving=x_sb[0:kp, kt, ms : ms + mw],
                    accumulate=k0 + kt > 0,
                )


def round_sums(p_sb, tile, sums, first, columns, tokens):
    """Take the finished sums of one u's columns to the strip, from `tile` on."""
    m_tiles = (tokens + 511) // 512
    for c in range(0, columns, 128):
        rp = min(128, columns - c)
        for mt in range(m_tiles):
            ms = 512 * mt
            mw = min(512, tokens - ms)
            at = (first + c // 128) * m_tiles + mt
            p_tile = p_sb[0:rp, tile + c // 128, ms : ms + mw]
            evict(p_tile, sums[at][0:rp, 0:mw], at)
