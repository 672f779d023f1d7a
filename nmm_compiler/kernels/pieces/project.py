"""Stage `project`: the products that stay on chip, p^T = (s u)^T of pairs of factors.

Features of p lie on the partitions, as the next product takes them.
"""

import nki.language as nl

from .between_ranks import sum_strips
from .records import Block, Epilogue, Term
from .sums import make_columns
from .two_cores import add_other_half, clear_tail, finish_sums, own


def project(
    p_sb, s_sb, source, x_load, pairs, cores, ranks, plain, p_scale, p_bias, squares, m0, tokens,
    core, spec, others,
):  # fmt: skip
    """Compute p^T of all pairs into a strip, one after the other; the first one may load s.

    cores, ranks: whether these sum over a part of s each. plain: nothing is between the factors.
    """
    if cores:
        made = nl.ndarray(p_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    elif ranks:
        made = nl.ndarray(p_sb.shape, dtype=p_sb.dtype, buffer=nl.sbuf)
    else:
        made = p_sb
    for pair in pairs:
        if cores or ranks:
            clear_tail(made, pair.tile, pair.u.n)
        for r0 in range(0, pair.u.n, pair.u.block):
            wide = min(pair.u.block, pair.u.n - r0)
            tile = pair.tile + r0 // 128
            make_columns(
                made[0:128, tile : tile + (wide + 127) // 128, 0:tokens],
                Term(
                    s_sb, source, x_load if pair.place == 0 else "none",
                    own(others.get(pair.u.name), pair.u.cut, core), pair.u,
                ),
                [],
                Term(None, None, "none", None, spec.nothing),
                [],
                r0, wide, pair.u.group, Block(m0, tokens),
                Epilogue(
                    p_scale[pair.place] if pair.scaled else pair.scale,
                    "" if cores or ranks else pair.scales, p_bias[pair.place],
                    pair.bias != "" and not cores and not ranks,
                    "identity" if cores or ranks else pair.activation,
                    getattr(nl, "copy" if cores or ranks else pair.op),
                    None, False, squares[pair.place], pair.gain != "" and not cores and not ranks,
                ),
            )  # fmt: skip
    if cores:
        if plain and not ranks:
            total = p_sb
        elif ranks:
            total = nl.ndarray(p_sb.shape, dtype=p_sb.dtype, buffer=nl.sbuf)
        else:
            total = made
        add_other_half(total, made, core)
    else:
        total = made
    if ranks:
        if plain:
            whole = p_sb
        else:
            whole = nl.ndarray(p_sb.shape, dtype=p_sb.dtype, buffer=nl.sbuf)
        sum_strips(whole, total, spec.p_features, spec.tp)
    else:
        whole = total
    if (cores or ranks) and not plain:
        for pair in pairs:
            finish_sums(
                p_sb, whole, pair.tile, pair.u.n,
                Epilogue(
                    p_scale[pair.place] if pair.scaled else pair.scale, pair.scales,
                    p_bias[pair.place], pair.bias != "", pair.activation, getattr(nl, pair.op),
                    None, False, squares[pair.place], pair.gain != "",
                ),
            )  # fmt: skip
