"""A selective state-space scan in two loop orders, for channels on partitions.

Written from the published description of a fused Mamba kernel, to predict its measurements: an
elementwise kernel that is bound by VectorE, with rows broadcast over partitions by TensorE.
"""

import nki
import nki.isa as nisa
import nki.language as nl
from pieces import COLUMNS as BANK
from pieces import P, both, load, new, row_of_sums, summed


def spread(row, ones, columns):
    """Return a tile with one row in all partitions: ones times the row.

    It stays in PSUM if one bank holds it; a longer one is copied to SBUF bank by bank, because no
    instruction reads across banks.
    """
    return summed([ones], [row]) if columns <= BANK else row_of_sums([ones], [row])


def one_state(total, delta, u, a, b_row, c_row, ones, columns, initial=0.0):
    """Add one state's contribution to `total`; return the states."""
    decay, states = new(P, columns), new(P, columns)
    nisa.activation(dst=decay, op=nl.exp, data=delta, scale=a)
    gain = both(delta, u, nl.multiply, columns)
    inputs = both(gain, spread(b_row, ones, columns), nl.multiply, columns)
    nisa.tensor_tensor_scan(
        dst=states, data0=decay, data1=inputs, initial=initial, op0=nl.multiply, op1=nl.add
    )
    outputs = both(states, spread(c_row, ones, columns), nl.multiply, columns)
    nisa.tensor_tensor(dst=total, data1=total, data2=outputs, op=nl.add)
    return states


def filled(rows, columns, value):
    tile = new(rows, columns)
    nisa.memset(dst=tile, value=value)
    return tile


@nki.jit
def operands_loaded_per_state(delta, u, a, b, c):
    """delta and u are loaded again for every state. delta, u: [channels, n]; a: [channels, s]."""
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = filled(1, P, 1.0)
    totals = {tile: filled(P, columns, 0.0) for tile in range(0, channels, P)}
    for state in range(a.shape[1]):
        for tile, total in totals.items():
            rows = slice(tile, tile + P)
            one_state(
                total, load(delta[rows, :], P, columns), load(u[rows, :], P, columns),
                load(a[rows, state : state + 1], P, 1),
                load(b[state : state + 1, :], 1, columns),
                load(c[state : state + 1, :], 1, columns), ones, columns,
            )  # fmt: skip
    for tile, total in totals.items():
        nisa.dma_copy(dst=result[tile : tile + P, :], src=total)
    return result


@nki.jit
def operands_loaded_once(delta, u, a, b, c):
    """All states of one tile of channels follow each other, so delta and u are loaded once."""
    return state_by_state(delta, u, a, b, c, delta.shape[1], lambda: 0.0)


@nki.jit
def sequence_in_tiles(delta, u, a, b, c):
    """As operands_loaded_once, in tiles of 512 positions; each scan starts from the one before."""
    return state_by_state(delta, u, a, b, c, BANK, lambda: filled(P, 1, 0.0))


def state_by_state(delta, u, a, b, c, width, start):
    """Scan `width` positions at a time; the first scan of a state starts from start()."""
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = filled(1, P, 1.0)
    for tile in range(0, channels, P):
        rows = slice(tile, tile + P)
        total = filled(P, columns, 0.0)
        delta_tile, u_tile = load(delta[rows, :], P, columns), load(u[rows, :], P, columns)
        for state in range(a.shape[1]):
            factor = load(a[rows, state : state + 1], P, 1)
            initial = start()
            for at in range(0, columns, width):
                part = slice(at, at + width)
                states = one_state(
                    total[:, part], delta_tile[:, part], u_tile[:, part], factor,
                    load(b[state : state + 1, part], 1, width),
                    load(c[state : state + 1, part], 1, width), ones, width, initial,
                )  # fmt: skip
                initial = states[:, width - 1 : width]
        nisa.dma_copy(dst=result[rows, :], src=total)
    return result
