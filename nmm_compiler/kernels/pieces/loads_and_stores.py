"""Pieces that the NKI kernels of all families share; codegen copies the ones a kernel uses.

Everywhere the contraction index lies on the partitions, in tiles of 128: an operand in SBUF is
[128, tiles, free]. Which row of HBM lands in which (partition, tile) is free as long as both
factors agree: `order` "consecutive_rows" gives each partition consecutive rows (one long run per
partition and DMA), "strided_rows" gives tile j the rows 128 j to 128 j + 127 (what a DMA transpose
produces). What fills no tile of 128 is a tile of its own at the end.
"""

import nki.isa as nisa
import nki.language as nl

from .records import Epilogue, Part


def load(dst, tile, part: Part, how, order, total, queue):
    """Load a part so that its contraction index, `total` long, lies on the partitions."""
    if how == "runs":
        load_runs(dst, tile, part, total)
    elif how == "rows" and order == "fours":
        load_fours(dst, tile, part)
    elif how == "rows":
        load_rows(dst, tile, part, order, total, queue)
    elif how == "dma":
        load_transposed_by_dma(dst, tile, part)
    else:
        load_transposed_by_tensor(dst, tile, part, order, how == "tensor16", queue)


def load_rows(dst, tile, part: Part, order, total, queue):
    """Load rows of a matrix, the contraction index."""
    tiles = part.rows // 128
    if tiles > 0:
        if order == "consecutive_rows":
            # partition p holds rows p * depth ... p * depth + depth - 1: a run of `tiles` rows
            depth = total // 128
            view = part.src[0 : 128 * depth, part.column : part.column + part.columns]
            view = view.reshape_dim(0, (128, depth))
            view = view[0:128, part.row // 128 : part.row // 128 + tiles, 0 : part.columns]
        else:
            # tile j holds rows 128 j ... 128 j + 127
            rows = part.src[
                part.row : part.row + 128 * tiles, part.column : part.column + part.columns
            ]
            view = rows.reshape_dim(0, (tiles, 128)).permute((1, 0, 2))
        move(dst[0:128, tile : tile + tiles, 0 : part.columns], view, queue)
    if part.rows % 128 > 0:
        rest = part.src[
            part.row + 128 * tiles : part.row + part.rows,
            part.column : part.column + part.columns,
        ]
        move(dst[0 : part.rows % 128, tile + tiles, 0 : part.columns], rest, queue)


def load_transposed_by_dma(dst, tile, part: Part):
    """Load with a DMA transpose: row 128 tile + p of the contraction lands in dst[p, tile, :]."""
    tiles = part.rows // 128
    if tiles > 0:
        block = part.src[
            part.column : part.column + part.columns, part.row : part.row + 128 * tiles
        ]
        nisa.dma_transpose(
            dst=dst[0:128, tile : tile + tiles, 0 : part.columns],
            src=block.reshape_dim(1, (tiles, 128)),
            axes=(2, 1, 0),
        )
    if part.rows % 128 > 0:
        nisa.dma_transpose(
            dst=dst[0 : part.rows % 128, tile + tiles, 0 : part.columns],
            src=part.src[
                part.column : part.column + part.columns,
                part.row + 128 * tiles : part.row + part.rows,
            ],
            axes=(1, 0),
        )


def load_transposed_by_tensor(dst, tile, part: Part, order, widen, queue):
    """Load rows as they lie, then turn 128 x 128 tiles on TensorE."""
    # fp8 numbers are turned as bfloat16, which holds each of them
    dtype = nl.bfloat16 if widen else part.src.dtype
    tiles = (part.rows + 511) // 512 * 4 if order == "fours" else (part.rows + 127) // 128
    for start in range(0, part.columns, 128):
        width = min(128, part.columns - start)
        each = part.rows // part.parts
        flat = nl.ndarray((part.parts * width, each), dtype=dtype, buffer=nl.sbuf)
        first = part.column + start
        rows = part.src[first : first + width, part.row : part.row + part.rows]
        if part.parts > 1:
            rows = rows.reshape_dim(1, (part.parts, each)).permute((1, 0, 2))
        move(flat, rows, "" if widen else queue)
        strip = dst[0:128, tile : tile + tiles, start : start + width]
        turn_rows(strip, flat, order, start // 128, part.parts)


def turn_rows(dst, flat, order, turn, parts):
    """Write rows of a tile, their elements a contraction index, as a strip: TensorE turns them.

    parts: of the contraction, whose rows lie one behind another. One copy empties a bank of PSUM.
    """
    high = flat.shape[0]
    width = high // parts
    rows = flat.shape[1]
    unit = 4 if order == "fours" else 1
    tiles = rows // (128 * unit) * unit
    many = 512 // high if unit == 1 else unit
    for first in range(0, tiles, many):
        count = min(many, tiles - first)
        turned = nl.ndarray((128, count, high), dtype=flat.dtype, buffer=nl.psum)
        for i in range(count):
            if order == "consecutive_rows":
                square = flat[0:high, first + i : 128 * tiles : tiles]
            elif order == "fours":
                begin = (first + i) // 4 * 512 + (first + i) % 4
                square = flat[0:high, begin : begin + 509 : 4]
            else:
                square = flat[0:high, 128 * (first + i) : 128 * (first + i + 1)]
            nisa.nc_transpose(dst=turned[0:128, i, 0:high], data=square, engine=nisa.engine.tensor)
        strip = dst[0:128, 0 : parts * tiles, 0:width].reshape_dim(1, (parts, tiles))
        strip = strip[0:128, 0:parts, first : first + count, 0:width].permute((0, 2, 1, 3))
        columns = turned[0:128, 0:count, 0:high].reshape_dim(2, (parts, width))
        evict(strip, columns, first // many + turn)
    deep = rows // unit % 128
    if deep > 0:
        turned = nl.ndarray((deep, unit, width), dtype=flat.dtype, buffer=nl.psum)
        for j in range(unit):
            last = flat[0:width, 128 * tiles + j : rows : unit]
            nisa.nc_transpose(dst=turned[0:deep, j, 0:width], data=last, engine=nisa.engine.tensor)
        evict(dst[0:deep, tiles : tiles + unit, 0:width], turned, turn)


def load_fours(dst, tile, part: Part):
    """Load rows of a matrix, the contraction index, in order "fours"."""
    whole = part.rows // 512
    rest = part.rows % 512
    if whole > 0:
        rows = part.src[part.row : part.row + 512 * whole, part.column : part.column + part.columns]
        strip = dst[0:128, tile : tile + 4 * whole, 0 : part.columns]
        fours = rows.reshape_dim(0, (whole, 128, 4)).permute((1, 0, 2, 3))
        move(strip.reshape_dim(1, (whole, 4)), fours, True)
    if rest > 0:
        rows = part.src[
            part.row + 512 * whole : part.row + part.rows,
            part.column : part.column + part.columns,
        ]
        nisa.dma_copy(
            dst=dst[0 : rest // 4, tile + 4 * whole : tile + 4 * whole + 4, 0 : part.columns],
            src=rows.reshape_dim(0, (rest // 4, 4)),
        )


def load_runs(dst, tile, part: Part, total):
    """Load rows of a matrix that is stored as a run of each partition's rows, in any order."""
    first = part.row // 128
    last = (part.row + part.rows) // 128
    rows = part.src.reshape_dim(0, (128, total // 128))
    move(
        dst[0:128, tile : tile + last - first, 0 : part.columns],
        rows[0:128, first:last, part.column : part.column + part.columns], True,
    )  # fmt: skip


def evict(dst, src, turn):
    """Copy PSUM to SBUF, rounding to dst's dtype."""
    if turn % 2 == 0:
        nisa.tensor_copy(dst=dst, src=src, engine=nisa.engine.vector)
    else:
        nisa.activation(dst=dst, op=nl.copy, data=src)


def finish_columns(dst, src, epilogue: Epilogue, tile, place, start, turn):
    """Write sums to dst through the epilogue: a tile of outputs on the partitions.

    tile: of all outputs. place: of the panel. start: the first token.
    """
    rows = src.shape[0]
    stop = start + src.shape[1]
    b_tile = epilogue.bias[0:rows, tile : tile + 1] if epilogue.has_bias else None
    if epilogue.scales == "channel":
        s_tile = epilogue.scale[0:rows, tile : tile + 1]
    elif epilogue.scales == "tensor":
        s_tile = epilogue.scale[0:rows, 0:1]
    else:
        s_tile = epilogue.scale
    if epilogue.normed:
        add_squares(epilogue.squares, src, tile, start)
    if epilogue.scales == "group":
        of_groups = epilogue.scale[0:rows, tile, start:stop]
        nisa.tensor_tensor(dst=dst, data1=src, data2=of_groups, op=nl.multiply)
    elif epilogue.scales == "token":
        scaled = nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
        of_tokens = epilogue.scale[0:rows, start:stop]
        nisa.tensor_tensor(dst=scaled, data1=src, data2=of_tokens, op=nl.multiply)
        shape_columns(dst, scaled, None, False, b_tile, epilogue, turn)
    elif epilogue.gated:
        multiply_columns(
            dst, src, s_tile, b_tile, epilogue.gate[0:rows, place, start:stop], epilogue
        )
    else:
        shape_columns(dst, src, s_tile, epilogue.scales != "", b_tile, epilogue, turn)


def shape_columns(dst, src, scale, scaled, bias, epilogue: Epilogue, turn):
    """Write activation(scale src + bias), scale and bias per partition."""
    if epilogue.activation != "identity":
        nisa.activation(
            dst=dst, op=epilogue.op, data=src, scale=scale if scaled else 1.0, bias=bias
        )
    elif scaled and epilogue.has_bias:
        nisa.tensor_scalar(
            dst=dst, data=src, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias
        )
    elif epilogue.has_bias:
        nisa.tensor_scalar(dst=dst, data=src, op0=nl.add, operand0=bias)
    elif scaled:
        evict_scaled(dst, src, scale, turn)
    else:
        evict(dst, src, turn)


def multiply_columns(dst, src, scale, bias, gate, epilogue: Epilogue):
    """Write (scale src + bias) gate, scale and bias per partition."""
    if epilogue.scales and epilogue.has_bias:
        value = nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=value, data=src, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias
        )
        nisa.tensor_tensor(dst=dst, data1=value, data2=gate, op=nl.multiply)
    elif epilogue.scales:
        nisa.scalar_tensor_tensor(
            dst=dst, data=src, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=gate
        )
    elif epilogue.has_bias:
        nisa.scalar_tensor_tensor(
            dst=dst, data=src, op0=nl.add, operand0=bias, op1=nl.multiply, operand1=gate
        )
    else:
        nisa.tensor_tensor(dst=dst, data1=src, data2=gate, op=nl.multiply)


def evict_scaled(dst, src, scale, turn):
    """Copy PSUM times a scale to SBUF."""
    if turn % 2 == 0:
        nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=scale)
    else:
        nisa.activation(dst=dst, op=nl.copy, data=src, scale=scale)


def finish_rows(dst, src, epilogue: Epilogue, first, place, top, turn):
    """Write sums to dst through the epilogue: a tile of tokens on the partitions.

    first: the first output of all. place: of the panel. top: the tile of tokens.
    """
    rows = src.shape[0]
    stop = first + src.shape[1]
    last = not epilogue.gated and epilogue.activation == "identity"
    if epilogue.scales:
        direct = last and not epilogue.has_bias
        value = dst if direct else nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
        if epilogue.scales == "channel":
            nisa.tensor_tensor(
                dst=value, data1=src, data2=epilogue.scale[0:rows, first:stop], op=nl.multiply
            )
        else:
            at = top if epilogue.scales == "token" else 0
            evict_scaled(value, src, epilogue.scale[0:rows, at : at + 1], turn)
    else:
        value = src
    if epilogue.has_bias:
        shifted = dst if last else nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
        bias = epilogue.bias[0:rows, first:stop]
        nisa.tensor_tensor(dst=shifted, data1=value, data2=bias, op=nl.add)
    else:
        shifted = value
    if epilogue.gated:
        gate = epilogue.gate[0:rows, top, place : place + src.shape[1]]
        nisa.tensor_tensor(dst=dst, data1=shifted, data2=gate, op=nl.multiply)
    elif epilogue.activation != "identity":
        nisa.activation(dst=dst, op=epilogue.op, data=shifted)
    elif not epilogue.scales and not epilogue.has_bias:
        evict(dst, src, turn)


def add_squares(squares, part, tile, start):
    """Add the squares of a tile of features, tokens from `start` on, to those of each partition."""
    rows = part.shape[0]
    stop = start + part.shape[1]
    if tile == 0:
        nisa.activation(dst=squares[0:rows, start:stop], op=nl.square, data=part)
    else:
        more = nl.ndarray(part.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=more, op=nl.square, data=part)
        nisa.tensor_tensor(
            dst=squares[0:rows, start:stop],
            data1=squares[0:rows, start:stop],
            data2=more,
            op=nl.add,
        )


def move(dst, src, own_queue):
    """Move a tile between HBM and SBUF on a DMA queue."""
    if own_queue == "scalar":
        nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)
    elif own_queue:
        nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)
    else:
        nisa.dma_copy(dst=dst, src=src)


def store_tiles(dst, src, own_queue, row, rows, column, columns):
    """Store tiles of 128 rows of a matrix."""
    tiles = rows // 128
    if tiles > 0:
        block = dst[row : row + 128 * tiles, column : column + columns]
        block = block.reshape_dim(0, (tiles, 128)).permute((1, 0, 2))
        move(block, src[0:128, 0:tiles, 0:columns], own_queue)
    if rows % 128 > 0:
        block = dst[row + 128 * tiles : row + rows, column : column + columns]
        move(block, src[0 : rows % 128, tiles, 0:columns], own_queue)


def block_of(tensor, dim, blocks, size, at):
    """Return a block of a dimension of an HBM matrix, which has so many blocks and a rest."""
    if dim == 0:
        return tensor[0 : blocks * size].reshape_dim(0, (blocks, size)).select(0, at)
    return (
        tensor[0 : tensor.shape[0], 0 : blocks * size]
        .reshape_dim(1, (blocks, size))
        .select(1, at)
    )  # fmt: skip


def position(i):
    """Return the variable of a loop on the device in SBUF, where a view takes it as an index."""
    at = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.register_store(at, i)
    return at
