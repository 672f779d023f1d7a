"""`NkiTensor`: a strided view of a storage, as the NKI language guide defines it.

Element (i0, i1, ...) sits at `offset + sum(strides[k] * i_k)` elements of the storage. On chip
dimension 0 is the partition dimension with the storage's row length as its stride. Views are
pure arithmetic; `array()` gives the NumPy view of the bytes when data is computed, `access()`
the record of the region for the trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    OperandError,
    OutOfBoundsError,
    SimulationError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.machine import current, kernel_frame
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.elements import marks_of, read
from nmm_compiler.simulator.tensors.geometry import (
    KEPT,
    Dims,
    Geometry,
    contiguous_run,
    geometry_of,
    merged,
    row_major,
)
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.registers import (
    Indirection,
    VirtualRegister,
    whole,
)
from nmm_compiler.simulator.trace import Access

Moved = tuple[tuple[Any, int, int], ...]
"""The registers that slices start at, of each part of an offset: (symbol, bytes a step, value)."""


def kind_of(dtype: Any, default: DType | None = None) -> DType:
    """Return the dtype that a kernel's argument names; None means the default."""
    kind = default if dtype is None else dtypes.find(dtype)
    if kind is None:
        raise current().error(OperandError, f"unknown dtype {dtype!r}; use those of nki.language")
    return kind


class NkiTensor(NKIObject):
    """A view of a tensor in HBM, SBUF or PSUM."""

    __slots__ = (
        "_access", "dtype", "geometry", "indirection", "moved", "offset", "shape", "storage",
        "strides",
    )  # fmt: skip

    def __init__(
        self,
        storage: Storage,
        geometry: Geometry,
        offset: int,
        indirection: Indirection | None = None,
        moved: Moved = (),
    ) -> None:
        self.storage = storage
        self.geometry = geometry
        self.shape = geometry.shape
        self.strides = geometry.strides
        self.dtype = geometry.dtype
        self.offset = offset
        self.indirection: Any = indirection
        self.moved = moved
        self._access: Access | None = None

    # Attributes that a kernel may read

    @property
    def base_tensor(self) -> NkiTensor:
        """The tensor that this is a view of; nki-library reads it, AWS's stubs do not have it."""
        return make_tensor(self.storage)

    def __repr__(self) -> str:
        return f"NkiTensor({self.name!r}, shape={self.shape}, dtype={self.dtype}, {self.memory})"

    def __str__(self) -> str:
        """Return the description and, where a kernel runs with data, the values below it."""
        known = self.storage.raw is not None and self.indirection is None
        return f"{self!r}\n{self.array()}" if known else repr(self)

    def need(self, holds: object, rule: str, kind: type[SimulationError] = OperandError) -> None:
        """Refuse what breaks a rule; the message has the rule and the view."""
        if not holds:
            raise current().error(kind, f"{rule}; the tensor is {self!r}, strides {self.strides}")

    def __bool__(self) -> bool:
        """Return True, as of any object: a value is not known when a kernel is compiled."""
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        self.need(False, "a tensor is not iterable; index it")

    def is_contiguous(self) -> bool:
        """Return whether the view covers its storage densely, row-major (free dims on chip)."""
        return all(stride == 1 for _, stride in merged(self.geometry.dims[self.memory != "hbm" :]))

    def is_indirect(self) -> bool:
        """Return whether the view uses an offset that is known at run time only."""
        return self.indirection is not None

    name = property(attrgetter("storage.name"), doc="The tensor's name.")
    buffer = property(attrgetter("storage.region"), doc="The memory region, such as nl.sbuf.")
    memory = property(attrgetter("storage.memory"), doc='Either "sbuf", "psum" or "hbm".')
    itemsize = property(attrgetter("dtype.item_bytes"), doc="Bytes of one element.")
    ndim = property(lambda self: len(self.shape), doc="Number of dimensions.")
    size = property(lambda self: math.prod(self.shape), doc="Number of elements.")
    free_size = property(lambda self: math.prod(self.shape[1:]), doc="Elements per partition.")

    def get_pattern(self) -> list[list[int]]:
        """Return [[stride, count], ...] of all dimensions."""
        return [[stride, count] for count, stride in self.geometry.dims]

    # Views

    def over(
        self,
        dims: Dims,
        offset: int | None = None,
        index: Indirection | None = None,
        moved: Moved | None = None,
        dtype: DType | None = None,
    ) -> NkiTensor:
        """Return a view over other dimensions, from another offset on, by another index."""
        start = self.offset if offset is None else offset
        return NkiTensor(
            self.storage, geometry_of(self.storage, dims, start, dtype or self.dtype), start,
            index or self.indirection, self.moved if moved is None else moved,
        )  # fmt: skip

    def __getitem__(self, key: Any) -> NkiTensor:
        """Return the view that a key selects."""
        if key.__class__ is not tuple:
            key = (key,)
        if self.indirection is not None or self.moved:
            return self._view(key)
        parts = self.geometry.parts
        at = tuple([(k.start, k.stop, k.step) if k.__class__ is slice else k for k in key])
        try:
            known = parts.get(at)
        except TypeError:  # an index that cannot be hashed, such as an array
            return self._view(key)
        if known is not None:
            return NkiTensor(self.storage, known[0], self.offset + known[1])
        part = self._view(key)
        # one by a register, whose value may change, cannot be hashed
        if part.__class__ is not UnusableView:
            if len(parts) >= KEPT:
                parts.clear()
            parts[at] = part.geometry, part.offset - self.offset
        return part

    def _view(self, key: tuple[Any, ...]) -> NkiTensor:
        """Return the view that a key selects, after the rules for keys."""
        rank, on_chip = len(self.shape), self.storage.memory != "hbm"
        for at, k in enumerate(key):
            if k is Ellipsis:
                key = key[:at] + (slice(None),) * (rank - len(key) + 1) + key[at + 1 :]
                break
        self.need(len(key) <= rank, f"{len(key)} indices; use at most {rank}")
        offset, moved = self.offset, [*self.moved]
        dims: list[tuple[int, int]] = []
        for d, (k, size, stride) in enumerate(zip(key, self.shape, self.strides, strict=False)):
            if k.__class__ is slice:
                start, stop, step = self._span(d, k, moved)
                if start < 0 or stop > size or start >= stop or step < 1:
                    return self._bad_slice(d, k, start == stop and 0 <= start <= size)
                if step > 1 and d == 0 and on_chip:
                    self.need(stop - start <= step, "partitions cannot be strided; use step 1")
                dims.append((-(-(stop - start) // step), stride * step))
            else:
                start = self._start(d, k, moved)
                start += size if start < 0 else 0
                self.need(
                    0 <= start < size,
                    f"index {k} into dimension {d}; use 0..{size - 1}",
                    OutOfBoundsError,
                )
                if d == 0 and on_chip:
                    dims.append((1, stride))
            offset += start * stride
        dims += self.geometry.dims[len(key) :] if len(key) < rank else ()
        dims += [(1, 1)] * (1 + on_chip - len(dims))
        if self._rows_chosen():
            again = "the dimension that an index tensor chooses cannot be indexed again"
            self.need(dims[0][0] == self.shape[0], again, UnsupportedInstructionError)
        return self.over(tuple(dims), offset, moved=tuple(moved))

    def _span(self, dim: int, key: Any, moved: list[Any]) -> tuple[int, int, int]:
        """Return (start, stop, step) of a slice; add the registers that move the view."""
        size, start = self.shape[dim], 0 if key.start is None else key.start
        if start.__class__ is not int:
            start = self._start(dim, start, moved)
        stop = size if key.stop is None else key.stop
        stop = stop.read() if stop.__class__ is VirtualRegister else self._number(stop)
        step = 1 if key.step is None else self._number(key.step)
        below = start < 0 and key.start.__class__ is not VirtualRegister
        return start + size * below, stop + size * (stop < 0), step

    def _start(self, dim: int, value: Any, moved: list[Any]) -> int:
        """Return where a slice or an index starts; add the register that moves the view."""
        if value.__class__ is not VirtualRegister:
            return self._number(value)
        self._dimension(dim, "dynamic selection")
        moved.append((value.symbol, self.strides[dim] * self.itemsize, value.read()))
        return value.value

    def _number(self, value: Any) -> int:
        if value.__class__ is int:
            return value
        number: Any = whole(value)
        use = "use an int, a slice, ..., nl.ds(start, size) or a register"
        self.need(number is not None, f"index {value!r} ({type(value).__name__}); {use}")
        return number

    def _bad_slice(self, d: int, k: slice, empty: bool) -> UnusableView:
        text = (
            f"slice {k.start}:{k.stop}{'' if k.step in (None, 1) else f':{k.step}'} of dimension "
            f"{d} of tensor {self.name!r} {self.shape} is empty or leaves it; stay inside "
            f"0:{self.shape[d]} (clip an edge tile with min())"
        )
        if empty and self.storage.memory == "hbm":
            return UnusableView(text)
        raise current().error(OutOfBoundsError, text)

    def __setitem__(self, key: Any, value: Any) -> None:
        current().assign(self, key, value)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Return elements start..end of dimension `dim`."""
        dim = self._dimension(dim)
        if not isinstance(start, VirtualRegister) and self._number(start) >= self._number(end):
            self._bad_slice(dim, slice(start, end, step), False)
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    def select(self, dim: int, index: Any) -> NkiTensor:
        """Return element `index` of dimension `dim`: an int, or a tensor or register."""
        if isinstance(index, (NkiTensor, VirtualRegister)):
            self.need(
                self.indirection is None,
                "it is indirect already; select once",
                UnsupportedInstructionError,
            )
            dim = self._dimension(dim, "dynamic selection")
            chosen = Indirection("scalar", index, self.strides[dim])
            return self.over(self.geometry.dims[:dim] + self.geometry.dims[dim + 1 :], index=chosen)
        dim, number = self._dimension(dim), self._number(index)
        self.need(number >= 0, f"select({dim}, {index}); use 0 or more", OutOfBoundsError)
        return self[(slice(None),) * dim + (number,)]

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Return rows of dimension 0 chosen by `vector_offset`, one index per partition."""
        self.need(
            dim == 0 and self.memory == "hbm" and self.indirection is None,
            f"vector_select({dim}) takes dimension 0 of an HBM tensor that is not indirect yet",
            UnsupportedInstructionError,
        )
        rows = vector_offset.shape[0], self.strides[0]
        chosen = Indirection("vector", vector_offset, self.strides[0])
        return self.over((rows, *self.geometry.dims[1:]), index=chosen)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """Address the storage directly: [[step, count], ...] in elements from `offset`."""
        kind = kind_of(dtype, self.dtype)
        item, old = kind.item_bytes, self.itemsize
        dims = [(self._number(count), self._number(step)) for step, count in pattern]
        self.need(min(dims, default=(1,))[0] > 0, f"ap pattern {pattern} has a count below 1")
        self.need(
            scalar_offset is None or vector_offset is None,
            "ap takes scalar_offset or vector_offset, not both",
        )
        if self.memory != "hbm":
            (count, step), row = dims[0], self.storage.bytes_per_partition // item
            self.need(
                count == 1 or step == row,
                f"the partition step of ap must be the free size of the tensor, {row}",
            )
            dims[0] = count, row
            dims += [(1, 1)] * (len(dims) == 1)
        index = None
        if vector_offset is not None:
            self.need(
                self._dimension(indirect_dim) == 0,
                f"indirect_dim={indirect_dim}; a vector_offset chooses along dimension 0 only",
                UnsupportedInstructionError,
            )
            index = Indirection("vector", vector_offset, math.prod(self.shape[1:]))
        elif scalar_offset is not None:
            dim = self._dimension(indirect_dim, "dynamic selection")
            index = Indirection("scalar", scalar_offset, self.strides[dim] * old // item)
        start = self.offset * old // item + (0 if offset is None else self._number(offset))
        view = self.over(tuple(dims), start, index, dtype=kind)
        problem = "" if index is not None else view.leaves()
        return UnusableView(problem) if problem else view

    def view(self, dtype: Any) -> NkiTensor:
        """Reinterpret the bits as another dtype; the last dimension is rescaled."""
        kind = kind_of(dtype)
        direct, what = self.indirection is None, f"view({kind})"
        self.need(direct, f"{what} of an indirect tensor", UnsupportedInstructionError)
        old, new = self.dtype.item_bytes, kind.item_bytes
        outer, total, start = self.geometry.dims[:-1], self.shape[-1] * old, self.offset * old
        places = total, start, *(stride * old for _, stride in outer)
        self.need(
            (old == new or self.strides[-1] == 1 or self.shape[-1] == 1)
            and not any(place % new for place in places),
            f"{what}: the last dimension must be contiguous, and divide into elements of {new} B",
        )
        last = self.geometry.dims[-1] if old == new else (total // new, 1)
        dims = (*((n, s * old // new) for n, s in outer), last)
        return self.over(dims, start // new, dtype=kind)

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Return columns chosen at run time (tensor indirection, trn3 and later)."""
        current().require("tensor indirection (.indirect)")
        count = index.size if num_elem is None else num_elem
        chosen = Indirection("columns", index, self.strides[-1], self.free_size)
        return self.over((self.geometry.dims[0], (count, 1)), index=chosen)

    # Whole dimensions: only shapes and strides change; what strides cannot express is refused

    def _dimension(self, dim: int, what: str = "", *, extra: int = 0, one: bool = False) -> int:
        """Return a dimension as a number from 0 on.

        what: done to it, which the partition dimension does not take. one: its size must be 1.
        """
        rank = len(self.shape) + extra
        number = dim + rank if dim < 0 else dim
        self.need(0 <= number < rank, f"there is no dimension {dim}", OutOfBoundsError)
        self.need(
            not one or self.shape[number] == 1, f"{what} of dimension {number}; its size must be 1"
        )
        free = not what or number > 0 or (self.memory == "hbm" and not self._rows_chosen())
        move = "move the data (nc_transpose, dma_copy) instead"
        self.need(free, f"{what} of the partition dimension is no view; {move}")
        return number

    def _rows_chosen(self) -> bool:
        """Return whether an index chooses rows: they stay outermost.

        NkiTensor.permute and reshape_dim: a single runtime index leaves the other dimensions free.
        """
        return self.indirection is not None and self.indirection.kind != "scalar"

    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Reorder dimensions; the partition dimension stays first."""
        dims = tuple(dims)
        self.need(
            sorted(dims) == list(range(len(self.shape))),
            f"permute{dims} is no permutation of its dimensions",
        )
        if dims[0] != 0:
            self._dimension(0, "permuting")
        return self.over(tuple(self.geometry.dims[d] for d in dims))

    def _replaced(self, dim: int, count: int, by: Dims) -> NkiTensor:
        """Return the view with other dimensions in place of `count` of them from `dim` on."""
        return self.over(self.geometry.dims[:dim] + by + self.geometry.dims[dim + count :])

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat dimension `dim`, which has size 1, `size` times without a copy."""
        dim = self._dimension(dim, "broadcasting", one=True)
        return self._replaced(dim, 1, ((size, 0),))

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of size 1 at `dim`."""
        dim = self._dimension(dim, "inserting before", extra=1)
        inner = self.strides[dim] * self.shape[dim] if dim < len(self.shape) else 1
        return self._replaced(dim, 0, ((1, inner),))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Drop dimension `dim` of size 1."""
        return self._replaced(self._dimension(dim, "dropping", one=True), 1, ())

    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """Split dimension `dim` into `shape`; one entry may be -1."""
        dim = self._dimension(dim, "splitting" if len(shape) > 1 else "")
        return self._regroup(dim, dim + 1, shape)

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge dimensions start_dim..end_dim (inclusive), which must be contiguous."""
        start, end = self._dimension(start_dim), self._dimension(end_dim)
        if end > start:
            self._dimension(start, "merging")
        return self._regroup(start, end + 1, (-1,))

    def reshape(self, *shape: Any) -> NkiTensor:
        """Return the same elements in another shape; the partition dimension is kept on chip."""
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        kept = self.memory != "hbm" or self.indirection is not None
        view = self._regroup(0, len(self.shape), (*wanted, *(1,) * (kept and len(wanted) == 1)))
        rows, new = self.shape[0], view.shape
        says = f"reshape to {new} changes the partitions; keep {rows} first"
        self.need(not kept or new[0] == rows, says)
        return view

    def _regroup(self, start: int, stop: int, shape: Sequence[int]) -> NkiTensor:
        """Return the view with dimensions of a shape, of which one size may be -1, in place of
        those from `start` to `stop`; refuse one that is none over the same elements."""
        dims = self.geometry.dims
        total = math.prod(self.shape[start:stop])
        sizes = [self._number(size) for size in shape]
        if -1 in sizes:
            sizes[sizes.index(-1)] = total // max(1, -math.prod(sizes))
        fits = math.prod(sizes) == total and min(sizes, default=1) > 0
        self.need(fits, f"{tuple(shape)} does not have {total} elements; keep their number")
        blocks = merged(dims[start:stop])
        result: list[tuple[int, int]] = []
        left, step = blocks.pop() if blocks else (1, 1)
        for size in reversed(sizes):
            while size > 1 and left == 1 and blocks:
                left, step = blocks.pop()
            copied = "copy it first, or reshape before slicing or permuting"
            self.need(left % size == 0, f"reshape to {tuple(sizes)} is no view; {copied}")
            result.append((size, step))
            left //= size
            step *= size
        return self.over(dims[:start] + tuple(reversed(result)) + dims[stop:])

    def rearrange(
        self,
        src_pattern: Sequence[Any],
        dst_pattern: Sequence[Any],
        fixed_sizes: dict[str, int] | None = None,
    ) -> NkiTensor:
        """Split, reorder and merge dimensions by name, as einops does."""
        groups, wanted = (
            [[entry] if isinstance(entry, str) else list(entry) for entry in pattern]
            for pattern in (src_pattern, dst_pattern)
        )
        self.need(
            len(groups) == len(self.shape),
            f"pattern {src_pattern} has another number of dimensions",
        )
        view, sizes = self, fixed_sizes or {}
        for d in reversed(range(len(groups))):  # those before it keep their numbers
            if len(groups[d]) > 1:
                view = view.reshape_dim(d, [sizes.get(name, -1) for name in groups[d]])
        names, order = ([name for group in each for name in group] for each in (groups, wanted))
        self.need(
            sorted(order) == sorted(names),
            f"patterns {src_pattern} and {dst_pattern} have other names",
        )
        view = view.permute([names.index(name) for name in order])
        for d, group in enumerate(wanted):
            if len(group) > 1:
                view = view.flatten_dims(d, d + len(group) - 1)
        return view

    # Data

    def leaves(self) -> str:
        """Say that some element of the view is outside its storage, or its partition, or ""."""
        storage, access, on_chip = self.storage, self.access(), self.memory != "hbm"
        whole, (first, _) = storage.bytes_per_partition, storage.address or (0, 0)
        beyond = on_chip and access.partition_stop - first > storage.shape[0]
        if self.offset >= 0 <= access.byte_start and access.byte_stop <= whole and not beyond:
            return ""
        return (
            f"pattern {self.get_pattern()} at offset {self.offset} leaves tensor {self.name!r} "
            f"{storage.shape} {storage.dtype} ({whole} B{' per partition' if on_chip else ''})"
        )

    def access(self) -> Access:
        """Return the record of the region for the trace, one for all views of it."""
        if self._access is not None:
            return self._access
        geometry, offset = self.geometry, None if self.indirection is not None else self.offset
        known = self.storage.accesses
        access = self._access = known.get((geometry, offset))
        if access is None:
            item, dense = self.dtype.item_bytes, geometry.dense
            if offset is None:
                start, extent = 0, self.storage.bytes_per_partition
                dense = contiguous_run(geometry.pattern, item) >= extent
            else:
                start, extent = offset * item + geometry.base, geometry.extent
            access = self._access = known[geometry, offset] = Access(
                self.storage.identity, geometry.memory, geometry.first, geometry.stop, start,
                start + extent, geometry.pattern, self.dtype, item, dense,
            )  # fmt: skip
        return access

    def array(self) -> np.ndarray:
        """Return the NumPy view of the elements (storage dtype)."""
        item = self.dtype.item_bytes
        return np.ndarray(
            self.shape, self.dtype.numpy, self.storage.raw, self.offset * item,
            tuple([s * item for s in self.strides]),
        )  # fmt: skip

    def missing(self) -> np.ndarray | None:
        """Return the mask of unwritten elements, or None when there are none."""
        marks = self.storage.unwritten
        if marks is None:
            return None
        mask = np.asarray(marks_of(self, marks).view(f"u{self.itemsize}")[..., 0] != 0)
        return mask if mask.any() else None

    def load(self, what: str = "") -> np.ndarray:
        """Return the stored elements; unwritten ones are NaN (4 in integers), and are noted.

        what: needs values, so that unwritten ones are refused.
        """
        return read(self, what)[0]


class UnusableView(NkiTensor):
    """A view that a kernel may make but not use: without elements, or one that leaves its tensor.

    NkiTensor.__getitem__ slices as NumPy does, and no document says that ap() looks at the tensor's
    end. AWS's kernels make such views before they see that there is nothing to do.
    """

    __slots__ = ("refusal",)

    def __init__(self, refusal: str) -> None:
        self.refusal = refusal

    def __getattr__(self, name: str) -> Any:  # no other attribute is set
        raise OutOfBoundsError(self.refusal, *kernel_frame())


_WHOLE: dict[tuple[Any, ...], Geometry] = {}


def make_tensor(storage: Storage) -> NkiTensor:
    """Return the view of a whole storage."""
    key = storage.memory, storage.shape, storage.dtype, storage.constant, storage.address
    geometry = _WHOLE.get(key)
    if geometry is None:
        dims = tuple(zip(storage.shape, row_major(storage.shape), strict=True))
        geometry = _WHOLE[key] = geometry_of(storage, dims, 0, storage.dtype)
    return NkiTensor(storage, geometry, 0)
