"""The residual that is added to a result before it is stored: loaded as the result lies in SBUF.

Its loads stand before those of the weights of the same outputs, so that it never comes last.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import load_rows
from .records import Block, Part, Product, Result, Weight


def load_tiles(part: Part, dtype):
    """Return a part of a matrix in HBM in SBUF, its rows in tiles of 128."""
    tiles = (part.rows + 127) // 128
    made = nl.ndarray((min(128, part.rows), tiles, part.columns), dtype=dtype, buffer=nl.sbuf)
    load_rows(made, 0, part, "strided_rows", part.rows)
    return made


def load_apart(dst, src):
    """Load many short runs on a queue of their own: the hardware writes their descriptors."""
    nisa.dma_copy(dst=dst, src=src, dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.scalar)


def add_tiles(dst, more, rows):
    """Add to a strip of so many rows, in tiles of 128, another one."""
    tiles = rows // 128
    rest = rows % 128
    columns = dst.shape[2]
    if tiles > 0:
        part = dst[0:128, 0:tiles, 0:columns]
        nisa.tensor_tensor(dst=part, data1=part, data2=more[0:128, 0:tiles, 0:columns], op=nl.add)
    if rest > 0:
        part = dst[0:rest, tiles, 0:columns]
        nisa.tensor_tensor(dst=part, data1=part, data2=more[0:rest, tiles, 0:columns], op=nl.add)


def residual_columns(result: Result, right: Weight, at: Block, product: Product, n0):
    """Return the residual of the outputs from n0 on, loaded as the result of a panel lies."""
    columns = min(right.plan.block, product.n - n0)
    if not result.as_rows:
        part = Part(result.residual, n0, columns, at.m0, at.tokens)
        return load_tiles(part, result.out.dtype)
    n_tiles = columns // 128
    tile = nl.ndarray((128, at.tokens, n_tiles), dtype=result.out.dtype, buffer=nl.sbuf)
    rows = result.residual[at.m0 : at.m0 + at.tokens, n0 : n0 + columns]
    load_apart(tile, rows.reshape_dim(1, (128, n_tiles)).permute((1, 0, 2)))
    return tile
