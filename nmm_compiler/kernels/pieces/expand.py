"""Stages `expand` and `combine`: the products that give results, panel by panel of their outputs.

Functions that take `others`, the kernel's operands, are written out where they are called: once for
each linear. A linear is x w, p v, or both in the same sums.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, load_rows, store, store_tiles
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


def low_rank_term(linear, p_sb, at: Block, others) -> Term:
    """Return the product of its p with the second factor of a linear."""
    return Term(
        Left(
            p_sb[
                0:128,
                linear.low_rank.tile : linear.low_rank.tile + linear.low_rank.tiles,
                0 : at.tokens,
            ]
            if linear.low_rank.r > 0
            else None,
            None, "none",
        ),
        own(others.get(linear.low_rank.v.name), linear.low_rank.v.cut, at.core),
        linear.low_rank.v,
    )  # fmt: skip


def epilogue_of(linear, scale, bias, gate, gated, spec) -> Epilogue:
    """Return what stands behind the sums of a linear."""
    return Epilogue(
        scale, "token" if linear.normed else spec.scales, bias, linear.bias != "",
        linear.activation, getattr(nl, linear.op), gate, gated, None, False,
    )  # fmt: skip


def load_panels(dense: Term, low: Term, gathered, gathers, n0, n, at: Block):
    """Return the chunks of a panel of a dense weight and of a second factor of n outputs, those
    that are loaded ahead. gathered: the panels of one that gathers its rows."""
    chunks = []
    low_chunks = gathered[n0 // low.plan.block] if gathers else []
    if dense.plan.k > 0 and dense.plan.mx_bytes == 0:
        chunks = load_panel(dense, n0, min(dense.plan.block, n - n0), at)
    if low.plan.k > 0 and not gathers:
        low_chunks = load_panel(low, n0, min(low.plan.block, n - n0), at)
    if dense.plan.mx_bytes > 0:  # its loads are the last ones
        chunks = load_panel(dense, n0, min(dense.plan.block, n - n0), at)
    return [chunks, low_chunks]


def expand(
    result: Result, panels, gathered, left: Left, p_sb, linear, ending: Epilogue, at: Block, others
):  # fmt: skip
    """Store the result of a linear for a block of tokens; its first panels are there."""
    dense = dense_term(linear, left, at, others)
    low = low_rank_term(linear, p_sb, at, others)
    gathers = linear.low_rank.groups.slots > 0
    for n0 in range(0, linear.n, linear.last.block):
        columns = min(linear.last.block, linear.n - n0)
        following = n0 + linear.last.block
        if linear.n > linear.last.block and following < linear.n:
            panels.append(load_panels(dense, low, gathered, gathers, following, linear.n, at))
        chunks = panels[n0 // linear.last.block]
        panel = Panel(n0, columns, linear.last.group, linear.last.down, columns, 0)
        if linear.by_rows:
            make_rows(
                result, dense, chunks[0], low, chunks[1], panel, at, ending,
            )  # fmt: skip
        else:
            y_sb = nl.ndarray(
                (128, (columns + 127) // 128, at.tokens), dtype=result.out.dtype, buffer=nl.sbuf
            )
            if result.has_residual and not linear.turned:
                added = nl.ndarray(y_sb.shape, dtype=result.out.dtype, buffer=nl.sbuf)
                load_rows(
                    added, 0, Part(result.residual, n0, columns, at.m0, at.tokens),
                    "strided_rows", columns,
                )  # fmt: skip
            make_columns(
                y_sb, dense, chunks[0], low, chunks[1], panel, at, ending,
            )  # fmt: skip
            if linear.turned:
                store_turned(result, y_sb, n0, columns, 0, 1, at)
            else:
                if result.has_residual:
                    add_tiles(y_sb, added, columns)
                store_tiles(result.out, y_sb, result.own_queue, n0, columns, at.m0, at.tokens)


def store_turned(result: Result, y_sb, n0, columns, core, cores, at: Block):
    """Store rows of y for a tile of tokens at most; y^T is in SBUF, and TensorE turns it.

    Of several cores each stores its part.
    """
    whole = columns // (128 * cores) * (128 * cores) if at.tokens == 1 else 0
    if whole > 0:
        part = whole // 128 // cores
        tiles = y_sb[0:128, core * part : core * part + part, 0 : at.tokens]
        store_one_turned(result, tiles, n0 + core * 128 * part, at)
    if whole < columns:
        rest = y_sb[0:128, whole // 128 : y_sb.shape[1], 0 : at.tokens]
        store_rows_turned(result, rest, n0 + whole, columns - whole, core, cores, at)


def store_one_turned(result: Result, y_sb, n0, at: Block):
    """Store a row of y: a tile of outputs becomes a row in SBUF, 128 of them in a transpose."""
    for first in range(0, y_sb.shape[1], 128):
        count = min(128, y_sb.shape[1] - first)
        turned = nl.ndarray((count, 128), dtype=y_sb.dtype, buffer=nl.psum)
        nisa.nc_transpose(
            dst=turned, data=y_sb[0:128, first : first + count, 0], engine=nisa.engine.tensor
        )
        rows_sb = nl.ndarray((count, 128), dtype=result.out.dtype, buffer=nl.sbuf)
        evict(rows_sb, turned, first // 128)
        left = n0 + 128 * first
        if result.has_residual:
            more = nl.ndarray((count, 128), dtype=result.out.dtype, buffer=nl.sbuf)
            lies = result.residual[at.m0, left : left + 128 * count]
            nisa.dma_copy(dst=more, src=lies.reshape_dim(0, (count, 128)))
            nisa.tensor_tensor(dst=rows_sb, data1=rows_sb, data2=more, op=nl.add)
        place = result.out[at.m0 : at.m0 + 1, left : left + 128 * count]
        store(place.reshape_dim(1, (count, 128)), rows_sb, result.own_queue)


def store_rows_turned(result: Result, y_sb, n0, columns, core, cores, at: Block):
    """Store rows of y, turned 128 outputs at a time; a residual is added to them."""
    rows_sb = nl.ndarray((at.tokens, columns), dtype=result.out.dtype, buffer=nl.sbuf)
    if result.has_residual:
        more = nl.ndarray((at.tokens, columns), dtype=result.out.dtype, buffer=nl.sbuf)
        lies = result.residual[at.m0 : at.m0 + at.tokens, n0 : n0 + columns]
        nisa.dma_copy(dst=more, src=lies)
    for n1 in range(0, columns, 512):
        width = min(512, columns - n1)
        turned = nl.ndarray((at.tokens, width), dtype=y_sb.dtype, buffer=nl.psum)
        for n2 in range(0, width, 128):
            nw = min(128, width - n2)
            nisa.nc_transpose(
                dst=turned[0 : at.tokens, n2 : n2 + nw],
                data=y_sb[0:nw, (n1 + n2) // 128, 0 : at.tokens],
                engine=nisa.engine.tensor,
            )
        evict(rows_sb[0 : at.tokens, n1 : n1 + width], turned, n1 // 512)
    if result.has_residual:
        nisa.tensor_tensor(dst=rows_sb, data1=rows_sb, data2=more, op=nl.add)
    part = columns // cores
    own_rows = rows_sb[0 : at.tokens, core * part : core * part + part]
    first = n0 + core * part
    place = result.out[at.m0 : at.m0 + at.tokens, first : first + part]
    store(place, own_rows, result.own_queue)


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


def combine(
    result: Result, left: Left, p_sb, gate, up, ends: Ends, at: Block, spec, others
):  # fmt: skip
    """Compute h = gate up for a block of tokens: stored, or h^T kept in a strip.

    The gate's sum leaves PSUM through its activation, the other through the multiplication.
    """
    gate_dense = dense_term(gate, left, at, others)
    gate_low = low_rank_term(gate, p_sb, at, others)
    gating = epilogue_of(gate, ends.scale[0], ends.bias[0], None, False, spec)
    # the gate's product has loaded x
    loaded = Left(left.strip, left.source, "none", left.left_scales)
    up_dense = dense_term(up, loaded, at, others)
    up_low = low_rank_term(up, p_sb, at, others)
    gate_panels = []
    up_panels = []
    gate_panels.append(load_panels(gate_dense, gate_low, [], False, 0, gate.n, at))
    up_panels.append(load_panels(up_dense, up_low, [], False, 0, up.n, at))
    for n0 in range(0, up.n, up.last.block):
        columns = min(up.last.block, up.n - n0)
        following = n0 + up.last.block
        if up.n > up.last.block and following < up.n:
            gate_panels.append(load_panels(gate_dense, gate_low, [], False, following, gate.n, at))
            up_panels.append(load_panels(up_dense, up_low, [], False, following, up.n, at))
        of_gate = gate_panels[n0 // up.last.block]
        of_up = up_panels[n0 // up.last.block]
        gate_panel = Panel(n0, columns, gate.last.group, gate.last.down, columns, 0)
        up_panel = Panel(n0, columns, up.last.group, up.last.down, columns, 0)
        if up.by_rows:
            active = nl.ndarray(
                (128, (at.tokens + 127) // 128, columns), dtype=nl.float32, buffer=nl.sbuf
            )
            make_rows(
                Result(None, None, False, result.own_queue, active, True), gate_dense,
                of_gate[0], gate_low, of_gate[1], gate_panel, at, gating,
            )  # fmt: skip
            gated = epilogue_of(up, ends.scale[1], ends.bias[1], active, True, spec)
            make_rows(
                Result(result.out, None, False, result.own_queue, None, False), up_dense,
                of_up[0], up_low, of_up[1], up_panel, at, gated,
            )  # fmt: skip
        else:
            active = nl.ndarray(
                (128, (columns + 127) // 128, at.tokens), dtype=nl.float32, buffer=nl.sbuf
            )
            make_columns(
                active, gate_dense, of_gate[0], gate_low, of_gate[1], gate_panel, at, gating,
            )  # fmt: skip
            if spec.down.n > 0:
                y_sb = result.strip[
                    0:128, n0 // 128 : n0 // 128 + (columns + 127) // 128, 0 : at.tokens
                ]
            else:
                y_sb = nl.ndarray(active.shape, dtype=result.out.dtype, buffer=nl.sbuf)
            gated = epilogue_of(up, ends.scale[1], ends.bias[1], active, True, spec)
            make_columns(
                y_sb, up_dense, of_up[0], up_low, of_up[1], up_panel, at, gated,
            )  # fmt: skip
            if up.turned:
                store_turned(result, y_sb, n0, columns, 0, 1, at)
            elif spec.down.n == 0:
                store_tiles(result.out, y_sb, result.own_queue, n0, columns, at.m0, at.tokens)
