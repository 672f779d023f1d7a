"""`neuronxcc.nki.language`: tensors, loads and stores, functions that compute, launch grids.

Elementwise functions and reductions are one pending instruction each. Those that take several
instructions (softmax, rms_norm, var, ...) call the current language's functions and return a tile.
Loops run as Python: the Beta 1 compiler traced a loop's body once and unrolled it later, so a
loop variable is an integer here.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nmm_compiler.errors import UnsupportedInstructionError
from nmm_compiler.simulator.beta1 import instructions
from nmm_compiler.simulator.beta1.index import Index, arange, box_of, mgrid, need
from nmm_compiler.simulator.beta1.instructions import (
    ISSUE,
    Body,
    dma_copied,
    elementwise,
    filled,
    functions_of,
    in_sbuf,
    kind_of_number,
    product,
    promote,
    tensor,
    tensor_anywhere,
    transposed,
    turned_by_dma,
)
from nmm_compiler.simulator.beta1.tensor import (
    Blocks,
    Chosen,
    Tensor,
    alike,
    as_number,
    assign,
    in_kind,
    need_broadcast,
    numpy_dtype,
    result,
    session,
    stretched,
    write,
    written,
)
from nmm_compiler.simulator.isa.enums import engine
from nmm_compiler.simulator.isa.gather import FP32_MIN
from nmm_compiler.simulator.language import base
from nmm_compiler.simulator.language.base import MemoryRegion, psum, sbuf, tile_size
from nmm_compiler.simulator.language.functions import NAMES as CURRENT, result_of
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.signatures import Function
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.tensor import NkiTensor, kind_of

_SHARED = (
    "sbuf", "psum", "hbm", "private_hbm", "shared_hbm", "tile_size", "ds", "program_id",
    "program_ndim",
)  # fmt: skip
NAMES: dict[str, Any] = {name: CURRENT[name] for name in _SHARED}


def _named(function: Body) -> Body:
    NAMES[function.__name__] = function
    return function


# Tensors


@_named
class par_dim(int):  # noqa: N801  (the name NKI gives it)
    """The size of a dimension, marked as that of the partition dimension."""


class Allocator(NamedTuple):
    """Where the tiles of a tensor go: `ncc.sbuf.alloc(f)`, `ncc.psum.mod_alloc(...)` and so on.

    func: takes (block index, partitions, bytes per partition), returns (partition, byte), or
        (bank, partition, byte) in PSUM.
    """

    region: MemoryRegion
    func: Body


def _created(
    call: str, /, shape: Any, dtype: Any, buffer: Any = None, name: str = "", value: Any = None
) -> Tensor:
    """Return a new tensor; on chip, filled with `value` unless that is None."""
    kind, given = kind_of(dtype), tuple(shape) if np.iterable(shape) else (shape,)
    marked = [d for d, size in enumerate(given) if isinstance(size, par_dim)]
    need(len(marked) < 2, f"shape {given} has {len(marked)} partition dimensions")
    sizes, par = base.sizes_of("", given), marked[0] if marked else 0
    allocator = buffer if isinstance(buffer, Allocator) else None
    region = allocator.region if allocator else sbuf if buffer is None else buffer
    session().flush()
    if base.is_hbm(region):
        need(
            value is None,
            "a tensor in HBM with an initial value (err_hbm_tensor_with_init_value_not_supported); "
            "make it with nl.ndarray and nl.store the value",
        )
        return Tensor(base.ndarray(sizes, kind, region, name))
    if len(sizes) - par < 2:
        sizes = (*sizes, 1)
    blocks, tile = sizes[:par], sizes[par:]
    flat = tile[0], math.prod(tile[1:])

    def one(*index: int) -> Tensor:
        address = None
        if allocator is not None:
            *bank, partition, byte = allocator.func(index, flat[0], flat[1] * kind.item_bytes)
            address = int(partition), int(byte) + int(sum(bank)) * tile_size.psum_bank_fmax_bytes
        made = base.ndarray(flat, kind, region, name, address)
        zeros = region is psum and value == 0  # no instruction: a first product overwrites them
        if value is not None and not zeros:
            ISSUE["memset"](made, in_kind(value, kind))
        elif zeros and made.storage.raw is not None:
            made.storage.raw.fill(0)
            made.storage.unwritten = None
        return Tensor(made.reshape(tile))

    if not blocks:
        return one()
    tiles = np.empty(blocks, object)
    for index in np.ndindex(blocks):
        tiles[index] = one(*index)
    return Blocks(tiles)


def _full(call: str, /, fill_value: Any, **given: Any) -> Tensor:
    value = as_number(fill_value)
    need(value is not None, f"fill_value {fill_value!r}; pass a number")
    return _created(call, value=value, **given)


def _created_like(call: str, /, a: Tensor, dtype: Any, **given: Any) -> Tensor:
    shape = tuple(par_dim(s) if d == a.par and a.par else s for d, s in enumerate(a.shape))
    return _created(call, shape, a.kind if dtype is None else dtype, **given)


@_named
def shared_constant(constant: Any, dtype: Any = None) -> Tensor:
    """Return a tensor in HBM with the data of an array."""
    session().flush()
    array = constant if isinstance(constant, str) or dtype is None else np.asarray(
        constant
    ).astype(kind_of(dtype).numpy)  # fmt: skip
    if isinstance(array, np.ndarray) and array.dtype == np.float64:
        array = array.astype(np.float32)
    return Tensor(base.shared_constant(array))


# Loads and stores


def _hbm(name: str, role: str, value: Any) -> Tensor:
    """Return a tensor in HBM with two dimensions or more."""
    value = tensor_anywhere(name, role, value)
    need(
        value.memory == "hbm",
        f"{name}: {role} {value!r} is in {value.memory.upper()}, it must be in HBM "
        "(err_unsupported_memory); nl.copy copies on chip",
    )
    missing = 2 - len(value.shape)
    return value if missing <= 0 else value.reshape((*value.shape, *(1,) * missing))


@_named
def load(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Return a tile in SBUF with the values of an HBM tensor; the masked part is left out."""
    source = _hbm("nl.load", "src", src)
    box = box_of(mask, source.shape)
    return result(
        source.shape, kind_of(dtype, source.kind),
        lambda dst: ISSUE["dma_copy"](dst, source.tile(box)), box,
        only=("sbuf",), exact=dtype is None,
    )  # fmt: skip


@_named
def store(dst: Any, value: Any, *, mask: Any = None) -> None:
    """Write a tile, or a number, to an HBM tensor; the masked part is left out."""
    target, number = _hbm("nl.store", "dst", dst), as_number(value)
    session().flush()
    box = box_of(mask, target.shape)
    if box == ():
        return
    if number is not None:
        value = filled("nl.store", target.shape, number, target.kind)
    source = tensor("nl.store", "value", value)
    flat = box is None and math.prod(source.shape) == math.prod(target.shape)
    view = source.tile() if flat else stretched(source, target.shape, "nl.store", box)
    ISSUE["dma_copy"](written(target, box), in_sbuf(view))


@_named
def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Return a tile in SBUF with the transpose of a 2-D HBM tensor.

    2-byte data is turned by the DMA engines where they can do it; everything else is loaded 128
    rows at a time and turned by TensorE.
    """
    source = _hbm("nl.load_transpose2d", "src", src)
    need(
        len(src.shape) == 2 and source.made().indirection is None,
        f"nl.load_transpose2d of {src!r}; it takes 2-D tensors without run-time indices",
    )
    box = box_of(mask, source.shape)
    by_dma = current().target.dma_transposes and source.kind.item_bytes == 2
    turn = functools.partial(turned_by_dma, axes=(1, 0)) if by_dma else _turned_by_products
    return result(
        (source.shape[1], source.shape[0]), kind_of(dtype, source.kind),
        lambda dst: turn(dst, source.tile(box)), box and box[::-1], only=("sbuf",),
        exact=dtype is None,
    )  # fmt: skip


def _turned_by_products(dst: NkiTensor, view: NkiTensor) -> None:
    flat = dst.reshape((dst.shape[0], dst.free_size)) if len(dst.shape) != 2 else dst
    for start in range(0, view.shape[0], tile_size.pmax):
        part = view[start : min(start + tile_size.pmax, view.shape[0]), :]
        block = result_of(ISSUE["dma_copy"], part, part)
        turned = result_of(
            ISSUE["nc_transpose"], block, block, engine.tensor, shape=part.shape[::-1], buffer=psum
        )
        ISSUE["tensor_copy"](flat[:, start : start + part.shape[0]], turned)


@_named
def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None) -> None:
    """Add a tile to rows of an HBM tensor that run-time indices choose."""
    target = _hbm("nl.atomic_rmw", "dst", dst)
    need(
        getattr(op, "__name__", "") == "add" and mask is None,
        "nl.atomic_rmw takes op=np.add and no mask",
        UnsupportedInstructionError,
    )
    dma_copied("nl.atomic_rmw", target, tensor("nl.atomic_rmw", "value", value), CURRENT["add"])


# Functions that compute


def _binary(short: str) -> Body:
    op = CURRENT[short]
    by_vector = op.nki_op.kind == "arith" and short != "power"

    def function(name: str, x: Any, y: Any, dtype: Any = None, mask: Any = None) -> Any:
        tile, other, reverse = (x, y, False) if isinstance(x, Tensor) else (y, x, True)
        tensor(name, "x", tile)
        number = as_number(other)
        if isinstance(other, Index) and short == "add" and math.prod(tile.shape) == 1:
            return Chosen(other, tile)
        if number is not None:
            kind = kind_of(dtype, promote(tile.kind, kind_of_number(other)))
            return elementwise(
                name, "tensor_scalar", data=tile, op0=op, operand0=number, reverse0=reverse,
                dtype=kind, mask=mask,
            )  # fmt: skip
        tensor(name, "y", other)
        if len(x.shape) != len(y.shape):
            need_broadcast(alike(x.shape, y.shape), y, x.shape, name)
            y = y.reshape(x.shape)
        shape = tuple(map(max, x.shape, y.shape))
        kind = kind_of(dtype, promote(x.kind, y.kind))
        for wide, narrow, turned in ((x, y, False), (y, x, True)):
            one_each = narrow.shape == (shape[0],) + (1,) * (len(shape) - 1)
            if one_each and by_vector and wide.shape == shape and math.prod(shape[1:]) > 1:
                return elementwise(
                    name, "tensor_scalar", data=wide, op0=op, operand0=narrow, reverse0=turned,
                    dtype=kind, mask=mask,
                )  # fmt: skip
        return elementwise(name, "tensor_tensor", data1=x, data2=y, op=op, dtype=kind, mask=mask)

    return function


def _unary(short: str) -> Body:
    op = CURRENT[short]
    row, given = "tensor_scalar", {"op0": op, "operand0": 0}
    if op.nki_op.activation is not None:
        row, given = "activation", {"op": op}

    def function(name: str, x: Any, dtype: Any = None, mask: Any = None) -> Tensor:
        return elementwise(name, row, data=tensor(name, "x", x), dtype=dtype, mask=mask, **given)

    return function


def _copy(name: str, src: Any, dtype: Any = None, mask: Any = None) -> Tensor:
    return instructions.NAMES["tensor_copy"](src, dtype=dtype, mask=mask)


def _matmul(name: str, x: Any, y: Any, transpose_x: bool = False, mask: Any = None) -> Tensor:
    if not transpose_x:
        turned = transposed(name, tensor(name, "x", x), engine.unknown)
        x = _copy(name, turned)
    return product(name, x, y, mask, turned=not transpose_x)


def _composite(short: str) -> Body:
    """Return a function that runs the current language's, over whole tiles."""
    current_function = CURRENT[short]

    def function(name: str, mask: Any = None, **given: Any) -> Tensor | None:
        session().flush()
        shape = next((v.shape for v in given.values() if isinstance(v, Tensor)), ())
        box = box_of(mask, shape)
        if box == ():
            return result(shape, dtypes.float32, None, box)
        if short == "softmax":
            given.pop("compute_dtype")
        for role, value in given.items():
            if isinstance(value, Tensor):
                given[role] = value.tile(box if value.shape == shape else None)
        made = current_function(**given)
        if made is None:
            return None
        if not box or made.shape != tuple(map(len, box)):
            return Tensor(made)
        return result(
            shape, made.dtype, lambda dst: ISSUE["tensor_copy"](dst, made), box, exact=True
        )

    return function


def _loop_reduce(
    name: str, x: Any, op: Any, loop_indices: Any, dtype: Any = None, mask: Any = None
) -> Tensor:
    """Return dst <op> x for the tile that it is assigned to; an unwritten tile takes x alone."""
    tile = tensor(name, "x", x)

    box = box_of(mask, tile.shape)

    def update(dst: NkiTensor) -> None:
        storage, place = dst.storage, (dst.offset, dst.shape)
        begun = None if storage.allocation.first_index >= 0 else set[Any]()
        places = session().reductions.setdefault(storage.identity, begun)
        if places is None or place in places:
            ISSUE["tensor_tensor"](dst, dst, tile.tile(box), op)
        else:
            ISSUE["tensor_copy"](dst, tile.tile(box))
            places.add(place)

    return result(tile.shape, kind_of(dtype, tile.kind), None, box, exact=True, update=update)


def _static_cast(name: str, input_data: Any, dtype: Any) -> Any:
    if isinstance(input_data, Tensor):
        return _copy(name, input_data, dtype)
    return np.asarray(input_data).astype(kind_of(dtype).numpy)[()]


def _update(dst: Tensor, short: str, value: Any) -> Tensor:
    """Do `dst += value` and kin in place; a product onto PSUM is one accumulation there."""
    now, adds = session(), short == "add" and dst.memory == "psum"
    if adds and now.pending is value and value.held.issue and value.held.update:
        need_broadcast(math.prod(dst.shape) == math.prod(value.shape), value, dst.shape, "+=")
        now.pending = None
        write(dst, value.held.box, value.held.update)
    else:
        assign(dst, NAMES[short](dst, value, dtype=dst.kind))
    return dst


def _reduced(op: str, name: str, x: Any, **given: Any) -> Tensor:
    return instructions.NAMES["tensor_reduce"](CURRENT[op], x, **given)


_OWN: dict[str, Body] = {
    "copy": _copy, "matmul": _matmul, "static_cast": _static_cast,
    "transpose": lambda name, x, **given: transposed(name, x, engine.unknown, **given),
    "reciprocal": lambda name, x, **given: instructions.NAMES["reciprocal"](x, **given),
    "loop_reduce": _loop_reduce, "ndarray": _created, "full": _full,
    "zeros": functools.partial(_created, value=0), "ones": functools.partial(_created, value=1),
    "empty_like": _created_like, "zeros_like": functools.partial(_created_like, value=0),
    **{short: functools.partial(_reduced, op) for short, op in {
        "sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply",
    }.items()},
    **{short: _composite(short) for short in (
        "sin", "cos", "tan", "ceil", "floor", "trunc", "mean", "var", "all", "softmax", "rms_norm",
        "where", "dropout", "gather_flattened", "rand", "random_seed",
    )},
    "expand_dims": lambda name, data, axis: tensor_anywhere(name, "data", data).expand_dims(axis),
    "broadcast_to": lambda name, src, shape: tensor_anywhere(name, "src", src).broadcast_to(shape),
    "shared_identity_matrix": lambda name, n, dtype: Tensor(
        base.identity(current(), int(n), kind_of(dtype))
    ),
    "device_print": lambda name, prefix, x, mask: base.device_print(
        prefix, x.tile() if isinstance(x, Tensor) else x
    ),
    "finfo": lambda name, dtype: ml_dtypes.finfo(kind_of(dtype).numpy),
    "num_programs": lambda name, axes: base.num_programs(axes),
}  # fmt: skip


def _body(short: str, function: Function) -> Body | None:
    """Return a function of the table, to be called with its name and its arguments."""
    if short in _OWN:
        return _OWN[short]
    given = tuple(function.parameters)
    if given[:2] == ("x", "y"):
        return _binary(short)
    return _unary(short) if given == ("x", "dtype", "mask") else None


for _name, _call in functions_of("language", "nl", _body).items():
    NAMES[_name] = _call
    setattr(_call, "nki_op", getattr(CURRENT.get(_name), "nki_op", None))  # noqa: B010


# Operators and methods of a tensor that compute


def _operator(tile: Tensor, name: str, swapped: bool, *others: Any) -> Any:
    """Do an operator, as the `nki.language` function of that name."""
    if any(other is None or isinstance(other, str) for other in others):
        return NotImplemented
    return NAMES[name](*((*others, tile) if swapped else (tile, *others)))


_ARITHMETIC = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "pow": "power",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift",
    "rshift": "right_shift", "mod": "mod",
}  # fmt: skip
_METHODS: dict[str, Any] = {
    "astype": lambda tile, dtype: _copy("astype", tile, dtype),
    "__invert__": lambda tile: NAMES["logical_not" if tile.kind == "bool" else "invert"](tile),
}
for _python, _name in {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal",
    "ne": "not_equal", "neg": "negative", "abs": "abs", **_ARITHMETIC,
}.items():  # fmt: skip
    _METHODS[f"__{_python}__"] = functools.partialmethod(_operator, _name, False)
for _python, _name in _ARITHMETIC.items():
    _METHODS[f"__r{_python}__"] = functools.partialmethod(_operator, _name, True)
    _METHODS[f"__i{_python}__"] = functools.partialmethod(_update, _name)
for _name, _method in _METHODS.items():
    setattr(Tensor, _name, _method)


# Launch grids and constants


@_named
def affine_range(*args: Any, **options: Any) -> range:
    """Return range(*args); iterations may run in any order on the device."""
    return range(*(int(a) for a in args))


class Dimension(tuple):
    """A dimension of a launch grid: the core of each of its programs."""

    __slots__ = ()


@_named
def spmd_dim(first: Any, second: Any) -> Dimension:
    """Return a dimension of first x second programs; those of an nl.nc have cores of their own."""
    return Dimension(
        outer if isinstance(first, nc) else inner if isinstance(second, nc) else 0
        for outer in range(first)
        for inner in range(second)
    )


@_named
class nc(int):  # noqa: N801  (the name NKI gives it)
    """A dimension of a launch grid whose programs run on cores of their own."""

    def __mul__(self, other: Any) -> Any:
        return spmd_dim(self, other)

    def __rmul__(self, other: Any) -> Any:
        return spmd_dim(other, self)


NAMES.update(
    fp32=SimpleNamespace(min=FP32_MIN),
    bfp16=SimpleNamespace(min=-math.inf), mgrid=mgrid,
    arange=arange, sequential_range=affine_range, static_range=affine_range,
    bool_=np.bool_,
)  # fmt: skip
for _name in (
    "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "bfloat16",
    "float8_e4m3", "float8_e5m2", "tfloat32",
):  # fmt: skip
    NAMES[_name] = getattr(np, _name, None) or numpy_dtype(dtypes.ALL[_name])
