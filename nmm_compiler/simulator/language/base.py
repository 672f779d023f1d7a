"""`nki.language`: memory regions, tensor creation, ranges, programs, hardware constants."""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import math
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from nmm_compiler.errors import KernelArgumentError, OperandError, OutOfBoundsError
from nmm_compiler.simulator.isa.dma import dma_copy
from nmm_compiler.simulator.isa.elementwise import tensor_copy
from nmm_compiler.simulator.machine import CURRENT, Machine, current, kernel_frame
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.memory import Storage, check_allocation
from nmm_compiler.simulator.tensors.registers import whole
from nmm_compiler.simulator.tensors.tensor import NkiTensor, kind_of, make_tensor
from nmm_compiler.targets import Target, get

Function = TypeVar("Function", bound=Callable[..., Any])
NAMES: dict[str, Any] = {}
"""The names of the stand-in `nki.language`; `functions.py` completes them."""


def exported(function: Function) -> Function:
    """Enter a function or a class under its name."""
    NAMES[function.__name__] = function
    return function


def program_constant(key: Any, make: Callable[[], NkiTensor]) -> NkiTensor:
    """Return a constant of the whole program, made where it is first asked for."""
    machine = current()
    if key not in machine.identities:
        turn, machine.turn = machine.turn, None  # no part of a loop on the device
        machine.identities[key] = make()
        machine.turn = turn
    return machine.identities[key]


@exported
class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm


def _test_of_regions(name: str, *regions: MemoryRegion) -> Callable[[Any], bool]:
    """Enter a function that says whether a buffer is one of some regions."""

    def test(buffer: Any) -> bool:
        return buffer in regions

    test.__name__ = test.__qualname__ = name
    return exported(test)


is_hbm = _test_of_regions("is_hbm", private_hbm, shared_hbm)
for _name, _regions in {"is_on_chip": (sbuf, psum), "is_psum": (psum,), "is_sbuf": (sbuf,)}.items():
    _test_of_regions(_name, *_regions)


class TileSize:
    """`nl.tile_size`: constants of the target the kernel runs on (trn2 outside a run)."""

    def __getattr__(self, name: str) -> int:
        """Return a constant."""
        if name not in TILE_SIZES:
            raise AttributeError(name)
        size, machine = TILE_SIZES[name], CURRENT.machine
        if isinstance(size, int):
            return size
        return size(machine.target if machine is not None else get("trn2"))


TILE_SIZES: dict[str, int | Callable[[Target], int]] = {
    "pmax": 128,
    "psum_bank_fmax": 512,
    "psum_fmax": 512,
    "psum_bank_fmax_bytes": 2048,
    "gemm_stationary_fmax": 128,
    "gemm_moving_fmax": 512,
    "bn_stats_fmax": 512,
    "psum_min_align": 4,
    "sbuf_min_align": 1,
    "psum_num_banks": lambda target: target.psum_banks,
    "sbuf_size_bytes": lambda target: target.partitions * target.sbuf_bytes_per_partition,
    "sbuf_fmax_bytes": lambda target: target.sbuf_usable_bytes_per_partition,
    "total_available_sbuf_size": lambda target: target.sbuf_usable_bytes_per_partition,
    "sbuf_fmax": lambda target: target.sbuf_usable_bytes_per_partition // 4,
}
tile_size = TileSize()


@exported
def ndarray(
    shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "", address: Any = None
) -> NkiTensor:
    """Allocate a tensor; its contents are undefined until written."""
    machine = current()
    kind = dtype if dtype.__class__ is DType else kind_of(dtype)
    buffer = sbuf if buffer is None else buffer
    if buffer.__class__ is not MemoryRegion:
        raise machine.error(
            KernelArgumentError,
            f"buffer {buffer!r}; use nl.sbuf, nl.psum, nl.hbm, nl.private_hbm or nl.shared_hbm",
        )
    # no dictionary: hashing a member of an Enum runs Python code
    memory = "sbuf" if buffer is sbuf else "psum" if buffer is psum else "hbm"
    if shape.__class__ is not tuple or {*map(type, shape)} - {int} or min(shape, default=1) < 1:
        shape = sizes_of(name, shape)
    shape += (1,) * (1 + (memory != "hbm") - len(shape))
    address = None if address is None else tuple(map(int, address))
    place = kernel_frame()
    if not name:
        if place not in machine.names:
            # of `tile = nl.ndarray(...)` "tile", of `tiles[i] = ...`, `tiles.append(...)` "tiles"
            found = _ASSIGNED.match(linecache.getline(*place))
            machine.names[place] = found[1] if found else ""
        name = machine.names[place] or memory
    if buffer is shared_hbm:
        return machine.programs.shared(machine, name, shape, kind, buffer)
    storage = Storage(machine, name, buffer, memory, shape, kind, address, line=place[1])
    if memory != "hbm":
        check_allocation(machine, storage)
    return make_tensor(storage)


_ASSIGNED = re.compile(r"\s*([\w.]+)(?:\[.*\])?(?:\s*:[^=]+)?(?:\s*=[^=]|\.append\()")


def sizes_of(name: str, shape: Any) -> tuple[int, ...]:
    """Return the sizes of a shape, or of its only dimension, as integers of at least 1."""
    given = tuple(shape) if np.iterable(shape) else (shape,)
    machine, sizes = current(), [0 if size is None else size for size in map(whole, given)]
    for value in given:
        machine.need(
            whole(value) is not None,
            f"size {value!r} ({type(value).__name__}) in a shape; use an int",
            OperandError,
        )
    machine.need(
        min(sizes, default=1) > 0,
        f"tensor {name!r} of shape {given}; every size must be at least 1",
        OperandError,
    )
    return tuple(sizes)


@exported
def shared_constant(constant: Any) -> NkiTensor:
    """Return a tensor in shared HBM with constant data (an array or a .npy path)."""
    machine = current()
    array = np.load(constant, allow_pickle=False) if isinstance(constant, str) \
        else np.asarray(constant)  # fmt: skip
    kind = kind_of(array.dtype)
    machine.note("nl.shared_constant", array)
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
    machine.programs.agree(machine, "nl.shared_constant", (array.shape, kind, content))
    return _constant(machine, "constant", array, kind)


def _constant(machine: Machine, name: str, array: np.ndarray, kind: DType) -> NkiTensor:
    """Return a tensor in HBM that nobody writes."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy() if machine.data else None
    storage = Storage(machine, name, shared_hbm, "hbm", array.shape or (1,), kind, None, raw)
    storage.constant = True
    return make_tensor(storage)


@exported
def ds(start: Any, size: Any) -> slice:
    """Return a slice of `size` elements from `start`, which may be a register."""
    count = size if size.__class__ is int else whole(size)
    if count is None or count < 0 or (start.__class__ is int and start < 0):
        raise OutOfBoundsError(
            f"nl.ds({start!r}, {size!r}) is empty or leaves its tensor; start at 0 or above, and "
            "pass a size that is known when the kernel is compiled",
            *kernel_frame(),
        )
    return slice(start, start + count)


@exported
def affine_range(start: Any, stop: Any = None, step: int = 1) -> range:
    """Return range(start, stop, step); the compiler unrolls the loop."""
    return range(start) if stop is None else range(start, stop, step)


sequential_range = static_range = affine_range


@exported
@contextlib.contextmanager
def no_reorder() -> Iterator[None]:
    """Keep program order inside the block."""
    machine = current()
    start = len(machine.instructions)
    machine.no_reorder_depth += 1
    try:
        yield
    finally:
        machine.no_reorder_depth -= 1
        if not machine.no_reorder_depth:
            machine.trace.ordered.append((start, len(machine.instructions)))


@exported
def program_id(axis: int = 0) -> int:
    """Return the index of this program along an axis of the launch grid."""
    return dict(enumerate(current().program)).get(axis, 0)


@exported
def num_programs(axes: Any = 0) -> int:
    """Return the number of programs along axes of the launch grid; of all for None."""
    launch = current().launch
    chosen = range(len(launch)) if axes is None else np.atleast_1d(axes)
    return math.prod(launch[axis] for axis in chosen if axis < len(launch))


@exported
def program_ndim() -> int:
    """Return the number of dimensions of the launch grid: 0 without one."""
    return len(current().launch)


@exported
def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print a tensor's values at this point of the run."""
    machine = current()
    machine.note("nl.device_print", print_prefix, tensor)
    if machine.data:
        print(print_prefix, tensor.array() if tensor.indirection is None else tensor)


def identity(machine: Machine, n: int, kind: DType) -> NkiTensor:
    """Return a constant [n, n] identity matrix in HBM."""
    return _constant(machine, "identity", np.eye(n, dtype=np.float32).astype(kind.numpy), kind)


@exported
def shared_identity_matrix(
    n: int, dtype: Any = dtypes.uint8, dst: NkiTensor | None = None
) -> NkiTensor:
    """Return an [n, n] identity matrix in SBUF; one per size and dtype is shared."""
    kind = kind_of(dtype)

    def make() -> NkiTensor:
        made = ndarray((n, n), kind, sbuf, f"identity_{kind}_{n}")
        dma_copy(made, identity(current(), n, kind))
        made.storage.constant = True
        return make_tensor(made.storage)

    shared = program_constant((n, str(kind)), make)
    if dst is None:
        return shared
    tensor_copy(dst, shared)
    return dst
