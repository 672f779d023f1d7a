"""`tensor[key]` in Beta 1: slices and integers, or index expressions, never both.

The view records which elements lie outside of the tensor (`Tensor.outside`), because the
instruction's mask may exclude them.
"""

from __future__ import annotations

import math
from typing import Any

from nmm_compiler.errors import OutOfBoundsError, TensorShapeError, UnsupportedInstructionError
from nmm_compiler.simulator.beta1.index import Index, Mask, box_of, whole
from nmm_compiler.simulator.beta1.tensor import OPERATIONS, Blocks, Masked, Shifted, Tensor, fail
from nmm_compiler.simulator.tensors.tensor import DynamicSlice, Indirection


def index(tensor: Tensor, key: Any) -> Any:
    """Return `tensor[key]`: a view, or the tile with an operand mask."""
    keys = list(key) if isinstance(key, tuple) else [key]
    for at, k in enumerate(keys):
        if k is Ellipsis:
            given = sum(o is not None and o is not Ellipsis for o in keys)
            keys[at : at + 1] = [slice(None)] * (len(tensor.shape) - given)
            break
    given = sum(k is not None for k in keys)
    if len(keys) == 1 and isinstance(keys[0], (Mask, bool)):
        return _masked(tensor, keys[0])
    if given > len(tensor.shape):
        raise fail(TensorShapeError, f"{given} indices into {tensor!r}")
    advanced = any(isinstance(k, (Index, Tensor, Shifted)) for k in keys)
    if advanced and any(k is None or isinstance(k, (slice, DynamicSlice)) for k in keys):
        raise fail(
            TensorShapeError,
            f"slices and index expressions together in an index of {tensor!r} "
            "(err_unsupported_mixing_basic_advanced_tensor_indexing); use one of them",
        )
    if advanced and given < len(tensor.shape):
        raise fail(
            TensorShapeError,
            f"{given} index expressions into {tensor!r}; give one for each dimension",
        )
    if tensor.pending is not None:
        OPERATIONS["settle"](tensor)
    keys += [slice(None)] * (len(tensor.shape) - given)
    return _advanced(tensor, keys) if advanced else _basic(tensor, keys)


def _masked(tile: Tensor, mask: Mask | bool) -> Tensor | Masked:
    """Return a tile with an operand mask; the tile itself where the mask leaves nothing out."""
    if tile.memory == "hbm":
        raise fail(
            UnsupportedInstructionError,
            f"a mask as the index of {tile!r}; an operand mask is for the tiles of a matmul (NKI "
            "API Masking), pass mask= to the load or store",
        )
    part = box_of(mask, tile.shape)
    return tile if part is True else Masked(tile, part)


def _block(tensor: Tensor, keys: list[Any]) -> Tensor:
    """Return the tile that the integers of `keys` choose, or the tensor of fewer blocks."""
    number = tensor.offset
    sizes, steps = [], []
    for d in range(tensor.par):
        k, step = keys[d], tensor.strides[d]
        if isinstance(k, (slice, DynamicSlice)):
            start, count, by = _span(tensor, d, k)
            _check_integer(tensor, d, start)
            _check_integer(tensor, d, start + (count - 1) * by)
            sizes.append(count)
            steps.append(step * by)
            number += start * step
            continue
        constant = isinstance(k, Index) and not any(k.coeffs)
        chosen = k.const if constant else None if isinstance(k, (Index, Tensor)) else whole(k)
        if chosen is None:
            raise fail(
                UnsupportedInstructionError,
                f"index {k!r} over block dimension {d} of {tensor!r}; blocks are tiles of their "
                "own, choose one with an integer or a loop variable",
            )
        chosen += tensor.shape[d] if chosen < 0 else 0
        _check_integer(tensor, d, chosen)
        number += chosen * step
    blocks = tensor.place
    assert isinstance(blocks, Blocks)
    shape, strides = tensor.shape[tensor.par :], tensor.strides[tensor.par :]
    if not sizes:
        return tensor.like(blocks.get(number), shape, strides, 0, 0)
    rest = keys[tensor.par :]
    if not all(isinstance(k, slice) and k == slice(None) for k in rest):
        raise fail(
            UnsupportedInstructionError,
            f"a part of several blocks of {tensor!r} at once; choose one block with an integer",
        )
    return tensor.like(blocks, (*sizes, *shape), (*steps, *strides), number, len(sizes))


def _check_integer(tensor: Tensor, dim: int, number: int) -> None:
    if not 0 <= number < tensor.shape[dim]:
        raise fail(
            OutOfBoundsError,
            f"index {number} of dimension {dim} of tensor {tensor.name!r} {tensor.shape} "
            "(err_tensor_access_out_of_bound)",
        )


def _basic(tensor: Tensor, keys: list[Any]) -> Tensor:
    """Index by integers, slices, nl.ds and None."""
    if all(isinstance(k, slice) and k == slice(None) for k in keys):
        return tensor.like(tensor.place, tensor.shape, tensor.strides, tensor.offset, tensor.par)
    if isinstance(tensor.place, Blocks):
        tile = _block(tensor, keys)
        return tile if tile.par else index(tile, tuple(keys[tensor.par :]))
    offset = tensor.offset
    shape: list[int] = []
    strides: list[int] = []
    outside: list[tuple[int, int, list[int], int]] = []
    dim = 0
    on_chip = tensor.memory != "hbm"
    for k in keys:
        if k is None:
            shape.append(1)
            strides.append(1)
            continue
        size, stride = tensor.shape[dim], tensor.strides[dim]
        if isinstance(k, (slice, DynamicSlice)):
            start, count, step = _span(tensor, dim, k)
            shape.append(count)
            strides.append(stride * step)
            if start < 0 or start + (count - 1) * step >= size:
                outside.append((dim, size, [len(shape) - 1, step], start))
            offset += start * stride
        else:
            number = _integer(tensor, k)
            number += size if number < 0 else 0
            _check_integer(tensor, dim, number)
            offset += number * stride
            if on_chip and dim == tensor.par:
                shape.append(1)
                strides.append(stride)
        dim += 1
    while on_chip and len(shape) < 2:
        shape.append(1)
        strides.append(1)
    made = tensor.like(tensor.place, tuple(shape), tuple(strides), offset, 0)
    if outside or tensor.outside:
        if tensor.outside:
            tensor.tile()  # an index of an index: the first has to be inside
        made.outside = tuple(
            (d, size, Index(made.shape, start, tuple(
                step * (axis == k) for k in range(len(shape))
            )))
            for d, size, (axis, step), start in outside
        )  # fmt: skip
    return made


def _span(tensor: Tensor, dim: int, key: slice | DynamicSlice) -> tuple[int, int, int]:
    size = tensor.shape[dim]
    if isinstance(key, DynamicSlice):
        start, count, step = _integer(tensor, key.start), _integer(tensor, key.size), 1
    else:
        start = 0 if key.start is None else _integer(tensor, key.start)
        stop = size if key.stop is None else _integer(tensor, key.stop)
        step = 1 if key.step is None else _integer(tensor, key.step)
        start += size if start < 0 else 0
        stop += size if stop < 0 else 0
        count = -(-(stop - start) // step) if step > 0 else 0
    if count < 1:
        raise fail(OutOfBoundsError, f"slice {key} of dimension {dim} of {tensor!r} is empty")
    if step > 1 and tensor.memory != "hbm" and dim == tensor.par and count > 1:
        raise fail(TensorShapeError, f"step {step} over the partitions of {tensor!r}; use step 1")
    return start, count, step


def _integer(tensor: Tensor, key: Any) -> int:
    number = key.const if isinstance(key, Index) and not any(key.coeffs) else whole(key)
    if number is None:
        raise fail(
            TensorShapeError,
            f"index {key!r} ({type(key).__name__}) into {tensor!r}; use integers, slices, nl.ds, "
            "or expressions of nl.arange and nl.mgrid",
        )
    return int(number)


def _advanced(tensor: Tensor, keys: list[Any]) -> Tensor:
    """Index by index expressions, integers, and one tile of run-time rows."""
    ranks = [len(k.shape) for k in keys if isinstance(k, (Index, Shifted))]
    ranks += [2 for k in keys if isinstance(k, Tensor)]
    rank = max(ranks)
    if rank < 2:
        raise fail(
            TensorShapeError,
            f"a 1-D nl.arange as index of {tensor!r} (err_1d_arange_not_supported); add an axis, "
            "nl.arange(n)[:, None], or use a slice",
        )
    if isinstance(tensor.place, Blocks):
        tile = _block(tensor, keys)
        if tile.par:
            raise fail(
                UnsupportedInstructionError, f"index expressions over several blocks of {tensor!r}"
            )
        return _advanced(tile, keys[tensor.par :])
    offset = tensor.offset
    shape = [1] * rank
    strides = [0] * rank
    outside = []
    choice = None
    on_chip = tensor.memory != "hbm"
    for dim in range(len(keys)):
        k, size, stride = keys[dim], tensor.shape[dim], tensor.strides[dim]
        if isinstance(k, Shifted):
            choice = _at_run_time(tensor, dim, k.tile, choice)
            k = k.index
        elif isinstance(k, Tensor) and math.prod(k.shape) == 1:
            choice = _at_run_time(tensor, dim, k, choice)
            continue
        elif isinstance(k, Tensor):
            choice = _chosen_rows(tensor, dim, k, choice, shape)
            continue
        if not isinstance(k, Index):
            number = _integer(tensor, k)
            number += size if number < 0 else 0
            _check_integer(tensor, dim, number)
            offset += number * stride
            continue
        sizes, steps = k.aligned(rank)
        for axis in range(rank):
            if sizes[axis] != 1 and shape[axis] not in (1, sizes[axis]):
                raise fail(TensorShapeError, f"index shapes of {tensor!r} do not broadcast")
            shape[axis] = max(shape[axis], sizes[axis])
            strides[axis] += steps[axis] * stride
            if steps[axis] and on_chip and (axis == 0) != (dim == tensor.par):
                raise fail(
                    TensorShapeError,
                    f"axis {axis} of the index moves along dimension {dim} of {tensor!r}; the "
                    "first axis of an index has to be the partitions, and only that",
                )
        if on_chip and dim == tensor.par and steps[0] not in (0, 1):
            raise fail(
                TensorShapeError, f"step {steps[0]} over the partitions of {tensor!r}; use step 1"
            )
        low, high = k.bounds()
        offset += k.const * stride
        if low < 0 or high >= size:
            outside.append((dim, size, Index(sizes, k.const, steps)))
    while len(shape) > 2 and choice is not None and shape[-1] == 1:
        shape.pop()
        strides.pop()
    if on_chip and shape[0] > 1 and not strides[0]:
        raise fail(
            TensorShapeError,
            f"one partition of {tensor!r} for {shape[0]}; broadcast it with .broadcast_to(shape)",
        )
    made = tensor.like(tensor.place, tuple(shape), tuple(strides), offset, 0)
    made.outside = tuple(outside)
    if choice is not None:
        if strides[0] and choice.kind == "vector":
            raise fail(
                UnsupportedInstructionError,
                f"the partition index next to run-time rows in an index of {tensor!r}",
            )
        made.choice = choice
    return made


def _at_run_time(tensor: Tensor, dim: int, tile: Tensor, before: Indirection | None) -> Indirection:
    """Return the indirection of one run-time index, the same for the whole view."""
    if before is not None or tensor.choice is not None or (tensor.memory != "hbm" and dim == 0):
        raise fail(
            UnsupportedInstructionError,
            f"run-time indices in two dimensions, or over the partitions, of {tensor!r}",
        )
    return Indirection("scalar", dim, tile.tile(), tensor.strides[dim])


def _chosen_rows(
    tensor: Tensor, dim: int, rows: Tensor, before: Indirection | None, shape: list[int]
) -> Indirection:
    """Return the indirection of a tile of run-time indices, one per partition."""
    if before is not None or tensor.memory != "hbm" or tensor.choice is not None:
        raise fail(
            UnsupportedInstructionError,
            f"run-time indices into {tensor!r} in {tensor.memory.upper()}; one dimension of an HBM "
            "tensor may have them (err_copy_dynamic_indirect_indices_not_natively_supported)",
        )
    index = rows.tile()
    if index.memory != "sbuf" or index.free_size != 1:
        raise fail(
            UnsupportedInstructionError,
            f"run-time indices {rows!r}; they must be an SBUF tile of one index per partition "
            "(err_indirect_indices_free_dim)",
        )
    shape[0] = max(shape[0], index.shape[0])
    return Indirection("vector", 0, index, tensor.strides[dim])
