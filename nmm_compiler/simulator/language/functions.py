"""`nki.language` functions that compute, make, fill, move and multiply tiles.

Each allocates its result and calls instructions. The same functions serve as operator names
(`op=nl.add`): they carry `nki_op`. The documented gaps of the hardware hold here too, because the
instructions below check them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import OperandError, UnsupportedInstructionError
from nmm_compiler.simulator.isa import (
    dma,
    elementwise,
    gather,
    operators,
    program_state,
    reductions,
    tensor_engine,
)
from nmm_compiler.simulator.isa.enums import engine as engines
from nmm_compiler.simulator.language import base, device_loops
from nmm_compiler.simulator.language.base import (
    NAMES,
    exported,
    ndarray,
    program_constant,
    psum,
    sbuf,
)
from nmm_compiler.simulator.loading.nki_object import NKIObject
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors import dtypes
from nmm_compiler.simulator.tensors.dtypes import float32, int32, uint16
from nmm_compiler.simulator.tensors.geometry import merged
from nmm_compiler.simulator.tensors.tensor import NkiTensor, kind_of


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Enter the function under its name, as a function and as an operator."""
    function.__name__ = function.__qualname__ = name
    function.nki_op = operators.BY_NAME.get(name)  # type: ignore[attr-defined]
    return exported(function)


def result_of(
    issue: Callable[..., Any],
    like: NkiTensor,
    *operands: Any,
    dtype: Any = None,
    shape: tuple[int, ...] = (),
    buffer: Any = sbuf,
    **options: Any,
) -> NkiTensor:
    """Return a new tile that an instruction writes; of `like` are its dtype and shape unless given.

    operands, options: of the instruction, behind its destination.
    """
    result = ndarray(shape or like.shape, kind_of(dtype, like.dtype), buffer, "")
    issue(result, *operands, **options)
    return result


def need_tile(name: str, x: Any) -> NkiTensor:
    """Return x; raise OperandError unless it is a tile."""
    if not isinstance(x, NkiTensor):
        raise current().error(
            OperandError, f"nl.{name}: {type(x).__name__} given; pass an on-chip tile"
        )
    return x


def stretch(name: str, x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """Return x as a view of `shape`: free dimensions of size 1 repeat."""
    for dim, (have, want) in enumerate(zip(x.shape, shape, strict=False)):
        if have != want:
            free = have == 1 and len(x.shape) == len(shape) and (dim > 0 or x.memory == "hbm")
            x.need(free, f"nl.{name}: shapes {x.shape} and {shape} do not broadcast")
            x = x.broadcast(dim, want)
    return x


def combine(name: str, op: str, x: NkiTensor, y: NkiTensor, dtype: Any) -> NkiTensor:
    """Return x <op> y, elementwise, where y is stretched to the shape of x."""
    operands = x, stretch(name, y, x.shape), NAMES[op]
    return result_of(elementwise.tensor_tensor, x, *operands, dtype=dtype)


def _binary(name: str) -> None:
    op = operators.BY_NAME[name]

    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        tile, other, reverse = (x, y, False) if isinstance(x, NkiTensor) else (y, x, True)
        need_tile(name, tile)
        scalar = functools.partial(result_of, elementwise.tensor_scalar, dtype=dtype)
        if not isinstance(other, NkiTensor):
            return scalar(tile, tile, function, other, reverse0=reverse)
        rank = len(y.shape)
        x.need(len(x.shape) == rank, f"nl.{name}: the other has {rank} dimensions; make equal")
        shape = tuple(max(a, b) for a, b in zip(x.shape, y.shape, strict=True))
        for tile, other, reverse in ((x, y, False), (y, x, True)):
            vector = other.free_size == 1 and tile.shape == shape and tile.free_size > 1
            if vector and op.kind == "arith" and name != "power" and other.dtype == "float32":
                return scalar(x, tile, function, other, shape=shape, reverse0=reverse)
        operands = stretch(name, x, shape), stretch(name, y, shape), function
        return result_of(elementwise.tensor_tensor, x, *operands, dtype=dtype, shape=shape)

    function.__doc__ = f"Return x <{name}> y, elementwise; also the operator nl.{name}."
    named(name, function)


Issue = Callable[[NkiTensor, NkiTensor, Any], Any]
"""Issues an instruction: (result, tile, operator)."""


def _unary(name: str, issue: Issue) -> Callable[..., Any]:
    """Enter a function of a tile that issues one instruction."""

    def function(x: Any, dtype: Any = None) -> NkiTensor:
        return result_of(issue, need_tile(name, x), x, function, dtype=dtype)

    function.__doc__ = f"Return {name}(x), elementwise; also the operator nl.{name}."
    return named(name, function)


def _activate(result: NkiTensor, x: NkiTensor, op: Any) -> None:
    elementwise.activation(result, op, x)


def _on_the_alu(result: NkiTensor, x: NkiTensor, op: Any) -> None:
    elementwise.tensor_scalar(result, x, op, 0)


for _name, _op in operators.BY_NAME.items():
    if _op.kind in ("arith", "bitvec") and _op.alu is not None:
        _binary(_name)
    elif _op.activation is not None and _name != "rsqrt":
        _unary(_name, _activate)
    elif "unary" in _op.kind:
        _unary(_name, _on_the_alu)
    else:
        NAMES[_name] = _op  # an operator that is no function
for _name, _rounds in {"ceil": np.ceil, "floor": np.floor, "trunc": np.trunc}.items():
    _unary(_name, _on_the_alu).nki_op = operators.Operator(_name, "unary", _rounds)  # type: ignore[attr-defined]
reciprocal = _unary("reciprocal", lambda result, x, op: elementwise.reciprocal(result, x))
copy = _unary(
    "copy", lambda result, x, op: elementwise.tensor_copy(result, x, engine=engines.vector)
)


def _periodic(name: str, shift: float) -> None:
    def function(x: Any, dtype: Any = None) -> NkiTensor:
        wrapped = result_of(
            elementwise.tensor_scalar, need_tile(name, x), x, NAMES["add"], shift + math.pi,
            op1=NAMES["mod"], operand1=2.0 * math.pi, dtype=float32,
        )  # fmt: skip
        elementwise.tensor_scalar(wrapped, wrapped, NAMES["subtract"], np.float32(math.pi))
        elementwise.tensor_scalar(
            wrapped, wrapped, NAMES["minimum"], math.pi - 1e-6,
            op1=NAMES["maximum"], operand1=-math.pi + 1e-6,
        )  # fmt: skip
        return result_of(_activate, x, wrapped, NAMES["sin"], dtype=dtype)

    function.__doc__ = f"Return {name}(x) after range reduction; nl.sin is also an activation."
    named(name, function)


_periodic("sin", 0.0)
_periodic("cos", math.pi / 2)


@exported
def tan(x: Any, dtype: Any = None) -> NkiTensor:
    """Return sin(x) / cos(x)."""
    top = NAMES["sin"](x, dtype=float32)
    bottom = reciprocal(NAMES["cos"](x, dtype=float32))
    return combine("tan", "multiply", top, bottom, dtype or x.dtype)


@exported
def where(condition: Any, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return x where condition is nonzero, else y."""
    condition = need_tile("where", condition)
    tile = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    kind = kind_of(dtype, tile.dtype)
    result = ndarray(condition.shape, kind, sbuf, "")
    mask = NAMES["not_equal"](condition, 0.0, dtype="uint8")
    for value, reverse in ((y, True), (x, False)):
        source = value
        if isinstance(value, NkiTensor):
            source = stretch("where", value, condition.shape)
            if source.dtype != kind:
                source = result_of(elementwise.tensor_copy, result, source)
        elementwise.tensor_copy_predicated(result, source, mask, reverse)
    return result


# Over the last free axes


def _axes(name: str, x: NkiTensor, axis: Any) -> tuple[int, ...]:
    axes = reductions.last_axes(x.shape, (axis,) if isinstance(axis, int) else axis)
    x.need(axes, f"nl.{name} over axis {axis}; reduce the last contiguous free axes")
    return axes


def reduced_shape(shape: tuple[int, ...], axes: Any, keepdims: bool) -> tuple[int, ...]:
    """Return the shape of a tile after a reduction over some free axes."""
    if keepdims:
        return tuple(1 if d in axes else s for d, s in enumerate(shape))
    kept = tuple(s for d, s in enumerate(shape) if d not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _reduction(name: str, op: str) -> None:
    def function(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
        axes = _axes(name, need_tile(name, x), axis)
        shape = reduced_shape(x.shape, axes, keepdims)
        return result_of(reductions.tensor_reduce, x, NAMES[op], x, axes, dtype=dtype, shape=shape)

    function.__doc__ = f"Return the {name} over the last free axes; also a reduction operator."
    named(name, function)


for _name, _alu in {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}.items():
    _reduction(_name, _alu)


@exported
def mean(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the mean over the last free axes."""
    count = math.prod(x.shape[a] for a in _axes("mean", x, axis))
    total, kind = NAMES["sum"](x, axis, float32, keepdims), dtype or x.dtype
    return NAMES["multiply"](total, 1.0 / count, kind)


@exported
def var(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the population variance over the last free axes."""
    apart = combine("var", "subtract", x, mean(x, axis, float32, True), float32)
    elementwise.tensor_tensor(apart, apart, apart, NAMES["multiply"])
    return mean(apart, axis, dtype or x.dtype, keepdims)


def all_(x: Any, axis: Any, dtype: Any = None) -> NkiTensor:
    """Return 1 where all elements along the axes are nonzero."""
    truth = NAMES["not_equal"](x, 0.0, dtype=float32)
    return NAMES["min"](truth, axis, dtype or x.dtype)


@exported
def softmax(x: Any, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Return softmax over the last free axes."""
    top = NAMES["max"](x, axis, float32, True)
    powers = NAMES["exp"](combine("softmax", "subtract", x, top, float32))
    inverse = reciprocal(NAMES["sum"](powers, axis, float32, True))
    return combine("softmax", "multiply", powers, inverse, dtype or x.dtype)


@exported
def rms_norm(
    x: Any,
    w: Any,
    axis: Any,
    n: int,
    epsilon: float = 1e-6,
    dtype: Any = None,
    compute_dtype: Any = None,
) -> NkiTensor:
    """Return x / sqrt(sum(x^2) / n + epsilon) * w."""
    kind = kind_of(compute_dtype, float32)
    total = NAMES["sum"](NAMES["square"](x, dtype=kind), axis, float32, True)
    scaled = result_of(
        elementwise.tensor_scalar, total, total, NAMES["multiply"], 1.0 / n, op1=NAMES["add"],
        operand1=epsilon,
    )  # fmt: skip
    elementwise.activation(scaled, NAMES["rsqrt"], scaled)
    normal = combine("rms_norm", "multiply", x, scaled, kind)
    return combine("rms_norm", "multiply", normal, w, dtype or x.dtype)


# Whole tiles

_EXACT_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def _spread_by_product(dst: NkiTensor, row: NkiTensor) -> None:
    """Write one row to all partitions of dst: ones times the row, one PSUM bank at a time.

    dst: (partitions, ...) and row: (1, ...) in SBUF, of one dtype of _EXACT_DTYPES.
    """
    ones = program_constant(
        ("ones", row.dtype.name),
        lambda: full((1, 128), 1.0, row.dtype, name="broadcast_ones"),
    )
    if len(merged(row.geometry.dims[1:])) > 1:
        row = copy(row)
    rows, size = dst.shape[0], row.free_size
    source, target = row.reshape((1, size)), dst.reshape((rows, size))
    bank = current().target.psum_bank_bytes_per_partition // 4
    for start in range(0, size, bank):
        part = slice(start, min(start + bank, size))
        wide = ndarray((rows, part.stop - start), float32, psum, "")
        tensor_engine.nc_matmul(wide, ones[:, :rows], source[:, part], is_stationary_onezero=True)
        elementwise.activation(target[:, part], copy, wide)


@exported
def load(src: Any, dtype: Any = None) -> NkiTensor:
    """Return an SBUF copy of an HBM tensor."""
    tile = need_tile("load", src)
    shape = tile.shape if len(tile.shape) > 1 else (1, *tile.shape)
    return result_of(dma.dma_copy, tile, tile, dtype=dtype, shape=shape)


@exported
def store(dst: Any, value: Any) -> None:
    """Copy an SBUF tile to an HBM tensor."""
    dma.dma_copy(dst, value)


def assign(tensor: NkiTensor, key: Any, value: Any) -> None:
    """Do `tensor[key] = value`: a copy on chip, or a DMA when one side is in HBM."""
    tensor.need(
        isinstance(value, NkiTensor),
        f"assignment of {type(value).__name__} to a part of a tensor; use nisa.memset, "
        "nisa.tensor_copy or nisa.dma_copy",
        UnsupportedInstructionError,
    )
    if tensor.memory == "hbm" or value.memory == "hbm":
        dma.dma_copy(tensor[key], value)
    else:
        elementwise.tensor_copy(tensor[key], value)


@exported
def load_transpose2d(src: Any, dtype: Any = None) -> NkiTensor:
    """Return an SBUF tile with the transpose of a 2-D HBM tensor."""
    tile = need_tile("load_transpose2d", src)
    tile.need(len(tile.shape) == 2, "nl.load_transpose2d: src must be 2-D")
    turned = result_of(dma.dma_transpose, tile, tile, (1, 0), shape=tile.shape[::-1])
    return _converted(turned, dtype)


def _converted(tile: NkiTensor, dtype: Any) -> NkiTensor:
    """Return the tile, or a copy if another dtype is asked for."""
    return tile if dtype is None or dtype == tile.dtype else copy(tile, dtype)


@exported
def transpose(x: Any, dtype: Any = None) -> NkiTensor:
    """Return the transpose of a 2-D tile, in PSUM."""
    tile = need_tile("transpose", x)
    turned = result_of(
        tensor_engine.nc_transpose, tile, tile, shape=(tile.free_size, tile.shape[0]), buffer=psum,
        engine=engines.tensor,
    )  # fmt: skip
    return _converted(turned, dtype and kind_of(dtype))


@exported
def matmul(x: Any, y: Any, transpose_x: bool = False) -> NkiTensor:
    """Return x @ y, or x.T @ y with transpose_x, in PSUM (float32)."""
    need_tile("matmul", x)
    need_tile("matmul", y)
    if not transpose_x:
        x = copy(transpose(x))
    shape = x.free_size, y.free_size
    return result_of(tensor_engine.nc_matmul, x, x, y, dtype=float32, shape=shape, buffer=psum)


@exported
def expand_dims(x: Any, axis: int) -> NkiTensor:
    """Return a view with a dimension of size 1 at `axis`."""
    return need_tile("expand_dims", x).expand_dim(axis)


@exported
def broadcast_to(x: Any, shape: Any, dtype: Any = None) -> NkiTensor:
    """Return x broadcast to `shape`, in SBUF; over partitions by TensorE, other dtypes by DMA."""
    tile, shape = need_tile("broadcast_to", x), tuple(shape)
    fits = len(shape) == len(tile.shape) and tile.shape[0] in (1, shape[0])
    tile.need(fits, f"nl.broadcast_to: it does not broadcast to {shape}")
    if tile.shape[0] != shape[0]:
        tile = copy(tile) if tile.memory == "psum" else tile
        spread = ndarray((shape[0], *tile.shape[1:]), tile.dtype, sbuf, "")
        on_chip = tile.memory == "sbuf" and tile.access().partition_start == 0
        if on_chip and tile.dtype in _EXACT_DTYPES:
            _spread_by_product(spread, tile)
        else:
            for partition in range(shape[0]):
                dma.dma_copy(spread[partition], tile)
        tile = spread
    if tile.shape == shape and (dtype is None or dtype == tile.dtype):
        return tile
    wide = stretch("broadcast_to", tile, shape)
    return result_of(elementwise.tensor_copy, wide, wide, dtype=dtype)


@exported
def gather_flattened(data: Any, indices: Any, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """Return data gathered along its flattened free dimensions, per partition."""
    free = f"nl.gather_flattened: axis {axis}; only the free axis"
    data.need(axis in (0, 1, -1), free, UnsupportedInstructionError)
    wide = indices if indices.dtype == "uint32" else copy(indices, "uint32")
    result = result_of(gather.nc_n_gather, data, data, wide, shape=indices.shape)
    return _converted(result, dtype)


@exported
def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor filled with a constant."""
    tensor = ndarray(shape, dtype, buffer, name)
    value = int(fill_value) if tensor.dtype.kind in ("int", "bool") else fill_value
    if tensor.memory != "hbm":
        elementwise.memset(tensor, value)
        return tensor
    flat, width = tensor.reshape((tensor.size,)), min(tensor.size, 2048)
    rows = min(tensor.size // width, 128)
    tile = result_of(elementwise.memset, tensor, value, shape=(rows, width))
    whole = tensor.size // tile.size * tile.size
    for start in range(0, whole, tile.size):
        dma.dma_copy(flat[start : start + tile.size], tile)
    for start in range(whole, tensor.size, width):
        left = min(tensor.size - start, width)
        dma.dma_copy(flat[start : start + left], tile[0:1, 0:left])
    return tensor


@exported
def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


@exported
def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


@exported
def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Return zeros of the shape and dtype of x."""
    return full(x.shape, 0, dtype or x.dtype, buffer or x.buffer, name)


@exported
def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Return an unwritten tensor of the shape and dtype of x."""
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


# Random numbers


@exported
def rand(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return uniform random values in [0, 1): 16 random bits each."""
    bits = ndarray(shape, uint16, sbuf, "")
    program_state.rng(bits)
    result = ndarray(shape, dtype, buffer, name)
    target = ndarray(shape, dtype, sbuf, "") if result.memory == "hbm" else result
    elementwise.tensor_scalar(target, bits, NAMES["multiply"], 1.0 / 65536.0)
    if target is not result:
        dma.dma_copy(result, target)
    return result


@exported
def random_seed(seed: Any) -> None:
    """Seed the generator: a [1, 1] tensor or an integer."""
    given = seed if isinstance(seed, NkiTensor) else full((1, 1), seed, int32)
    program_state.set_rng_seed(given)


@exported
def dropout(x: Any, rate: Any, dtype: Any = None) -> NkiTensor:
    """Return x with elements zeroed with probability `rate`."""
    result = result_of(program_state.dropout, x, x, rate)
    return _converted(result, dtype and kind_of(dtype))


NAMES.update(
    {str(d): d for d in dtypes.ALL.values() if d not in ("bool", "int64", "uint64")},
    bool_=dtypes.bool_, DType=dtypes.DType, NKIObject=NKIObject, NkiTensor=NkiTensor, all=all_,
    dynamic_range=device_loops.dynamic_range, fori_loop=device_loops.fori_loop,
    while_loop=device_loops.while_loop,
    **{name: getattr(base, name) for name in (
        "sbuf", "psum", "hbm", "private_hbm", "shared_hbm", "tile_size", "sequential_range",
        "static_range",
    )},
)  # fmt: skip
