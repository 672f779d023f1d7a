"""Loads of a few columns into a strip whose tiles are spaced 16 elements apart, for double rows."""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import load_rows
from .records import Part


def load_packed(dst, tile, part: Part, order, total):
    """Load rows of a few columns in long runs, then space them as dst has them."""
    tiles = part.rows // 128
    rest = part.rows % 128
    flat = nl.ndarray((128, (part.rows + 127) // 128, part.columns), dtype=dst.dtype)
    load_rows(flat, 0, part, order, total)
    if tiles > 0:
        spaced = dst[0:128, tile : tile + tiles, 0 : part.columns]
        nisa.tensor_copy(dst=spaced, src=flat[0:128, 0:tiles, 0 : part.columns])
    if rest > 0:
        spaced = dst[0:rest, tile + tiles, 0 : part.columns]
        nisa.tensor_copy(dst=spaced, src=flat[0:rest, tiles, 0 : part.columns])
