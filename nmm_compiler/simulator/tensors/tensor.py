"""`NkiTensor`: a strided view of a storage, as the NKI language guide defines it.

Element (i0, i1, ...) sits at `offset + sum(strides[k] * i_k)` elements of the storage. On chip
dimension 0 is the partition dimension with the storage's row length as its stride. Views are
pure arithmetic; `array()` gives the NumPy view of the bytes when data is computed, `access()`
the record of the region for the trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index as as_index
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    OutOfBoundsError,
    TargetRuleError,
    TensorDtypeError,
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.data import DynamicSlice as DynamicSlice
from nmm_compiler.simulator.tensors.data import Indirection as Indirection
from nmm_compiler.simulator.tensors.data import TensorData
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.geometry import (
    Geometry,
    numbers_of,
    part_of,
    remember_part,
    whole_of,
)
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.registers import VirtualRegister
from nmm_compiler.simulator.tensors.reshaping import fail
from nmm_compiler.simulator.trace import Access


class NkiTensor(TensorData):
    """A view of a tensor in HBM, SBUF or PSUM.

    moved: the registers that slices start at: (symbol, step, value) of each part of the offset.
    """

    __slots__ = ("geometry", "indirection", "moved", "parts", "shape", "strides")

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        dtype: DType,
        indirection: Indirection | None = None,
        moved: tuple[tuple[Any, int, int], ...] = (),
    ) -> None:
        self.storage = storage
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.dtype = dtype
        self.indirection = indirection
        self._access: Access | None = None
        self._array: np.ndarray | None = None
        self.special = False
        self.geometry: Geometry | None = None
        self.moved = moved
        self.parts: dict[tuple[Any, ...], NkiTensor] | None = None

    # Attributes that a kernel may read

    @property
    def base_tensor(self) -> NkiTensor:
        """The tensor that this is a view of; nki-library reads it, AWS's stubs do not have it."""
        return make_tensor(self.storage)

    def __repr__(self) -> str:
        text = f"NkiTensor({self.name!r}, shape={self.shape}, dtype={self.dtype}, {self.memory}"
        machine = self.storage.machine
        if machine.data and self.size <= 64 and self.indirection is None:
            return f"{text}, value={self.array().tolist()})"
        return text + ")"

    def __str__(self) -> str:
        """Return the description and, where a kernel runs with data, the values below it."""
        if self.size <= 64 or not self.storage.machine.data or self.indirection is not None:
            return repr(self)
        return f"{self!r}\n{self.array()}"

    def __bool__(self) -> bool:
        """Return True, as of any object: a value is not known when a kernel is compiled."""
        return True

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        raise fail(TensorShapeError, f"tensor {self.name!r} is not iterable; index it")

    def is_contiguous(self) -> bool:
        """Return whether the view covers its storage densely, row-major (free dims on chip)."""
        expected = 1
        dims = range(len(self.shape) - 1, -1 if self.memory == "hbm" else 0, -1)
        for d in dims:
            if self.shape[d] != 1 and self.strides[d] != expected:
                return False
            expected *= self.shape[d]
        return True

    def is_indirect(self) -> bool:
        """Return whether the view uses an offset that is known at run time only."""
        return self.indirection is not None

    # Views

    def _like(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None
    ) -> NkiTensor:
        start = self.offset if offset is None else offset
        return NkiTensor(
            self.storage, shape, strides, start, self.dtype, self.indirection, self.moved
        )

    def __getitem__(self, key: Any) -> NkiTensor:
        """Return the view that a key selects; the same view for the same numbers."""
        if key.__class__ is not tuple:
            key = (key,)
        if self.indirection is not None or self.moved:
            return self._view(key)
        at = None
        if len(key) == 2:
            rows, columns = key
            if rows.__class__ is slice and columns.__class__ is slice:
                at = (
                    rows.start, rows.stop, rows.step, columns.start, columns.stop, columns.step,
                )  # fmt: skip
        if at is None:
            at = numbers_of(key)
        parts = self.parts
        if parts is None:
            parts = self.parts = {}
        try:
            part = parts.get(at)
            if part is None:
                part = part_of(self, at)
                if part is None:
                    part = self._view(key)
                    if part.__class__ is UnusableView or not remember_part(self, at, part):
                        return part
                parts[at] = part
            return part
        except TypeError:  # an index that cannot be hashed, such as an array
            return self._view(key)

    def _view(self, key: tuple[Any, ...]) -> NkiTensor:
        """Return the view that a key selects, after the rules for keys."""
        shape, strides = self.shape, self.strides
        rank = len(shape)
        given = len(key)
        for at, k in enumerate(key):
            if k is Ellipsis:
                key = key[:at] + (slice(None),) * (rank - given + 1) + key[at + 1 :]
                given = len(key)
                break
        if given > rank:
            raise fail(
                TensorShapeError,
                f"{given} indices into tensor {self.name!r} of shape {shape}; use at most {rank}",
            )
        offset = self.offset
        moved = self.moved
        new_shape: list[int] = []
        new_strides: list[int] = []
        dropped = 0
        on_chip = self.storage.memory != "hbm"
        d = 0
        for k in key:
            size = shape[d]
            stride = strides[d]
            kind = k.__class__
            if kind is slice:
                start, stop, step = k.start, k.stop, k.step
                if start is None and stop is None and step is None:
                    new_shape.append(size)
                    new_strides.append(stride)
                    d += 1
                    continue
                if start is None:
                    start = 0
                elif start.__class__ is not int:
                    start, moved = self._start(d, start, moved)
                if stop is None:
                    stop = size
                elif stop.__class__ is not int:
                    stop = stop.read() if stop.__class__ is VirtualRegister else self._number(stop)
                if start < 0:
                    start += size
                if stop < 0:
                    stop += size
                if step is None:
                    step = 1
                elif step.__class__ is not int:
                    step = self._number(step)
                if start < 0 or stop > size or start >= stop or step < 1:
                    return self._bad_slice(d, k, start == stop and 0 <= start <= size)
                if step == 1:
                    new_shape.append(stop - start)
                    new_strides.append(stride)
                else:
                    if d == 0 and on_chip and stop - start > step:
                        raise fail(
                            TensorShapeError,
                            f"step {step} on the partition dimension of {self.name!r}; "
                            "partitions cannot be strided, use step 1",
                        )
                    new_shape.append((stop - start + step - 1) // step)
                    new_strides.append(stride * step)
                offset += start * stride
            elif kind is DynamicSlice:
                start, count = k.start, k.size
                if start.__class__ is not int:
                    start, moved = self._start(d, start, moved)
                if count.__class__ is not int:
                    count = self._number(count)
                if start < 0 or count < 1 or start + count > size:
                    empty = count == 0 and 0 <= start <= size
                    return self._bad_slice(d, slice(start, start + count), empty)
                new_shape.append(count)
                new_strides.append(stride)
                offset += start * stride
            else:
                number, moved = self._start(d, k, moved)
                if number < 0:
                    number += size
                if not 0 <= number < size:
                    raise fail(
                        OutOfBoundsError,
                        f"index {k} into dimension {d} of tensor {self.name!r}, which has size "
                        f"{size}; use 0..{size - 1}",
                    )
                offset += number * stride
                if d == 0 and on_chip:
                    new_shape.append(1)
                    new_strides.append(stride)
                else:
                    dropped += 1
            d += 1
        if d < rank:
            new_shape += shape[d:]
            new_strides += strides[d:]
        if dropped:
            least = 2 if on_chip else 1
            while len(new_shape) < least:
                new_shape.append(1)
                new_strides.append(1)
        if self.indirection is not None:
            self._check_indirect_index(new_shape)
        return NkiTensor(
            self.storage, tuple(new_shape), tuple(new_strides), offset, self.dtype,
            self.indirection, moved,
        )  # fmt: skip

    def _check_indirect_index(self, new_shape: list[int]) -> None:
        if (
            self.indirection is not None
            and self.indirection.kind != "scalar"
            and (not new_shape or new_shape[0] != self.shape[0])
        ):
            raise fail(
                UnsupportedInstructionError,
                f"indirect view of {self.name!r}: the indirect dimension cannot be indexed again",
            )

    def _start(self, dim: int, value: Any, moved: Any) -> tuple[int, Any]:
        """Return where a slice or an index starts, and the registers that move the view."""
        if not isinstance(value, VirtualRegister):
            return self._number(value), moved
        self._free_only(dim, "dynamic selection")
        number = value.read()
        return number, (*moved, (value.symbol, self.strides[dim], number))

    def _number(self, value: Any) -> int:
        try:
            return as_index(value)
        except TypeError:
            if isinstance(value, float) and value.is_integer():
                return int(value)
            raise fail(
                TensorShapeError,
                f"index {value!r} ({type(value).__name__}) into tensor {self.name!r}; use an int, "
                "a slice, ..., nl.ds(start, size) or a register",
            ) from None

    def _bad_slice(self, d: int, k: slice, empty: bool) -> UnusableView:
        text = (
            f"slice {k.start}:{k.stop}{'' if k.step in (None, 1) else f':{k.step}'} of dimension "
            f"{d} of tensor {self.name!r} {self.shape} is empty or leaves it; stay inside "
            f"0:{self.shape[d]} (clip an edge tile with min())"
        )
        if empty and self.storage.memory == "hbm":
            return UnusableView(self.storage.machine, text)
        raise fail(OutOfBoundsError, text)

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
        dim = self._dimension(dim)
        if not isinstance(index, (NkiTensor, VirtualRegister)):
            size = self.shape[dim]
            number = self._number(index)
            if not 0 <= number < size:
                raise fail(
                    OutOfBoundsError,
                    f"select({dim}, {index}) of {self.name!r} {self.shape}; use 0..{size - 1}",
                )
            if dim == 0 and self.memory != "hbm":
                return self[number]
            return self._like(
                self.shape[:dim] + self.shape[dim + 1 :],
                self.strides[:dim] + self.strides[dim + 1 :],
                self.offset + number * self.strides[dim],
            )
        if self.indirection is not None:
            raise fail(
                UnsupportedInstructionError, f"{self.name!r} is indirect already; select once"
            )
        self._free_only(dim, "dynamic selection")
        step = self.strides[dim]
        view = self._like(
            self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :]
        )
        view.indirection = Indirection("scalar", dim, index, step)
        return view

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Return rows of dimension 0 chosen by `vector_offset`, one index per partition."""
        if dim != 0 or self.memory != "hbm" or self.indirection is not None:
            raise fail(
                UnsupportedInstructionError,
                f"vector_select({dim}) of {self.name!r} in {self.memory}; it takes dimension 0 "
                "of an HBM tensor that is not indirect yet",
            )
        count = vector_offset.shape[0]
        view = self._like((count, *self.shape[1:]), self.strides)
        view.indirection = Indirection("vector", 0, vector_offset, self.strides[0])
        return view

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
        kind = self.dtype if dtype is None else dtypes.find(dtype)
        if kind is None:
            raise fail(TensorDtypeError, f"unknown dtype {dtype!r}")
        storage = self.storage
        steps = tuple(self._number(p[0]) for p in pattern)
        counts = tuple(self._number(p[1]) for p in pattern)
        if any(c < 1 for c in counts):
            raise fail(TensorShapeError, f"ap pattern {pattern} has a count below 1")
        if scalar_offset is not None and vector_offset is not None:
            raise fail(TensorShapeError, "ap takes scalar_offset or vector_offset, not both")
        base = self.offset * self.dtype.item_bytes // kind.item_bytes
        start = base + (0 if offset is None else self._number(offset))
        row = storage.bytes_per_partition // kind.item_bytes
        if storage.memory != "hbm" and counts[0] > 1 and steps[0] != row:
            raise fail(
                TensorShapeError,
                f"ap of {self.name!r}: the partition step is {steps[0]}, it must be the free "
                f"size of the tensor, {row} elements",
            )
        if storage.memory != "hbm":
            steps = (row, *steps[1:])
        if storage.memory != "hbm" and len(counts) == 1:
            counts, steps = (*counts, 1), (*steps, 1)
        indirection = None
        indirect_dim = self._dimension(indirect_dim)
        if vector_offset is not None:
            if indirect_dim:
                raise fail(
                    UnsupportedInstructionError,
                    f"ap of {self.name!r} with a vector_offset and indirect_dim={indirect_dim}; "
                    "a vector of offsets chooses along dimension 0 only",
                )
            step = math.prod(self.shape[indirect_dim + 1 :])
            indirection = Indirection("vector", 0, vector_offset, step)
        elif scalar_offset is not None:
            self._free_only(indirect_dim, "dynamic selection")
            step = self.strides[indirect_dim]
            step = step * self.dtype.item_bytes // kind.item_bytes
            indirection = Indirection("scalar", indirect_dim, scalar_offset, step)
        view = NkiTensor(
            storage, counts, steps, start, kind, indirection, self._moved_in(kind.item_bytes)
        )
        problem = "" if indirection is not None else view.leaves()
        return UnusableView(storage.machine, problem) if problem else view

    def view(self, dtype: Any) -> NkiTensor:
        """Reinterpret the bits as another dtype; the last dimension is rescaled."""
        kind = dtypes.find(dtype)
        if kind is None:
            raise fail(TensorDtypeError, f"unknown dtype {dtype!r}")
        if self.indirection is not None:
            raise fail(
                UnsupportedInstructionError, f"view(dtype) of {self.name!r}, which is indirect"
            )
        old, new = self.dtype.item_bytes, kind.item_bytes
        moved = self._moved_in(new)
        if old == new:
            return NkiTensor(self.storage, self.shape, self.strides, self.offset, kind, None, moved)
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            raise fail(
                TensorShapeError,
                f"view({kind}) of {self.name!r}: the last dimension must be contiguous",
            )
        total = self.shape[-1] * old
        outer = [s * old for s in self.strides[:-1]]
        start = self.offset * old
        if total % new or any(s % new for s in outer) or start % new:
            raise fail(
                TensorShapeError,
                f"view({kind}) of {self.name!r} {self.shape} {self.dtype}: {total} B do not "
                f"divide into {new} B elements",
            )
        return NkiTensor(
            self.storage, (*self.shape[:-1], total // new), (*(s // new for s in outer), 1),
            start // new, kind, None, moved,
        )  # fmt: skip

    def _moved_in(self, item: int) -> tuple[tuple[Any, int, int], ...]:
        """Return `moved` in steps of elements of `item` bytes."""
        return tuple((s, step * self.itemsize // item, v) for s, step, v in self.moved)

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Return columns chosen at run time (tensor indirection, trn3 and later)."""
        machine = current()
        if not machine.target.tensor_indirection:
            machine.rule(
                TargetRuleError,
                f"tensor indirection (.indirect) needs trn3, the target is {machine.target.name}",
            )
        count = index.size if num_elem is None else num_elem
        row = self.strides[0]
        return NkiTensor(
            self.storage, (self.shape[0], count), (row, 1), self.offset, self.dtype,
            Indirection("columns", 1, index, self.strides[-1], self.free_size), self.moved,
        )  # fmt: skip


class UnusableView(NkiTensor):
    """A view that a kernel may make but not use: without elements, or one that leaves its tensor.

    NkiTensor.__getitem__ slices as NumPy does, and no document says that ap() looks at the tensor's
    end. AWS's kernels make such views before they see that there is nothing to do.
    """

    __slots__ = ("machine", "refusal")

    def __init__(self, machine: Any, refusal: str) -> None:
        self.machine, self.refusal = machine, refusal

    def __getattr__(self, name: str) -> Any:  # no other attribute is set
        raise self.machine.error(OutOfBoundsError, self.refusal)


def make_tensor(storage: Storage) -> NkiTensor:
    """Return the view of a whole storage."""
    return whole_of(NkiTensor, storage)
