"""The products that give a result in HBM, for one block of tokens: y or y^T.

The left factor has its contraction index on the partitions. A weight is loaded in panels, or once.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import (
    finish_columns,
    finish_rows,
    load,
    store,
    store_last,
    store_rows,
)
from .moving_tokens import expand_moving, store_turned
from .records import Base, Block, Epilogue, Part, Product, Result, Strip, Weight
from .residuals import add_tiles, load_tiles, residual_columns


def load_panel(right: Weight, at: Block, product: Product, n0):
    """Return the weights of the outputs from n0 on, loaded."""
    w_type = nl.float32 if product.widen else right.weight.dtype
    k_tiles = (product.k + 127) // 128
    columns = min(right.plan.block, product.n - n0)
    aligned = product.double_row or right.plan.load == "dma"
    pitch = (columns + 15) // 16 * 16 if aligned else columns
    if right.plan.resident:
        w_sb = right.whole[0:128, 0:k_tiles, n0 : n0 + columns]
    else:
        w_sb = nl.ndarray((128, k_tiles, pitch), dtype=w_type, buffer=nl.sbuf)
    for k0 in range(0, product.k, right.plan.chunk):
        rows = min(right.plan.chunk, product.k - k0)
        if at.m0 == 0 or not right.plan.resident:
            part = Part(right.weight, k0, rows, n0, columns)
            load(w_sb, k0 // 128, part, right.plan.load, product.order, product.k)
    return w_sb


def load_base_panel(base: Base, right: Weight, product: Product, n0):
    """Return the weights of the base product for the outputs from n0 on, loaded."""
    columns = min(right.plan.block, product.n - n0)
    base_tiles = (base.length + 127) // 128
    pitch = (columns + 15) // 16 * 16 if base.load == "dma" else columns
    base_sb = nl.ndarray((128, base_tiles, pitch), dtype=base.w.dtype, buffer=nl.sbuf)
    for k0 in range(0, base.length, base.chunk):
        part = Part(base.w, k0, min(base.chunk, base.length - k0), n0, columns)
        load(base_sb, k0 // 128, part, base.load, base.order, base.length)
    return base_sb


def expand_rows(
    result: Result,
    left: Strip,
    right: Weight,
    base: Base,
    at: Block,
    product: Product,
    epilogue: Epilogue,
):
    """Store y of a block of tokens: tokens stationary, weights moving."""
    all_move = result.moving > 0 and result.moving == at.tokens
    w_type = nl.float32 if product.widen else right.weight.dtype
    base_panels = []
    w_panels = []
    residuals = []
    if right.loaded:
        w_panels.append(right.first)
    for n0 in range(0, min(product.n, right.plan.block * right.ahead), right.plan.block):
        if result.has_residual and not all_move:
            columns = min(right.plan.block, product.n - n0)
            part = Part(
                result.residual, at.m0 + result.moving, at.tokens - result.moving, n0, columns
            )
            residuals.append(load_tiles(part, result.out.dtype))
        if base.length > 0:
            base_panels.append(load_base_panel(base, right, product, n0))
        if not right.plan.stream and (n0 > 0 or not right.loaded):
            w_panels.append(load_panel(right, at, product, n0))
    for n0 in range(0, product.n, right.plan.block):
        columns = min(right.plan.block, product.n - n0)
        aligned = product.double_row or right.plan.load == "dma"
        pitch = (columns + 15) // 16 * 16 if aligned else columns
        # loads of later panels start before this one is stored
        following = n0 + right.plan.block * right.ahead
        if result.has_residual and following < product.n and not all_move:
            width = min(right.plan.block, product.n - following)
            part = Part(
                result.residual, at.m0 + result.moving, at.tokens - result.moving, following, width
            )
            residuals.append(load_tiles(part, result.out.dtype))
        if base.length > 0:
            if following < product.n:
                base_panels.append(load_base_panel(base, right, product, following))
            base_sb = base_panels[n0 // right.plan.block]
        if not right.plan.stream:
            if following < product.n:
                w_panels.append(load_panel(right, at, product, following))
            w_sb = w_panels[n0 // right.plan.block]
        if result.moving > 0:
            y_moved = expand_moving(result, left, w_sb, n0, columns, product, epilogue)
        for mt in range((at.tokens - result.moving + 127) // 128):
            ms = result.moving + 128 * mt
            mw = min(128, at.tokens - ms)
            y_sb = nl.ndarray((mw, columns), dtype=result.out.dtype, buffer=nl.sbuf)
            for n1 in range(0, columns, 512 * right.plan.group):
                group = (min(512 * right.plan.group, columns - n1) + 511) // 512
                sums = []
                for _ in range(group):
                    sums.append(
                        nl.ndarray((mw, min(512, columns)), dtype=nl.float32, buffer=nl.psum)
                    )
                for k0 in range(0, base.length, base.chunk):
                    rows = min(base.chunk, base.length - k0)
                    for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                        kp = min(128, base.length - 128 * kt)
                        for i in range(group):
                            ns = n1 + 512 * i
                            nw = min(512, columns - ns)
                            nisa.nc_matmul(
                                dst=sums[i][0:mw, 0:nw],
                                stationary=base.x_sb[0:kp, kt, ms : ms + mw],
                                moving=base_sb[0:kp, kt, ns : ns + nw],
                                accumulate=kt > 0,
                            )
                for k0 in range(0, product.k, right.plan.chunk):
                    rows = min(right.plan.chunk, product.k - k0)
                    first = k0 // 128
                    if right.plan.stream:
                        w_sb = nl.ndarray(
                            (128, (rows + 127) // 128, pitch),
                            dtype=w_type,
                            buffer=nl.sbuf,
                        )
                        part = Part(right.weight, k0, rows, n0, columns)
                        load(w_sb, 0, part, right.plan.load, product.order, product.k)
                    pairs = rows // 256 if product.double_row else 0
                    for pair in range(pairs):
                        kt = k0 // 128 + 2 * pair
                        wt = kt - first if right.plan.stream else kt
                        for i in range(group):
                            ns = n1 + 512 * i
                            nw = min(512, columns - ns)
                            nisa.nc_matmul(
                                dst=sums[i][0:mw, 0:nw],
                                stationary=left.strip[0:128, kt : kt + 2, ms : ms + mw],
                                moving=w_sb[0:128, wt : wt + 2, ns : ns + nw],
                                accumulate=base.length > 0 or kt > 0,
                                perf_mode=nisa.matmul_perf_mode.double_row,
                            )
                    for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
                        kp = min(128, product.k - 128 * kt)
                        for i in range(group):
                            ns = n1 + 512 * i
                            nw = min(512, columns - ns)
                            nisa.nc_matmul(
                                dst=sums[i][0:mw, 0:nw],
                                stationary=left.strip[0:kp, kt, ms : ms + mw],
                                moving=w_sb[
                                    0:kp, kt - first if right.plan.stream else kt, ns : ns + nw
                                ],
                                accumulate=base.length > 0 or kt > 0,
                            )
                each = epilogue.scales == "token"
                own = Epilogue(
                    epilogue.scale[0:128, mt : mt + 1] if each else epilogue.scale, epilogue.bias,
                    "tensor" if each else epilogue.scales, epilogue.has_bias, epilogue.activation,
                )  # fmt: skip
                for i in range(group):
                    ns = n1 + 512 * i
                    nw = min(512, columns - ns)
                    turn = i + mt + n0 // 512
                    final = at.m0 + ms + mw == result.out.shape[0]
                    late = result.ends and final and n0 + 2 * right.plan.block >= product.n
                    # the first store, too, waits for two engines
                    late = late or (result.begins and at.m0 + ms + n0 == 0)
                    half = nw // 2 if late and nw > 256 else nw
                    finish_rows(
                        y_sb[0:mw, ns : ns + half], sums[i][0:mw, 0:half], own, n0 + ns, turn
                    )
                    if half < nw:
                        # both engines take a part of what leaves PSUM late
                        finish_rows(
                            y_sb[0:mw, ns + half : ns + nw], sums[i][0:mw, half:nw], own,
                            n0 + ns + half, turn + 1,
                        )  # fmt: skip
            if result.has_residual:
                more = residuals[n0 // right.plan.block][0:mw, mt, 0:columns]
                nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=more, op=nl.add)
            last = n0 + columns == product.n and at.m0 + ms + mw == result.out.shape[0]
            if result.begins and at.m0 + ms + n0 == 0 and columns > 1024:
                part = columns // 2
                store_last(result.out[0:mw, 0:part], y_sb[0:mw, 0:part])
                store(result.out[0:mw, part:columns], y_sb[0:mw, part:columns], True)
            elif result.ends and last:
                store_last(result.out[at.m0 + ms : at.m0 + ms + mw, n0 : n0 + columns], y_sb)
            else:
                store(
                    result.out[at.m0 + ms : at.m0 + ms + mw, n0 : n0 + columns], y_sb,
                    result.own_queue,
                )  # fmt: skip
        if result.moving > 0:
            moved = Part(None, at.m0, result.moving, n0, columns)
            store_turned(result, y_moved, moved, n0 + columns == product.n)


def expand_columns(
    result: Result,
    left: Strip,
    right: Weight,
    base: Base,
    at: Block,
    product: Product,
    epilogue: Epilogue,
):
    """Store the result of a block of tokens: weights stationary, tokens moving."""
    w_type = nl.float32 if product.widen else right.weight.dtype
    base_panels = []
    w_panels = []
    residuals = []
    if right.loaded:
        w_panels.append(right.first)
    for n0 in range(0, min(product.n, right.plan.block * right.ahead), right.plan.block):
        if result.has_residual:
            residuals.append(residual_columns(result, right, at, product, n0))
        if base.length > 0:
            base_panels.append(load_base_panel(base, right, product, n0))
        if not right.plan.stream and (n0 > 0 or not right.loaded):
            w_panels.append(load_panel(right, at, product, n0))
    m_tiles = (at.tokens + 511) // 512
    m_step = ((at.tokens + m_tiles - 1) // m_tiles + 15) // 16 * 16  # moved at a time
    own = Epilogue(
        epilogue.scale, epilogue.bias, None if epilogue.scales == "token" else epilogue.scales,
        epilogue.has_bias, epilogue.activation,
    )  # fmt: skip
    for n0 in range(0, product.n, right.plan.block):
        columns = min(right.plan.block, product.n - n0)
        aligned = product.double_row or right.plan.load == "dma"
        pitch = (columns + 15) // 16 * 16 if aligned else columns
        n_tiles = (columns + 127) // 128
        # loads of later panels start before this one is stored
        following = n0 + right.plan.block * right.ahead
        if result.has_residual and following < product.n:
            residuals.append(residual_columns(result, right, at, product, following))
        if base.length > 0:
            if following < product.n:
                base_panels.append(load_base_panel(base, right, product, following))
            base_sb = base_panels[n0 // right.plan.block]
        if not right.plan.stream:
            if following < product.n:
                w_panels.append(load_panel(right, at, product, following))
            w_sb = w_panels[n0 // right.plan.block]
        if result.as_rows:
            y_sb = nl.ndarray((128, at.tokens, n_tiles), dtype=result.out.dtype, buffer=nl.sbuf)
        else:
            y_sb = nl.ndarray((128, n_tiles, at.tokens), dtype=result.out.dtype, buffer=nl.sbuf)
        for n1 in range(0, n_tiles, right.plan.group):
            group = min(right.plan.group, n_tiles - n1)
            sums = []
            for _ in range(group * m_tiles):
                sums.append(
                    nl.ndarray((128, min(512, at.tokens)), dtype=nl.float32, buffer=nl.psum)
                )
            for k0 in range(0, base.length, base.chunk):
                rows = min(base.chunk, base.length - k0)
                for kt in range(k0 // 128, (k0 + rows + 127) // 128):
                    kp = min(128, base.length - 128 * kt)
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        if result.as_rows:
                            stationary = base_sb[0:kp, kt, n1 + i : columns : n_tiles]
                        else:
                            stationary = base_sb[0:kp, kt, ns : ns + nw]
                        for mt in range(m_tiles):
                            ms = m_step * mt
                            mw = min(m_step, at.tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=stationary,
                                moving=base.x_sb[0:kp, kt, ms : ms + mw],
                                accumulate=kt > 0,
                            )
            for k0 in range(0, product.k, right.plan.chunk):
                rows = min(right.plan.chunk, product.k - k0)
                first = k0 // 128
                if right.plan.stream:
                    w_sb = nl.ndarray(
                        (128, (rows + 127) // 128, pitch),
                        dtype=w_type,
                        buffer=nl.sbuf,
                    )
                    part = Part(right.weight, k0, rows, n0, columns)
                    load(w_sb, 0, part, right.plan.load, product.order, product.k)
                pairs = rows // 256 if product.double_row else 0
                for pair in range(pairs):
                    kt = k0 // 128 + 2 * pair
                    wt = kt - first if right.plan.stream else kt
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        if result.as_rows:
                            stationary = w_sb[0:128, wt : wt + 2, n1 + i : columns : n_tiles]
                        else:
                            stationary = w_sb[0:128, wt : wt + 2, ns : ns + nw]
                        for mt in range(m_tiles):
                            ms = m_step * mt
                            mw = min(m_step, at.tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=stationary,
                                moving=left.strip[0:128, kt : kt + 2, ms : ms + mw],
                                accumulate=base.length > 0 or kt > 0,
                                perf_mode=nisa.matmul_perf_mode.double_row,
                            )
                for kt in range(k0 // 128 + 2 * pairs, (k0 + rows + 127) // 128):
                    kp = min(128, product.k - 128 * kt)
                    for i in range(group):
                        ns = 128 * (n1 + i)
                        nw = min(128, columns - ns)
                        wt = kt - first if right.plan.stream else kt
                        if result.as_rows:
                            stationary = w_sb[0:kp, wt, n1 + i : columns : n_tiles]
                        else:
                            stationary = w_sb[0:kp, wt, ns : ns + nw]
                        for mt in range(m_tiles):
                            ms = m_step * mt
                            mw = min(m_step, at.tokens - ms)
                            nisa.nc_matmul(
                                dst=sums[i * m_tiles + mt][0:nw, 0:mw],
                                stationary=stationary,
                                moving=left.strip[0:kp, kt, ms : ms + mw],
                                accumulate=base.length > 0 or kt > 0,
                            )
            for i in range(group):
                ns = 128 * (n1 + i)
                nw = min(128, columns - ns)
                for mt in range(m_tiles):
                    ms = m_step * mt
                    mw = min(m_step, at.tokens - ms)
                    if result.as_rows:
                        y_tile = y_sb[0:nw, ms : ms + mw, n1 + i]
                    else:
                        y_tile = y_sb[0:nw, n1 + i, ms : ms + mw]
                    y_sum = sums[i * m_tiles + mt][0:nw, 0:mw]
                    if epilogue.scales == "token":
                        scaled = nl.ndarray((nw, mw), dtype=nl.float32, buffer=nl.sbuf)
                        of_tokens = epilogue.scale[0:nw, ms : ms + mw]
                        nisa.tensor_tensor(dst=scaled, data1=y_sum, data2=of_tokens, op=nl.multiply)
                        y_sum = scaled
                    finish_columns(y_tile, y_sum, own, n0 // 128 + n1 + i, i + mt)
        if result.has_residual:
            more = residuals[n0 // right.plan.block]
            if result.as_rows:
                nisa.tensor_tensor(dst=y_sb, data1=y_sb, data2=more, op=nl.add)
            else:
                add_tiles(y_sb, more, columns)
        if result.as_rows:
            view = result.out[at.m0 : at.m0 + at.tokens, n0 : n0 + columns].reshape_dim(
                1, (128, n_tiles)
            )
            # many short runs: the hardware writes their descriptors
            whole = at.m0 + at.tokens == result.out.shape[0]
            if result.ends and whole and n0 + columns == product.n:
                store_last(view.permute((1, 0, 2)), y_sb)
            else:
                store(view.permute((1, 0, 2)), y_sb, True)
        else:
            store_rows(result, y_sb, n0, columns, at.m0, at.tokens)
