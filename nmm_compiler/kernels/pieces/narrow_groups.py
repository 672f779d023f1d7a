"""Narrow gated MLPs, several as one: the features of a stack of groups share the partitions.

One product then covers the stack, where each group alone would fill a part of TensorE's columns and
rows. A feature's result is multiplied by the gate of its own group before down adds them all up.
"""

import nki.isa as nisa
import nki.language as nl

from .chosen_groups import gates_of
from .expand import add_tiles
from .loads_and_stores import load
from .new_tiles import copied, filled
from .records import Part


def add_narrow_groups(total, x_sb, groups, picks, operands, m, spec):
    """Add to y^T, [128, tiles, tokens], what some groups make of the tokens that chose them."""
    stacks = spec.at_once // spec.stack
    rows = spec.stack * spec.features
    ups = []
    downs = []
    hs = []
    for q in range(stacks):
        ups.append(load_stack_up(operands[0], groups[0], q, spec))
        downs.append(load_stack_down(operands[1], groups[0], q, spec))
    for q in range(stacks):
        if spec.way == "picks":
            gates = on_rows(picks[1][0:1, 0 : spec.at_once], q, spec)
        else:
            group = on_rows(groups[1][0:1, 0 : spec.at_once], q, spec)
            every = m * spec.top_k
            strip = gates_of(
                group, picks[0][0:rows, 0:every], picks[1][0:rows, 0:every], m, spec.top_k
            )
            gates = strip.reshape((rows, m))
        hs.append(stacked_h(x_sb, ups[q], gates, m, spec))
    tiles = (spec.k + 127) // 128
    many = max(1, min(tiles, 512 // m))
    for t0 in range(0, tiles, many):
        count = min(many, tiles - t0)
        sums = nl.ndarray((128, count, m), dtype=nl.float32, buffer=nl.psum)
        for t in range(count):
            first = 128 * (t0 + t)
            wide = min(128, spec.k - first)
            for q in range(stacks):
                nisa.nc_matmul(
                    dst=sums[0:wide, t, 0:m], stationary=downs[q][0:rows, first : first + wide],
                    moving=hs[q], accumulate=q > 0,
                )  # fmt: skip
        part = total[0:128, t0 : t0 + count, 0:m]
        add_tiles(part, sums, min(128 * count, spec.k - 128 * t0))


def stacked_h(x_sb, up, gates, m, spec):
    """Return h^T of a stack, [stack n, tokens], times the gates of each feature's group."""
    rows = spec.stack * spec.features
    halves = []
    for half in range(2):
        sums = nl.ndarray((rows, m), dtype=nl.float32, buffer=nl.psum)
        first = half * spec.features
        for t in range(up.shape[2]):
            deep = min(128, spec.k - 128 * t)
            nisa.nc_matmul(
                dst=sums,
                stationary=up[0:deep, 0 : spec.stack, t, first : first + spec.features],
                moving=x_sb[0:deep, t, 0:m],
                accumulate=t > 0,
            )
        halves.append(sums)
    active = nl.ndarray((rows, m), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=active, op=getattr(nl, spec.op), data=halves[0])
    nisa.tensor_tensor(dst=active, data1=active, data2=halves[1], op=nl.multiply)
    h_sb = nl.ndarray((rows, m), dtype=x_sb.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=h_sb, data1=active, data2=gates, op=nl.multiply)
    return h_sb


def on_rows(row, q, spec):
    """Return a number of each group of stack q, from fp32 [1, groups], on its features' rows."""
    spread = nl.ndarray((1, spec.stack, spec.features), dtype=nl.float32, buffer=nl.sbuf)
    own = row[0:1, q * spec.stack : (q + 1) * spec.stack]
    nisa.tensor_copy(dst=spread, src=own.reshape((1, spec.stack, 1)).broadcast(2, spec.features))
    one = filled((1, 1), nl.float32, 1.0)
    sums = nl.ndarray((spec.stack * spec.features, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=spread, moving=one)
    return copied(sums, nl.float32)


def load_stack_up(gate_up, groups, q, spec):
    """Return gate and up of a stack: [128, stack, tiles of the contraction, 2 n]."""
    tiles = (spec.k + 127) // 128
    tile = nl.ndarray(
        (128, spec.stack, tiles, 2 * spec.features), dtype=gate_up.dtype, buffer=nl.sbuf
    )
    for j in range(spec.stack):
        s = q * spec.stack + j
        matrix = gate_up.select(0, groups[0:1, s : s + 1])
        own = tile[0:128, j, 0:tiles, 0 : 2 * spec.features]
        load(
            own,
            0,
            Part(matrix, 0, spec.k, 0, 2 * spec.features, 1),
            "rows",
            spec.up.order,
            spec.k,
            False,
        )
    return tile


def load_stack_down(down, groups, q, spec):
    """Return the rows of down of a stack, [stack n, k]."""
    tile = nl.ndarray((spec.stack * spec.features, spec.k), dtype=down.dtype, buffer=nl.sbuf)
    for j in range(spec.stack):
        s = q * spec.stack + j
        nisa.dma_copy(
            dst=tile[j * spec.features : (j + 1) * spec.features, 0 : spec.k],
            src=down.select(0, groups[0:1, s : s + 1]),
        )
    return tile
