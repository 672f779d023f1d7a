"""Views that reorder, split, merge, repeat or drop whole dimensions of a tensor.

Only shapes and strides change; no data moves. A view that strides cannot express (a reshape of a
permuted view, a change of the partition dimension) is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from nmm_compiler.errors import OutOfBoundsError, SimulationError, TensorShapeError
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.machine import current


def fail(kind: type[SimulationError], message: str) -> SimulationError:
    """Return an error of `kind` at the kernel's current line."""
    return current().error(kind, message)


class Reshaping(NKIObject):
    """The part of `NkiTensor` that works on whole dimensions."""

    __slots__ = ()

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    indirection: Any
    name: Any
    memory: Any
    size: Any

    def _like(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None
    ) -> Self:
        raise NotImplementedError  # NkiTensor's

    def _number(self, value: Any) -> int:
        raise NotImplementedError  # NkiTensor's

    def _dimension(self, dim: int, extra: int = 0) -> int:
        rank = len(self.shape) + extra
        if dim < 0:
            dim += rank
        if not 0 <= dim < rank:
            raise fail(
                OutOfBoundsError,
                f"dimension {dim} of tensor {self.name!r}, which has {len(self.shape)} dimensions",
            )
        return dim

    def _free_only(self, dim: int, what: str) -> None:
        # NkiTensor.permute and reshape_dim: after vector_select the rows stay outermost; a single
        # runtime index leaves the other dimensions free
        rows_chosen = self.indirection is not None and self.indirection.kind != "scalar"
        if dim == 0 and (self.memory != "hbm" or rows_chosen):
            raise fail(
                TensorShapeError,
                f"{what} of the partition dimension of {self.name!r} {self.shape} is no view; "
                "move the data (nc_transpose, dma_copy) instead",
            )

    def permute(self, dims: Sequence[int]) -> Self:
        """Reorder dimensions; the partition dimension stays first."""
        dims = tuple(dims)
        if sorted(dims) != list(range(len(self.shape))):
            raise fail(TensorShapeError, f"permute{dims} of shape {self.shape} is no permutation")
        if dims[0] != 0:
            self._free_only(0, "permuting")
        return self._like(tuple(self.shape[d] for d in dims), tuple(self.strides[d] for d in dims))

    def broadcast(self, dim: int, size: int) -> Self:
        """Repeat dimension `dim`, which has size 1, `size` times without a copy."""
        dim = self._dimension(dim)
        if self.shape[dim] != 1:
            raise fail(
                TensorShapeError,
                f"broadcast of dimension {dim} of {self.name!r} {self.shape}; its size must be 1",
            )
        self._free_only(dim, "broadcasting")
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._like(tuple(shape), tuple(strides))

    def expand_dim(self, dim: int) -> Self:
        """Insert a dimension of size 1 at `dim`."""
        dim = self._dimension(dim, 1)
        self._free_only(dim, "inserting before")
        inner = self.strides[dim] * self.shape[dim] if dim < len(self.shape) else 1
        return self._like(
            self.shape[:dim] + (1,) + self.shape[dim:],
            self.strides[:dim] + (inner,) + self.strides[dim:],
        )

    def squeeze_dim(self, dim: int) -> Self:
        """Drop dimension `dim` of size 1."""
        dim = self._dimension(dim)
        if self.shape[dim] != 1:
            raise fail(
                TensorShapeError, f"squeeze of dimension {dim} of {self.shape}; its size must be 1"
            )
        self._free_only(dim, "dropping")
        return self._like(
            self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :]
        )

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> Self:
        """Split dimension `dim` into `shape`; one entry may be -1."""
        dim = self._dimension(dim)
        sizes = self._infer(tuple(shape), self.shape[dim])
        if len(sizes) > 1:
            self._free_only(dim, "splitting")
        strides, step = [], self.strides[dim]
        for size in reversed(sizes):
            strides.append(step)
            step *= size
        return self._like(
            self.shape[:dim] + sizes + self.shape[dim + 1 :],
            self.strides[:dim] + tuple(reversed(strides)) + self.strides[dim + 1 :],
        )

    def _infer(self, shape: tuple[int, ...], total: int) -> tuple[int, ...]:
        shape = tuple(self._number(s) for s in shape)
        if -1 in shape:
            rest = math.prod(s for s in shape if s != -1)
            if shape.count(-1) > 1 or rest == 0 or total % rest:
                raise fail(TensorShapeError, f"cannot infer -1 in {shape} for {total} elements")
            shape = tuple(total // rest if s == -1 else s for s in shape)
        if math.prod(shape) != total or any(s < 1 for s in shape):
            raise fail(
                TensorShapeError,
                f"{shape} has {math.prod(shape)} elements, {self.name!r} {self.shape} has "
                f"{total} there; keep the number of elements",
            )
        return shape

    def flatten_dims(self, start_dim: int, end_dim: int) -> Self:
        """Merge dimensions start_dim..end_dim (inclusive), which must be contiguous."""
        start, end = self._dimension(start_dim), self._dimension(end_dim)
        if end > start:
            self._free_only(start, "merging")
        sizes, steps = self.shape[start : end + 1], self.strides[start : end + 1]
        merged = self._regroup(sizes, steps, (math.prod(sizes),))
        return self._like(
            self.shape[:start] + (math.prod(sizes),) + self.shape[end + 1 :],
            self.strides[:start] + merged + self.strides[end + 1 :],
        )

    def _regroup(
        self, shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return strides for `new` over the same elements, or raise when there are none."""
        blocks: list[tuple[int, int]] = []
        for size, stride in zip(shape, strides, strict=True):
            if size == 1:
                continue
            if blocks and blocks[-1][1] == stride * size:
                blocks[-1] = (blocks[-1][0] * size, stride)
            else:
                blocks.append((size, stride))
        result: list[int] = []
        position = len(blocks) - 1
        left, step = (blocks[position][0], blocks[position][1]) if blocks else (1, 1)
        for size in reversed(new):
            if size == 1:
                result.append(step)
                continue
            while left == 1 and position > 0:
                position -= 1
                left, step = blocks[position]
            if left % size:
                raise fail(
                    TensorShapeError,
                    f"reshape of {self.name!r} {shape} with strides {strides} to {new} is no "
                    "view; copy it first, or reshape before slicing or permuting",
                )
            result.append(step)
            left //= size
            step *= size
        return tuple(reversed(result))

    def reshape(self, *shape: Any) -> Self:
        """Return the same elements in another shape; the partition dimension is kept on chip."""
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        new = self._infer(tuple(wanted), self.size)
        if self.memory == "hbm" and self.indirection is None:
            return self._like(new, self._regroup(self.shape, self.strides, new))
        if new[0] != self.shape[0]:
            raise fail(
                TensorShapeError,
                f"reshape of {self.name!r} {self.shape} to {new} changes the partition "
                f"dimension; keep {self.shape[0]} first",
            )
        inner = self._regroup(self.shape[1:], self.strides[1:], new[1:] or (1,))
        if len(new) == 1:
            new = (new[0], 1)
        return self._like(new, (self.strides[0], *inner))

    def rearrange(
        self,
        src_pattern: Sequence[Any],
        dst_pattern: Sequence[Any],
        fixed_sizes: dict[str, int] | None = None,
    ) -> Self:
        """Split, reorder and merge dimensions by name, as einops does."""
        fixed = dict(fixed_sizes or {})
        view, names, d = self, [], 0
        if len(src_pattern) != len(self.shape):
            raise fail(TensorShapeError, f"pattern {src_pattern} for shape {self.shape}")
        for entry in src_pattern:
            if isinstance(entry, str):
                names.append(entry)
                d += 1
                continue
            sizes = tuple(fixed.get(n, -1) for n in entry)
            view = view.reshape_dim(d, sizes) if len(sizes) > 1 else view
            names += list(entry)
            d += len(entry)
        flat = [n for e in dst_pattern for n in ([e] if isinstance(e, str) else e)]
        if sorted(flat) != sorted(names):
            raise fail(TensorShapeError, f"patterns {src_pattern} and {dst_pattern} differ")
        order = tuple(names.index(n) for n in flat)
        if order != tuple(range(len(order))):
            view = view.permute(order)
        for d, entry in enumerate(dst_pattern):
            if not isinstance(entry, str) and len(entry) > 1:
                view = view.flatten_dims(d, d + len(entry) - 1)
        return view
