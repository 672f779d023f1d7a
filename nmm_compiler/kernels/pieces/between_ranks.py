"""The sum over the ranks that share a product: each has computed its part.

A rank is a logical core. Of its two physical ones each exchanges with the same one of the others.
"""

import nki.collectives as ncc
import nki.language as nl


def sum_strips(total, sums, n, ranks):
    """Write the sum of the strips of all ranks, n features of p^T each."""
    tiles = sums.shape[1]
    tokens = sums.shape[2]
    rows = min(128, n)
    # collectives take matrices in SBUF
    ncc.all_reduce(
        [sums.reshape((128, tiles * tokens))[0:rows, 0 : tiles * tokens]],
        [total.reshape((128, tiles * tokens))[0:rows, 0 : tiles * tokens]],
        ncc.ReplicaGroup([list(range(ranks))]),
        nl.add,
    )
