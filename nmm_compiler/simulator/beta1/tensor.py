"""`Tensor` of Beta 1: a strided view with a partition dimension anywhere, indexed by expressions.

An affine index expression of a strided tensor is again a strided view, so indexing is arithmetic
and `view()` is the simulator's `NkiTensor`. Block dimensions, those before the partition
dimension, count tiles: each has storage of its own, as the Beta 1 compiler placed them one by one.
A tensor that an instruction returned may be pending: it has a shape and a dtype, and gets storage
when something reads it (`pending.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    NmmError,
    OutOfBoundsError,
    SimulationError,
    TensorDtypeError,
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.beta1.index import Index, Part, common_part
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.tensor import Indirection, NkiTensor

OPERATIONS: dict[str, Callable[..., Any]] = {}
"""The functions behind operators and methods of a tensor; the language layer fills it in."""


def fail(kind: type[SimulationError], message: str) -> NmmError:
    """Return an error of `kind` at the kernel's current line."""
    return current().error(kind, f"NKI Beta 1: {message}")


class Blocks:
    """The tiles of a tensor with block dimensions, each allocated when first touched.

    make: allocates the tile of a block, counted row-major over the block dimensions.
    """

    __slots__ = ("made", "make")

    def __init__(self, make: Callable[[int], Storage]) -> None:
        self.make = make
        self.made: dict[int, Storage] = {}

    def get(self, number: int) -> Storage:
        """Return the storage of a block."""
        found = self.made.get(number)
        if found is None:
            found = self.made[number] = self.make(number)
        return found


def numpy_dtype(kind: DType) -> Any:
    """Return what `tensor.dtype` is in Beta 1: a NumPy dtype; tfloat32 has none and stays."""
    if kind == "bool":
        return np.dtype(np.bool_)
    return kind if kind == "tfloat32" else kind.numpy


class Shifted:
    """An index expression plus a tile of one element: a run-time offset."""

    __slots__ = ("index", "tile")

    def __init__(self, tile: Tensor, index: Index) -> None:
        self.tile = tile
        self.index = index

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the expression."""
        return self.index.shape


class Masked:
    """A tile with an operand mask, `tile[i_f < n]`: matmuls alone take it (NKI API Masking)."""

    __slots__ = ("part", "tile")

    def __init__(self, tile: Tensor, part: Part) -> None:
        self.tile = tile
        self.part = part

    def __getitem__(self, key: Any) -> Tensor | Masked:
        found = OPERATIONS["index"](self.tile, key)
        if isinstance(found, Masked):
            return Masked(self.tile, common_part(self.part, found.part))
        return self if found is self.tile else found  # a mask that leaves nothing out


class Tensor:
    """A tensor in HBM, SBUF or PSUM, or a view of one."""

    __slots__ = (
        "__weakref__",
        "_view",
        "choice",
        "kind",
        "memory",
        "offset",
        "outside",
        "par",
        "pending",
        "place",
        "shape",
        "strides",
    )  # fmt: skip

    def __init__(
        self,
        place: Storage | Blocks | None,
        memory: str,
        kind: DType,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int = 0,
        par: int = 0,
    ) -> None:
        self.place = place
        self.memory = memory
        self.kind = kind
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.par = par
        self.outside: tuple[tuple[int, int, Index], ...] = ()
        self.choice: Indirection | None = None
        self.pending: Any = None
        self._view: NkiTensor | None = None

    @classmethod
    def of(cls, view: NkiTensor) -> Tensor:
        """Return the tensor over a view of the simulator."""
        made = cls(view.storage, view.memory, view.dtype, view.shape, view.strides, view.offset)
        made.choice = view.indirection
        made._view = view
        return made

    # Attributes that a kernel may read

    @property
    def dtype(self) -> Any:
        """The NumPy dtype."""
        return numpy_dtype(self.kind)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.kind.item_bytes

    @property
    def buffer(self) -> Any:
        """The memory region."""
        return self.storage.region

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.place.name if isinstance(self.place, Storage) else self.memory

    def __repr__(self) -> str:
        return f"tensor({self.name!r}, shape={self.shape}, dtype={self.kind}, {self.memory})"

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        raise fail(TensorShapeError, f"{self!r} is not iterable; index it")

    def __bool__(self) -> bool:
        raise fail(
            UnsupportedInstructionError,
            f"the truth of {self!r} is not known when a kernel is compiled "
            "(err_ambiguous_tensor_truth_value); compare with `is not None`, or use nl.where",
        )

    # Storage

    @property
    def storage(self) -> Storage:
        """The storage behind the view; a pending tensor gets one now."""
        place = self.place
        if place.__class__ is Storage:
            return place
        if self.pending is not None:
            OPERATIONS["settle"](self)
            return self.storage
        raise self._no_tile()

    def settle_in(self, view: NkiTensor) -> None:
        """Take the storage of `view`, a new tile of this tensor's shape."""
        self.place = view.storage
        self.strides, self.offset, self.pending = view.strides, view.offset, None
        self._view = view

    def _no_tile(self) -> NmmError:
        return fail(
            TensorShapeError,
            f"{self!r} is no tile: dimension {self.par} is its partition dimension and "
            f"{self.par} block dimensions stand before it "
            "(err_failed_to_infer_tile_from_local_tensor); index them",
        )

    def tile_shape(self) -> tuple[int, ...]:
        """Return the shape as a tile: at least two dimensions, partitions first."""
        if self.par:
            raise self._no_tile()
        if self.memory == "hbm":
            return self.shape + (1,) * (2 - len(self.shape))
        return self.shape

    def view(self, dtype: Any) -> Tensor:
        """Return the bits as another dtype."""
        return Tensor.of(self.tile().view(kind_of(dtype)))

    def tile(self, box: Part = True) -> NkiTensor:
        """Return the simulator's view of this tile, or of a box of it: (start, stop) per dimension.

        Raises OutOfBoundsError for what leaves the tensor there.
        """
        if box is True and self._view is not None and not self.outside:
            return self._view
        storage = self.storage
        shape, offset = self.shape, self.offset
        if self.par:
            raise self._no_tile()
        if box is not True and box is not False:
            offset += sum(a * s for (a, _), s in zip(box, self.strides, strict=True))
            shape = tuple(b - a for a, b in box)
        for dim, size, index in self.outside:
            start = index.const
            if box is not True and box is not False:
                start += sum(a * c for (a, _), c in zip(box, index.coeffs, strict=True))
            low, high = Index(shape, start, index.coeffs).bounds()
            if low < 0 or high >= size:
                raise fail(
                    OutOfBoundsError,
                    f"index range [{low}, {high}] of dimension {dim} of tensor {self.name!r}, "
                    f"which has size {size} (err_tensor_access_out_of_bound); pass a mask",
                )
        view = NkiTensor(storage, shape, self.strides, offset, self.kind, self.choice)
        if box is True:
            self._view = view
        return view

    # Indexing

    def __getitem__(self, key: Any) -> Tensor:
        return OPERATIONS["index"](self, key)

    def like(
        self,
        place: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        par: int,
    ) -> Tensor:
        """Return another view of the same tensor."""
        made = Tensor(place, self.memory, self.kind, shape, strides, offset, par)
        made.choice = self.choice
        if shape == self.shape and offset == self.offset:
            made.outside = self.outside
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        OPERATIONS["assign"](self[key], value)

    def same_elements(self, other: Tensor) -> bool:
        """Return whether both are the same elements in the same order."""
        return (
            self.place is other.place
            and self.place is not None
            and self.offset == other.offset
            and self.shape == other.shape
            and self.strides == other.strides
        )

    # Views

    def reshape(self, *sizes: Any, shape: Any = None) -> Tensor:
        """Return the same elements in another shape."""
        given = sizes if shape is None else (shape,)
        wanted = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
        return Tensor.of(self.tile().reshape(tuple(int(s) for s in wanted)))

    def expand_dims(self, axis: Any) -> Tensor:
        """Return a view with dimensions of size 1 at `axis`."""
        view = self.tile()
        for a in sorted(axis) if isinstance(axis, (list, tuple)) else [axis]:
            view = view.expand_dim(a)
        return Tensor.of(view)

    def broadcast_to(self, shape: Any) -> Tensor:
        """Return a view of `shape`; dimensions of size 1 repeat."""
        return OPERATIONS["broadcast"](self, tuple(shape))

    def astype(self, dtype: Any) -> Tensor:
        """Return a copy in another dtype."""
        return OPERATIONS["copy"](self, dtype=dtype)

    def assert_shape(self, shape: Any) -> Tensor:
        """Return the tensor; raise TensorShapeError unless it has `shape`."""
        if tuple(shape) != self.shape:
            raise fail(TensorShapeError, f"{self!r} does not have shape {tuple(shape)}")
        return self

    __hash__ = object.__hash__


def kind_of(dtype: Any) -> DType:
    """Return the dtype that a kernel's argument names."""
    kind = dtypes.find(dtype)
    if kind is None:
        raise fail(TensorDtypeError, f"unknown dtype {dtype!r}; use those of nki.language")
    return kind


def _add_operators() -> None:
    """Give Tensor the operators that are `nki.language` functions."""
    names = {
        "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "power",
        "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift",
        "rshift": "right_shift", "mod": "mod", "lt": "less", "le": "less_equal", "gt": "greater",
        "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
    }  # fmt: skip

    def forward(name: str) -> Any:
        def operator(self: Tensor, other: Any) -> Any:
            if other is None or isinstance(other, str):
                return NotImplemented
            return OPERATIONS[name](self, other)

        return operator

    def backward(name: str) -> Any:
        return lambda self, other: OPERATIONS[name](other, self)

    def inplace(name: str) -> Any:
        return lambda self, other: OPERATIONS["update"](self, name, other)

    def alone(name: str) -> Any:
        return lambda self: OPERATIONS[name](self)

    for python, name in names.items():
        setattr(Tensor, f"__{python}__", forward(name))
        if name not in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
            setattr(Tensor, f"__r{python}__", backward(name))
            setattr(Tensor, f"__i{python}__", inplace(name))
    for python, name in (("neg", "negative"), ("invert", "invert"), ("abs", "abs")):
        setattr(Tensor, f"__{python}__", alone(name))


_add_operators()


def strides_of(shape: tuple[int, ...], par: int) -> tuple[int, ...]:
    """Return strides of a new on-chip tensor: blocks count tiles, partitions count rows."""
    blocks, tile = shape[:par], shape[par:]
    row = math.prod(tile[1:])
    strides = [row]
    for d in range(1, len(tile)):
        strides.append(math.prod(tile[d + 1 :]))
    counts = [math.prod(blocks[d + 1 :]) for d in range(par)]
    return (*counts, *strides)
