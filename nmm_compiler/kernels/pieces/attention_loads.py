"""Loads queries, keys and values of an attention kernel, and transposes and rotates them.

Queries and keys have the head size on the partitions, in parts of 128; values have keys there.
"""

import nki.isa as nisa
import nki.language as nl

from .loads_and_stores import load_rows, turn_rows
from .new_tiles import filled
from .records import Part


def make_identity():
    """Return ones on the diagonal [128, 128]."""
    identity = filled((128, 128), nl.bfloat16, 1.0)
    keep_side(identity, 1, 0, 0.0)
    keep_side(identity, -1, 0, 0.0)
    return identity


def make_band(sign, offset):
    """Return a band [128, 384] of 0 beside a band of -1e30."""
    band = filled((128, 384), nl.bfloat16, 0.0)
    keep_side(band, sign, offset, -1.0e30)
    return band


def keep_side(tile, sign, offset, value):
    """Write a value where offset + sign (partition - column) is less than 0."""
    nisa.affine_select(
        dst=tile,
        pattern=[[-sign, tile.shape[1]]],
        channel_multiplier=sign,
        on_true_tile=tile,
        on_false_value=value,
        cmp_op=nl.greater_equal,
        offset=offset,
    )


def load_keys(k, rope, spec):
    """Return k^T [128, parts of d, context]."""
    k_t = nl.ndarray((128, spec.parts, spec.context), dtype=k.dtype, buffer=nl.sbuf)
    for c0 in range(0, spec.context, 512):
        width = min(512, spec.context - c0)
        if spec.k_layout == "col":
            for part in range(spec.parts):
                deep = min(128, spec.d - 128 * part)
                nisa.dma_copy(
                    dst=k_t[0:deep, part, c0 : c0 + width],
                    src=k[128 * part : 128 * part + deep, c0 : c0 + width],
                )
        else:
            for r0 in range(c0, c0 + width, 128):
                deep = min(128, spec.context - r0)
                natural = nl.ndarray((128, 1, spec.d), dtype=k.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=natural[0:deep, 0, 0 : spec.d], src=k[r0 : r0 + deep, 0 : spec.d])
                if spec.rope == "qk":
                    natural = rotate(natural, load_angles(rope, r0, deep, spec), deep, spec)
                turn_rows(
                    k_t[0:128, 0 : spec.parts, r0 : r0 + deep], natural[0:deep, 0, 0 : spec.d],
                    "strided_rows", r0 // 128, 1,
                )  # fmt: skip
    return k_t


def load_values(v, spec):
    """Return v [128, tiles of keys, d + 1], with a column of ones."""
    v_sb = nl.ndarray((128, (spec.context + 127) // 128, spec.d + 1), dtype=v.dtype, buffer=nl.sbuf)
    nisa.memset(dst=v_sb[0:128, 0 : v_sb.shape[1], spec.d : spec.d + 1], value=1.0)
    for c0 in range(0, spec.context, 512):
        keys = Part(v, c0, min(512, spec.context - c0), 0, spec.d, 1)
        load_rows(v_sb, c0 // 128, keys, "strided_rows", spec.context, "")
    return v_sb


def fetch_queries(q, q0, spec):
    """Load a tile of queries of all heads of a group as they lie."""
    rows = min(128, spec.m - q0)
    natural = nl.ndarray((128, spec.group, spec.d), dtype=q.dtype, buffer=nl.sbuf)
    block = q[0 : spec.group, q0 : q0 + rows, 0 : spec.d]
    nisa.dma_copy(dst=natural[0:rows, 0 : spec.group, 0 : spec.d], src=block.permute((1, 0, 2)))
    return natural


def turn_queries(flat, rope, q0, spec):
    """Return q^T [128, parts of d, heads, 128] of a tile of queries."""
    rows = min(128, spec.m - q0)
    natural = flat
    if spec.rope != "none":
        first = spec.context - spec.m + q0 if spec.rope == "qk" else q0
        natural = rotate(flat, load_angles(rope, first, rows, spec), rows, spec)
    q_t = nl.ndarray((128, spec.parts, spec.group, 128), dtype=flat.dtype, buffer=nl.sbuf)
    for h in range(spec.group):
        strip = q_t[0:128, 0 : spec.parts, h, 0:rows]
        turn_rows(strip, natural[0:rows, h, 0 : spec.d], "strided_rows", h, 1)
    return q_t


def load_angles(rope, first, rows, spec):
    """Return the angles of tokens `first` and on, [rows, 2, d / 2]."""
    half = spec.d // 2
    angles = nl.ndarray((128, 2, half), dtype=rope.dtype, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=angles[0:rows, 0:2, 0:half],
        src=rope[0:2, first : first + rows, 0:half].permute((1, 0, 2)),
    )
    return angles


def rotate(x, angles, rows, spec):
    """Return x [rows, heads, d], rotated by the angles of each row, in fp32."""
    heads = x.shape[1]
    half = spec.d // 2
    made = nl.ndarray((128, heads, spec.d), dtype=x.dtype, buffer=nl.sbuf)
    cos = angles[0:rows, 0:1, 0:half].broadcast(1, heads)
    sin = angles[0:rows, 1:2, 0:half].broadcast(1, heads)
    a = x[0:rows, 0:heads, 0:half]
    b = x[0:rows, 0:heads, half : 2 * half]
    rotate_half(made[0:rows, 0:heads, 0:half], a, b, cos, sin, True)
    rotate_half(made[0:rows, 0:heads, half : 2 * half], b, a, cos, sin, False)
    return made


def rotate_half(dst, a, b, cos, sin, first):
    """Write a cos - b sin, or a cos + b sin, each on an engine of its own."""
    engine = nisa.engine.vector if first else nisa.engine.gpsimd
    left = nl.ndarray(dst.shape, dtype=nl.float32, buffer=nl.sbuf)
    right = nl.ndarray(dst.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=left, data1=a, data2=cos, op=nl.multiply, engine=engine)
    nisa.tensor_tensor(dst=right, data1=b, data2=sin, op=nl.multiply, engine=engine)
    op = nl.subtract if first else nl.add
    nisa.tensor_tensor(dst=dst, data1=left, data2=right, op=op, engine=engine)
