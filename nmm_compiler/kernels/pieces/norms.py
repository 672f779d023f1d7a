"""The RMS norm between two products, and the norm of x before the first, for a block of tokens.

Between two products, the gain of each feature multiplies what is kept of the first product. One
over the root of the mean square is a number of each token, which commutes with the second product:
it multiplies its sums. The squares are added up while the first product goes on.

x is normalized where it lies in SBUF, its features on the partitions: a product with ones adds the
partitions up, and gives every partition the sums of all tokens.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import load
from .new_tiles import filled
from .records import Block, Part
from .scales_and_biases import load_columns


def new_squares(size, tokens):
    """Return room for the sums of squares, [128, tokens], zeros where no feature comes."""
    squares = nl.ndarray((128, tokens), dtype=nl.float32, buffer=nl.sbuf)
    if size < 128:
        nisa.memset(dst=squares, value=0.0)
    return squares


def inverse_roots(squares, size, tokens, eps, down):
    """Return 1 / sqrt(mean + eps) of each token; TensorE adds the partitions up.

    A column per 128 tokens, [128, tiles], or with `down` on every partition, [128, tokens].
    """
    shift = filled((128, 1), nl.float32, eps)
    ones = filled((128, 128 if down else 1), nl.float32, 1.0)
    step = 512 if down else 128
    inverse = nl.ndarray(
        (128, tokens if down else (tokens + 127) // 128), dtype=nl.float32, buffer=nl.sbuf
    )
    for m0 in range(0, tokens, step):
        mw = min(step, tokens - m0)
        high = 128 if down else mw
        own = squares[0:128, m0 : m0 + mw]
        total = nl.ndarray((high, mw if down else 1), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=total, stationary=ones if down else own, moving=own if down else ones,
            is_stationary_onezero=down, is_moving_onezero=not down,
        )  # fmt: skip
        first = m0 if down else m0 // 128
        nisa.activation(
            dst=inverse[0:high, first : first + total.shape[1]], op=nl.rsqrt, data=total,
            scale=1.0 / size, bias=shift[0:high, 0:1],
        )  # fmt: skip
    return inverse


def feature_columns(vector, size, order, offset):
    """Load a number per feature, plus an offset, as fp32 [128, tiles]: as the rows of a strip."""
    if order == "strided_rows":
        raw = load_columns(vector, size, 1, 0, 1, False)
    else:
        held = nl.ndarray((128, (size + 127) // 128, 1), dtype=vector.dtype, buffer=nl.sbuf)
        if size % 128 > 0:
            nisa.memset(dst=held, value=0.0)
        load(held, 0, Part(vector.reshape((size, 1)), 0, size, 0, 1, 1), "rows", order, size, "")
        raw = held.reshape((128, (size + 127) // 128))
    columns = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=columns, data=raw, op0=nl.add, operand0=offset)
    return columns


def load_normed(x_sb, x, at: Block, gain, bias, spec, own_queue):
    """Load a block of tokens, so many features at a time; put its norm, if any, in its place.

    gain, bias: fp32 [128, tiles], as the features lie in the strip.
    """
    for k0 in range(0, spec.k, spec.x_chunk):
        part = Part(x, k0, min(spec.x_chunk, spec.k - k0), at.m0, at.tokens, spec.x_parts)
        load(x_sb, k0 // 128, part, spec.x_load, spec.order, spec.k, own_queue)
    if spec.norm != "none":
        normalize(x_sb, at.tokens, gain, bias, spec)


def normalize(x_sb, tokens, gain, bias, spec):
    """Put the norm of each token over its features, [128, tiles, tokens], in its place."""
    tiles = spec.k // 128
    rest = spec.k % 128
    # few tokens: several tiles at a time, which makes fewer and longer instructions
    deep = max(1, 1024 // tokens)
    squares = new_squares(spec.k, tokens)
    mean = means(x_sb, spec.k, tokens) if spec.norm == "layer" else None
    parts = []
    for first in range(0, tiles, deep):
        parts.append(x_sb[0:128, first : min(first + deep, tiles), 0:tokens])
    if rest > 0:
        parts.append(x_sb[0:rest, tiles : tiles + 1, 0:tokens])
    for i in range(len(parts)):
        square_tiles(squares, parts[i], mean, i > 0, spec)
    inverse = inverse_roots(squares, spec.k, tokens, spec.norm_eps, True)
    for i in range(len(parts)):
        scale_tiles(parts[i], min(deep * i, tiles), mean, inverse, gain, bias, spec)


def square_tiles(squares, part, mean, begun, spec):
    """Add the squares of tiles of x, less the mean where there is one, to those of each token."""
    rows = part.shape[0]
    count = part.shape[1]
    tokens = part.shape[2]
    square = nl.ndarray((rows, count, tokens), dtype=nl.float32, buffer=nl.sbuf)
    if spec.norm == "layer":
        subtract_means(square, part, mean)
        nisa.activation(dst=square, op=nl.square, data=square)
    else:
        nisa.activation(dst=square, op=nl.square, data=part)
    by_token = square[0:rows, 0:count, 0:tokens].permute((0, 2, 1))
    sums = squares[0:rows, 0:tokens]
    if begun:
        more = nl.ndarray((rows, tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=more, op=nl.add, data=by_token, axis=2)
        nisa.tensor_tensor(dst=sums, data1=sums, data2=more, op=nl.add)
    else:
        nisa.tensor_reduce(dst=sums, op=nl.add, data=by_token, axis=2)


def means(x_sb, size, tokens):
    """Return the mean of each token on every partition, [128, tokens]; TensorE adds them up."""
    mean = nl.ndarray((128, tokens), dtype=nl.float32, buffer=nl.sbuf)
    ones = filled((128, 128), x_sb.dtype, 1.0)
    for m0 in range(0, tokens, 512):
        mw = min(512, tokens - m0)
        total = nl.ndarray((128, mw), dtype=nl.float32, buffer=nl.psum)
        for kt in range((size + 127) // 128):
            kp = min(128, size - 128 * kt)
            nisa.nc_matmul(
                dst=total,
                stationary=ones[0:kp, 0:128],
                moving=x_sb[0:kp, kt, m0 : m0 + mw],
                is_stationary_onezero=True,
                accumulate=kt > 0,
            )
        nisa.activation(dst=mean[0:128, m0 : m0 + mw], op=nl.copy, data=total, scale=1.0 / size)
    return mean


def subtract_means(dst, part, mean):
    """Write tiles of x less the mean of each token."""
    rows = part.shape[0]
    tokens = part.shape[2]
    every = mean.reshape((128, 1, tokens))[0:rows, 0:1, 0:tokens].broadcast(1, part.shape[1])
    nisa.tensor_tensor(dst=dst, data1=part, data2=every, op=nl.subtract)


def scale_tiles(part, tile, mean, inverse, gain, bias, spec):
    """Put the norm of tiles of x in their place, from the tile `tile` on."""
    rows = part.shape[0]
    count = part.shape[1]
    tokens = part.shape[2]
    value = nl.ndarray((rows, count, tokens), dtype=nl.float32, buffer=nl.sbuf)
    every = inverse.reshape((128, 1, tokens))[0:rows, 0:1, 0:tokens].broadcast(1, count)
    if spec.norm == "layer":
        subtract_means(value, part, mean)
    centered = value if spec.norm == "layer" else part
    if spec.norm_gain:
        # the roots come last: the squares are still summed
        own_gain = gain[0:rows, tile : tile + count].reshape((rows, count, 1))
        nisa.tensor_tensor(
            dst=value, data1=centered, data2=own_gain.broadcast(2, tokens), op=nl.multiply
        )
    scaled = value if spec.norm_gain else centered
    normed = value if spec.norm_bias else part
    nisa.tensor_tensor(dst=normed, data1=scaled, data2=every, op=nl.multiply)
    if spec.norm_bias:
        own_bias = bias[0:rows, tile : tile + count].reshape((rows, count, 1))
        nisa.tensor_tensor(dst=part, data1=value, data2=own_bias.broadcast(2, tokens), op=nl.add)
