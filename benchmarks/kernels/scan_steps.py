"""A selective state-space scan in two loop orders, for channels on partitions.

Written from the published description of a fused Mamba kernel, to predict its measurements: an
elementwise kernel that is bound by VectorE, with rows broadcast over partitions by TensorE.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import COLUMNS as BANK
from pieces import P, activated, both, filled, load, new, row_of_sums, summed


def spread(row, ones):
    """Return a tile with one row in all partitions: ones times the row.

    It stays in PSUM if one bank holds it; a longer one is copied to SBUF bank by bank, because no
    instruction reads across banks.
    """
    return (summed if row.shape[1] <= BANK else row_of_sums)([ones], [row])


def one_state(total, delta, u, a, b_row, c_row, ones, initial=0.0):
    """Add one state's contribution to `total`; return the states."""
    states, decay = new(*delta.shape), activated(delta, nl.exp, scale=a)
    inputs = both(both(delta, u, nl.multiply), spread(b_row, ones), nl.multiply)
    nisa.tensor_tensor_scan(
        dst=states, data0=decay, data1=inputs, initial=initial, op0=nl.multiply, op1=nl.add
    )
    both(total, both(states, spread(c_row, ones), nl.multiply), nl.add, total)
    return states


@nki.jit
def operands_loaded_per_state(delta, u, a, b, c):
    """delta and u are loaded again for every state. delta, u: [channels, n]; a: [channels, s]."""
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = filled(1, P, 1.0)
    totals = {tile: filled(P, columns) for tile in range(0, channels, P)}
    for s in range(a.shape[1]):
        for tile, total in totals.items():
            rows, state = slice(tile, tile + P), slice(s, s + 1)
            one_state(
                total, load(delta[rows, :]), load(u[rows, :]), load(a[rows, state]),
                load(b[state, :]), load(c[state, :]), ones,
            )  # fmt: skip
    for tile, total in totals.items():
        nisa.dma_copy(dst=result[tile : tile + P, :], src=total)
    return result


@nki.jit
def operands_loaded_once(delta, u, a, b, c, width=0):
    """All states of one tile of channels follow each other, so delta and u are loaded once.

    width: of tiles of the sequence, if it is cut; each scan starts from the one before.
    """
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = filled(1, P, 1.0)
    parts = [slice(at, at + (width or columns)) for at in range(0, columns, width or columns)]
    for tile in range(0, channels, P):
        rows = slice(tile, tile + P)
        total = filled(P, columns)
        delta_tile, u_tile = load(delta[rows, :]), load(u[rows, :])
        for s in range(a.shape[1]):
            state = slice(s, s + 1)
            factor = load(a[rows, state])
            initial = filled(P, 1) if width else 0.0
            for part in parts:
                states = one_state(
                    total[:, part], delta_tile[:, part], u_tile[:, part], factor,
                    load(b[state, part]), load(c[state, part]), ones, initial,
                )  # fmt: skip
                initial = states[:, states.shape[1] - 1 :]
        nisa.dma_copy(dst=result[rows, :], src=total)
    return result
