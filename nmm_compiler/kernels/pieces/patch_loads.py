"""The loads of a patch of a dense product: chunks of the contraction, of x and of panels of w.

A short load holds one tile of 128 rows. With one first, a product begins early; with several last,
little work is left when the last of w is there.
"""

import nki.language as nl

from .loads_and_stores import load, load_aside, load_rows
from .packed_loads import load_packed
from .records import Chunks, Contraction, Part, Weight


def panel_tiles(weight: Weight, columns, depth, schedule):
    """Return tiles for a panel of w, one a chunk."""
    aligned = schedule.double_row or schedule.w.load == "dma"
    pitch = (columns + 15) // 16 * 16 if aligned else columns
    tiles = []
    for k1 in range(0, depth, schedule.w.chunk):
        k_tiles = (min(schedule.w.chunk, depth - k1) + 127) // 128
        tiles.append(nl.ndarray((128, k_tiles, pitch), dtype=weight.weight.dtype, buffer=nl.sbuf))
    return tiles


def load_ahead(tiles, weight: Weight, n0, columns, run: Contraction, short):
    """Load all chunks of a panel of w."""
    for k0 in range(0, run.depth, weight.plan.chunk):
        rows = min(weight.plan.chunk, run.depth - k0)
        part = Part(weight.weight, run.first + k0, rows, n0, columns)
        tile = tiles[k0 // weight.plan.chunk]
        if short:
            left = run.depth - k0 - rows
            load_shorter(tile, part, left, weight.plan.chunk, run.order, run.total)
        else:
            load(tile, 0, part, weight.plan.load, run.order, run.total)


def load_chunk(tile, operand: Chunks, k0, run: Contraction):
    """Load a chunk of an operand, from row k0 of the run, or what is left of the first."""
    rows = min(operand.plan.chunk, run.depth - k0)
    part = Part(operand.source, run.first + k0, rows, operand.column, operand.columns)
    if operand.begins and k0 == 0:
        if rows > 128:
            load_tiles_of(tile, operand, k0, 1, rows - 128, run)
    elif operand.short:
        left = run.depth - k0 - rows
        load_shorter(tile, part, left, operand.plan.chunk, run.order, run.total)
    elif operand.aside or operand.parted or operand.plan.load == "packed":
        load_tiles_of(tile, operand, k0, 0, rows, run)
    else:
        load(tile, 0, part, operand.plan.load, run.order, run.total)


def load_tiles_of(dst, operand: Chunks, k0, tile, rows, run: Contraction):
    """Load so many rows of a chunk, from one of its tiles on."""
    row = run.first + k0 + 128 * tile
    part = Part(operand.source, row, rows, operand.column, operand.columns)
    if operand.parted:
        first = operand.first
        some = Part(operand.source, row, rows, operand.column + first, operand.width)
        place = dst[0:128, 0 : dst.shape[1], first : first + operand.width]
        load(place, tile, some, operand.plan.load, run.order, run.total)
    elif operand.aside and operand.plan.load == "rows" and run.total % 128 == 0:
        load_aside(dst, tile, part, run.order, run.total)
    elif operand.plan.load == "packed":
        load_packed(dst, tile, part, run.order, run.total)
    else:
        load(dst, tile, part, operand.plan.load, run.order, run.total)


def load_shorter(dst, part: Part, left, chunk, order, total):
    """Load a chunk after which `left` rows follow; chunks have `chunk` rows.

    The last chunk comes tile by tile, its last tile in parts of columns, the one before in halves.
    """
    tiles = part.rows // 128
    if left > chunk:
        load_rows(dst, 0, part, order, total)
    elif left > 0:
        half = (tiles + 1) // 2
        for kt in range(0, tiles, half):
            rows = 128 * min(half, tiles - kt)
            some = Part(part.src, part.row + 128 * kt, rows, part.column, part.columns)
            load_rows(dst, kt, some, order, total)
    else:
        for kt in range(tiles - 1):
            one = Part(part.src, part.row + 128 * kt, 128, part.column, part.columns)
            load_rows(dst, kt, one, order, total)
        row = part.row + 128 * (tiles - 1)
        for n0 in range(0, part.columns, 512):
            columns = min(512, part.columns - n0)
            last = Part(part.src, row, 128, part.column + n0, columns)
            load_rows(dst[0:128, 0:tiles, n0 : n0 + columns], tiles - 1, last, order, total)
