"""Tensors of Beta 1: `nl.ndarray`, `nl.zeros`, constants; partitions in any dimension, blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import (
    EngineRuleError,
    ProgramsDisagreeError,
    TensorShapeError,
    UnsupportedInstructionError,
)
from nmm_compiler.simulator.beta1.index import box_of
from nmm_compiler.simulator.beta1.operands import ISSUE, in_sbuf, tensor
from nmm_compiler.simulator.beta1.pending import (
    as_number,
    nothing_pending,
    read,
    session,
)
from nmm_compiler.simulator.beta1.tensor import (
    Blocks,
    Tensor,
    fail,
    kind_of,
    strides_of,
)
from nmm_compiler.simulator.language import base
from nmm_compiler.simulator.language import random_numbers as current_random
from nmm_compiler.simulator.language.base import (
    MemoryRegion,
    sbuf,
    shared_hbm,
    tile_size,
)
from nmm_compiler.simulator.tensors.dtypes import DType
from nmm_compiler.simulator.tensors.memory import Storage
from nmm_compiler.simulator.tensors.tensor import NkiTensor


class par_dim(int):  # noqa: N801  (the name NKI gives it)
    """The size of a partition dimension."""

    def __new__(cls, size: Any) -> par_dim:
        """Return the size marked as that of the partition dimension."""
        return super().__new__(cls, int(size))


class Allocator:
    """Where the tiles of a tensor go: `ncc.sbuf.alloc(f)`, `ncc.psum.mod_alloc(...)` and so on.

    place: takes (block index, partitions, bytes per partition), returns (partition, byte).
    """

    def __init__(self, region: MemoryRegion, place: Callable[..., tuple[int, int]]) -> None:
        self.region = region
        self.place = place


# Creation


def _shape(shape: Any) -> tuple[tuple[int, ...], int]:
    """Return (sizes, position of the partition dimension)."""
    given = tuple(shape) if not isinstance(shape, (int, np.integer)) else (shape,)
    marked = [d for d, size in enumerate(given) if isinstance(size, par_dim)]
    if len(marked) > 1:
        raise fail(TensorShapeError, f"shape {given} has {len(marked)} partition dimensions")
    sizes = []
    for size in given:
        number = as_number(size)
        if number is None or number != int(number) or number < 1:
            raise fail(TensorShapeError, f"size {size!r} in shape {given}; use positive integers")
        sizes.append(int(number))
    return tuple(sizes), marked[0] if marked else 0


def _new(
    shape: Any, dtype: Any, buffer: Any, name: str, fill: Callable[[NkiTensor], None] | None
) -> Tensor:
    kind = kind_of(dtype)
    sizes, par = _shape(shape)
    allocator = buffer if isinstance(buffer, Allocator) else None
    region = allocator.region if allocator else sbuf if buffer is None else buffer
    if not isinstance(region, MemoryRegion):
        raise fail(
            UnsupportedInstructionError,
            f"buffer={buffer!r}; use nl.sbuf, nl.psum, nl.hbm, nl.private_hbm or nl.shared_hbm",
        )
    session().flush()
    if base.is_hbm(region):
        return _new_hbm(sizes, kind, region, name)
    if len(sizes) - par < 2:
        sizes = (*sizes, 1)
    tile = sizes[par:]
    if tile[0] > tile_size.pmax:
        raise fail(
            TensorShapeError,
            f"tensor {name!r} {sizes} has {tile[0]} partitions, the memory has {tile_size.pmax} "
            "(err_num_partition_exceed_arch_limit); tile it, or mark the partition dimension with "
            "nl.par_dim",
        )
    per_partition = math.prod(tile[1:]) * kind.item_bytes

    def make(number: int) -> Storage:
        address = None
        if allocator is not None:
            index = tuple(int(i) for i in np.unravel_index(number, sizes[:par])) if par else ()
            address = allocator.place(index, tile[0], per_partition)
        made = base.ndarray((tile[0], math.prod(tile[1:])), kind, region, name, address)
        if fill is not None:
            fill(made)
        return made.storage

    strides = strides_of(sizes, par)
    if not par:
        return Tensor(make(0), region.value, kind, sizes, strides)
    blocks = Blocks(make)
    if fill is not None:
        for number in range(math.prod(sizes[:par])):
            blocks.get(number)
    return Tensor(blocks, region.value, kind, sizes, strides, 0, par)


def _new_hbm(sizes: tuple[int, ...], kind: DType, region: MemoryRegion, name: str) -> Tensor:
    now = session()
    if region is not shared_hbm or len(now.shared) <= now.shared_count:
        made = Tensor.of(base.ndarray(sizes, kind, region, name))
        if region is shared_hbm:
            now.shared.append(made)
            now.shared_count += 1
        return made
    known = now.shared[now.shared_count]
    now.shared_count += 1
    if (known.shape, known.kind) != (sizes, kind):
        raise fail(
            ProgramsDisagreeError,
            f"program {now.program} allocates nl.shared_hbm tensor {now.shared_count} as {sizes} "
            f"{kind}, an earlier program as {known.shape} {known.kind}",
        )
    return known


def ndarray(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **more: Any) -> Tensor:
    """Return a new tensor; its contents are undefined until written."""
    _known(more)
    return _new(shape, dtype, buffer, name, None)


def _known(more: dict[str, Any]) -> None:
    for key in more:
        if key not in ("lazy_initialization", "init_value"):
            raise fail(UnsupportedInstructionError, f"keyword {key!r} of a tensor; leave it out")


def full(
    shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = None, name: str = "", **more: Any
) -> Tensor:
    """Return a new tensor on chip that is filled with a number."""
    _known(more)
    region = buffer.region if isinstance(buffer, Allocator) else buffer
    if region is not None and base.is_hbm(region):
        raise fail(
            EngineRuleError,
            "a tensor in HBM with an initial value (err_hbm_tensor_with_init_value_not_supported); "
            "make it with nl.ndarray and nl.store the value",
        )
    value = as_number(fill_value)
    if value is None:
        raise fail(TensorShapeError, f"fill_value {fill_value!r}; pass a number")

    def fill(tile: NkiTensor) -> None:
        if tile.memory == "psum" and value == 0:
            _leave_zero(tile)
        else:
            ISSUE["memset"](tile, int(value) if tile.dtype.kind != "float" else value)

    return _new(shape, dtype, buffer, name, fill)


def _leave_zero(tile: NkiTensor) -> None:
    """Let a PSUM tile be zero without an instruction; see Session.zeroed."""
    storage = tile.storage
    if storage.raw is not None:
        storage.raw.fill(0)
        storage.unwritten, storage.missing = None, 0
    row = storage.bytes_per_partition // tile.dtype.item_bytes
    session().zeroed[storage.identity] = np.zeros(row, np.bool_)


def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **more: Any) -> Tensor:
    """Return a new tensor of zeros."""
    return full(shape, 0, dtype, buffer=buffer, name=name, **more)


def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **more: Any) -> Tensor:
    """Return a new tensor of ones."""
    return full(shape, 1, dtype, buffer=buffer, name=name, **more)


def _like_shape(a: Tensor) -> tuple[Any, ...]:
    return tuple(par_dim(s) if d == a.par and a.par else s for d, s in enumerate(a.shape))


def zeros_like(a: Tensor, dtype: Any = None, *, buffer: Any = None, name: str = "") -> Tensor:
    """Return zeros of the shape and dtype of a."""
    return zeros(_like_shape(a), a.kind if dtype is None else dtype, buffer=buffer, name=name)


def empty_like(a: Tensor, dtype: Any = None, *, buffer: Any = None, name: str = "") -> Tensor:
    """Return an unwritten tensor of the shape and dtype of a."""
    return ndarray(_like_shape(a), a.kind if dtype is None else dtype, buffer=buffer, name=name)


def rand(shape: Any, dtype: Any = np.float32) -> Tensor:
    """Return uniform random numbers in [0, 1)."""
    session().flush()
    return Tensor.of(current_random.rand(_shape(shape)[0], kind_of(dtype)))


def random_seed(seed: Any, *, mask: Any = None) -> None:
    """Seed the generator with a number or a tile of one element."""
    if box_of(mask, (1, 1)) is False:
        return
    with nothing_pending():
        if isinstance(seed, Tensor):
            view = in_sbuf(read(tensor("nl.random_seed", "seed", seed)))
            current_random.random_seed(view)
        else:
            current_random.random_seed(seed)


def shared_constant(constant: Any, dtype: Any = None) -> Tensor:
    """Return a tensor in HBM with the data of an array."""
    session().flush()
    array = constant if isinstance(constant, str) or dtype is None else np.asarray(
        constant
    ).astype(kind_of(dtype).numpy)  # fmt: skip
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        array = array.astype(np.float32)
    return Tensor.of(base.shared_constant(array))


def shared_identity_matrix(n: int, dtype: Any = np.uint8) -> Tensor:
    """Return an identity matrix in HBM."""
    now = session()
    now.flush()
    return Tensor.of(base.identity(now.machine, int(n), kind_of(dtype)))
