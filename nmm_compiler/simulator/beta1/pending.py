"""Tiles that instructions return: each is issued once, with its assignment as destination.

`dst[...] = nisa.f(...)` is one instruction that writes dst, `psum[...] += nisa.nc_matmul(...)` one
accumulation. So the result of an instruction is pending until the kernel's next operation. An
assignment becomes its destination; any other operation gives it a tile of its own first. At most
one tile is pending, so instructions stay in program order. The masked-out part of an unwritten tile
holds undefined values: reading them is legal, they are NaN.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from nmm_compiler.errors import EngineRuleError, HazardError, TensorShapeError
from nmm_compiler.simulator.beta1.index import Part
from nmm_compiler.simulator.beta1.tensor import OPERATIONS, Tensor, fail
from nmm_compiler.simulator.isa.elementwise import memset, tensor_copy
from nmm_compiler.simulator.language.base import ndarray, psum, sbuf
from nmm_compiler.simulator.machine import Machine, current, kernel_frame, place_instructions
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.tensor import NkiTensor


@dataclasses.dataclass(slots=True)
class Pending:
    """How to issue the instruction whose result a tile is.

    issue: takes the simulator's view of the destination, cut to `box`.
    box: the part inside the mask; True for all of it, False for nothing.
    only: memories that the instruction can write. exact: no rounding to the tile's dtype, the
        destination's dtype alone counts (copies, transposes, products).
    accumulate: adds into PSUM, for a product. updates: reads its destination as well, so that it
        has to be assigned to one (nl.loop_reduce).
    """

    issue: Callable[[NkiTensor], Any]
    box: Part
    only: tuple[str, ...]
    exact: bool
    place: tuple[str, int]
    accumulate: Callable[[NkiTensor], Any] | None = None
    updates: bool = False


class Session:
    """State of one program of a Beta 1 kernel, beside the machine's.

    zeroed: PSUM tensors of nl.zeros by storage, with the elements per partition that something has
        written: the first product overwrites, so zeros are written only where something reads them.
    lent: results that took the tile that they were assigned to, while the kernel holds them.
    reductions: places that nl.loop_reduce has written.
    spills: live tiles beyond a memory are no error: "the Neuron compiler inserts the necessary
        spills or refills" (NKI programming model, SDK 2.26).
    program, grid: this program's place in the launch grid.
    """

    spills = True

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.trace.beta_1 = True
        self.pending: Tensor | None = None
        self.zeroed: dict[int, np.ndarray] = {}
        self.program: tuple[int, ...] = ()
        self.grid: tuple[int, ...] = ()
        self.shared: list[Tensor] = []
        self.shared_count = 0
        self.lent: list[weakref.ref[Tensor]] = []
        self.reductions: set[tuple[int, int, tuple[int, ...]]] = set()
        self.read_only: dict[int, str] = {}

    def flush(self) -> None:
        """Issue the pending tile, if there is one, into a tile of its own."""
        tile = self.pending
        if tile is not None:
            settle(tile)


def session() -> Session:
    """Return the session of the running program."""
    machine = current()
    found = machine.dialect
    if found is None:
        found = machine.dialect = Session(machine)
    return found


def result(
    shape: tuple[int, ...],
    kind: DType,
    issue: Callable[[NkiTensor], Any],
    *,
    box: Part = True,
    only: tuple[str, ...] = ("sbuf", "psum"),
    exact: bool = False,
    accumulate: Callable[[NkiTensor], Any] | None = None,
) -> Tensor:
    """Issue the pending tile; return a new pending tile."""
    now = session()
    now.flush()
    tile = Tensor(None, only[0], kind, shape, (0,) * len(shape))
    tile.pending = Pending(issue, box, only, exact, kernel_frame(), accumulate)
    now.pending = tile
    return tile


def settle(tile: Tensor) -> None:
    """Issue a pending tile into new storage."""
    now = session()
    pending = tile.pending
    if pending is None:
        return
    if now.pending is tile:
        now.pending = None
    with place_instructions(now.machine, pending.place):
        if pending.updates:
            raise fail(
                TensorShapeError,
                "nl.loop_reduce updates the tile that it is assigned to; write dst[...] = "
                "nl.loop_reduce(...)",
            )
        region = psum if pending.only[0] == "psum" else sbuf
        tile.settle_in(ndarray(tile.shape, tile.kind, region))
        _issue(pending, tile, pending.issue)


def _issue(pending: Pending, dst: Tensor, issue: Callable[[NkiTensor], Any]) -> None:
    if pending.box is not False:
        view = written(dst, pending.box)
        issue(view)
    if pending.box is not True and dst.memory != "hbm":
        leave_undefined(dst)


def leave_undefined(dst: Tensor) -> None:
    """Let unwritten elements of dst hold undefined values: NaN, or 4 in integers."""
    storage = dst.storage
    if storage.unwritten is None or dst.outside:
        return
    view = dst.tile()
    missing = view.unwritten_view()
    if missing is not None and missing.any():
        open_places = missing.any(axis=-1) if missing.ndim > len(view.shape) else missing
        view.array()[open_places] = np.nan if dst.kind.kind == "float" else 4
        view.mark_written()


# Zeros in PSUM


def _columns(view: NkiTensor) -> np.ndarray:
    """Return the element positions per partition that a PSUM view covers."""
    row = view.storage.bytes_per_partition // view.dtype.item_bytes
    at = np.asarray(view.offset % row)
    for size, stride in zip(view.shape[1:], view.strides[1:], strict=True):
        at = at[..., None] + np.arange(size) * stride
    return at.reshape(-1)


def written(dst: Tensor, box: Part = True) -> NkiTensor:
    """Return the view of a destination, and note that it is written."""
    if dst.memory == "hbm":
        check_mutable(dst)
    view = dst.tile(box)
    if session().lent:
        _move_out(dst)
    if dst.memory == "psum":
        covered = session().zeroed.get(view.storage.identity)
        if covered is not None:
            covered[_columns(view)] = True
            if covered.all():
                del session().zeroed[view.storage.identity]
    return view


def _move_out(dst: Tensor) -> None:
    """Copy results that live in dst, and that the kernel still holds, to tiles of their own.

    `x = nl.exp(a); t[...] = x` is one instruction, and x is t's memory from then on: until
    something else is written there.
    """
    now = session()
    held = [tile for tile in (ref() for ref in now.lent) if tile is not None]
    now.lent = []
    for tile in held:
        if tile is not dst and tile.place is dst.place:
            copied = ndarray(tile.shape, tile.kind, psum if tile.memory == "psum" else sbuf)
            tensor_copy(copied, tile.tile())
            tile.outside, tile.par = (), 0
            tile.settle_in(copied)
        elif tile is not dst:
            now.lent.append(weakref.ref(tile))


def read(source: Tensor, box: Part = True) -> NkiTensor:
    """Return the view of an operand; zeros in PSUM that nothing has written are written now."""
    view = source.tile(box)
    if view.storage.memory == "psum":
        covered = session().zeroed.get(view.storage.identity)
        if covered is not None:
            _write_zeros(source, view, covered)
    return view


def _write_zeros(source: Tensor, view: NkiTensor, covered: np.ndarray) -> None:
    missing = np.unique(_columns(view)[~covered[_columns(view)]])
    if not missing.size:
        return
    row = view.storage.bytes_per_partition // view.dtype.item_bytes
    for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
        start, count = int(run[0]), len(run)
        partition = view.offset // row
        memset(
            NkiTensor(
                view.storage, (view.shape[0], count), (row, 1), partition * row + start, view.dtype
            ),
            0,
        )
        covered[run] = True


def check_mutable(dst: Tensor) -> None:
    """Refuse a write to a kernel parameter that is not annotated as mutable."""
    name = session().read_only.get(dst.storage.identity)
    if name is not None:
        raise fail(
            EngineRuleError,
            f"parameter {name!r} is written (err_cannot_update_immutable_parameter); annotate it "
            "as nt.mutable_tensor and return it, or write to an nl.shared_hbm tensor",
        )


# Assignment


def assign(dst: Tensor, value: Any) -> None:
    """Do `dst = value` for a part of a tensor."""
    if isinstance(value, Tensor):
        _assign_tile(dst, value)
        return
    number = as_number(value)
    if number is None:
        raise fail(
            TensorShapeError,
            f"assignment of {type(value).__name__} to a part of {dst!r}; assign a tile or a number",
        )
    now = session()
    now.flush()
    _on_chip(dst)
    memset(written(dst), int(number) if dst.kind.kind != "float" else number)


def _assign_tile(dst: Tensor, value: Tensor) -> None:
    now = session()
    if dst.same_elements(value):
        return  # what `a[i] += b` ends with: the sum is there
    pending = value.pending
    if pending is not None and now.pending is value and _fits(dst, value, pending):
        _on_chip(dst)
        now.pending = None
        try:
            with place_instructions(now.machine, pending.place):
                _issue(pending, dst, pending.issue)
        except HazardError:  # dst overlaps what the instruction reads: through a tile of its own
            now.pending = value
        else:
            value.pending = None
            value.place, value.memory, value.par = dst.place, dst.memory, dst.par
            value.shape, value.strides, value.offset = dst.shape, dst.strides, dst.offset
            value.kind, value.outside = dst.kind, dst.outside
            now.lent.append(weakref.ref(value))
            return
    now.flush()
    _on_chip(dst)
    box: Part = True
    if pending is not None and pending.box is not True:
        box = pending.box
        if box is False:
            leave_undefined(dst)
            return
    if value.memory == "hbm":
        raise fail(
            EngineRuleError,
            f"assignment of {value!r} in HBM (err_unsupported_memory); use nl.load first",
        )
    if box is not True and value.shape != dst.shape:
        box = True
    source = stretched(value, dst.shape, "assignment", box)
    tensor_copy(written(dst, box), source)
    if box is not True:
        leave_undefined(dst)


def _on_chip(dst: Tensor) -> None:
    if dst.memory == "hbm":
        raise fail(
            EngineRuleError,
            f"assignment to {dst!r} in HBM (err_unsupported_memory); use nl.store(dst, value)",
        )


def _fits(dst: Tensor, value: Tensor, pending: Pending) -> bool:
    """Return whether the instruction can write dst itself, with the same values."""
    if dst.memory not in pending.only or dst.par:
        return False
    if dst.shape != value.shape:
        whole = pending.box is True and dst.shape[0] == value.shape[0]
        if not whole or _free(dst.shape) != _free(value.shape):
            return False
    if pending.exact or dst.kind == value.kind:
        return True
    floats = dst.kind.kind == value.kind.kind == "float"
    return floats and value.kind == "float32"


def _free(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(s for s in shape[1:] if s != 1)


def as_number(value: Any) -> Any:
    """Return a Python or NumPy scalar as a number, else None."""
    if isinstance(value, (bool, int, float, np.generic)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return None


def stretched(tile: Tensor, shape: tuple[int, ...], what: str, box: Part = True) -> NkiTensor:
    """Return the operand as a view of `shape`, cut to `box`; free dimensions of size 1 repeat."""
    if tile.shape == shape:
        return read(tile, box)
    view = read(tile)
    if len(view.shape) != len(shape):
        if view.shape[0] == shape[0] and _free(view.shape) == _free(shape):
            view = view.reshape(shape)
        else:
            raise no_broadcast(tile, shape, what)
    strides = list(view.strides)
    for d, (have, want) in enumerate(zip(view.shape, shape, strict=True)):
        if have != want:
            if have != 1:
                raise no_broadcast(tile, shape, what)
            if d == 0:
                spread = OPERATIONS["broadcast"](tile, (want, *tile.shape[1:]))
                return stretched(spread, shape, what, box)
            strides[d] = 0
    offset = view.offset
    if box is not True and box is not False:
        offset += sum(a * s for (a, _), s in zip(box, strides, strict=True))
        shape = tuple(b - a for a, b in box)
    return NkiTensor(view.storage, shape, tuple(strides), offset, view.dtype, view.indirection)


def no_broadcast(tile: Tensor, shape: tuple[int, ...], what: str) -> Any:
    """Return the error for a tile that does not broadcast to `shape`."""
    return fail(TensorShapeError, f"{what}: {tile!r} does not broadcast to {shape}")


@contextmanager
def nothing_pending() -> Iterator[Session]:
    """Issue the pending tile, then run instructions that have a destination."""
    now = session()
    now.flush()
    yield now


OPERATIONS["settle"] = settle
OPERATIONS["assign"] = assign
