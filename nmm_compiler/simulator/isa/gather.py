"""Selection and data movement by index inside SBUF, mostly on GpSimd.

Index patterns (iota), what a pattern or a predicate selects, gathers, shuffle, nonzero, topk.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nmm_compiler.errors import HazardError, KernelArgumentError, OutOfBoundsError
from nmm_compiler.simulator.isa import cycles, poison
from nmm_compiler.simulator.isa.enums import reduce_cmd
from nmm_compiler.simulator.isa.instruction import Steps, instruction
from nmm_compiler.simulator.isa.operands import ANY_DTYPE, INT32, SBUF, Issue
from nmm_compiler.simulator.isa.operators import Takes
from nmm_compiler.simulator.isa.values import F32, f32, put, put_with_sum, rows_of, scalar_value
from nmm_compiler.simulator.tensors.dtypes import FLOAT32, FLOATS, INTEGERS
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_BOUNDS = Takes("", ("equal", "less", "less_equal", "greater", "greater_equal"))
_MAXIMUM = Takes("reduce", ("maximum", "max"), "maximum")
FP32_MIN = float(np.finfo(np.float32).min)


def affine_values(
    call: Issue, dst: NkiTensor, pattern: Any, offset: int, multiplier: int
) -> np.ndarray:
    """Return int64 offset + partition * multiplier + sum(index * step), [P, elements]."""
    call.need(
        isinstance(pattern, (list, tuple))
        and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pattern),
        "pattern must be a list of [step, num] pairs",
        KernelArgumentError,
    )
    counts = range(1, 2**31)
    pairs = [(call.integer("step", s), call.integer("num", num, counts)) for s, num in pattern]
    call.need(
        len(pairs) < 5 and math.prod(c for _, c in pairs) == dst.free_size,
        "pattern has at most 4 [step, num] pairs whose nums multiply to the elements that dst has "
        "in a partition",
    )
    values = np.zeros((), np.int64)
    for step, count in pairs:
        values = values[..., None] + np.arange(count) * step
    rows = offset + np.arange(dst.shape[0]) * multiplier
    return np.asarray(rows[:, None] + values.reshape(1, -1))


@instruction(
    engines="gpsimd",
    operands="-> dst",
    memory=SBUF,
    integers={"offset": INT32, "channel_multiplier": INT32},
    cycles=cycles.linear(fixed="gpsimd_fixed_cycles"),
)
def iota(
    call: Issue,
    dst: Any,
    pattern: Any,
    offset: Any = 0,
    channel_multiplier: Any = 0,
) -> Steps:
    """dst[p, ...] = offset + p * channel_multiplier + pattern, on GpSimd."""
    values = affine_values(call, dst, pattern, offset, channel_multiplier)
    yield {}
    wrapped = (values & 0xFFFFFFFF).astype(np.uint32).view(np.int32)
    put(dst, wrapped)


@instruction(
    engines="gpsimd",
    operands="on_true_tile[P F] -> dst[P F]",
    memory=SBUF,
    streams="on_true_tile",
    operators={"cmp_op": Takes("", (*_BOUNDS.names, "not_equal"), "equal")},
    integers={"offset": INT32, "channel_multiplier": INT32},
    cycles=cycles.linear(fixed="gpsimd_fixed_cycles"),
)
def affine_select(
    call: Issue,
    dst: Any,
    pattern: Any,
    channel_multiplier: Any,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = None,
    offset: Any = 0,
) -> Steps:
    """dst = on_true_tile where cmp_op(affine value, 0), else on_false_value, on GpSimd."""
    values = affine_values(call, dst, pattern, offset, channel_multiplier)
    number = call.number("on_false_value", on_false_value)
    yield {}
    call.kept = chosen = np.asarray(cmp_op.alu(values, 0)) != 0
    put(dst, np.where(chosen, f32(on_true_tile).reshape(values.shape), F32(number)))


@instruction(
    engines="vector",
    operands="on_true_tile[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"bound0": FLOAT32, "bound1": FLOAT32},
    streams="on_true_tile",
    dtypes={"on_true_tile": FLOATS},
    operators={"comp_op0": _BOUNDS, "comp_op1": _BOUNDS, "reduce_op": _MAXIMUM},
    integers={"range_start": INT32},
    commands="idle reset reduce reset_reduce",
)
def range_select(
    call: Issue,
    dst: Any,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = None,
    range_start: int = 0,
    on_false_value: Any = ...,
) -> Steps:
    """dst = on_true_tile where both comparisons of the free index hold, else FP32_MIN."""
    call.need(
        len(call.tensors(("bound0", "bound1"))) == 2,
        "bound0 and bound1 must be (P, 1) float32 tensors",
    )
    call.need(
        -(2**24) <= range_start <= range_start + on_true_tile.free_size - 1 <= 2**24,
        "float32 compares indices, so they stay within 2**24",
        HazardError,
    )
    if on_false_value is not Ellipsis:
        call.should(
            abs(call.number("on_false_value", on_false_value) - FP32_MIN) <= 1e31,
            f"the hardware fills FP32_MIN ({FP32_MIN:g}) only",
        )
    yield {}
    values = rows_of(on_true_tile)
    index = (range_start + np.arange(values.shape[1])).astype(F32)[None, :]
    low, high = scalar_value(bound0, 2), scalar_value(bound1, 2)
    above, below = comp_op0.alu(index, low) != 0, comp_op1.alu(index, high) != 0
    call.kept = chosen = np.asarray(above & below)
    put_with_sum(call, np.where(chosen, values, F32(FP32_MIN)))


@instruction(
    engines="vector",
    operands="predicate[P F], on_true[P F] -> dst[P F], reduce_res[P 1]",
    numbers={"on_false": ANY_DTYPE},
    streams="on_true predicate",
    dtypes={
        "on_true": (FLOATS | INTEGERS | {"bool"}) - {"tfloat32", "int32", "uint32"},
        "predicate": frozenset({"int8", "uint8", "int16", "uint16", "bool"}),
        "reduce_res": FLOATS,
    },
    pair="on_true predicate",
    operators={"reduce_op": _MAXIMUM},
    commands="reset_reduce reduce idle",
    cycles=cycles.two_inputs,
)
def select_reduce(
    call: Issue,
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_op: Any = None,
    reverse_pred: bool = False,
) -> None:
    """dst = on_true where predicate, else on_false (number or [P, 1]), with an optional max."""
    partitions = dst.shape[0]
    given = predicate.load(f"predicate of {call.name}").reshape(partitions, -1)
    chosen = (given == 0) if reverse_pred else (given != 0)
    if on_false.__class__ is not NkiTensor:
        call.kept = chosen
    values = rows_of(on_true)
    put_with_sum(call, np.where(chosen, values, scalar_value(on_false, 2)))


_NUMBERS = frozenset({"float32", "int32"})


@instruction(
    engines="gpsimd",
    operands="data[P E], indices[P F] -> dst[P F]",
    memory=SBUF,
    streams="indices",
    dtypes={"indices": frozenset({"uint32"})},
    same_dtype="dst data",
    packed=True,
)
def nc_n_gather(call: Issue, dst: Any, data: Any, indices: Any) -> None:
    """dst[p, i] = data[p].flatten()[indices[p, i]] in every partition."""
    rows = data.shape[0]
    chosen = indices.load(f"indices of {call.name}").reshape(rows, -1).astype(np.int64)
    most = int(chosen.max())
    call.need(most < data.free_size, f"index {most} leaves data", OutOfBoundsError)
    call.move = lambda v: np.take_along_axis(v.reshape(rows, -1), chosen, axis=1).reshape(dst.shape)
    put(dst, call.move(data.load()), exact=True)


@instruction(
    engines="gpsimd",
    operands="src_buffer[P E], index[P W] -> dst[P F]",
    memory=SBUF,
    limits={"P": range(16, 129, 16)},
    dtypes={"index": frozenset({"uint16"})},
    same_dtype="dst src_buffer",
    packed=True,
    cycles=cycles.local_gather,
)
def local_gather(
    call: Issue,
    dst: Any,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: Any = None,
) -> Steps:
    """Gather in groups of 16 partitions; a group's indices are its own 16 rows, column first.

    An index is the position of the first of num_elem_per_idx contiguous elements (AWS's own test
    of the instruction multiplies row numbers by the elements of a row before it passes them).
    """
    partitions, width = index.shape[0], index.free_size
    valid = 16 * width
    if num_valid_indices is not None:
        valid = call.integer("num_valid_indices", num_valid_indices, range(1, 2**31))
    size = valid * num_elem_per_idx
    call.need(
        num_elem_per_idx in (1, 2, 4, 8, 16, 32)
        and valid <= min(16 * width, 4096)
        and size <= dst.free_size,
        "1 to 32 (power of two) elements per index, at most 4096 indices, and a place in dst for "
        "each element",
    )
    yield {"indices": valid, "elements": num_elem_per_idx}
    values = src_buffer.load().reshape(partitions, -1)
    rows = index.load(f"index of {call.name}").reshape(partitions, width).astype(np.int64)
    firsts = _of_groups(rows)[:, :valid]
    places = (firsts[..., None] + np.arange(num_elem_per_idx)).reshape(len(firsts), -1)
    call.need(
        places.max() < values.shape[1],
        f"index {int(firsts.max())} leaves src_buffer",
        OutOfBoundsError,
    )
    result = np.take_along_axis(values, places.repeat(16, axis=0), axis=1)
    put(dst.reshape((partitions, dst.free_size))[:, 0:size], result, exact=True)


def _of_groups(values: np.ndarray) -> np.ndarray:
    """Return the values of each group of 16 partitions, column by column: [groups, values]."""
    return values.reshape(len(values) // 16, 16, -1).swapaxes(1, 2).reshape(len(values) // 16, -1)


@instruction(
    engines="vector",
    operands="src[P F] -> dst[Q F]",
    streams="src",
    same_dtype="dst src",
    packed=True,
)
def nc_stream_shuffle(call: Issue, dst: Any, src: Any, shuffle_mask: Any) -> Steps:
    """dst[p] = src[mask[p]] within each quadrant of 32 partitions; 255 leaves dst[p]."""
    says = "shuffle_mask must be a list of 32 entries, each 0..31 or 255"
    call.need(isinstance(shuffle_mask, (list, tuple)), says, KernelArgumentError)
    mask = [call.integer("shuffle_mask", m) for m in shuffle_mask]
    call.need(len(mask) == 32 and set(mask) <= {*range(32), 255}, says)
    active = -(-max(dst.shape[0], src.shape[0]) // 32)  # quadrants
    legal = {1: (0, 32, 64, 96), 2: (0, 64)}.get(active, (0,))
    starts = [access.partition_start for access in (*call.reads, *call.writes)]
    call.should(
        set(starts) <= set(legal),
        f"src and dst start at partitions {starts}; with {32 * active} active ones they start at "
        f"{' or '.join(map(str, legal))}",
    )
    yield {}
    partition = np.arange(dst.shape[0]).reshape(-1, *[1] * (len(dst.shape) - 1))
    entry = np.asarray(mask)[partition % 32]
    call.kept = np.broadcast_to(entry != 255, dst.shape)
    origins = np.where(entry == 255, 0, entry + partition // 32 * 32 * (src.shape[0] > 32)).ravel()
    call.need(
        origins.max() < src.shape[0],
        f"it reads partitions up to {origins.max()}; give src enough of them",
        OutOfBoundsError,
    )
    call.move = lambda values: values[origins].reshape(dst.shape)
    put(dst, call.move(src.load()), exact=True, where=call.kept)


@instruction(
    engines="gpsimd",
    operands="src[P F] -> dst[P F+1]",
    memory=SBUF,
    dtypes={"dst": frozenset({"int32"}), "src": _NUMBERS},
    integers={"index_offset": INT32, "padding_val": INT32},
)
def nonzero_with_count(
    call: Issue,
    dst: Any,
    src: Any,
    index_offset: Any = 0,
    padding_val: Any = -1,
) -> None:
    """dst[p] = positions of nonzero src[p], padding, then their count; p = 0, 16, 32, ..."""
    for p in range(0, src.shape[0], 16):
        mask = src[p : p + 1].missing()
        if mask is not None and mask.all():
            continue  # a group that is not used: its results stay unwritten
        row = src[p : p + 1].load(f"a comparison, {call.name}").reshape(-1)
        found = np.flatnonzero(row) + index_offset
        padding = np.full(row.size - found.size, padding_val, np.int64)
        put(dst[p : p + 1], np.concatenate([found, padding, [found.size]]))


@instruction(
    engines="gpsimd",
    operands="segment_ids[1 N] -> dst[1 2*N]",
    memory=SBUF,
    dtypes={"dst": _NUMBERS, "segment_ids": _NUMBERS},
)
def sequence_bounds(call: Issue, dst: Any, segment_ids: Any) -> None:
    """dst[0, 0, i], dst[0, 1, i] = first and past-the-end index of the segment of element i."""
    ids = segment_ids.load(f"a comparison, {call.name}").reshape(-1)
    same = ids[:, None] == ids
    none = (ids == 0) | ~same.any(axis=1)  # NaN is no segment's number
    first, behind = same.argmax(axis=1), len(ids) - same[:, ::-1].argmax(axis=1)
    put(dst, np.where(none, [[len(ids)], [-1]], [first, behind]).astype(F32))


@instruction(
    engines="gpsimd",
    operands="src[P C] -> val_dst[P K], idx_dst[P K]",
    memory=SBUF,
    limits={"P": range(16, 129, 16)},
    integers={"n": INT32},
    dtypes={
        "val_dst": frozenset({"bfloat16"}),
        "idx_dst": frozenset({"uint32"}),
        "src": frozenset({"bfloat16"}),
    },
    flows={"val_dst": poison.everywhere, "idx_dst": poison.everywhere},
    cycles=cycles.topk,
)
def topk(call: Issue, val_dst: Any, idx_dst: Any, src: Any, n: Any) -> Steps:
    """Find the K largest of each group's n elements, ascending, with their indices, on GpSimd.

    A group of 16 partitions holds its elements column by column: element e sits in partition
    e % 16, column e // 16.
    """
    k = val_dst.free_size
    call.need(
        8 <= n < 65536 and k <= min(n, 32767) and src.free_size >= -(-n // 16),
        "8 <= n < 65536, it finds at most n values, and src has ceil(n / 16) elements in each row",
    )
    yield {"n": n, "k": k}
    values = _of_groups(src.load())[:, :n].astype(F32)
    order = np.argsort(values, axis=1, kind="stable")[:, -k:]
    put(val_dst, np.take_along_axis(values, order, axis=1).repeat(16, axis=0))
    put(idx_dst, order.repeat(16, axis=0))
