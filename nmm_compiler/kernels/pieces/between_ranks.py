"""The sum over the ranks that share a product: each has computed its part.

A rank is a logical core. Of its two physical ones each exchanges with the same one of the others.
"""

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from .records import Rounding
from .two_cores import finish_sums


def rank_sums(tiles, tokens, dtype):
    """Return a strip for this rank's part of p^T."""
    return nl.ndarray((128, tiles, tokens), dtype=dtype, buffer=nl.sbuf)


def sum_strips(p_sb, sums, n, ranks, rounding: Rounding):
    """Write the sum of the strips of all ranks, n features of p^T each, to p^T, rounded."""
    scaled = rounding.scales or rounding.factor != 1.0
    shaped = rounding.has_bias or rounding.activation != "identity"
    tiles = sums.shape[1]
    tokens = sums.shape[2]
    rows = min(128, n)
    if scaled or shaped:
        total = nl.ndarray((128, tiles, tokens), dtype=sums.dtype, buffer=nl.sbuf)
    else:
        total = p_sb
    # collectives take matrices in SBUF
    ncc.all_reduce(
        [sums.reshape((128, tiles * tokens))[0:rows, 0 : tiles * tokens]],
        [total.reshape((128, tiles * tokens))[0:rows, 0 : tiles * tokens]],
        ncc.ReplicaGroup([list(range(ranks))]),
        nl.add,
    )
    if scaled or shaped:
        finish_sums(p_sb, total, n, tokens, rounding)


def sum_results(out, part, ranks):
    """Write the sum of the results of all ranks, private matrices in HBM, to `out`."""
    total = nl.ndarray(part.shape, dtype=part.dtype, buffer=nl.private_hbm)
    ncc.all_reduce([part], [total], ncc.ReplicaGroup([list(range(ranks))]), nl.add)
    nisa.dma_copy(dst=out, src=total)
