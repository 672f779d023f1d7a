"""A selective state-space scan in two loop orders, for channels on partitions.

Written from the published description of a fused Mamba kernel, to predict its measurements: an
elementwise kernel that is bound by VectorE, with rows broadcast over partitions by TensorE.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import P, activated, both, filled, load, new, slices, spread


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
    totals = [(rows, filled(P, columns)) for rows in slices(channels)]
    for state in slices(a.shape[1], 1):
        for rows, total in totals:
            one_state(
                total, load(delta[rows, :]), load(u[rows, :]), load(a[rows, state]),
                load(b[state, :]), load(c[state, :]), ones,
            )  # fmt: skip
    for rows, total in totals:
        nisa.dma_copy(dst=result[rows, :], src=total)
    return result


@nki.jit
def operands_loaded_once(delta, u, a, b, c, width=0):
    """All states of one tile of channels follow each other, so delta and u are loaded once.

    width: of tiles of the sequence, if it is cut; each scan starts from the one before.
    """
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = filled(1, P, 1.0)
    for rows in slices(channels):
        total = filled(P, columns)
        delta_tile, u_tile = load(delta[rows, :]), load(u[rows, :])
        for state in slices(a.shape[1], 1):
            factor = load(a[rows, state])
            initial = filled(P, 1) if width else 0.0
            for part in slices(columns, width or columns):
                states = one_state(
                    total[:, part], delta_tile[:, part], u_tile[:, part], factor,
                    load(b[state, part]), load(c[state, part]), ones, initial,
                )  # fmt: skip
                initial = states[:, states.shape[1] - 1 :]
        nisa.dma_copy(dst=result[rows, :], src=total)
    return result
