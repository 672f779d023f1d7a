"""Stage `project`: the products that stay on chip, p^T = (s u)^T of pairs of factors.

Features of p lie on the partitions, as the next product takes them.
"""

import nki.isa as nisa
import nki.language as nl

from .records import Block, Ends, Epilogue, Left, Panel, Term
from .sums import load_chunk, make_columns
from .two_cores import add_other_half, clear_tail, finish_sums, own, sum_strips


def project(p_sb, left: Left, pairs, cores, ranks, ends: Ends, at: Block, spec, others):
    """Compute p^T of pairs of factors into a strip, one after the other.

    The first of them may load the left factor. With `cores` each of two cores, and of several ranks
    each one, sums over a part of it.
    """
    shared = cores or ranks > 1
    if shared:
        made = nl.ndarray(p_sb.shape, dtype=nl.float32 if cores else p_sb.dtype, buffer=nl.sbuf)
    else:
        made = p_sb
    for pair in pairs:
        if shared:
            clear_tail(made, pair.tile, pair.u.n)
        for r0 in range(0, pair.u.n, pair.u.block):
            wide = min(pair.u.block, pair.u.n - r0)
            tile = pair.tile + r0 // 128
            if pair.u.few_sums:
                project_few(
                    made[0:128, tile : tile + (wide + 127) // 128, 0 : at.tokens],
                    Term(
                        Left(left.strip, None, "none"),
                        own(others.get(pair.u.name), pair.u.cut, at.core), pair.u,
                    ),
                    [], r0, wide, pair.v.parts, ends.p_scale[pair.place], pair.scales != "", at,
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
                    Panel(r0, wide, pair.u.group, 1, 1, wide, 0), at,
                    Epilogue(
                        ends.p_scale[pair.place] if pair.scaled else pair.scale,
                        "" if shared else pair.scales, ends.p_bias[pair.place],
                        pair.bias != "" and not shared,
                        "identity" if shared else pair.activation,
                        getattr(nl, "copy" if shared else pair.op),
                        None, False, ends.squares[pair.place], pair.gain != "" and not shared,
                    ),
                )  # fmt: skip
    if shared:
        if cores:
            total = nl.ndarray(
                p_sb.shape, dtype=p_sb.dtype if ranks > 1 else nl.float32, buffer=nl.sbuf
            )
            add_other_half(total, made, at.core)
        else:
            total = made
        if ranks > 1:
            whole = nl.ndarray(p_sb.shape, dtype=p_sb.dtype, buffer=nl.sbuf)
            sum_strips(whole, total, pairs[0].u.n, ranks)
        else:
            whole = total
        for pair in pairs:
            finish_sums(
                p_sb, whole, pair.tile, pair.u.n,
                Epilogue(
                    ends.p_scale[pair.place] if pair.scaled else pair.scale, pair.scales,
                    ends.p_bias[pair.place], pair.bias != "", pair.activation,
                    getattr(nl, pair.op), None, False, ends.squares[pair.place], pair.gain != "",
                ),
            )  # fmt: skip


def project_few(p_sb, term: Term, chunks, r0, wide, times, scale, scaled, at: Block):
    """Compute p^T of few tokens: four sums take turns, so that none waits for itself.

    chunks: of u, where they are loaded ahead. times: how often p^T is there, one behind another.
    scale: of each rank, where it is scaled.
    """
    for n1 in range(0, wide, 128):
        width = min(128, wide - n1)
        sums = nl.ndarray((width, 4, at.tokens), dtype=nl.float32, buffer=nl.psum)
        for k0 in range(0, term.plan.k, term.plan.chunk):
            rows = min(term.plan.chunk, term.plan.k - k0)
            if term.plan.ahead:
                chunk = chunks[k0 // term.plan.chunk]
                u_sb = chunk[0:128, 0 : chunk.shape[1], n1 : n1 + width]
            else:
                u_sb = load_chunk(term, k0, r0 + n1, width)
            fours = term.plan.order == "fours"
            for kt in range((rows + 511) // 512 * 4 if fours else (rows + 127) // 128):
                parts = min(128, (rows - 512 * (kt // 4)) // 4 if fours else rows - 128 * kt)
                tile = k0 // 128 + kt
                nisa.nc_matmul(
                    dst=sums[0:width, tile % 4, 0 : at.tokens],
                    stationary=u_sb[0:parts, kt, 0:width],
                    moving=term.left.strip[0:parts, tile, 0 : at.tokens],
                    accumulate=tile >= 4,
                )
        total = nl.ndarray((width, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total, op=nl.add, data=sums.permute((0, 2, 1)), axis=2)
        for i in range(times):
            last = p_sb[width * i : width * i + width, n1 // 128, 0 : at.tokens]
            if scaled:
                place = (r0 + n1) // 128
                own_scale = scale[0:width, place : place + 1]
                nisa.tensor_scalar(dst=last, data=total, op0=nl.multiply, operand0=own_scale)
            else:
                nisa.tensor_copy(dst=last, src=total)
