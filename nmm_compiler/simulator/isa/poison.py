"""Tracks unwritten memory: which elements of a result depend on elements that were never written.

The tensor records a read of such elements with their mask (`NkiTensor.load`). After the instruction
has computed, `spread` marks the dependent elements of its results. What moves elements moves their
marks by the same function. Else the row of the instruction names a flow, or the sizes say it: exact
for elementwise work, products and reductions; whole partitions where an instruction mixes a
partition's elements; all of them where it mixes partitions. A predicate and an index need known
values: the kernel is refused there, and where a marked element reaches an output.
A comparison is elementwise work as any other, so its results are marked: nki-library's
cross_entropy_backward compares a tile of which it filled half the rows, and stores that half only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.simulator.tensors.elements import mark
from nmm_compiler.simulator.tensors.tensor import NkiTensor

Flow = Callable[[np.ndarray, NkiTensor], np.ndarray]


def _blocks(mask: np.ndarray, dst: NkiTensor, rows: int, columns: int) -> np.ndarray:
    """All elements of a block of partitions and elements to all of the same block."""
    if mask.size % dst.shape[0]:
        return np.asarray(mask.any())
    grid = mask.reshape(dst.shape[0] // rows, rows, -1, columns).any(axis=(1, 3))
    wide = grid.repeat(rows, axis=0).repeat(dst.free_size // grid.shape[1], axis=1)
    return wide.reshape(dst.shape)


def by_partition(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """All elements of a partition to all of the same partition."""
    return _blocks(mask, dst, 1, mask.size // dst.shape[0])


def by_place(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """Element to element, or the elements that a reduction sums to their sum; else by partition."""
    if mask.size % dst.size:
        return by_partition(mask, dst)
    return _blocks(mask, dst, 1, mask.size // dst.size)


def quantized(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A group of 8 partitions x 4 values to the same group."""
    return _blocks(mask, dst, 8, 4)


def onwards(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A scan: from the first such element on."""
    flat = by_place(mask, dst).reshape(dst.shape[0], -1)
    return np.logical_or.accumulate(flat, axis=1).reshape(dst.shape)


def to_columns(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A column of moving to the same column of the product, or all partitions to one."""
    flat = mask.reshape(-1, dst.free_size).any(axis=0)
    return np.broadcast_to(flat, (dst.shape[0], dst.free_size)).reshape(dst.shape)


def to_rows(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A column of stationary to the row of that number of the product."""
    flat = mask.reshape(-1, dst.shape[0], 1).any(axis=0)
    return np.broadcast_to(flat, (dst.shape[0], dst.free_size)).reshape(dst.shape)


PRODUCT: dict[str, Flow] = {
    "stationary": to_rows, "stationary_scale": to_rows,
    "moving": to_columns, "moving_scale": to_columns,
}  # fmt: skip


def everywhere(mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """Any element to all."""
    return np.asarray(mask.any())


def spread(call: Any) -> None:
    """Mark the results that depend on the unwritten elements that a call has read."""
    machine, row = call.machine, call.row
    noted, machine.poisoned = machine.poisoned, []
    results = call.tensors(row.writes)
    for view, mask, origin in noted:
        sources = [role for role, given in call.tensors(row.reads) if given is view] or [""]
        for role, dst in results:
            terms, keep = row.terms.get(role), call.kept
            flows = [
                row.flows.get(source)
                or row.flows.get(role)
                or (by_place if row.terms.get(source) == terms else by_partition)
                for source in sources
            ]
            moved = [call.move(mask)] if call.move else [flow(mask, dst) for flow in flows]
            here = np.logical_or.reduce(moved)
            if keep is not None and keep.size == dst.size:
                here = here & keep.reshape(dst.shape)
            if here.any():
                mark(dst, True, np.broadcast_to(here, dst.shape), origin)
