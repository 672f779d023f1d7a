"""Tensors of Beta 1: views of the one tensor of the simulator, in the forms of that dialect.

Three things differ. A view is chosen by index expressions (`index.py`), and part of it may lie
outside of its tensor, because a mask leaves that part out. Block dimensions, those before the
partition dimension, count tiles, each allocated alone. And an instruction returns its tile:
`dst[...] = nisa.f(...)` is one instruction that writes dst, `psum[...] += nisa.nc_matmul(...)` one
accumulation. So a result is pending until the kernel's next operation. An assignment becomes its
destination; any other operation gives it a tile of its own first. At most one tile is pending, so
instructions stay in program order. What a mask left unwritten is undefined: reading it is legal.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from nmm_compiler.errors import (
    HazardError,
    OperandError,
    OutOfBoundsError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.beta1.index import (
    Affine,
    Index,
    Mask,
    Part,
    Shape,
    affine,
    bounds,
    box_of,
    common_part,
    common_shape,
    fail,
    full_key,
    mgrid,
    need,
    whole_box,
)
from nmm_compiler.simulator.isa.elementwise import memset, tensor_copy
from nmm_compiler.simulator.isa.operands import same_view
from nmm_compiler.simulator.language.base import ndarray, psum, sbuf
from nmm_compiler.simulator.language.functions import broadcast_to, result_of, stretch
from nmm_compiler.simulator.machine import current, kernel_frame, place_instructions
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.elements import mark, poisoned_values
from nmm_compiler.simulator.tensors.registers import Indirection, whole
from nmm_compiler.simulator.tensors.tensor import NkiTensor, kind_of

Issue = Callable[[NkiTensor], Any]
"""Issues an instruction that writes this view."""


def numpy_dtype(kind: DType) -> Any:
    """Return what `tensor.dtype` is in Beta 1: a NumPy dtype; tfloat32 has none and stays."""
    if kind == "bool":
        return np.dtype(np.bool_)
    return kind if kind == "tfloat32" else kind.numpy


def as_number(value: Any) -> Any:
    """Return a Python or NumPy scalar as a number, else None."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    return value if isinstance(value, (bool, int, float)) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """How to issue the instruction whose result a tile is.

    issue: None for one that updates a destination, which it has to be assigned to
        (nl.loop_reduce). update: what changes the destination in place, for a product what adds to
        it. box: of the result, inside the mask. only: memories that the instruction can write, the
        first unless it is assigned to another one.
    exact: no rounding to the tile's dtype, the destination's dtype alone counts (copies,
        transposes, products).
    """

    shape: Shape
    dtype: DType
    issue: Issue | None
    update: Issue | None
    box: Part
    only: tuple[str, ...]
    exact: bool
    place: tuple[str, int]
    memory = property(lambda self: self.only[0])


@dataclasses.dataclass
class Session:
    """State of one program of a Beta 1 kernel, beside its machine's.

    lent: results that took the tile that they were assigned to, while the kernel holds them; by
        their identity.
    reductions: by storage, the places that nl.loop_reduce has written; None where something was
        written there before it.
    read_only: names of parameters that the kernel may not write, by storage.
    """

    pending: Any = None
    lent: weakref.WeakValueDictionary[int, Tensor] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )
    reductions: dict[int, set[Any] | None] = dataclasses.field(default_factory=dict)
    read_only: dict[int, str] = dataclasses.field(default_factory=dict)

    def flush(self) -> Session:
        """Issue the pending tile, if there is one, into a tile of its own."""
        tile, self.pending = self.pending, None
        if tile is not None:
            pending, region = tile.held, psum if tile.memory == "psum" else sbuf
            with place_instructions(pending.place):
                tile.become(Tensor(ndarray(tile.shape, tile.kind, region)))
                write(tile, pending.box, pending.issue or _not_alone)
        return self


def _not_alone(view: NkiTensor) -> NoReturn:
    raise fail(
        OperandError,
        "nl.loop_reduce updates the tile that it is assigned to; write dst[...] = "
        "nl.loop_reduce(...)",
    )


def session() -> Session:
    """Return the session of the running program."""
    machine = current()
    if machine.dialect is None:
        machine.dialect = Session()
    return machine.dialect


@dataclasses.dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Tensor:
    """A tile, or a tensor in HBM, or a part of one.

    held: its view, or how to issue the instruction that makes it. outside: (dimension, its size,
    index) of each dimension that the view may leave, over the axes of the view. part: what an
    operand mask leaves, `tile[i_f < n]`, which matmuls alone take (NKI API Masking).
    """

    held: Any
    outside: tuple[tuple[int, int, Affine], ...] = ()
    part: Part = None
    par = 0  # block dimensions before the partition dimension

    # Attributes that a kernel may read

    shape = property(attrgetter("held.shape"), doc="The sizes of the dimensions.")
    kind = property(attrgetter("held.dtype"), doc="The dtype as the simulator has it.")
    memory = property(attrgetter("held.memory"), doc='Either "sbuf", "psum" or "hbm".')
    dtype = property(lambda self: numpy_dtype(self.kind), doc="The NumPy dtype.")
    ndim = property(lambda self: len(self.shape), doc="Number of dimensions.")
    itemsize = property(attrgetter("kind.item_bytes"), doc="Bytes of one element.")
    buffer = property(lambda self: self.made().buffer, doc="The memory region.")
    name = property(lambda self: getattr(self.held, "name", self.memory), doc="Its name.")

    def __repr__(self) -> str:
        return f"tensor({self.name!r}, shape={self.shape}, dtype={self.kind}, {self.memory})"

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Any:
        raise fail(OperandError, f"{self!r} is not iterable; index it")

    def __bool__(self) -> bool:
        raise fail(
            UnsupportedInstructionError,
            f"the truth of {self!r} is not known when a kernel is compiled "
            "(err_ambiguous_tensor_truth_value); compare with `is not None`, or use nl.where",
        )

    # The view

    def become(self, other: Tensor) -> None:
        """Be the same tensor as another one from now on."""
        self.held, self.outside = other.held, other.outside

    def separate(self) -> None:
        """Copy a result that has the memory of the tile that it was assigned to.

        `x = nl.exp(a); t[...] = x` is one instruction, and x is t's memory from then on: until one
        of the two is written.
        """
        if session().lent.pop(id(self), None) is not None:
            view, region = self.tile(), psum if self.memory == "psum" else sbuf
            self.become(Tensor(result_of(tensor_copy, view, view, buffer=region)))

    def made(self) -> NkiTensor:
        """Return the simulator's view of this tile; a pending one gets its memory now."""
        if session().pending is self:
            session().flush()
        if not isinstance(self.held, NkiTensor):
            raise fail(
                UnsupportedInstructionError,
                f"{self!r} again after `+=`, which summed it in one instruction, so that it has no "
                "memory; nl.copy it to a tile first, and add that",
            )
        return self.held

    def tile(self, box: Part = None) -> NkiTensor:
        """Return the simulator's view of this tile, or of a box of it.

        Raises OutOfBoundsError for what leaves the tensor there.
        """
        view = self.made()
        for dim, size, index in self.outside:
            low, high = bounds(index, box or whole_box(self.shape))
            need(
                low >= 0 and high < size,
                f"index range [{low}, {high}] of dimension {dim} of tensor {self.name!r}, "
                f"which has size {size} (err_tensor_access_out_of_bound); pass a mask",
                OutOfBoundsError,
            )
        if not box:
            return view
        chosen = view.indirection
        if chosen is not None and chosen.kind == "vector":
            rows = slice(box[0].start, box[0].stop)
            chosen = Indirection("vector", chosen.index[rows], chosen.step)
        starts = (axis.start * step for axis, step in zip(box, view.strides, strict=True))
        dims = tuple(zip(map(len, box), view.strides, strict=True))
        return view.over(dims, view.offset + sum(starts), chosen)

    # Indexing

    def __getitem__(self, key: Any) -> Any:
        """Return the part that a key selects."""
        return self._lending(self._at(key))

    def _lending(self, view: Tensor) -> Tensor:
        """Return a view of this tile; it is lent the memory too, if this one is."""
        lent = session().lent
        if id(self) in lent:
            lent[id(view)] = view
        return view

    def _at(self, key: Any) -> Tensor:
        """Return the part that a key selects: slices and integers, or index expressions."""
        if isinstance(key, (Mask, bool)):
            return self._masked(key)
        rank = len(self.shape)
        keys = full_key(key, rank)
        given = [k for k in keys if k is not None]
        need(len(given) <= rank, f"{len(keys)} indices into {self!r}")
        if any(isinstance(k, (Index, Tensor, Chosen)) for k in keys):
            need(
                not any(k is None or isinstance(k, slice) for k in keys),
                "slices, or too few indices, beside index expressions in an index of "
                f"{self!r} (err_unsupported_mixing_basic_advanced_tensor_indexing); give one "
                "expression for each dimension",
            )
            return self._part(keys)
        if all(k.__class__ is slice and k == slice(None) for k in keys):
            return Tensor(self.made(), self.outside)
        spans = [_span(k, size) for k, size in zip(given, self.shape, strict=True)]
        if self.memory == "hbm" and any(map(_leaves, spans, self.shape)):
            # a mask has to cut it: each slice has an axis of its own
            axes = iter(mgrid[tuple(span for span in spans if isinstance(span, slice))])
            return self._part([next(axes) if isinstance(s, slice) else s for s in spans])
        view, axis = self.tile()[tuple(given)], 0
        for k in keys:
            if k is None:
                view = view.expand_dim(axis)
            rows = axis == 0 and self.memory != "hbm"  # an index of partitions leaves one
            axis += k is None or rows or isinstance(k, slice)
        return Tensor(view)

    def _masked(self, mask: Mask | bool) -> Tensor:
        """Return a tile with an operand mask."""
        need(
            self.memory != "hbm",
            f"a mask as the index of {self!r}; an operand mask is for the tiles of a matmul "
            "(NKI API Masking), pass mask= to the load or store",
            UnsupportedInstructionError,
        )
        left = common_part(self.part, box_of(mask, self.shape))
        return dataclasses.replace(self, held=self.tile(), part=left)

    def _part(self, keys: list[Any]) -> Tensor:
        """Return the view of an affine index per dimension, some with a run-time tile."""
        view = self.tile()  # an index of an index: the first has to be inside
        choice, on_chip = view.indirection, self.memory != "hbm"
        lines: list[np.ndarray] = []
        for dim, key in enumerate(keys):
            if isinstance(key, Tensor):
                key = Chosen(np.zeros((key.shape[0], 1), np.int64), key)
            if isinstance(key, Chosen):
                choice, key = _chosen(self, dim, key.tile, choice), key.base
            if not isinstance(key, np.ndarray):
                key = np.asarray(_number(self, key, dim))
            lines.append(key)
        shape = common_shape(*map(np.shape, lines))
        need(
            len(shape) > 1,
            f"a 1-D nl.arange as index of {self!r} (err_1d_arange_not_supported); add an "
            "axis, nl.arange(n)[:, None], or use a slice",
        )
        forms = [affine(np.broadcast_to(line, shape)) for line in lines]
        starts, (rows, *others) = zip(*forms, strict=True)
        need(
            not on_chip
            or (rows[0] in (0, 1) and not any(rows[1:]) and not any(free[0] for free in others)),
            f"an index of {self!r} whose first axis is not its partitions, in steps of 1; the "
            "first axis of an index has to be the partitions, and only that",
        )
        strides = tuple((np.array(view.strides) @ np.array([rows, *others])).tolist())
        offset = view.offset + int(np.dot(starts, view.strides))
        every = whole_box(shape)
        outside = tuple(
            (dim, size, line)
            for dim, (line, size) in enumerate(zip(forms, view.shape, strict=True))
            if not all(0 <= end < size for end in bounds(line, every))
        )
        if choice is not view.indirection:
            while len(shape) > 2 and shape[-1] == 1:
                shape, strides = shape[:-1], strides[:-1]
        if choice is not None and choice.kind == "vector":
            first_rows = starts[0] == 0 and rows[0] == (shape[0] > 1) and not any(rows[1:])
            need(
                not strides[0] and (first_rows or choice is not view.indirection),
                f"an index of {self!r} with a partition index next to run-time rows, or over rows "
                "that run-time indices chose; index the tile of those instead",
                UnsupportedInstructionError,
            )
        need(
            not on_chip or shape[0] == 1 or strides[0],
            f"one partition of {self!r} for {shape[0]}; broadcast it with .broadcast_to(shape)",
        )
        dims = tuple(zip(shape, strides, strict=True))
        return Tensor(view.over(dims, offset, choice), outside)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.separate()
        assign(self[key], value)

    # Views

    def view(self, dtype: Any) -> Tensor:
        """Return the bits as another dtype."""
        return self._lending(Tensor(self.tile().view(kind_of(dtype))))

    def reshape(self, *sizes: Any, shape: Any = None) -> Tensor:
        """Return the same elements in another shape."""
        view = self.tile().reshape(*(sizes if shape is None else (shape,)))
        return self._lending(Tensor(view))

    def expand_dims(self, axis: Any) -> Tensor:
        """Return a view with dimensions of size 1 at `axis`."""
        view = self.tile()
        for a in sorted(axis) if isinstance(axis, (list, tuple)) else [axis]:
            view = view.expand_dim(a)
        return self._lending(Tensor(view))

    def broadcast_to(self, shape: Any) -> Tensor:
        """Return a view of `shape`; one partition becomes many by a product with ones, or by DMA.

        Free dimensions of size 1 repeat.
        """
        tile, shape = self, tuple(shape)
        if tile.shape == shape:
            return tile
        lead = len(shape) - len(tile.shape)
        if lead > 0 and (tile.memory == "hbm" or tile.shape[0] == 1):
            tile = tile.reshape((1,) * lead + tile.shape)
        return self._lending(Tensor(stretched(tile, shape, "broadcast_to")))

    def assert_shape(self, shape: Any) -> Tensor:
        """Return the tensor; raise OperandError unless it has `shape`."""
        need(tuple(shape) == self.shape, f"{self!r} does not have shape {tuple(shape)}")
        return self

    __array_ufunc__ = None  # operators of NumPy scalars and index expressions leave it to these


class Chosen(NamedTuple):
    """An index, to which the run-time numbers of a tile are added: one, or one for each row."""

    base: np.ndarray
    tile: Tensor


class Blocks(Tensor):
    """A tensor with block dimensions, which count tiles; each has storage of its own.

    tiles: an array of tensors.
    """

    __slots__ = ("tiles",)
    par = property(lambda self: self.tiles.ndim)
    shape = property(lambda self: (*self.tiles.shape, *self.held.shape))

    def __init__(self, tiles: np.ndarray) -> None:
        super().__init__(tiles.flat[0].held)
        self.tiles = tiles

    def made(self) -> NkiTensor:
        """Refuse the use of several tiles as one."""
        raise fail(
            OperandError,
            f"{self!r} is no tile: dimension {self.par} is its partition dimension and "
            f"{self.par} block dimensions stand before it "
            "(err_failed_to_infer_tile_from_local_tensor); index them",
        )

    def __getitem__(self, key: Any) -> Tensor:
        """Return the tile that integers choose, or a part of it, or the tensor of fewer blocks."""
        keys = full_key(key, len(self.shape))
        chosen, rest = keys[: self.par], tuple(keys[self.par :])
        found = self.tiles[tuple(self._block(d, k) for d, k in enumerate(chosen))]
        if isinstance(found, Tensor):
            return found[rest]
        need(
            all(isinstance(k, slice) and k == slice(None) for k in rest),
            f"a part of several blocks of {self!r} at once; choose one block with an integer",
            UnsupportedInstructionError,
        )
        return Blocks(found)

    def _block(self, dim: int, key: Any) -> int | slice:
        need(
            not isinstance(key, Tensor) and not (isinstance(key, Index) and any(affine(key)[1])),
            f"index {key!r} over block dimension {dim} of {self!r}; blocks are tiles of their "
            "own, choose one with an integer or a loop variable",
            UnsupportedInstructionError,
        )
        span, size = _span(key, self.shape[dim]), self.shape[dim]
        if not isinstance(span, slice):
            return _number(self, span, dim)
        inside = not _leaves(span, size) and range(size)[span]
        need(inside, f"{key} of block dimension {dim} of {self!r} leaves it", OutOfBoundsError)
        return span


def _span(key: Any, size: int) -> Any:
    """Return a slice with its ends; what is no slice as it is."""
    if isinstance(key, slice):
        return slice(key.start or 0, size if key.stop is None else key.stop, key.step)
    return key


def _leaves(span: Any, size: int) -> bool:
    return isinstance(span, slice) and span.stop > size


def _number(tensor: Tensor, key: Any, dim: int) -> int:
    """Return an integer index of a dimension; a negative one counts from the end."""
    if isinstance(key, Index) and not any(affine(key)[1]):
        key = key.flat[0]
    number, size = whole(key), tensor.shape[dim]
    if number is None:
        raise fail(
            OperandError,
            f"index {key!r} ({type(key).__name__}) into {tensor!r}; use integers, slices, nl.ds, "
            "or expressions of nl.arange and nl.mgrid",
        )
    need(
        -size <= number < size,
        f"index {number} of dimension {dim} of tensor {tensor.name!r} {tensor.shape} "
        "(err_tensor_access_out_of_bound)",
        OutOfBoundsError,
    )
    return int(number % size)


def _chosen(tensor: Tensor, dim: int, tile: Tensor, before: Indirection | None) -> Indirection:
    """Return the indirection of run-time indices: one for the whole view, or one per partition."""
    one = math.prod(tile.shape) == 1
    need(
        before is None and (tensor.memory == "hbm" or (dim > 0 and one)),
        f"run-time indices in two dimensions of {tensor!r}, or in {tensor.memory.upper()} over "
        "partitions or many of them (err_copy_dynamic_indirect_indices_not_natively_supported)",
        UnsupportedInstructionError,
    )
    index, step = tile.tile(), tensor.tile().strides[dim]
    if one:
        return Indirection("scalar", index, step)
    need(
        index.memory == "sbuf" and index.free_size == 1,
        f"run-time indices {tile!r}; they must be an SBUF tile of one index per partition "
        "(err_indirect_indices_free_dim)",
        UnsupportedInstructionError,
    )
    return Indirection("vector", index, step)


# Results and their destinations


def result(
    shape: Shape,
    kind: DType,
    issue: Issue | None,
    box: Part = None,
    *,
    only: tuple[str, ...] = ("sbuf", "psum"),
    exact: bool = False,
    update: Issue | None = None,
) -> Tensor:
    """Issue the pending tile; return a new pending tile of a shape and a dtype.

    box: the part of it that is written.
    """
    now = session().flush()
    now.pending = Tensor(Pending(shape, kind, issue, update, box, only, exact, kernel_frame()))
    return now.pending


def written(dst: Tensor, box: Part = None) -> NkiTensor:
    """Return the view of a destination, and note that it is written."""
    now = session()
    dst.separate()
    view = dst.tile(box)
    name = now.read_only.get(view.storage.identity)
    need(
        name is None,
        f"parameter {name!r} is written (err_cannot_update_immutable_parameter); annotate it "
        "as nt.mutable_tensor and return it, or write to an nl.shared_hbm tensor",
    )
    for tile in list(now.lent.values()):
        if tile.tile().storage is view.storage:
            tile.separate()
    return view


def write(dst: Tensor, box: Part, issue: Issue) -> None:
    """Issue what writes a box of dst; what it leaves out of dst on chip stays undefined."""
    if box != ():
        issue(written(dst, box))
    if box is None or dst.memory == "hbm" or dst.outside:
        return
    view = dst.tile()
    missing = view.missing()
    if missing is not None:
        view.array()[...] = poisoned_values(view, view.array(), missing)
        mark(view, False)


def assign(dst: Tensor, value: Any) -> None:
    """Do `dst = value` for a part of a tensor."""
    now = session()
    if isinstance(value, Tensor) and same_view(dst.held, value.held):
        return  # what `a[i] += b` ends with: the sum is there
    need(
        dst.memory != "hbm",
        f"assignment to {dst!r} in HBM (err_unsupported_memory); use nl.store(dst, value)",
    )
    if not isinstance(value, Tensor):
        number = as_number(value)
        need(
            number is not None,
            f"assignment of {type(value).__name__} to a part of {dst!r}; assign a tile or a number",
        )
        constant = in_kind(number, dst.kind)
        value = result(dst.shape, dst.kind, lambda tile: memset(tile, constant))
    assert isinstance(value, Tensor)
    pending = value.held if now.pending is value else None
    if pending is not None and _fits(dst, value, pending):
        now.pending = None
        try:
            with place_instructions(pending.place):
                write(dst, pending.box, pending.issue or pending.update)
        except HazardError:  # dst overlaps what the instruction reads: through a tile of its own
            now.pending = value
        else:
            value.become(dst)
            now.lent[id(value)] = value
            return
    now.flush()
    need(
        value.memory != "hbm",
        f"assignment of {value!r} in HBM (err_unsupported_memory); use nl.load first",
    )
    box: Part = None
    if pending is not None and (value.shape == dst.shape or pending.box == ()):
        box = pending.box
    write(
        dst, box,
        lambda view: tensor_copy(view, stretched(value, dst.shape, "assignment", box)),
    )  # fmt: skip


def in_kind(number: Any, kind: DType) -> Any:
    """Return a number as a constant of a dtype."""
    return number if kind.kind == "float" else int(number)


def _fits(dst: Tensor, value: Tensor, pending: Pending) -> bool:
    """Return whether the instruction can write dst itself, with the same values."""
    reached = dst.memory in pending.only and not dst.par
    whole = pending.box is None and alike(dst.shape, value.shape)
    wider = value.kind == "float32" and dst.kind.kind == "float"
    same = pending.exact or dst.kind == value.kind or wider
    return reached and same and (whole or dst.shape == value.shape)


def alike(a: Shape, b: Shape) -> bool:
    """Return whether two shapes differ only by free dimensions of size 1."""
    return a[0] == b[0] and [s for s in a[1:] if s != 1] == [s for s in b[1:] if s != 1]


def stretched(tile: Tensor, shape: Shape, what: str, box: Part = None) -> NkiTensor:
    """Return the operand as a view of `shape`, cut to `box`; dimensions of size 1 repeat."""
    if tile.shape == shape:
        return tile.tile(box)
    view = tile.tile()
    if len(view.shape) != len(shape) and alike(view.shape, shape):
        view = view.reshape(shape)
    need_broadcast(
        len(view.shape) == len(shape)
        and all(have in (1, want) for have, want in zip(view.shape, shape, strict=True)),
        tile, shape, what,
    )  # fmt: skip
    if view.shape[0] != shape[0] and tile.memory != "hbm":
        session().flush()
        view = broadcast_to(view, (shape[0], *view.shape[1:]))
    return Tensor(stretch(what, view, shape)).tile(box)


def need_broadcast(fits: bool, tile: Tensor, shape: Shape, what: str) -> None:
    """Refuse a tile that does not broadcast to `shape`."""
    apart = tile.shape[0] != shape[0] and " (err_num_partition_mismatch)"
    need(fits, f"{what}: {tile!r} does not broadcast to {shape}{apart or ''}")
