"""Stage `project`: the products that stay on chip, p^T = (s u)^T of pairs of factors.

Features of p lie on the partitions, as the next product takes them.
"""

import nki.language as nl

from .between_ranks import sum_strips
from .records import Block, Ends, Epilogue, Left, Panel, Term
from .sums import make_columns
from .two_cores import add_other_half, clear_tail, finish_sums, own


def project(p_sb, left: Left, stage, ends: Ends, at: Block, spec, others):
    """Compute p^T of the pairs of a stage into a strip, one after the other.

    The first of them may load the left factor. Cores, and ranks, sum over a part of it each.
    """
    if stage.cores:
        made = nl.ndarray(p_sb.shape, dtype=nl.float32, buffer=nl.sbuf)
    elif stage.ranks:
        made = nl.ndarray(p_sb.shape, dtype=p_sb.dtype, buffer=nl.sbuf)
    else:
        made = p_sb
    for pair in stage.pairs:
        if stage.shared:
            clear_tail(made, pair.tile, pair.u.n)
        for r0 in range(0, pair.u.n, pair.u.block):
            wide = min(pair.u.block, pair.u.n - r0)
            tile = pair.tile + r0 // 128
            make_columns(
                made[0:128, tile : tile + (wide + 127) // 128, 0 : at.tokens],
                Term(
                    Left(left.strip, left.source, left.how if pair.place == 0 else "none"),
                    own(others.get(pair.u.name), pair.u.cut, at.core), pair.u,
                ),
                [],
                Term(Left(None, None, "none"), None, spec.nothing),
                [],
                Panel(r0, wide, pair.u.group, 1), at,
                Epilogue(
                    ends.p_scale[pair.place] if pair.scaled else pair.scale,
                    "" if stage.shared else pair.scales, ends.p_bias[pair.place],
                    pair.bias != "" and not stage.shared,
                    "identity" if stage.shared else pair.activation,
                    getattr(nl, "copy" if stage.shared else pair.op),
                    None, False, ends.squares[pair.place], pair.gain != "" and not stage.shared,
                ),
            )  # fmt: skip
    if stage.cores:
        if stage.plain and not stage.ranks:
            total = p_sb
        elif stage.ranks:
            total = nl.ndarray(p_sb.shape, dtype=p_sb.dtype, buffer=nl.sbuf)
        else:
            total = made
        add_other_half(total, made, at.core)
    else:
        total = made
    if stage.ranks:
        if stage.plain:
            whole = p_sb
        else:
            whole = nl.ndarray(p_sb.shape, dtype=p_sb.dtype, buffer=nl.sbuf)
        sum_strips(whole, total, spec.p_features, spec.tp)
    else:
        whole = total
    if stage.shared and not stage.plain:
        for pair in stage.pairs:
            finish_sums(
                p_sb, whole, pair.tile, pair.u.n,
                Epilogue(
                    ends.p_scale[pair.place] if pair.scaled else pair.scale, pair.scales,
                    ends.p_bias[pair.place], pair.bias != "", pair.activation,
                    getattr(nl, pair.op), None, False, ends.squares[pair.place], pair.gain != "",
                ),
            )  # fmt: skip
