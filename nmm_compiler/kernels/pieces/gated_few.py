"""The gated product of few tokens: weights stationary, tokens moving, products added in SBUF.

A load of a panel of gate and of up is summed as it arrives and its memory freed, so that panels are
as wide as a bank of PSUM takes, and are loaded in long runs (few_tokens.py has one product alone).
"""

import nki.isa as nisa
import nki.language as nl

from .few_tokens import add_sums, finish_few
from .gated_product import multiply
from .loads_and_stores import load, store_rows
from .records import Block, Branch, Kept, Operand, Panels, Part, Result


def gate_few(
    result: Result,
    gate: Branch,
    up: Branch,
    plan: Operand,
    at: Block,
    panels: Panels,
    kept: Kept,
):
    """Compute rows of h^T, kept or stored."""
    for n0 in range(panels.first, panels.stop, plan.block):
        columns = min(plan.block, panels.stop - n0)
        n_tiles = columns // 128
        first = (n0 - panels.first) // 128
        if kept.keep:
            y_sb = kept.strip[0:128, first : first + n_tiles, 0 : at.tokens]
        else:
            y_sb = nl.ndarray((128, n_tiles, at.tokens), dtype=result.out.dtype, buffer=nl.sbuf)
        # the gate is active before the last of up arrives
        gates = added_products(gate, plan, n0, columns, at.tokens)
        active = nl.ndarray((128, n_tiles, at.tokens), dtype=nl.float32, buffer=nl.sbuf)
        finish_few(active, gates, gate.epilogue, n0 // 128)
        ups = added_products(up, plan, n0, columns, at.tokens)
        if up.epilogue.has_bias:
            for i in range(n_tiles):
                multiply(
                    y_sb[0:128, i, 0 : at.tokens], ups[0:128, i, 0 : at.tokens],
                    active[0:128, i, 0 : at.tokens], up.epilogue, n0 // 128 + i,
                )  # fmt: skip
        else:
            nisa.tensor_tensor(dst=y_sb, data1=ups, data2=active, op=nl.multiply)
        if not kept.keep:
            store_rows(result, y_sb, n0, columns, at.m0, at.tokens)


def added_products(branch: Branch, plan: Operand, n0, columns, tokens):
    """Return (s w)^T of the outputs from n0 on in fp32, [128, tiles, tokens]."""
    aligned = plan.load == "dma"
    pitch = (columns + 15) // 16 * 16 if aligned else columns
    n_tiles = columns // 128
    totals = nl.ndarray((128, n_tiles, tokens), dtype=nl.float32, buffer=nl.sbuf)
    for k0 in range(0, branch.product.k, plan.chunk):
        rows = min(plan.chunk, branch.product.k - k0)
        # a tile for each load, so that its last read frees its memory
        w_sb = nl.ndarray(
            (128, (rows + 127) // 128, pitch), dtype=branch.weight.dtype, buffer=nl.sbuf
        )
        part = Part(branch.weight, k0, rows, n0, columns)
        load(w_sb, 0, part, plan.load, branch.product.order, branch.product.k)
        for kt in range((rows + 127) // 128):
            kp = min(128, rows - 128 * kt)
            sums = nl.ndarray((128, n_tiles, tokens), dtype=nl.float32, buffer=nl.psum)
            for i in range(n_tiles):
                nisa.nc_matmul(
                    dst=sums[0:128, i, 0:tokens],
                    stationary=w_sb[0:kp, kt, 128 * i : 128 * i + 128],
                    moving=branch.strip[0:kp, k0 // 128 + kt, 0:tokens],
                    accumulate=False,
                )
            add_sums(totals, sums, k0 // 128 + kt)
    return totals
