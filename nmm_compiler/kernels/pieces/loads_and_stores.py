"""Pieces that the NKI kernels of all families share; codegen copies the ones a kernel uses.

Everywhere the contraction index lies on the partitions, in tiles of 128: an operand in SBUF is
[128, tiles, free]. Which row of HBM lands in which (partition, tile) is free as long as both
factors agree: `order` "consecutive_rows" gives each partition consecutive rows (one long run per
partition and DMA), "strided_rows" gives tile j the rows 128 j to 128 j + 127 (what a DMA transpose
produces). What fills no tile of 128 is a tile of its own at the end, but in "spread_rows": there
all partitions but the last hold as many consecutive rows as there are tiles.
"""

import nki.isa as nisa
import nki.language as nl

from .records import Epilogue, Part, Result


def load(dst, tile, part: Part, how, order, total):
    """Load a part so that its contraction index, `total` long, lies on the partitions."""
    if order == "spread_rows":
        load_spread(dst, tile, part, total, how == "aside")
    elif how == "rows":
        load_rows(dst, tile, part, order, total)
    elif how == "aside":
        load_aside(dst, tile, part, order, total)
    elif how == "strided":
        load_strided(dst, tile, part, order, total)
    elif how == "dma":
        load_transposed_by_dma(dst, tile, part)
    elif how == "dma16":
        load_transposed_in_steps(dst, tile, part)
    elif how == "tensor8":
        load_bytes_transposed_by_tensor(dst, tile, part)
    else:
        load_transposed_by_tensor(dst, tile, part, how == "tensor16")


def load_rows(dst, tile, part: Part, order, total):
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
        nisa.dma_copy(dst=dst[0:128, tile : tile + tiles, 0 : part.columns], src=view)
    if part.rows % 128 > 0:
        nisa.dma_copy(
            dst=dst[0 : part.rows % 128, tile + tiles, 0 : part.columns],
            src=part.src[
                part.row + 128 * tiles : part.row + part.rows,
                part.column : part.column + part.columns,
            ],
        )


def load_aside(dst, tile, part: Part, order, total):
    """Load rows as `load_rows` does, on the sync engine's queue, idle before the first result."""
    tiles = part.rows // 128
    if tiles > 0:
        if order == "consecutive_rows":
            depth = total // 128
            view = part.src[0 : 128 * depth, part.column : part.column + part.columns]
            view = view.reshape_dim(0, (128, depth))
            view = view[0:128, part.row // 128 : part.row // 128 + tiles, 0 : part.columns]
        else:
            rows = part.src[
                part.row : part.row + 128 * tiles, part.column : part.column + part.columns
            ]
            view = rows.reshape_dim(0, (tiles, 128)).permute((1, 0, 2))
        store(dst[0:128, tile : tile + tiles, 0 : part.columns], view, True)
    if part.rows % 128 > 0:
        store(
            dst[0 : part.rows % 128, tile + tiles, 0 : part.columns],
            part.src[
                part.row + 128 * tiles : part.row + part.rows,
                part.column : part.column + part.columns,
            ],
            True,
        )


def load_spread(dst, tile, part: Part, total, aside):
    """Load rows of a contraction that fills no whole tiles: tile j has each depth-th row from j on.

    Partition p holds rows p * depth ... p * depth + depth - 1, the last one fewer, so that almost
    all of it is one load of long runs. ScalarE's queue, idle before the first sum, has the rest.
    """
    depth = (total + 127) // 128
    full = total // depth
    first = part.row // 128
    tiles = (part.rows + 127) // 128
    view = part.src[0 : full * depth, part.column : part.column + part.columns]
    view = view.reshape_dim(0, (full, depth))[0:full, first : first + tiles, 0 : part.columns]
    store(dst[0:full, tile : tile + tiles, 0 : part.columns], view, aside)
    rest = min(total % depth - first, tiles)
    if rest > 0:
        row = full * depth + first
        last = part.src[row : row + rest, part.column : part.column + part.columns]
        nisa.dma_copy(
            dst=dst[full : full + 1, tile : tile + rest, 0 : part.columns],
            src=last.reshape_dim(0, (1, rest)),
            dge_mode=nisa.dge_mode.hwdge,
            engine=nisa.engine.scalar,
        )


def load_strided(dst, tile, part: Part, order, total):
    """Load columns of a matrix that has few rows, in runs of a few elements."""
    tiles = part.rows // 128
    if tiles > 0:
        if order == "consecutive_rows":
            depth = total // 128
            view = part.src[part.column : part.column + part.columns, 0 : 128 * depth]
            view = view.reshape_dim(1, (128, depth))
            view = view[0 : part.columns, 0:128, part.row // 128 : part.row // 128 + tiles].permute(
                (1, 0, 2)
            )
        else:
            view = part.src[
                part.column : part.column + part.columns, part.row : part.row + 128 * tiles
            ]
            view = view.reshape_dim(1, (tiles, 128)).permute((2, 0, 1))
        nisa.dma_copy(
            dst=dst[0:128, tile : tile + tiles, 0 : part.columns].permute((0, 2, 1)),
            src=view,
        )
    if part.rows % 128 > 0:
        nisa.dma_copy(
            dst=dst[0 : part.rows % 128, tile + tiles, 0 : part.columns],
            src=part.src[
                part.column : part.column + part.columns,
                part.row + 128 * tiles : part.row + part.rows,
            ].permute((1, 0)),
        )


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


def load_transposed_in_steps(dst, tile, part: Part):
    """Load with DMA transposes of 16 rows each: the most from an address known at run time."""
    for start in range(0, part.columns, 16):
        width = min(16, part.columns - start)
        rows = dst[0:128, 0 : dst.shape[1], start : start + width]
        step = Part(part.src, part.row, part.rows, part.column + start, width)
        load_transposed_by_dma(rows, tile, step)


def load_transposed_by_tensor(dst, tile, part: Part, widen):
    """Load rows as they lie, then turn 128 x 128 tiles on TensorE."""
    # fp8 numbers are turned as bfloat16, which holds each of them
    dtype = nl.bfloat16 if widen else part.src.dtype
    tiles = part.rows // 128
    for start in range(0, part.columns, 128):
        width = min(128, part.columns - start)
        flat = nl.ndarray((width, part.rows), dtype=dtype, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=flat,
            src=part.src[
                part.column + start : part.column + start + width, part.row : part.row + part.rows
            ],
        )
        # a bank of PSUM takes four turned tiles; one copy takes them out
        for first in range(0, tiles, 4):
            count = min(4, tiles - first)
            turned = nl.ndarray((128, count, width), dtype=dtype, buffer=nl.psum)
            for i in range(count):
                square = flat[0:width, 128 * (first + i) : 128 * (first + i + 1)]
                nisa.nc_transpose(
                    dst=turned[0:128, i, 0:width], data=square, engine=nisa.engine.tensor
                )
            evict(
                dst[0:128, tile + first : tile + first + count, start : start + width],
                turned,
                first // 4 + start // 128,
            )
        if part.rows % 128 > 0:
            turned = nl.ndarray((part.rows % 128, width), dtype=dtype, buffer=nl.psum)
            nisa.nc_transpose(
                dst=turned, data=flat[0:width, 128 * tiles : part.rows], engine=nisa.engine.tensor
            )
            evict(
                dst[0 : part.rows % 128, tile + tiles, start : start + width], turned, start // 128
            )


def load_bytes_transposed_by_tensor(dst, tile, part: Part):
    """Load rows of fp8 numbers, then turn tiles on TensorE, which writes 16 bits for each."""
    for start in range(0, part.columns, 128):
        width = min(128, part.columns - start)
        flat = nl.ndarray((width, part.rows), dtype=part.src.dtype, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=flat,
            src=part.src[
                part.column + start : part.column + start + width, part.row : part.row + part.rows
            ],
        )
        for first in range(0, part.rows, 128):
            deep = min(128, part.rows - first)
            turned = nl.ndarray((deep, width, 2), dtype=part.src.dtype, buffer=nl.psum)
            nisa.nc_transpose(
                dst=turned[0:deep, 0:width, 0],
                data=flat[0:width, first : first + deep],
                engine=nisa.engine.tensor,
            )
            place = dst[0:deep, tile + first // 128, start : start + width]
            evict(place, turned[0:deep, 0:width, 0], first // 128 + start // 128)


def evict(dst, src, turn):
    """Copy PSUM to SBUF, rounding to dst's dtype."""
    if turn % 2 == 0:
        nisa.tensor_copy(dst=dst, src=src, engine=nisa.engine.vector)
    else:
        nisa.activation(dst=dst, op=nl.copy, data=src)


def evict_scaled(dst, src, scale, turn):
    """Copy PSUM times a scale to SBUF."""
    if turn % 2 == 0:
        nisa.tensor_scalar(dst=dst, data=src, op0=nl.multiply, operand0=scale)
    else:
        nisa.activation(dst=dst, op=nl.copy, data=src, scale=scale)


def activate(dst, src, activation, turn):
    """Apply the activation on the way to SBUF."""
    if activation == "identity":
        evict(dst, src, turn)
    elif activation == "relu":
        if turn % 2 == 0:
            nisa.tensor_scalar(dst=dst, data=src, op0=nl.maximum, operand0=0.0)
        else:
            nisa.activation(dst=dst, op=nl.relu, data=src)
    elif activation == "silu":
        nisa.activation(dst=dst, op=nl.silu, data=src)
    elif activation == "gelu":
        nisa.activation(dst=dst, op=nl.gelu, data=src)
    else:
        nisa.activation(dst=dst, op=nl.gelu_apprx_tanh, data=src)


def activate_with_bias_column(dst, src, bias, activation):
    """Add a bias per partition and apply the activation in one pass."""
    if activation == "identity":
        nisa.tensor_scalar(dst=dst, data=src, op0=nl.add, operand0=bias)
    elif activation == "relu":
        nisa.activation(dst=dst, op=nl.relu, data=src, bias=bias)
    elif activation == "silu":
        nisa.activation(dst=dst, op=nl.silu, data=src, bias=bias)
    elif activation == "gelu":
        nisa.activation(dst=dst, op=nl.gelu, data=src, bias=bias)
    else:
        nisa.activation(dst=dst, op=nl.gelu_apprx_tanh, data=src, bias=bias)


def activate_with_bias_row(dst, src, bias, activation, turn):
    """Add a bias per column, spread over the partitions, and apply the activation."""
    if activation == "identity":
        nisa.tensor_tensor(dst=dst, data1=src, data2=bias, op=nl.add)
    else:
        total = nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=total, data1=src, data2=bias, op=nl.add)
        activate(dst, total, activation, turn)


def quantize(dst, src, scale):
    """Write src times a scale to fp8, saturating at the largest finite number."""
    scaled = nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scaled, op=nl.copy, data=src, scale=scale)
    nisa.tensor_scalar(
        dst=dst, data=scaled, op0=nl.minimum, operand0=240.0, op1=nl.maximum, operand1=-240.0
    )


def round_to(dst, src, scale, requantize, scaled, turn):
    """Round to the dtype of dst."""
    if requantize:
        quantize(dst, src, scale)
    elif scaled:
        evict_scaled(dst, src, scale, turn)
    else:
        evict(dst, src, turn)


def finish_rows(dst, src, epilogue: Epilogue, first, turn):
    """Write sums to dst through the epilogue: tokens on the partitions, outputs from `first` on."""
    rows = src.shape[0]
    stop = first + src.shape[1]
    b_tile = epilogue.bias[0:rows, first:stop] if epilogue.has_bias else None
    if epilogue.scales == "channel":
        s_tile = epilogue.scale[0:rows, first:stop]
    else:
        s_tile = epilogue.scale[0:rows, 0:1] if epilogue.scales else None
    if not epilogue.scales:
        if epilogue.has_bias:
            activate_with_bias_row(dst, src, b_tile, epilogue.activation, turn)
        else:
            activate(dst, src, epilogue.activation, turn)
    elif epilogue.scales == "tensor" and not epilogue.has_bias:
        activate_scaled(dst, src, s_tile, epilogue.activation, turn)
    elif epilogue.activation == "identity" and not epilogue.has_bias:
        nisa.tensor_tensor(dst=dst, data1=src, data2=s_tile, op=nl.multiply)
    else:
        whole = nl.ndarray(src.shape, dtype=nl.float32, buffer=nl.sbuf)
        if epilogue.scales == "tensor":
            evict_scaled(whole, src, s_tile, turn)
        else:
            nisa.tensor_tensor(dst=whole, data1=src, data2=s_tile, op=nl.multiply)
        if epilogue.has_bias:
            activate_with_bias_row(dst, whole, b_tile, epilogue.activation, turn)
        else:
            activate(dst, whole, epilogue.activation, turn)


def finish_columns(dst, src, epilogue: Epilogue, tile, turn):
    """Write sums to dst through the epilogue: a tile of outputs on the partitions."""
    rows = src.shape[0]
    b_tile = epilogue.bias[0:rows, tile : tile + 1] if epilogue.has_bias else None
    at = tile if epilogue.scales == "channel" else 0
    s_tile = epilogue.scale[0:rows, at : at + 1] if epilogue.scales else None
    if not epilogue.scales:
        if epilogue.has_bias:
            activate_with_bias_column(dst, src, b_tile, epilogue.activation)
        else:
            activate(dst, src, epilogue.activation, turn)
    elif epilogue.has_bias:
        activate_scaled_with_bias_column(dst, src, s_tile, b_tile, epilogue.activation)
    else:
        activate_scaled(dst, src, s_tile, epilogue.activation, turn)


def activate_scaled(dst, src, scale, activation, turn):
    """Apply the activation to src times a scale per partition."""
    if activation == "identity":
        evict_scaled(dst, src, scale, turn)
    elif activation == "relu":
        nisa.activation(dst=dst, op=nl.relu, data=src, scale=scale)
    elif activation == "silu":
        nisa.activation(dst=dst, op=nl.silu, data=src, scale=scale)
    elif activation == "gelu":
        nisa.activation(dst=dst, op=nl.gelu, data=src, scale=scale)
    else:
        nisa.activation(dst=dst, op=nl.gelu_apprx_tanh, data=src, scale=scale)


def activate_scaled_with_bias_column(dst, src, scale, bias, activation):
    """Apply the activation to src times a scale plus a bias, both per partition, in one pass."""
    if activation == "identity":
        nisa.tensor_scalar(
            dst=dst, data=src, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=bias
        )
    elif activation == "relu":
        nisa.activation(dst=dst, op=nl.relu, data=src, scale=scale, bias=bias)
    elif activation == "silu":
        nisa.activation(dst=dst, op=nl.silu, data=src, scale=scale, bias=bias)
    elif activation == "gelu":
        nisa.activation(dst=dst, op=nl.gelu, data=src, scale=scale, bias=bias)
    else:
        nisa.activation(dst=dst, op=nl.gelu_apprx_tanh, data=src, scale=scale, bias=bias)


def store(dst, src, own_queue):
    """Store a tile."""
    if own_queue:  # that of the sync engine
        nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync)
    else:
        nisa.dma_copy(dst=dst, src=src)


def store_last(dst, src):
    """Store the last tile of a kernel on ScalarE's queue, which has nothing left to do."""
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)


def store_rows(result: Result, src, row, rows, column, columns):
    """Store tiles of 128 rows."""
    dst = result.out
    tiles = rows // 128
    if tiles > 0:
        block = dst[row : row + 128 * tiles, column : column + columns]
        store(
            block.reshape_dim(0, (tiles, 128)).permute((1, 0, 2)),
            src[0:128, 0:tiles, 0:columns],
            result.own_queue,
        )
    if rows % 128 > 0:
        block = dst[row + 128 * tiles : row + rows, column : column + columns]
        store(block, src[0 : rows % 128, tiles, 0:columns], result.own_queue)


def split(tensor, dim, blocks, size):
    """Return a view of an HBM matrix in which one dimension is [blocks, size], without the rest."""
    if dim == 0:
        return tensor[0 : blocks * size, 0 : tensor.shape[1]].reshape_dim(0, (blocks, size))
    return tensor[0 : tensor.shape[0], 0 : blocks * size].reshape_dim(1, (blocks, size))


def position(i):
    """Return the variable of a loop on the device in SBUF, where a view takes it as an index."""
    at = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.register_store(at, i)
    return at
