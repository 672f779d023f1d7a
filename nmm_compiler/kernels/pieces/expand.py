"""Stages `expand` and `combine`: the products that give results, panel by panel of their outputs.

Functions that take `others`, the kernel's operands, are written out where they are called: once for
each linear. A linear is x w, p v, or both in the same sums.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, load_rows, move, store_tiles
from .records import Block, Ends, Epilogue, Left, Panel, Part, Result, Term
from .sums import load_panel, make_columns, make_rows
from .two_cores import own


def dense_term(linear, left: Left, at: Block, others) -> Term:
    """Return the product with the dense weight of a linear."""
    return Term(
        left, own(others.get(linear.weight.name), linear.weight.cut, at.core), linear.weight,
        own(others.get(linear.weight.scale), linear.weight.cut, at.core)
        if linear.weight.mx_bytes > 0
        else None,
        getattr(nl, linear.weight.element) if linear.weight.mx_bytes > 0 else None,
    )  # fmt: skip


def low_rank_term(linear, left: Left, at: Block, others) -> Term:
    """Return the product of its p with the second factor of a linear."""
    return Term(
        Left(
            left.p_sb[
                0:128,
                linear.low_rank.tile : linear.low_rank.tile + linear.low_rank.tiles,
                0 : at.tokens,
            ]
            if linear.low_rank.r > 0
            else None,
            None, "none",
        ),
        left.v_sb
        if linear.low_rank.groups.slots > 0
        else own(others.get(linear.low_rank.v.name), linear.low_rank.v.cut, at.core),
        linear.low_rank.v,
    )  # fmt: skip


def epilogue_of(linear, scale, bias, gate, gated, spec) -> Epilogue:
    """Return what stands behind the sums of a linear."""
    return Epilogue(
        scale, "token" if linear.normed else spec.scales, bias, linear.bias != "",
        linear.activation, getattr(nl, linear.op), gate, gated, None, False,
    )  # fmt: skip


def load_panels(linear, left: Left, n0, at: Block, others):
    """Return a linear's panels from output n0 on: the chunks of its second factor and of its dense
    weight, loaded if they are loaded ahead."""
    width = min(linear.last.block, linear.n - n0)
    own_dense = dense_term(linear, left, at, others)
    own_low = low_rank_term(linear, left, at, others)
    return [
        load_panel(own_low, n0, width, at) if linear.low_rank.r > 0 else [],
        load_panel(own_dense, n0, width, at) if linear.weight.k > 0 else [],
    ]


def expand(result: Result, first, left: Left, linear, ending: Epilogue, at: Block, others):
    """Store the result of a linear for a block of tokens; its first panels are there."""
    panels = [first]
    for n0 in range(0, linear.n, linear.last.block):
        columns = min(linear.last.block, linear.n - n0)
        if n0 + linear.last.block < linear.n:
            following = load_panels(linear, left, n0 + linear.last.block, at, others)
            panels.append(following)
        apart = columns // 128 if linear.runs else linear.last.apart
        panel = Panel(n0, columns, linear.last.group, linear.last.down, apart, columns, 0)
        chunks = panels[n0 // linear.last.block] if linear.n > linear.last.block else first
        expand_panel(result, chunks, left, linear, ending, panel, at, others)


def expand_panel(
    result: Result, chunks, left: Left, linear, ending: Epilogue, panel: Panel, at: Block, others
):  # fmt: skip
    """Store some outputs of a linear, or keep them in a strip."""
    dense = dense_term(linear, left, at, others)
    low = low_rank_term(linear, left, at, others)
    if linear.by_rows:
        make_rows(result, dense, chunks[1], low, chunks[0], panel, at, ending)
    else:
        if not result.kept:
            y_sb = nl.ndarray(
                (128, (panel.columns + 127) // 128, at.tokens), dtype=result.out.dtype,
                buffer=nl.sbuf,
            )  # fmt: skip
        if result.has_residual and not linear.turned:
            added = nl.ndarray(y_sb.shape, dtype=result.out.dtype, buffer=nl.sbuf)
            load_rows(
                added, 0, Part(result.residual, panel.n0, panel.columns, at.m0, at.tokens, 1),
                "strided_rows", panel.columns, "",
            )  # fmt: skip
        make_columns(
            result.strip if result.kept else y_sb, dense, chunks[1], low, chunks[0], panel, at,
            ending,
        )  # fmt: skip
        if linear.turned and not result.kept:
            store_turned(result, y_sb, panel.n0, panel.columns, 0, 1, at)
        elif not result.kept:
            if result.has_residual:
                add_tiles(y_sb, added, panel.columns)
            if linear.runs:
                row = result.out[0:1, 0 : panel.columns].reshape_dim(1, (128, panel.columns // 128))
                move(row.permute((1, 2, 0)), y_sb, result.own_queue)
            else:
                store_tiles(
                    result.out, y_sb, result.own_queue, panel.n0, panel.columns, at.m0, at.tokens
                )  # fmt: skip


def store_turned(result: Result, y_sb, n0, columns, core, cores, at: Block):
    """Store rows of y for a tile of tokens at most; y^T is in SBUF, and TensorE turns it.

    Of several cores each stores its part.
    """
    tiles = columns // (128 * cores)
    # of several tokens by a DMA that NKI Beta 1 has no view for
    most = min(tiles, 128 // at.tokens) if result.own_queue or at.tokens == 1 else 1
    whole = tiles // max(1, most) * most
    first = core * tiles
    if whole > 0:
        store_tiles_turned(result, y_sb, first, whole // most, most, n0, at)
    if whole < tiles:
        store_tiles_turned(result, y_sb, first + whole, 1, tiles - whole, n0, at)
    done = 128 * cores * tiles
    if done < columns:
        rest = y_sb[0:128, done // 128 : y_sb.shape[1], 0 : at.tokens]
        store_rows_turned(result, rest, n0 + done, columns - done, core, cores, at)


def store_tiles_turned(result: Result, y_sb, begin, deep, most, n0, at: Block):
    """Store tiles of outputs from `begin` on as rows, as many in a transpose as `most` says.

    A partition gets outputs of one token, from `deep` tiles that lie one behind another: so a store
    has long runs, on all DMA engines.
    """
    rows = most * at.tokens
    stop = begin + most * deep
    rows_sb = nl.ndarray((rows, 128 * deep), dtype=result.out.dtype, buffer=nl.sbuf)
    if result.has_residual:
        more = nl.ndarray((rows, 128 * deep), dtype=result.out.dtype, buffer=nl.sbuf)
        lies = result.residual[at.m0 : at.m0 + at.tokens, n0 + 128 * begin : n0 + 128 * stop]
        if most > 1:
            lies = lies.reshape_dim(1, (most, 128 * deep)).permute((1, 0, 2))
        move(more, lies, result.own_queue)
    for first in range(0, deep, 4):
        count = min(4, deep - first)
        turned = nl.ndarray((rows, 128 * count), dtype=y_sb.dtype, buffer=nl.psum)
        for i in range(count):
            if most == 1:
                square = y_sb[0:128, begin + first + i, 0 : at.tokens]
            elif at.tokens == 1 and deep == 1:
                square = y_sb[0:128, begin:stop, 0]
            else:
                square = y_sb[0:128, begin + first + i : stop : deep, 0 : at.tokens]
            nisa.nc_transpose(
                dst=turned[0:rows, 128 * i : 128 * (i + 1)], data=square, engine=nisa.engine.tensor
            )
        part = rows_sb[0:rows, 128 * first : 128 * (first + count)]
        if result.has_residual:
            added = more[0:rows, 128 * first : 128 * (first + count)]
            nisa.tensor_tensor(dst=part, data1=turned, data2=added, op=nl.add)
        else:
            evict(part, turned, first // 4)
    place = result.out[at.m0 : at.m0 + at.tokens, n0 + 128 * begin : n0 + 128 * stop]
    if most > 1:
        place = place.reshape_dim(1, (most, 128 * deep)).permute((1, 0, 2))
    move(place, rows_sb, result.own_queue)


def store_rows_turned(result: Result, y_sb, n0, columns, core, cores, at: Block):
    """Store outputs that fill no tile for each core, turned; a residual is added to them."""
    rows_sb = nl.ndarray((at.tokens, columns), dtype=result.out.dtype, buffer=nl.sbuf)
    turned = nl.ndarray((at.tokens, columns), dtype=y_sb.dtype, buffer=nl.psum)
    for n1 in range(0, columns, 128):
        width = min(128, columns - n1)
        nisa.nc_transpose(
            dst=turned[0 : at.tokens, n1 : n1 + width],
            data=y_sb[0:width, n1 // 128, 0 : at.tokens],
            engine=nisa.engine.tensor,
        )
    if result.has_residual:
        more = nl.ndarray((at.tokens, columns), dtype=result.out.dtype, buffer=nl.sbuf)
        lies = result.residual[at.m0 : at.m0 + at.tokens, n0 : n0 + columns]
        move(more, lies, result.own_queue)
        nisa.tensor_tensor(dst=rows_sb, data1=turned, data2=more, op=nl.add)
    else:
        evict(rows_sb, turned, 0)
    part = columns // cores
    first = core * part
    move(
        result.out[at.m0 : at.m0 + at.tokens, n0 + first : n0 + first + part],
        rows_sb[0 : at.tokens, first : first + part], result.own_queue,
    )  # fmt: skip


def add_tiles(dst, more, rows):
    """Add to a strip of so many rows, in tiles of 128, another one."""
    tiles = rows // 128
    rest = rows % 128
    columns = dst.shape[2]
    if tiles > 0:
        part = dst[0:128, 0:tiles, 0:columns]
        nisa.tensor_tensor(dst=part, data1=part, data2=more[0:128, 0:tiles, 0:columns], op=nl.add)
    if rest > 0:
        part = dst[0:rest, tiles, 0:columns]
        nisa.tensor_tensor(dst=part, data1=part, data2=more[0:rest, tiles, 0:columns], op=nl.add)


def combine(result: Result, left: Left, gate, up, ends: Ends, at: Block, spec, others):
    """Compute h = gate up for a block of tokens: stored, or h^T kept in a strip.

    The gate's sum leaves PSUM through its activation, the other through the multiplication.
    """
    gating = epilogue_of(gate, ends.scale[0], ends.bias[0], None, False, spec)
    # the gate's product has loaded x
    loaded = Left(left.strip, left.source, "none", left.left_scales, left.p_sb)
    first_gate = load_panels(gate, left, 0, at, others)
    first_up = load_panels(up, loaded, 0, at, others)
    gate_panels = [first_gate]
    up_panels = [first_up]
    for n0 in range(0, up.n, up.last.block):
        columns = min(up.last.block, up.n - n0)
        if n0 + up.last.block < up.n:
            next_gate = load_panels(gate, left, n0 + up.last.block, at, others)
            next_up = load_panels(up, loaded, n0 + up.last.block, at, others)
            gate_panels.append(next_gate)
            up_panels.append(next_up)
        gate_chunks = gate_panels[n0 // up.last.block] if up.n > up.last.block else first_gate
        up_chunks = up_panels[n0 // up.last.block] if up.n > up.last.block else first_up
        panel = Panel(n0, columns, up.last.group, up.last.down, up.last.apart, columns, 0)
        active = nl.ndarray(
            (128, (at.tokens + 127) // 128, columns)
            if up.by_rows
            else (128, (columns + 127) // 128, at.tokens),
            dtype=nl.float32, buffer=nl.sbuf,
        )  # fmt: skip
        expand_panel(
            Result(None, None, False, result.own_queue, active, True), gate_chunks, left, gate,
            gating, panel, at, others,
        )  # fmt: skip
        gated = epilogue_of(up, ends.scale[1], ends.bias[1], active, True, spec)
        expand_panel(
            Result(
                result.out, None, False, result.own_queue,
                result.strip[0:128, n0 // 128 : n0 // 128 + (columns + 127) // 128, 0 : at.tokens]
                if result.kept
                else None,
                result.kept,
            ),
            up_chunks, loaded, up, gated, panel, at, others,
        )  # fmt: skip
