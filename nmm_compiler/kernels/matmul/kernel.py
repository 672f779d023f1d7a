"""Dense product y = activation(x w + bias), in any layout of x, w and y.

The contraction lies on the partitions of both operands. For y the tokens are stationary and w
moves; for y^T tiles of w are stationary and the tokens move. A patch of the result, several tiles
each way, is summed in PSUM at a time: each chunk of x and w that arrives has work for all of them.
One tile takes all of a chunk, then the next does, so that the first leaves PSUM before the last is
done. The contraction may be cut into segments, whose sums are added in fp32 in SBUF. A last tile of
a few tokens of y moves past stationary w, in one pass with the others. Few tokens may move past
stationary w altogether (`w_stationary`), whose products are added in SBUF.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.few_tokens import expand_few, load_few, start_weights
from ..pieces.loads_and_stores import finish_columns, finish_rows, store, store_rows
from ..pieces.moving_tokens import store_turned
from ..pieces.norms import load_normed, norm_of_x
from ..pieces.patch_loads import load_ahead, panel_tiles
from ..pieces.patch_sums import add_up, sum_patch, totals_of
from ..pieces.records import (
    Block,
    Chunks,
    Contraction,
    Dense,
    EarlierPatch,
    Epilogue,
    Part,
    Patch,
    Product,
    Result,
    Strip,
    Tokens,
    Weight,
)
from ..pieces.residuals import add_tiles, load_tiles
from ..pieces.scales_and_biases import bias_columns, panel_scales, product_scales, spread_bias
from ..pieces.token_blocks import over_blocks
from ..pieces.two_cores import half, half_row


@nki.jit
def matmul(x, w, spec, schedule, **others):
    """Return y."""
    as_rows = spec.out_layout == "row"
    m_block = schedule.m_block
    aside = schedule.own_queue
    y_dtype = x.dtype if spec.result_dtype == spec.dtype else getattr(nl, spec.result_dtype)
    m_halves = 2 if schedule.split == "tokens" else 1
    n_halves = 2 if schedule.split == "outputs" else 1
    if as_rows:
        out = nl.ndarray(
            (m_halves * spec.m, n_halves * spec.n), dtype=y_dtype, buffer=nl.shared_hbm
        )
    else:
        out = nl.ndarray(
            (n_halves * spec.n, m_halves * spec.m), dtype=y_dtype, buffer=nl.shared_hbm
        )
    part = out
    bias_part = others.get("bias")
    scale_part = others.get("w_scale")
    whole_residual = others.get("residual")
    if schedule.split:
        core = nl.program_id(0)
    if schedule.split == "tokens":
        x = half(x, 0 if spec.x_layout == "row" else 1, core)
        part = half(out, 0 if as_rows else 1, core)
        if spec.residual:
            whole_residual = half(whole_residual, 0 if as_rows else 1, core)
    elif schedule.split == "outputs":
        w = half(w, 1 if spec.w_layout == "row" else 0, core)
        part = half(out, 1 if as_rows else 0, core)
        if spec.residual:
            whole_residual = half(whole_residual, 1 if as_rows else 0, core)
        if spec.bias:
            bias_part = half_row(bias_part, core)
        if spec.scales == "channel":
            scale_part = half_row(scale_part, core)
    few = Product(spec.k, spec.n, schedule.k_order, spec.k, schedule.double_row, False, 0)
    x_few = None
    started = None
    if schedule.w_stationary:
        turned = schedule.x.load == "dma" or schedule.x.load == "dma16"
        aligned = schedule.double_row or turned
        x_few = load_few(x, schedule.x.load, spec.k, schedule.k_order, Block(0, spec.m), aligned)
        # the first weights come before the scales and biases, which only the first result needs
        started = start_weights(
            Weight(w, None, schedule.w, 0, False, None), few, min(schedule.w.chunk, spec.k)
        )
    if not spec.bias:
        bias_sb = None
    elif as_rows:
        bias_sb = spread_bias(bias_part, spec.n, aside)
    else:
        bias_sb = bias_columns(bias_part, spec.n, aside)
    if spec.fp8 and schedule.w_stationary and as_rows and spec.scales == "channel":
        scale_sb = panel_scales(
            scale_part, others.get("x_scale"), spec.n, schedule.w.block, spec.fp8_x, aside
        )
    elif spec.fp8:
        down = schedule.w_stationary or not as_rows
        scale_sb = product_scales(
            scale_part, others.get("x_scale"), spec.n, spec.scales, down, spec.fp8_x, aside
        )
    else:
        scale_sb = None
    resident = []
    if schedule.w.resident:
        aligned = schedule.double_row or schedule.w.load == "dma"
        for n0 in range(0, spec.n, schedule.w.block):
            columns = min(schedule.w.block, spec.n - n0)
            pitch = (columns + 15) // 16 * 16 if aligned else columns
            for k0 in range(0, spec.k, schedule.w.chunk):
                k_tiles = (min(schedule.w.chunk, spec.k - k0) + 127) // 128
                resident.append(nl.ndarray((128, k_tiles, pitch), dtype=w.dtype, buffer=nl.sbuf))
    weight = Weight(w, resident, schedule.w, 0, False, None)
    epilogue = Epilogue(scale_sb, bias_sb, spec.scales, spec.bias, spec.activation)
    norm = norm_of_x(
        others.get("norm_gain"), others.get("norm_bias"), spec.k, spec, schedule
    )  # fmt: skip
    dense = Dense(weight, norm, epilogue)
    tokens = Tokens(part, whole_residual, x, spec.m, m_block)

    if schedule.w_stationary:
        result = Result(part, as_rows, schedule.own_queue, 0, None, False, False, False)
        panels = Weight(w, None, schedule.w, 0, True, started)
        left = Strip(x_few, None, schedule.x)
        expand_few(result, left, panels, Block(0, spec.m), few, epilogue)
    else:
        over_blocks(matmul_block, tokens, dense, spec, schedule)
    return out


def matmul_block(out, residual, x, dense: Dense, at: Block, spec, schedule):
    """Compute a block of tokens."""
    moving = schedule.moving if at.tokens % 128 > 0 else 0
    result = Result(out, False, schedule.own_queue, moving, residual, spec.residual, False, False)
    as_rows = spec.out_layout == "row"
    m_wide = schedule.x.group * (128 if as_rows else 512)
    n_wide = schedule.w.group * (512 if as_rows else 128)
    segment = schedule.k_segment
    several = segment < spec.k
    x_turned = schedule.x.load == "dma" or schedule.x.load == "dma16"
    x_aligned = schedule.double_row or x_turned
    # no result has left yet, so that x takes their queue beside the loads of w
    aside = schedule.own_queue and at.m0 == 0 and not schedule.m_loop and not several
    aside = aside and spec.k > schedule.w.chunk
    first_of_all = schedule.short_start and at.m0 == 0 and not schedule.m_loop
    early = schedule.ahead > 0 and not several and not schedule.w.resident
    w_chunks = (spec.k + schedule.w.chunk - 1) // schedule.w.chunk
    # sums of segments leave for HBM as they are
    plain = spec.activation == "identity" and not spec.bias and not spec.scales and moving == 0
    x_tiles = []
    w_next = []
    for n0 in range(0, spec.n, schedule.w.block):
        columns = min(schedule.w.block, spec.n - n0)
        totals = None
        if several:
            # fp32 sums of the segments: x and w need to stay in SBUF for one segment only
            height = at.tokens if as_rows else columns
            across = columns if as_rows else at.tokens
            totals = nl.ndarray(
                (128, (height + 127) // 128, across), dtype=nl.float32, buffer=nl.sbuf
            )
        # the last panel ends in short loads and stores
        short = schedule.short_end and n0 + schedule.w.block >= spec.n
        for k0 in range(0, spec.k, segment):
            depth = min(segment, spec.k - k0)
            x_chunks = (depth + schedule.x.chunk - 1) // schedule.x.chunk
            run = Contraction(
                k0, depth, schedule.w.chunk, spec.k, schedule.k_order, schedule.double_row
            )
            # a tile for each chunk, so that the last read of a chunk frees its memory
            if schedule.w.resident:
                w_tiles = dense.weight.whole
            elif early and n0 > 0:
                w_tiles = w_next
            else:
                w_tiles = panel_tiles(dense.weight, columns, depth, schedule)
            if several:
                x_tiles = []
            # tokens beyond whole tiles are the first of the first patch, or all of it
            stop = at.tokens
            if moving > 0:
                stop = max(at.tokens, moving + 1)
            for m1 in range(moving, stop, m_wide):
                tokens = min(m_wide, at.tokens - m1)
                first = moving if m1 == moving else 0  # of the patch in its tiles
                if several or n0 == 0:
                    pitch = (tokens + first + 15) // 16 * 16 if x_aligned else tokens + first
                    for k1 in range(0, depth, schedule.x.chunk):
                        k_tiles = (min(schedule.x.chunk, depth - k1) + 127) // 128
                        x_tiles.append(
                            nl.ndarray((128, k_tiles, pitch), dtype=x.dtype, buffer=nl.sbuf)
                        )
                if spec.norm != "none" and n0 == 0:
                    # the norm takes all of x: one tile, and no chunk is left to load
                    x_sb = x_tiles[(m1 - moving) // m_wide]
                    step = spec.k if spec.m <= 128 else schedule.w.chunk
                    load_normed(
                        x_sb, x, schedule.x.load, step,
                        Block(at.m0 + m1 - first, tokens + first), spec.k, dense.norm,
                    )  # fmt: skip
                for n1 in range(0, columns, n_wide):
                    width = min(n_wide, columns - n1)
                    # w of the first patch does not wait for that of the second
                    parted = first_of_all and k0 == 0 and m1 == moving and n0 == 0
                    begins = parted and n1 == 0
                    left = Chunks(
                        x_tiles, (m1 - moving) // m_wide * x_chunks, x, schedule.x,
                        at.m0 + m1 - first, tokens + first, first, tokens,
                        (several or n0 == 0) and n1 == 0 and spec.norm == "none", aside,
                        begins, False, False,
                    )  # fmt: skip
                    right = Chunks(
                        w_tiles, n0 // schedule.w.block * w_chunks if schedule.w.resident else 0,
                        dense.weight.weight, schedule.w, n0, columns, n1, width,
                        m1 == moving and (n1 == 0 or parted)
                        and (at.m0 == 0 or not schedule.w.resident)
                        and not (early and n0 > 0), False, begins, short, parted,
                    )  # fmt: skip
                    alone = moving > 0 and moving == at.tokens
                    if result.has_residual and k0 + depth == spec.k and not alone:
                        more = residual_patch(result, left, right, as_rows)
                    else:
                        more = None
                    begin = at.m0 + m1 - moving + n0 + n1 + k0 == 0
                    if schedule.warm > 0 and tokens > 0 and begin:
                        warm = schedule.warm
                    else:
                        warm = 0
                    if as_rows:
                        sums = sum_patch(left, right, run, first, warm)
                    else:
                        sums = sum_patch(right, left, run, 0, warm)
                    n2 = n0 + schedule.w.block
                    last = m1 + m_wide >= at.tokens and n1 + n_wide >= columns
                    if early and last and n2 < spec.n:
                        # the load of the next panel starts before this one is stored
                        w_next = panel_tiles(
                            dense.weight, min(columns, spec.n - n2), depth, schedule
                        )
                        short_next = schedule.short_end and n2 + schedule.w.block >= spec.n
                        load_ahead(
                            w_next, dense.weight, n2, min(columns, spec.n - n2), run, short_next
                        )
                    patch = Patch(
                        (m1 if as_rows else n1) // 128, n1 if as_rows else m1,
                        tokens if as_rows else width, width if as_rows else tokens,
                    )  # fmt: skip
                    if k0 + depth < spec.k:
                        add_up(totals, sums, patch, k0 == 0)
                    else:
                        if several and not plain:
                            sums = totals_of(totals, sums, patch)
                        earlier = EarlierPatch(
                            several and plain, totals, patch.tile, patch.column
                        )  # fmt: skip
                        if short:
                            finish_last_rows(result, sums, left, right, dense.epilogue, more)
                        elif as_rows:
                            finish_patch_rows(
                                result, sums, left, right, dense.epilogue, more, earlier
                            )
                        else:
                            finish_patch_columns(
                                result, sums, left, right, dense.epilogue, more, earlier
                            )
                        if first > 0:
                            turn_patch(result, sums, left, right, dense.epilogue)


def residual_patch(result: Result, tokens: Chunks, outputs: Chunks, as_rows):
    """Return the residual of a patch, loaded."""
    start = outputs.column + outputs.first
    part = Part(
        result.residual,
        tokens.column + tokens.first if as_rows else start,
        tokens.width if as_rows else outputs.width,
        start if as_rows else tokens.column,
        outputs.width if as_rows else tokens.width,
    )
    return load_tiles(part, result.out.dtype)


def finish_patch_rows(
    result: Result,
    sums,
    tokens: Chunks,
    outputs: Chunks,
    epilogue: Epilogue,
    more,
    patch: EarlierPatch,
):
    """Store a patch of y: tokens on the partitions."""
    across = (outputs.width + 511) // 512
    start = outputs.column + outputs.first
    down = (tokens.width + 127) // 128
    for a in range(down):
        m0 = tokens.column + tokens.first + 128 * a
        mw = min(128, tokens.width - 128 * a)
        y_sb = nl.ndarray((mw, outputs.width), dtype=result.out.dtype, buffer=nl.sbuf)
        for b in range(across):
            ns = 512 * b
            nw = min(512, outputs.width - ns)
            total = sums[a * across + b][0:mw, 0:nw]
            y_tile = y_sb[0:mw, ns : ns + nw]
            if patch.adds:
                column = patch.column + ns
                before = patch.totals[0:mw, patch.tile + a, column : column + nw]
                nisa.tensor_tensor(dst=y_tile, data1=before, data2=total, op=nl.add)
            else:
                finish_rows(y_tile, total, epilogue, start + ns, a + b)
        if result.has_residual:
            part = more[0:mw, a, 0 : outputs.width]
            nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=part, op=nl.add)
        rows = result.out[m0 : m0 + mw, start : start + outputs.width]
        store(rows, y_sb, result.own_queue)


def turn_patch(result: Result, sums, tokens: Chunks, outputs: Chunks, epilogue: Epilogue):
    """Store the moving tokens of a patch of y, whose sums are the last."""
    n_tiles = outputs.width // 128
    start = outputs.column + outputs.first
    before = (tokens.width + 127) // 128 * ((outputs.width + 511) // 512)
    y_sb = nl.ndarray((128, n_tiles, tokens.first), dtype=result.out.dtype, buffer=nl.sbuf)
    for i in range(n_tiles):
        tile = y_sb[0:128, i, 0 : tokens.first]
        finish_columns(tile, sums[before + i], epilogue, start // 128 + i, i)
    moved = Part(None, tokens.column, tokens.first, start, outputs.width)
    store_turned(result, y_sb, moved, True)


def finish_patch_columns(
    result: Result,
    sums,
    tokens: Chunks,
    outputs: Chunks,
    epilogue: Epilogue,
    more,
    patch: EarlierPatch,
):
    """Store a patch of y^T: outputs on the partitions."""
    across = (tokens.width + 511) // 512
    start = outputs.column + outputs.first
    n_tiles = (outputs.width + 127) // 128
    y_sb = nl.ndarray((128, n_tiles, tokens.width), dtype=result.out.dtype, buffer=nl.sbuf)
    for a in range(n_tiles):
        nw = min(128, outputs.width - 128 * a)
        for b in range(across):
            ms = 512 * b
            mw = min(512, tokens.width - ms)
            total = sums[a * across + b][0:nw, 0:mw]
            y_tile = y_sb[0:nw, a, ms : ms + mw]
            if patch.adds:
                column = patch.column + ms
                before = patch.totals[0:nw, patch.tile + a, column : column + mw]
                nisa.tensor_tensor(dst=y_tile, data1=before, data2=total, op=nl.add)
            else:
                finish_columns(y_tile, total, epilogue, start // 128 + a, a + b)
    if result.has_residual:
        add_tiles(y_sb, more, outputs.width)
    store_rows(result, y_sb, start, outputs.width, tokens.column, tokens.width)


def finish_last_rows(
    result: Result, sums, tokens: Chunks, outputs: Chunks, epilogue: Epilogue, more
):
    """Store the last patch of y, tokens on the partitions: each tile when its sum is there."""
    across = (outputs.width + 511) // 512
    start = outputs.column + outputs.first
    down = (tokens.width + 127) // 128
    for b in range(across):
        ns = 512 * b
        nw = min(512, outputs.width - ns)
        for a in range(down):
            m0 = tokens.column + tokens.first + 128 * a
            mw = min(128, tokens.width - 128 * a)
            y_sb = nl.ndarray((mw, nw), dtype=result.out.dtype, buffer=nl.sbuf)
            for i in range(2):
                # VectorE takes one half, ScalarE the other
                first = i * ((nw + 1) // 2)
                stop = min(nw, first + (nw + 1) // 2)
                total = sums[a * across + b][0:mw, first:stop]
                finish_rows(y_sb[0:mw, first:stop], total, epilogue, start + ns + first, i)
            if result.has_residual:
                part = more[0:mw, a, ns : ns + nw]
                nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=part, op=nl.add)
            rows = result.out[m0 : m0 + mw, start + ns : start + ns + nw]
            store(rows, y_sb, ((across - b) * down - a) % 2 == 1)
