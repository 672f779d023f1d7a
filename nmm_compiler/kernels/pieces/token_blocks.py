"""The loop over the blocks of tokens of a kernel."""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import position, split
from .records import Block, Tokens


def over_blocks(compute, tokens: Tokens, held, spec, schedule):
    """Compute block by block: compute(out, residual, x, held, place, spec, schedule)."""
    first = 0
    if schedule.m_loop:
        # on the device: the compiled program holds one block, whatever the number of tokens
        first = tokens.m - tokens.m % tokens.m_block
        x_dim = 1 if spec.x_layout == "col" else 0
        out_dim = 0 if spec.out_layout == "row" else 1
        x_blocks = split(tokens.x, x_dim, tokens.m // tokens.m_block, tokens.m_block)
        out_blocks = split(tokens.out, out_dim, tokens.m // tokens.m_block, tokens.m_block)
        if spec.residual:
            residual_blocks = split(
                tokens.residual, out_dim, tokens.m // tokens.m_block, tokens.m_block
            )

        def body(i):
            at = position(i)
            x_part = x_blocks.select(x_dim, at)
            out_part = out_blocks.select(out_dim, at)
            residual_part = None
            if spec.residual:
                residual_part = residual_blocks.select(out_dim, at)
            block = Block(0, tokens.m_block)
            compute(out_part, residual_part, x_part, held, block, spec, schedule)

        # the loop variable is a register because its bound is one
        nl.fori_loop(0, nisa.register_alloc(tokens.m // tokens.m_block), body)
    for m0 in range(first, tokens.m, tokens.m_block):
        at = Block(m0, min(tokens.m_block, tokens.m - m0))
        compute(tokens.out, tokens.residual, tokens.x, held, at, spec, schedule)
