"""A selective state-space scan in two loop orders, for channels on partitions.

Written from the published description of a fused Mamba kernel, to predict its measurements: an
elementwise kernel that is bound by VectorE, with rows broadcast over partitions by TensorE.
"""

import nki
import nki.isa as nisa
import nki.language as nl

P = 128
BANK = 512


def load(source, rows, columns):
    """Return an SBUF tile with a copy of an HBM region."""
    tile = nl.ndarray((rows, columns), dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def spread(row, ones, columns):
    """Return a tile with one row in all partitions: ones times the row.

    It stays in PSUM if one bank holds it; a longer one is copied to SBUF bank by bank, because no
    instruction reads across banks.
    """
    if columns <= BANK:
        wide = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=wide, stationary=ones, moving=row)
        return wide
    wide = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    for at in range(0, columns, BANK):
        product = nl.ndarray((P, BANK), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=product, stationary=ones, moving=row[:, at : at + BANK])
        nisa.tensor_copy(dst=wide[:, at : at + BANK], src=product)
    return wide


def one_state(total, delta, u, a, b_row, c_row, ones, columns, initial=0.0):
    """Add one state's contribution to `total`; return the states."""
    decay = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=decay, op=nl.exp, data=delta, scale=a)
    gain = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=gain, data1=delta, data2=u, op=nl.multiply)
    inputs = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=inputs, data1=gain, data2=spread(b_row, ones, columns), op=nl.multiply)
    states = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor_scan(
        dst=states, data0=decay, data1=inputs, initial=initial, op0=nl.multiply, op1=nl.add
    )
    outputs = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=outputs, data1=states, data2=spread(c_row, ones, columns), op=nl.multiply
    )
    nisa.tensor_tensor(dst=total, data1=total, data2=outputs, op=nl.add)
    return states


@nki.jit
def operands_loaded_per_state(delta, u, a, b, c):
    """delta and u are loaded again for every state. delta, u: [channels, n]; a: [channels, s]."""
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = nl.ndarray((1, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    totals = []
    for _ in range(channels // P):
        total = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        totals.append(total)
    for state in range(a.shape[1]):
        for tile in range(channels // P):
            rows = slice(tile * P, (tile + 1) * P)
            one_state(
                totals[tile],
                load(delta[rows, :], P, columns),
                load(u[rows, :], P, columns),
                load(a[rows, state : state + 1], P, 1),
                load(b[state : state + 1, :], 1, columns),
                load(c[state : state + 1, :], 1, columns),
                ones,
                columns,
            )
    for tile in range(channels // P):
        nisa.dma_copy(dst=result[tile * P : (tile + 1) * P, :], src=totals[tile])
    return result


@nki.jit
def operands_loaded_once(delta, u, a, b, c):
    """All states of one tile of channels follow each other, so delta and u are loaded once."""
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = nl.ndarray((1, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    for tile in range(channels // P):
        rows = slice(tile * P, (tile + 1) * P)
        total = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        delta_tile, u_tile = load(delta[rows, :], P, columns), load(u[rows, :], P, columns)
        for state in range(a.shape[1]):
            one_state(
                total,
                delta_tile,
                u_tile,
                load(a[rows, state : state + 1], P, 1),
                load(b[state : state + 1, :], 1, columns),
                load(c[state : state + 1, :], 1, columns),
                ones,
                columns,
            )
        nisa.dma_copy(dst=result[rows, :], src=total)
    return result


@nki.jit
def sequence_in_tiles(delta, u, a, b, c):
    """As operands_loaded_once, in tiles of 512 positions; each scan starts from the one before."""
    channels, columns = delta.shape
    result = nl.ndarray((channels, columns), dtype=delta.dtype, buffer=nl.shared_hbm)
    ones = nl.ndarray((1, P), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    for tile in range(channels // P):
        rows = slice(tile * P, (tile + 1) * P)
        total = nl.ndarray((P, columns), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        delta_tile, u_tile = load(delta[rows, :], P, columns), load(u[rows, :], P, columns)
        for state in range(a.shape[1]):
            factor = load(a[rows, state : state + 1], P, 1)
            initial = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.memset(dst=initial, value=0.0)
            for at in range(0, columns, BANK):
                part = slice(at, at + BANK)
                states = one_state(
                    total[:, part],
                    delta_tile[:, part],
                    u_tile[:, part],
                    factor,
                    load(b[state : state + 1, part], 1, BANK),
                    load(c[state : state + 1, part], 1, BANK),
                    ones,
                    BANK,
                    initial,
                )
                initial = states[:, BANK - 1 : BANK]
        nisa.dma_copy(dst=result[rows, :], src=total)
    return result
