"""The RMS norm between two products, for one block of tokens.

The gain of each feature multiplies what is kept of the first product. One over the root of the mean
square is a number of each token, which commutes with the second product: it multiplies its sums.
The squares are added up while the first product goes on.
"""

import nki.isa as nisa
import nki.language as nl


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
    shift = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=shift, value=eps)
    ones = nl.ndarray((128, 128 if down else 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    if down:
        inverse = nl.ndarray((128, tokens), dtype=nl.float32, buffer=nl.sbuf)
        for m0 in range(0, tokens, 512):
            mw = min(512, tokens - m0)
            total = nl.ndarray((128, mw), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=total,
                stationary=ones,
                moving=squares[0:128, m0 : m0 + mw],
                is_stationary_onezero=True,
            )
            part = inverse[0:128, m0 : m0 + mw]
            nisa.activation(dst=part, op=nl.rsqrt, data=total, scale=1.0 / size, bias=shift)
    else:
        inverse = nl.ndarray((128, (tokens + 127) // 128), dtype=nl.float32, buffer=nl.sbuf)
        for mt in range((tokens + 127) // 128):
            mw = min(128, tokens - 128 * mt)
            total = nl.ndarray((mw, 1), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=total,
                stationary=squares[0:128, 128 * mt : 128 * mt + mw],
                moving=ones,
                is_moving_onezero=True,
            )
            part = inverse[0:mw, mt : mt + 1]
            nisa.activation(
                dst=part, op=nl.rsqrt, data=total, scale=1.0 / size, bias=shift[0:mw, 0:1]
            )
    return inverse
