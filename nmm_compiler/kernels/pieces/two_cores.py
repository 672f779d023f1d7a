"""What cores do together: two of a logical core, or the ranks that share a product.

Of a logical core each takes its half, and gives what it has made.
Both run the same program, `core` being 0 on one and 1 on the other, and share HBM. A half is a view
whose place depends on `core`; sizes and control flow do not.
"""

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import finish_columns
from .records import Epilogue


def own(tensor, dim, core):
    """Return this core's half of a tensor in HBM, cut along a dimension; all of it for -1."""
    if dim < 0:
        return tensor
    size = tensor.shape[dim] // 2
    if dim == 0:
        return tensor[core * size : core * size + size]
    return tensor[0 : tensor.shape[0], core * size : core * size + size]


def clear_tail(sums, first, n):
    """Clear the last of the tiles of n features: an exchange takes all their partitions."""
    if n % 128 > 0:
        nisa.memset(dst=sums[0:128, first + n // 128, 0 : sums.shape[2]], value=0.0)


def exchange(theirs, mine, core):
    """Send a strip of this core to the other one, and receive its."""
    nisa.sendrecv(src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0)


def add_other_half(sums, mine, core):
    """Write the sums of both cores, [128, tiles, tokens] each, to a strip."""
    theirs = nl.ndarray(mine.shape, dtype=mine.dtype, buffer=nl.sbuf)
    exchange(theirs, mine, core)
    nisa.tensor_tensor(dst=sums, data1=mine, data2=theirs, op=nl.add)


def finish_sums(dst, sums, first, n, epilogue: Epilogue):
    """Write sums of n features through the epilogue, from tile `first` of both strips on."""
    tokens = sums.shape[2]
    for tile in range((n + 127) // 128):
        rows = min(128, n - 128 * tile)
        finish_columns(
            dst[0:rows, first + tile, 0:tokens], sums[0:rows, first + tile, 0:tokens], epilogue,
            tile, tile, 0, tile,
        )  # fmt: skip


def sum_strips(total, sums, n, ranks):
    """Write the sum of the strips of all ranks, n features of p^T each.

    A rank is a logical core. Of its two physical ones each exchanges with the same one of the
    others.
    """
    tiles = sums.shape[1]
    tokens = sums.shape[2]
    rows = min(128, n)
    group = []
    for rank in range(ranks):
        group.append(rank)
    # collectives take matrices in SBUF
    ncc.all_reduce(
        [sums.reshape((128, tiles * tokens))[0:rows, 0 : tiles * tokens]],
        [total.reshape((128, tiles * tokens))[0:rows, 0 : tiles * tokens]],
        ncc.ReplicaGroup([group]),
        nl.add,
    )
