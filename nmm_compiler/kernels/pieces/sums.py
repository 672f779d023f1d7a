"""Sums of products in PSUM, of a block of tokens: weights stationary, or tokens.

A weight arrives in panels of outputs, and a panel in chunks of the contraction. Each chunk has a
tile of its own, so that its last read frees its memory; the first sums of a panel load it.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, finish_columns, finish_rows, load, move
from .mx import add_mx_rows, add_parts, load_mx_chunk, load_parts, move_scales
from .records import Block, Epilogue, Panel, Part, Patch, Result, Step, Term


def load_chunk(term: Term, k0, n0, columns):
    """Return a chunk of a panel of the weight, loaded."""
    if term.plan.load == "gathered":
        # all of it is in SBUF
        last = (min(term.plan.k, k0 + term.plan.chunk) + 127) // 128
        return term.weight[0:128, k0 // 128 : last, n0 : n0 + columns]
    if term.plan.mx_bytes > 0:
        return load_mx_chunk(term, k0, n0, columns)
    if term.plan.parts > 1:
        return load_parts(term, n0, columns)
    rows = min(term.plan.chunk, term.plan.k - k0)
    aligned = term.plan.double_row or term.plan.load == "dma"
    pitch = (columns + 15) // 16 * 16 if aligned else columns
    deep = (rows + 511) // 512 * 4 if term.plan.order == "fours" else (rows + 127) // 128
    tile = nl.ndarray((128, deep, pitch), dtype=term.weight.dtype, buffer=nl.sbuf)
    at_end = k0 + 2 * term.plan.chunk >= term.plan.k and n0 + columns == term.plan.n
    pieces = term.plan.pieces if at_end else 1
    wide = columns // pieces
    for piece in range(pieces):
        part = Part(term.weight, k0, rows, n0 + piece * wide, wide, 1)
        load(
            tile[0:128, 0:deep, piece * wide : (piece + 1) * wide], 0, part, term.plan.load,
            term.plan.order, term.plan.k, term.plan.queue,
        )  # fmt: skip
    return tile


def load_left(term: Term, k0, at: Block):
    """Load a chunk of the left factor from HBM into its strip."""
    part = Part(term.left.source, k0, min(term.plan.chunk, term.plan.k - k0), at.m0, at.tokens, 1)
    load(term.left.strip, k0 // 128, part, term.left.how, term.plan.order, term.plan.k, "")


def load_panel(term: Term, n0, columns, at: Block):
    """Return the chunks of a panel of the weight, loaded if it is loaded ahead, else none yet."""
    tiles = []
    if term.plan.ahead:
        for k0 in range(0, term.plan.k, term.plan.chunk):
            if n0 == 0 and term.left.how != "none":
                load_left(term, k0, at)
            tiles.append(load_chunk(term, k0, n0, columns))
    return tiles


def make_columns(
    dst, first: Term, first_tiles, second: Term, second_tiles, panel: Panel, at: Block,
    epilogue: Epilogue,
):  # fmt: skip
    """Compute a panel of y^T into dst, [128, tiles, tokens]: outputs on the partitions."""
    m_tiles = (at.tokens + 511) // 512
    m_step = ((at.tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16
    block = 128 * panel.apart
    n_tiles = (panel.columns + block - 1) // block * panel.apart
    wide = min(512, at.tokens)
    per_bank = min(panel.group, 512 // wide)
    bare = (
        epilogue.scales == ""
        and epilogue.activation == "identity"
        and not (epilogue.has_bias or epilogue.gated or epilogue.normed)
    )
    joint = bare and at.tokens == 1 and per_bank == panel.group and panel.columns % block == 0
    for n1 in range(0, n_tiles, panel.group):
        count = min(panel.group, n_tiles - n1)
        sums = []
        for i in range(count * m_tiles):
            # sums of few tokens share a bank, as nki-library's of MX blocks do
            if i % per_bank == 0:
                bank = nl.ndarray((128, per_bank * wide), dtype=nl.float32, buffer=nl.psum)
            sums.append(bank[0:128, i % per_bank * wide : (i % per_bank + 1) * wide])
        if second.plan.k > 0:
            # p is there, and the loads of the first are the last ones
            sum_columns(sums, second_tiles, second, panel, n1, count, at, False)
        if first.plan.k > 0:
            sum_columns(sums, first_tiles, first, panel, n1, count, at, second.plan.k > 0)
        if joint:
            # one copy for the sums of a bank, which end nearly together
            evict(dst[0:128, n1 : n1 + count, 0], bank[0:128, 0:count], n1 // panel.group)
        for i in range(0 if joint else count):
            behind = panel.columns - (n1 + i) // panel.apart * block
            width = min(128, behind // panel.apart)
            for mt in range(m_tiles):
                ms = m_step * mt
                mw = min(m_step, at.tokens - ms)
                finish_columns(
                    dst[0:width, n1 + i, ms : ms + mw], sums[i * m_tiles + mt][0:width, 0:mw],
                    epilogue, panel.n0 // 128 + n1 + i, n1 + i, ms, i + mt,
                )  # fmt: skip


def sum_columns(sums, tiles, term: Term, panel: Panel, n1, count, at: Block, begun):
    """Add (s w)^T of tiles of outputs from n1 on to their sums; tokens move."""
    for k0 in range(0, term.plan.k, term.plan.chunk):
        rows = min(term.plan.chunk, term.plan.k - k0)
        if n1 == 0 and not term.plan.ahead:
            if panel.n0 == 0 and term.left.how != "none":
                load_left(term, k0, at)
            tiles.append(load_chunk(term, k0, panel.n0, panel.columns))
        w_sb = tiles[k0 // term.plan.chunk]
        if term.plan.parts > 1:
            add_parts(sums, w_sb, term, panel, n1, count, at.tokens, begun)
        elif term.plan.mx_bytes > 0:
            size = term.plan.mx_bytes
            if n1 + panel.before == 0:
                move_scales(w_sb, rows, size, panel.loaded)
            for kt in range((rows + 511) // 512):
                parts = min(128, (rows - 512 * kt) // 4)
                left = size * panel.before
                data = w_sb[0:parts, kt : kt + 1, left : left + size * panel.columns]
                above = 4 * (kt % 4)
                behind = size * panel.loaded + panel.before
                own = w_sb[above : above + parts - 28, kt // 4, behind : behind + panel.columns]
                block = Step(0, 1, parts, k0 // 512 + kt, own)
                add_columns(
                    sums, data.view(term.element), block, term, panel, n1, count, at.tokens, begun
                )  # fmt: skip
        else:
            fours = term.plan.order == "fours"
            pairs = rows // 256 if term.plan.double_row else 0
            for pair in range(pairs):
                pair_of = Step(2 * pair, 2, 128, k0 // 128 + 2 * pair)
                add_columns(sums, w_sb, pair_of, term, panel, n1, count, at.tokens, begun)
            for kt in range(2 * pairs, (rows + 511) // 512 * 4 if fours else (rows + 127) // 128):
                high = (rows - 512 * (kt // 4)) // 4 if fours else rows - 128 * kt
                single = Step(kt, 1, min(128, high), k0 // 128 + kt)
                add_columns(sums, w_sb, single, term, panel, n1, count, at.tokens, begun)


def add_columns(
    sums, w_sb, step: Step, term: Term, panel: Panel, n1, count, tokens, begun
):  # fmt: skip
    """Add the products of a step of the contraction to the sums of `count` tiles of outputs."""
    m_tiles = (tokens + 511) // 512
    m_step = ((tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16
    for i in range(count):
        begin = (n1 + i) // panel.apart * panel.apart * 128
        first = begin + (n1 + i) % panel.apart
        width = min(128, (panel.columns - begin) // panel.apart)
        last = first + panel.apart * (width - 1) + 1
        for mt in range(m_tiles):
            ms = m_step * mt
            mw = min(m_step, tokens - ms)
            if term.plan.mx_bytes > 0:
                nisa.nc_matmul_mx(
                    dst=sums[i * m_tiles + mt][0:width, 0:mw],
                    stationary=w_sb[0 : step.rows, 0, first : last : panel.apart],
                    moving=term.left.strip[0 : step.rows, step.tile, ms : ms + mw],
                    stationary_scale=step.scales[0 : step.rows - 28, first : last : panel.apart],
                    moving_scale=term.left.left_scales[0 : step.rows, step.tile, ms : ms + mw],
                    accumulate=begun or step.tile > 0,
                )
            elif step.deep == 2:
                nisa.nc_matmul(
                    dst=sums[i * m_tiles + mt][0:width, 0:mw],
                    stationary=w_sb[0:128, step.kt : step.kt + 2, first : last : panel.apart],
                    moving=term.left.strip[0:128, step.tile : step.tile + 2, ms : ms + mw],
                    accumulate=begun or step.tile > 0,
                    perf_mode=nisa.matmul_perf_mode.double_row,
                )
            else:
                nisa.nc_matmul(
                    dst=sums[i * m_tiles + mt][0:width, 0:mw],
                    stationary=w_sb[0 : step.rows, step.kt, first : last : panel.apart],
                    moving=term.left.strip[0 : step.rows, step.tile, ms : ms + mw],
                    accumulate=begun or step.tile > 0,
                )


def make_rows(
    result: Result, first: Term, first_tiles, second: Term, second_tiles, panel: Panel, at: Block,
    epilogue: Epilogue,
):  # fmt: skip
    """Compute a panel of y: tokens on the partitions, several tiles each way at a time.

    Each chunk that arrives has work for all sums of a patch.
    """
    m_tiles = (at.tokens + 127) // 128
    spare = at.tokens % 2 if first.plan.mx_bytes > 0 else 0
    for top in range(0, m_tiles, panel.down):
        height = min(panel.down, m_tiles - top)
        for left in range(0, panel.columns, 512 * panel.group):
            width = min(512 * panel.group, panel.columns - left)
            patch = Patch(top, height, left, width)
            across = (width + 511) // 512
            residuals = []
            if result.has_residual:
                for a in range(height):
                    residuals.append(load_residual(result, panel, patch, a, at))
            sums = []
            for _ in range(height * across):
                sums.append(
                    nl.ndarray(
                        (min(128, at.tokens + spare), min(512, panel.columns)),
                        dtype=nl.float32,
                        buffer=nl.psum,
                    )
                )
            if first.plan.k > 0:
                sum_rows(sums, first_tiles, first, panel, patch, at, False)
            if second.plan.k > 0:
                sum_rows(sums, second_tiles, second, panel, patch, at, first.plan.k > 0)
            for a in range(height):
                ms = 128 * (top + a)
                mw = min(128, at.tokens - ms)
                if result.kept:
                    y_sb = result.strip[0:mw, top + a, left : left + width]
                else:
                    y_sb = nl.ndarray((mw, width), dtype=result.out.dtype, buffer=nl.sbuf)
                for b in range(across):
                    ns = 512 * b
                    nw = min(512, width - ns)
                    finish_rows(
                        y_sb[0:mw, ns : ns + nw], sums[a * across + b][0:mw, 0:nw], epilogue,
                        panel.n0 + left + ns, left + ns, top + a, a + b,
                    )  # fmt: skip
                if result.has_residual:
                    nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=residuals[a], op=nl.add)
                if not result.kept:
                    column = panel.n0 + left
                    rows = result.out[at.m0 + ms : at.m0 + ms + mw, column : column + width]
                    move(rows, y_sb, result.own_queue)


def load_residual(result: Result, panel: Panel, patch: Patch, a, at: Block):
    """Return the residual of a tile of tokens of a patch, loaded before the patch's weights."""
    ms = 128 * (patch.top + a)
    mw = min(128, at.tokens - ms)
    first = panel.n0 + patch.left
    tile = nl.ndarray((mw, patch.width), dtype=result.out.dtype, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=tile,
        src=result.residual[at.m0 + ms : at.m0 + ms + mw, first : first + patch.width],
    )
    return tile


def sum_rows(sums, tiles, term: Term, panel: Panel, patch: Patch, at: Block, begun):
    """Add s w of a patch to its sums; tokens stationary, weights moving.

    One sum takes all of a chunk, then the next does: the first leaves PSUM before the last is done.
    """
    across = (patch.width + 511) // 512
    for k0 in range(0, term.plan.k, term.plan.chunk):
        rows = min(term.plan.chunk, term.plan.k - k0)
        if patch.top + patch.left == 0 and not term.plan.ahead:
            if panel.n0 == 0 and term.left.how != "none":
                load_left(term, k0, at)
            tiles.append(load_chunk(term, k0, panel.n0, panel.columns))
        w_sb = tiles[k0 // term.plan.chunk]
        tile = k0 // 128
        pairs = rows // 256 if term.plan.double_row else 0
        if patch.top + patch.left == 0 and term.plan.mx_bytes > 0:
            move_scales(w_sb, rows, term.plan.mx_bytes, panel.columns)
        for a in range(patch.height):
            ms = 128 * (patch.top + a)
            mw = min(128, at.tokens - ms)
            for b in range(across):
                ns = patch.left + 512 * b
                nw = min(512, patch.left + patch.width - ns)
                if term.plan.mx_bytes > 0:
                    even = mw + mw % 2
                    add_mx_rows(
                        sums[a * across + b][0:even, 0:nw], w_sb, k0, rows, ns, ms, term,
                        panel.columns, begun,
                    )  # fmt: skip
                else:
                    for pair in range(pairs):
                        kt = 2 * pair
                        nisa.nc_matmul(
                            dst=sums[a * across + b][0:mw, 0:nw],
                            stationary=term.left.strip[
                                0:128, tile + kt : tile + kt + 2, ms : ms + mw
                            ],
                            moving=w_sb[0:128, kt : kt + 2, ns : ns + nw],
                            accumulate=begun or tile + kt > 0,
                            perf_mode=nisa.matmul_perf_mode.double_row,
                        )
                    for kt in range(2 * pairs, (rows + 127) // 128):
                        kp = min(128, rows - 128 * kt)
                        nisa.nc_matmul(
                            dst=sums[a * across + b][0:mw, 0:nw],
                            stationary=term.left.strip[0:kp, tile + kt, ms : ms + mw],
                            moving=w_sb[0:kp, kt, ns : ns + nw],
                            accumulate=begun or tile + kt > 0,
                        )
