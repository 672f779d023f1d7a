"""Data movement by index inside SBUF, mostly on GpSimd: gathers, shuffle, nonzero, topk."""

from __future__ import annotations

from typing import Any

import numpy as np

from nmm_compiler.errors import KernelArgumentError, OperandError, OutOfBoundsError
from nmm_compiler.simulator.isa import cycles
from nmm_compiler.simulator.isa.instruction import (
    INT32,
    NO_ATTRIBUTES,
    Call,
    Steps,
    attributes,
    instruction,
)
from nmm_compiler.simulator.isa.operands import SBUF
from nmm_compiler.simulator.isa.values import F32, put, raw
from nmm_compiler.simulator.tensors.tensor import NkiTensor

_NUMBERS = frozenset({"float32", "int32"})


@instruction(
    engines=("gpsimd",),
    operands="data[P E], indices[P F] -> dst[P F]",
    memory=SBUF,
    streams=("indices",),
    dtypes={"indices": frozenset({"uint32"})},
    same_dtype=("dst", "data"),
)
def nc_n_gather(call: Call, dst: Any, data: Any, indices: Any, name: str | None = None) -> None:
    """dst[p, i] = data[p].flatten()[indices[p, i]] in every partition."""
    values = raw(data).reshape(data.shape[0], -1)
    chosen = (
        indices.known("indices of nisa.nc_n_gather").reshape(data.shape[0], -1).astype(np.int64)
    )
    if chosen.max() >= values.shape[1]:
        raise call.error(
            OutOfBoundsError,
            f"index {int(chosen.max())} into {values.shape[1]} elements of {data.name!r}",
        )
    put(dst, np.take_along_axis(values, chosen, axis=1), exact=True)


@instruction(
    engines=("gpsimd",),
    operands="src_buffer[P E], index[P W] -> dst[P F]",
    memory=SBUF,
    limits={"P": range(16, 129, 16)},
    dtypes={"index": frozenset({"uint16"})},
    same_dtype=("dst", "src_buffer"),
    cycles=cycles.local_gather,
)
def local_gather(
    call: Call,
    dst: Any,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: Any = None,
    name: str | None = None,
) -> Steps:
    """Gather in groups of 16 partitions; a group's indices are its own 16 rows, column first.

    An index is the position of the first of num_elem_per_idx contiguous elements (AWS's own test
    of the instruction multiplies row numbers by the elements of a row before it passes them).
    """
    partitions, width = index.shape[0], index.free_size
    valid = 16 * width
    if num_valid_indices is not None:
        valid = call.integer("num_valid_indices", num_valid_indices, range(1, 2**31))
    if (
        num_elem_per_idx not in (1, 2, 4, 8, 16, 32)
        or valid > min(16 * width, 4096)
        or dst.free_size < valid * num_elem_per_idx
    ):
        raise call.error(
            OperandError,
            f"dst {dst.shape}, index {index.shape}, {num_elem_per_idx} elements per index, {valid} "
            "indices; 1 to 32 (power of two) elements per index, at most 4096 indices, and a place "
            "for each element",
        )
    yield attributes(indices=valid, elements=num_elem_per_idx)
    values = raw(src_buffer).reshape(partitions, -1)
    rows = index.known("index of nisa.local_gather").reshape(partitions, width).astype(np.int64)
    size = valid * num_elem_per_idx
    result = np.zeros((partitions, size), values.dtype)
    for start in range(0, partitions, 16):
        flat = rows[start : start + 16].T.reshape(-1)[:valid]
        places = (flat[:, None] + np.arange(num_elem_per_idx)).reshape(-1)
        if places.size and places.max() >= values.shape[1]:
            raise call.error(
                OutOfBoundsError,
                f"index {int(flat.max())} leaves {src_buffer.name!r} {src_buffer.shape}",
            )
        result[start : start + 16] = values[start : start + 16, places]
    target = dst if dst.free_size == size else dst.reshape(
        (partitions, dst.free_size))[:, 0:size]  # fmt: skip
    put(target, result, exact=True)


def _check_quadrants(call: Call, dst: NkiTensor, src: NkiTensor) -> None:
    """Check where src and dst start, by the larger of their numbers of quadrants."""
    active = -(-max(dst.shape[0], src.shape[0]) // 32)
    legal = {1: (0, 32, 64, 96), 2: (0, 64)}.get(active, (0,))
    for role, access in (("src", call.reads[0]), ("dst", call.writes[0])):
        if access.partition_start not in legal:
            call.rule(
                OperandError,
                f"{role} starts at partition {access.partition_start}; "
                f"with {32 * active} active partitions it starts at "
                f"{' or '.join(map(str, legal))}",
            )


@instruction(
    engines=("vector",),
    operands="src[P F] -> dst[Q F]",
    streams=("src",),
    same_dtype=("dst", "src"),
)
def nc_stream_shuffle(
    call: Call, dst: Any, src: Any, shuffle_mask: Any, name: str | None = None
) -> Steps:
    """dst[p] = src[mask[p]] within each quadrant of 32 partitions; 255 leaves dst[p]."""
    if not isinstance(shuffle_mask, (list, tuple)):
        raise call.error(
            KernelArgumentError, f"shuffle_mask is {type(shuffle_mask).__name__}; pass a list of 32"
        )
    mask = [call.integer("shuffle_mask", m) for m in shuffle_mask]
    _check_quadrants(call, dst, src)
    if len(mask) != 32 or any(m != 255 and not 0 <= m < 32 for m in mask):
        raise call.error(
            OperandError,
            f"shuffle_mask has {len(mask)} entries; it needs 32, each 0..31 or 255",
        )
    yield NO_ATTRIBUTES
    source = raw(src).reshape(src.shape[0], -1).copy()
    for p in range(dst.shape[0]):
        choice = mask[p % 32]
        if choice == 255:
            continue
        origin = p - p % 32 + choice
        if src.shape[0] <= 32:
            origin = choice
        if origin >= src.shape[0]:
            raise call.error(
                OutOfBoundsError,
                f"mask[{p % 32}] = {choice} reads partition {origin} of src "
                f"{src.shape}; give src enough partitions",
            )
        put(dst[p : p + 1], source[origin : origin + 1], exact=True)


@instruction(
    engines=("gpsimd",),
    operands="src[P F] -> dst[P F+1]",
    memory=SBUF,
    dtypes={"dst": frozenset({"int32"}), "src": _NUMBERS},
    integers={"index_offset": INT32, "padding_val": INT32},
)
def nonzero_with_count(
    call: Call,
    dst: Any,
    src: Any,
    index_offset: Any = 0,
    padding_val: Any = -1,
    name: str | None = None,
) -> None:
    """dst[p] = positions of nonzero src[p], padding, then their count; p = 0, 16, 32, ..."""
    for p in range(0, src.shape[0], 16):
        mask = src[p : p + 1].unwritten_view()
        if mask is not None and mask.all():
            continue  # a group that is not used: its results stay unwritten
        row = raw(src[p : p + 1]).reshape(-1)
        found = np.flatnonzero(row) + index_offset
        result = np.full(row.size + 1, padding_val, np.int64)
        result[: found.size] = found
        result[-1] = found.size
        put(dst[p : p + 1], result)


@instruction(
    engines=("gpsimd",),
    operands="segment_ids[1 N] -> dst[1 2*N]",
    memory=SBUF,
    dtypes={"dst": _NUMBERS, "segment_ids": _NUMBERS},
)
def sequence_bounds(call: Call, dst: Any, segment_ids: Any, name: str | None = None) -> None:
    """dst[0, 0, i], dst[0, 1, i] = first and past-the-end index of the segment of element i."""
    count = segment_ids.free_size
    ids = raw(segment_ids).reshape(-1)
    result = np.zeros((2, count), F32)
    for i, value in enumerate(ids):
        same = np.flatnonzero(ids == value)
        none = value == 0 or not len(same)  # NaN is no segment's number
        result[:, i] = (count, -1) if none else (same[0], same[-1] + 1)
    put(dst, result)


@instruction(
    engines=("gpsimd",),
    operands="src[P C] -> val_dst[P K], idx_dst[P K]",
    memory=SBUF,
    limits={"P": range(16, 129, 16)},
    integers={"n": INT32},
    dtypes={
        "val_dst": frozenset({"bfloat16"}),
        "idx_dst": frozenset({"uint32"}),
        "src": frozenset({"bfloat16"}),
    },
    cycles=cycles.topk,
)
def topk(
    call: Call, val_dst: Any, idx_dst: Any, src: Any, n: Any, name: str | None = None
) -> Steps:
    """Find the K largest of each group's n elements, ascending, with their indices, on GpSimd.

    A group of 16 partitions holds its elements column by column: element e sits in partition
    e % 16, column e // 16.
    """
    k, partitions = val_dst.free_size, src.shape[0]
    if not 8 <= n < 65536 or k > min(n, 32767) or src.free_size < -(-n // 16):
        raise call.error(
            OperandError,
            f"src {src.shape}, val_dst {val_dst.shape}, n={n}; 8 <= n < 65536, it finds at most n "
            "values, and src has ceil(n / 16) elements per partition",
        )
    yield attributes(n=n, k=k)
    values = raw(src).reshape(partitions, -1)
    best = np.zeros((partitions, k), values.dtype)
    places = np.zeros((partitions, k), np.int64)
    for start in range(0, partitions, 16):
        snake = values[start : start + 16].T.reshape(-1)[:n].astype(F32)
        order = np.argsort(snake, kind="stable")[-k:]
        best[start : start + 16] = snake[order].astype(values.dtype)
        places[start : start + 16] = order
    put(val_dst, best)
    put(idx_dst, places)
