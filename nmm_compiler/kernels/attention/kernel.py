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
    groups = spec.groups
    heads = 2 * spec.batch * spec.heads if schedule.split else spec.batch * spec.heads
    out = nl.ndarray((heads, spec.m, spec.d), dtype=q.dtype, buffer=nl.shared_hbm)
    part = out
    core = nl.program_id(0) if schedule.split else 0
    if schedule.split == "heads":
        part = half_of_groups(out, groups * spec.group, core)
        q = half_of_groups(q, groups * spec.group, core)
        k = half_of_groups(k, groups, core)
        v = half_of_groups(v, groups, core)
    elif schedule.split == "query_heads":
        part = half_of_heads(out, groups, core)
        q = half_of_heads(q, groups, core)
    # a decode step takes several groups at a time
    sets = groups
    if spec.decode and not schedule.loop and schedule.split != "query_heads":
        sets = groups // spec.at_once
    if spec.decode:
        shape = (sets, groups // sets * spec.columns, spec.d)
    else:
        shape = (groups, spec.group, spec.m, spec.d)
    q_groups = q.reshape(shape)
    out_groups = part.reshape(shape)
    if schedule.loop:
        # a group a turn, as a tensor of one group
        k = k.reshape((groups, 1, k.shape[1], k.shape[2]))
        v = v.reshape((groups, 1, v.shape[1], v.shape[2]))

        def body(i):
            at = position(i)
            compute(
                [out_groups.select(0, at)],
                [q_groups.select(0, at)],
                k.select(0, at),
                v.select(0, at),
                others.get("rope"),
                spec,
                schedule,
            )

        # the loop variable is a register because its bound is one
        nl.fori_loop(0, nisa.register_alloc(spec.groups), body)
    else:
        outs = []
        qs = []
        for i in range(sets):
            outs.append(out_groups.select(0, i))
            qs.append(q_groups.select(0, i))
        compute(outs, qs, k, v, others.get("rope"), spec, schedule)
    return out


def compute(outs, qs, k, v, rope, spec, schedule):
    """Compute the heads of several groups."""
    if spec.decode:
        decode_groups(outs, qs, k, v, rope, spec, schedule)
    else:
        prefill_groups(outs, qs, k, v, rope, spec, schedule)


def half_of_groups(tensor, count, core):
    """Return this core's half of the matrices of all heads, `count` of them."""
    return tensor.reshape((2, count, tensor.shape[1], tensor.shape[2])).select(0, core)


def half_of_heads(tensor, groups, core):
    """Return this core's half of the heads of each group, one below the other."""
    rows = tensor.shape[0] // (2 * groups) * tensor.shape[1]
    return tensor.reshape((groups, 2, rows, tensor.shape[2])).select(1, core)
