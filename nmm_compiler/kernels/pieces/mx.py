"""Products of MX blocks on TensorE of trn3: four features of each of 8 partitions share a scale.

Order "fours": strip tile 4 t + j holds, on partition p, feature 512 t + 4 p + j of a contraction of
whole 128s; what fills no 512 has 32, 64 or 96 partitions. So a plain factor of the same left factor
reads the strip tile by tile, and nc_matmul_mx its copy with the four side by side, quantized.

A weight [k, n] is in HBM as bytes: data [k / 4, n size], of which a row is four features of each
output, size 2 or 4 bytes together, and scales [k / 32, n]. A chunk of it is one tile of bytes, the
data of each 512 features and behind them the scales: those of tile t are on partitions 4 (t % 4) to
4 (t % 4) + 3 of each quadrant, where the free axis is at t // 4, so that four tiles share a row.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import evict, load_rows, move
from .records import Panel, Part, Term


def quantize_strip(strip, size, tokens):
    """Return a strip of `size` features as MXFP8 data and its scales, [128, tiles of 512, columns].

    One column more than there are tokens is zeros: a stationary operand has an even number.
    """
    columns = tokens + tokens % 2
    whole = size // 512
    rest = size % 512
    tiles = (size + 511) // 512
    data = nl.ndarray((128, tiles, columns), dtype=nl.float8_e4m3fn_x4, buffer=nl.sbuf)
    scales = nl.ndarray((128, tiles, columns), dtype=nl.uint8, buffer=nl.sbuf)
    deep = max(1, 512 // tokens)
    for first in range(0, whole, deep):
        count = min(deep, whole - first)
        part = strip[0:128, 4 * first : 4 * (first + count), 0:tokens]
        quantize_tiles(
            data[0:128, first : first + count, 0:columns],
            scales[0:128, first : first + count, 0:columns], part, count, tokens, columns,
            first // deep,
        )  # fmt: skip
    if rest > 0:
        part = strip[0 : rest // 4, 4 * whole : 4 * whole + 4, 0:tokens]
        quantize_tiles(
            data[0 : rest // 4, whole : whole + 1, 0:columns],
            scales[0 : rest // 4, whole : whole + 1, 0:columns], part, 1, tokens, columns, 1,
        )  # fmt: skip
    return [data, scales]


def quantize_tiles(data, scales, strip, count, tokens, columns, turn):
    """Quantize so many tiles of 512 features: their four side by side, then on VectorE."""
    rows = strip.shape[0]
    fours = nl.ndarray((rows, count, columns, 4), dtype=strip.dtype, buffer=nl.sbuf)
    if columns > tokens:
        nisa.memset(dst=fours[0:rows, 0:count, tokens:columns, 0:4], value=0.0)
    tiles = strip.reshape_dim(1, (count, 4))
    evict(fours[0:rows, 0:count, 0:tokens, 0:4], tiles.permute((0, 1, 3, 2)), turn)
    nisa.quantize_mx(dst=data, src=fours.reshape((rows, count, 4 * columns)), dst_scale=scales)


def load_mx_chunk(term: Term, k0, n0, columns):
    """Return a chunk of a panel of an MX weight, data and scales, loaded.

    The scales come first, or behind the first tile of a weight, then a tile a load: each has
    products before the next is there.
    """
    rows = min(term.plan.chunk, term.plan.k - k0)
    tiles = (rows + 511) // 512
    size = term.plan.mx_bytes
    # whole elements from one tile to the next
    width = size * columns + (columns + 3) // 4 * 4
    tile = nl.ndarray((128, tiles, width), dtype=nl.uint8, buffer=nl.sbuf)
    early = 1 if k0 + n0 == 0 and rows >= 512 else 0
    data = term.weight[k0 // 4 : (k0 + rows) // 4, size * n0 : size * (n0 + columns)]
    load_rows(
        tile, 0, Part(data, 0, 128 * early, 0, size * columns, 1), "strided_rows", rows, False
    )
    for group in range((rows + 2047) // 2048):
        deep = min(2048, rows - 2048 * group)
        place = tile[0:128, group, size * columns : (size + 1) * columns]
        first = k0 // 32 + 64 * group
        scales = term.weight_scales[first : first + deep // 32, n0 : n0 + columns]
        if deep == 2048 and columns % 8 == 0:
            load_scales_by_all(place, scales)
        else:
            for quadrant in range(min(4, (deep + 127) // 128)):
                load_scales(place, scales, quadrant, deep // 512, (deep % 512) // 128)
    at_end = k0 + rows == term.plan.k and n0 + columns == term.plan.n
    for late in range(early, tiles):
        pieces = term.plan.pieces if at_end and late + 1 == tiles else 1
        wide = size * columns // pieces
        deep = min(128, rows // 4 - 128 * late)
        for piece in range(pieces):
            own = Part(data, 128 * late, deep, piece * wide, wide, 1)
            place = tile[0:128, 0:tiles, piece * wide : (piece + 1) * wide]
            load_rows(place, late, own, "strided_rows", rows, "")
    return tile


def load_scales_by_all(dst, src):
    """Load the scales of four tiles, [64, n], by all DMA engines, which belong to partitions.

    Those of the second half of the outputs arrive on the other partitions of each quadrant.
    """
    half = src.shape[1] // 2
    rows = src[0:64, 0 : 2 * half].reshape_dim(0, (4, 4, 4)).reshape_dim(3, (2, half))
    move(dst[0:128, 0:half], rows.permute((1, 3, 0, 2, 4)), True)


def move_scales(w_sb, rows, size, columns):
    """Move the scales of a chunk that arrived beside their partitions to where products read them.

    Just before the first product: VectorE would wait for the load with what stands behind.
    """
    moved = []
    for p in range(32):
        moved.append(16 + p if p < 16 else 255)
    half = columns // 2
    for group in range(rows // 2048 if columns % 8 == 0 else 0):
        scales = w_sb[0:128, group, size * columns : size * columns + 2 * half]
        nisa.nc_stream_shuffle(
            dst=scales[0:128, half : 2 * half].view(nl.uint32),
            src=scales[0:128, 0:half].view(nl.uint32),
            shuffle_mask=moved,
        )


def load_scales(dst, src, quadrant, whole, rest):
    """Load scales of up to four tiles, [16 a tile, n], to a quadrant: four of each tile.

    rest: the quadrants that a last tile has, which is not whole.
    """
    first = 32 * quadrant
    n = src.shape[1]
    if whole > 0:
        rows = src[0 : 16 * whole, 0:n].reshape_dim(0, (whole, 4, 4))
        part = dst[first : first + 4 * whole, 0:n]
        move(part, rows[0:whole, quadrant, 0:4, 0:n], True)
    if quadrant < rest:
        last = 16 * whole + 4 * quadrant
        part = dst[first + 4 * whole : first + 4 * whole + 4, 0:n]
        move(part, src[last : last + 4, 0:n], True)


def add_mx_rows(dst, w_sb, k0, rows, ns, ms, term: Term, loaded, begun):
    """Add the products of a chunk, from output ns and token ms on, to a sum of an even number of
    tokens; loaded: the columns of the chunk."""
    tokens = dst.shape[0]
    columns = dst.shape[1]
    size = term.plan.mx_bytes
    behind = size * loaded + ns
    for kt in range((rows + 511) // 512):
        parts = min(128, (rows - 512 * kt) // 4)
        tile = k0 // 512 + kt
        above = 4 * (kt % 4)
        data = w_sb[0:parts, kt, size * ns : size * (ns + columns)]
        nisa.nc_matmul_mx(
            dst=dst,
            stationary=term.left.strip[0:parts, tile, ms : ms + tokens],
            moving=data.view(term.element),
            stationary_scale=term.left.left_scales[0:parts, tile, ms : ms + tokens],
            moving_scale=w_sb[above : above + parts - 28, kt // 4, behind : behind + columns],
            accumulate=begun or tile > 0,
        )


def load_parts(term: Term, n0, columns):
    """Return a panel of a weight of few rows, whose parts lie behind one another: so more DMA
    engines, which belong to partitions, load it."""
    wide = columns // term.plan.parts
    tile = nl.ndarray((128, 1, wide), dtype=term.weight.dtype, buffer=nl.sbuf)
    panel = term.weight[0 : term.plan.k, n0 : n0 + columns]
    move(
        tile[0 : term.plan.parts * term.plan.k, 0, 0:wide],
        panel.reshape_dim(1, (term.plan.parts, wide)).permute((1, 0, 2)), "scalar",
    )  # fmt: skip
    return tile


def add_parts(sums, w_sb, term: Term, panel: Panel, n1, tiles, tokens, begun):
    """Add p v of tiles of outputs to their sums: each part of a panel by its own partitions."""
    wide = panel.columns // term.plan.parts
    count = min(128, wide // panel.apart)
    for i in range(tiles):
        begin = (n1 + i) // panel.apart * panel.apart * 128
        for o in range(0, 128, count):
            first = begin + (n1 + i) % panel.apart + o * panel.apart
            base = term.plan.k * (first // wide)
            last = first % wide + panel.apart * (count - 1) + 1
            nisa.nc_matmul(
                dst=sums[i][o : o + count, 0:tokens],
                stationary=w_sb[base : base + term.plan.k, 0, first % wide : last : panel.apart],
                moving=term.left.strip[base : base + term.plan.k, 0, 0:tokens],
                accumulate=begun,
            )
