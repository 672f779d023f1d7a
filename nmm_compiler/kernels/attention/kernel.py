"""Attention y = softmax(scale q k^T + mask) v, for prefill and for decoding.

The heads that share keys make a group. Groups follow each other, or are a loop on the device.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from ..pieces.attention_decode import decode_groups
from ..pieces.attention_prefill import prefill_groups
from ..pieces.loads_and_stores import position


@nki.jit
def attention(q, k, v, spec, schedule, **others):
    """Return y."""
    groups = spec.batch * spec.kv_heads
    out = nl.ndarray((spec.batch * spec.heads, spec.m, spec.d), dtype=q.dtype, buffer=nl.shared_hbm)
    if schedule.decode:
        q_groups = q.reshape((groups, spec.columns, spec.d))
        out_groups = out.reshape((groups, spec.columns, spec.d))
    else:
        q_groups = q.reshape((groups, spec.group, spec.m, spec.d))
        out_groups = out.reshape((groups, spec.group, spec.m, spec.d))
    if schedule.loop:

        def body(i):
            at = position(i)
            compute(
                [out_groups.select(0, at)],
                [q_groups.select(0, at)],
                [k.select(0, at)],
                [v.select(0, at)],
                others.get("rope"),
                spec,
                schedule,
            )

        # the loop variable is a register because its bound is one
        nl.fori_loop(0, nisa.register_alloc(spec.batch * spec.kv_heads), body)
    else:
        outs = []
        qs = []
        ks = []
        vs = []
        for g in range(groups):
            outs.append(out_groups.select(0, g))
            qs.append(q_groups.select(0, g))
            ks.append(k.select(0, g))
            vs.append(v.select(0, g))
        compute(outs, qs, ks, vs, others.get("rope"), spec, schedule)
    return out


def compute(outs, qs, ks, vs, rope, spec, schedule):
    """Compute the heads of several groups."""
    if schedule.decode:
        decode_groups(outs, qs, ks, vs, rope, spec, schedule)
    else:
        prefill_groups(outs, qs, ks, vs, rope, spec, schedule)
