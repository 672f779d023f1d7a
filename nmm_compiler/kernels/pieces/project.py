"""Stage `project`: the products that stay on chip, p^T = (s u)^T of pairs of factors.

Features of p lie on the partitions, as the next product takes them.
"""

import nki.isa as nisa
import nki.language as nl

from .between_ranks import sum_strips
from .mx import load_fours
from .records import Block, Ends, Epilogue, Left, Panel, Part, Term
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
            if spec.mx and at.tokens <= 128:
                project_fours(
                    made[0:128, tile : tile + (wide + 127) // 128, 0 : at.tokens],
                    Term(
                        Left(left.strip, None, "none"),
                        own(others.get(pair.u.name), pair.u.cut, at.core), pair.u,
                    ),
                    r0, wide, pair.twice, at,
                )  # fmt: skip
            else:
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


def project_fours(p_sb, term: Term, r0, wide, twice, at: Block):
    """Compute p^T of few tokens, in order "fours": four sums, none of which waits for itself."""
    rows = term.plan.k
    deep = (rows + 511) // 512
    u_sb = nl.ndarray((128, 4 * deep, wide), dtype=term.weight.dtype, buffer=nl.sbuf)
    load_fours(u_sb, 0, Part(term.weight, 0, rows, r0, wide), "rows")
    for n1 in range((wide + 127) // 128):
        width = min(128, wide - 128 * n1)
        sums = []
        for _ in range(4):
            sums.append(nl.ndarray((width, at.tokens), dtype=nl.float32, buffer=nl.psum))
        for t in range(deep):
            parts = min(128, (rows - 512 * t) // 4)
            for j in range(4):
                nisa.nc_matmul(
                    dst=sums[j][0:width, 0 : at.tokens],
                    stationary=u_sb[0:parts, 4 * t + j, 128 * n1 : 128 * n1 + width],
                    moving=term.left.strip[0:parts, 4 * t + j, 0 : at.tokens],
                    accumulate=t > 0,
                )
        first = nl.ndarray((width, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=first, src=sums[0])
        for j in range(1, 3):
            nisa.tensor_tensor(dst=first, data1=first, data2=sums[j], op=nl.add)
        nisa.tensor_tensor(
            dst=p_sb[0:width, n1, 0 : at.tokens], data1=first, data2=sums[3], op=nl.add
        )
        if twice:
            again = p_sb[64 : 64 + width, n1, 0 : at.tokens]
            nisa.tensor_tensor(dst=again, data1=first, data2=sums[3], op=nl.add)
