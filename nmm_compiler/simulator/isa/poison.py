"""Tracks unwritten memory: which elements of a result depend on elements that were never written.

The tensor records a read of such elements with their mask (`TensorData.load`). After the
instruction has computed, `spread` marks the dependent elements of its results: exactly for
elementwise work, copies, transposes, products and reductions; by whole partitions where an
instruction mixes a partition's elements; all of them where it mixes partitions. A predicate and an
index need known values: the kernel is refused there, and where a marked element reaches an output.
A comparison is elementwise work as any other, so its results are marked: nki-library's
cross_entropy_backward compares a tile of which it filled half the rows, and stores that half only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.simulator.machine import Machine
from nmm_compiler.simulator.tensors.data import refuse_poison
from nmm_compiler.simulator.tensors.indirect import positions
from nmm_compiler.simulator.tensors.tensor import NkiTensor

Arguments = dict[str, Any]
Flow = Callable[[Arguments, Any, np.ndarray, NkiTensor], np.ndarray]

_NEED_VALUES = frozenset({"nonzero_with_count", "sequence_bounds"})


def _by_shape(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """Element to element, or all elements of a partition to all of the same partition."""
    if mask.size == dst.size:
        return mask.reshape(dst.shape)
    return _by_partition(arguments, view, mask, dst)


def _by_partition(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    if mask.shape[0] != dst.shape[0]:
        return np.asarray(mask.any())
    return mask.reshape(len(mask), -1).any(axis=1).reshape(-1, *[1] * (len(dst.shape) - 1))


def _onwards(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A scan: from the first such element on."""
    if mask.size != dst.size:
        return _by_partition(arguments, view, mask, dst)
    flat = np.logical_or.accumulate(mask.reshape(len(mask), -1), axis=1)
    return flat.reshape(dst.shape)


def _product(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A row of the result for each column of stationary, a column for each of moving."""
    if view.storage is dst.storage:
        return mask.reshape(dst.shape)
    names = ("stationary", "stationary_scale")
    rows = any(view.storage is arguments[n].storage for n in names if n in arguments)
    if "data" in arguments:  # a transpose
        return mask.reshape(len(mask), -1).T.reshape(dst.shape)
    m, n = dst.shape[0], dst.free_size
    columns = m if rows else n
    flat = mask.reshape(-1, columns).any(axis=0) if mask.size % columns == 0 else mask.any()
    flat = np.broadcast_to(flat, columns)
    shaped = flat[:, None] if rows else flat[None, :]
    return np.broadcast_to(shaped, (m, n)).reshape(dst.shape)


def _dma_transpose(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[mask.ndim]
    return mask.transpose(order)


def _reduced(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    return mask.reshape(dst.shape[0], dst.free_size, -1).any(axis=-1).reshape(dst.shape)


def _across(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    return mask.reshape(len(mask), -1).any(axis=0).reshape(dst.shape)


def _gathered(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    index = arguments["indices"].array().reshape(len(mask), -1).astype(np.int64)
    return np.take_along_axis(mask.reshape(len(mask), -1), index, axis=1).reshape(dst.shape)


def _quantized(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    """A group of 8 partitions x 4 values, and its scale."""
    groups = np.asarray(mask.reshape(len(mask) // 8, 8, -1, 4).any(axis=(1, 3)))
    if dst is arguments["dst"]:
        return np.repeat(groups, 8, axis=0).reshape(dst.shape)
    scales = np.zeros((dst.shape[0], groups.shape[1]), np.bool_)
    number = np.arange(len(groups))
    scales[number // 4 * 32 + number % 4] = groups
    return scales.reshape(dst.shape)


def _shuffled(arguments: Arguments, view: Any, mask: np.ndarray, dst: NkiTensor) -> np.ndarray:
    result = np.zeros((dst.shape[0], dst.free_size), np.bool_)
    rows = mask.reshape(len(mask), -1)
    for p in range(dst.shape[0]):
        choice = arguments["shuffle_mask"][p % 32]
        if choice != 255:
            result[p] = rows[choice if len(rows) <= 32 else p - p % 32 + choice]
    return result.reshape(dst.shape)


_FLOWS: dict[str, Flow] = {
    **dict.fromkeys(
        ("bn_stats", "bn_aggr", "max8", "nc_find_index8", "nc_match_replace8", "local_gather"),
        _by_partition,
    ),
    **dict.fromkeys(("tensor_tensor_scan", "tensor_scalar_cumulative"), _onwards),
    **dict.fromkeys(("nc_matmul", "nc_matmul_mx", "nc_transpose"), _product),
    "dma_transpose": _dma_transpose,
    "quantize_mx": _quantized,
    "tensor_reduce": _reduced,
    "tensor_partition_reduce": _across,
    "nc_n_gather": _gathered,
    "nc_stream_shuffle": _shuffled,
    "topk": lambda a, v, mask, dst: np.asarray(mask.any()),
}  # fmt: skip


def _needs_values(op: str, arguments: Arguments, view: Any) -> str:
    """Return why the instruction needs known values of a view, or ""."""
    if op in _NEED_VALUES:
        return f"a comparison, nisa.{op}"
    for role in ("predicate", "indices", "index", "src_seeds"):
        if view is not None and arguments.get(role) is view:
            return f"{role} of nisa.{op}"
    return ""


def spread(machine: Machine, op: str, arguments: Arguments, written: tuple[str, ...]) -> None:
    """Mark the results that depend on the unwritten elements that the instruction has read."""
    noted, machine.poisoned = machine.poisoned, []
    results = [arguments[role] for role in written if arguments[role] is not None]
    for view, mask, origin in noted:
        what = _needs_values(op, arguments, view)
        if what:
            refuse_poison(machine, what, origin, int(mask.sum()), mask.size)
            continue
        flow = _FLOWS.get(op, _by_shape)
        for dst in results:
            side = arguments.get("dst", dst)
            if dst is side or op in ("quantize_mx", "topk"):
                here = flow(arguments, view, mask, dst)
            else:
                here = _by_partition(arguments, view, mask, dst)
            keep = machine.kept
            if keep is not None and keep.size == dst.size:
                here = here & keep.reshape(dst.shape)
            if here.any():
                mark(dst, np.broadcast_to(here, dst.shape), origin)
    machine.kept = None


def mark(dst: NkiTensor, here: np.ndarray, origin: str) -> None:
    """Mark elements of dst as dependent on unwritten memory, whose first read is `origin`."""
    storage = dst.storage
    if storage.unwritten is None:
        assert storage.raw is not None
        storage.unwritten = np.zeros(storage.raw.size // storage.granule, np.bool_)
        storage.missing = 0
    if dst.indirection is not None:
        table, valid = positions(dst)
        factor = max(dst.dtype.item_bytes // storage.granule, 1)
        flat = table[valid][here.reshape(table.shape)[valid]]
        storage.unwritten[(flat[:, None] * factor + np.arange(factor)).reshape(-1)] = True
    else:
        mask = dst.unwritten_view()
        assert mask is not None
        mask[here] = True
    storage.missing = int(np.count_nonzero(storage.unwritten))
    storage.origin = storage.origin or origin
