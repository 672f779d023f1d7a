"""`nki.language` functions that compute: each allocates its result and calls instructions.

The same functions serve as operator names (`op=nl.add`): they carry `nki_op`. The documented
gaps of the hardware hold here too, because the instructions below check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import TensorShapeError, UnsupportedInstructionError
from nmm_compiler.simulator import isa_activation, isa_dma, isa_elementwise, isa_tensor, ops
from nmm_compiler.simulator.dtypes import float32
from nmm_compiler.simulator.isa_common import engine as engines
from nmm_compiler.simulator.isa_reduce import tensor_reduce
from nmm_compiler.simulator.language_base import (
    MemoryRegion,
    dtype_of,
    ndarray,
    private_hbm,
    psum,
    sbuf,
    shared_hbm,
)
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.partition_broadcast import EXACT_DTYPES, spread_by_product
from nmm_compiler.simulator.tensor import NkiTensor

FUNCTIONS: dict[str, Any] = {}


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    function.nki_op = ops.BY_NAME.get(name)  # type: ignore[attr-defined]
    FUNCTIONS[name] = function
    return function


def _new(machine: Machine, like: NkiTensor, shape: tuple[int, ...], dtype: Any) -> NkiTensor:
    kind = like.dtype if dtype is None else dtype_of(machine, dtype)
    return ndarray(shape, kind, sbuf, "")


def _need_tile(machine: Machine, name: str, x: Any) -> NkiTensor:
    if not isinstance(x, NkiTensor):
        raise machine.error(
            TensorShapeError, f"nl.{name}: {type(x).__name__} given; pass an on-chip tile"
        )
    return x


def _broadcast(machine: Machine, name: str, x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    for dim, (have, want) in enumerate(zip(x.shape, shape, strict=False)):
        if have != want:
            if have != 1 or dim == 0 or len(x.shape) != len(shape):
                raise machine.error(
                    TensorShapeError, f"nl.{name}: shapes {x.shape} and {shape} do not broadcast"
                )
            x = x.broadcast(dim, want)
    return x


def _binary(name: str) -> None:
    op = ops.BY_NAME[name]

    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        machine = current()
        tile, other, reverse = (x, y, False) if isinstance(x, NkiTensor) else (y, x, True)
        _need_tile(machine, name, tile)
        if not isinstance(other, NkiTensor):
            result = _new(machine, tile, tile.shape, dtype)
            isa_elementwise.tensor_scalar(result, tile, function, other, reverse0=reverse)
            return result
        if len(x.shape) != len(y.shape):
            raise machine.error(
                TensorShapeError, f"nl.{name}: shapes {x.shape} and {y.shape} differ in rank"
            )
        shape = tuple(max(a, b) for a, b in zip(x.shape, y.shape, strict=True))
        result = _new(machine, x, shape, dtype)
        for tile, other, reverse in ((x, y, False), (y, x, True)):
            vector = other.free_size == 1 and tile.shape == shape and tile.free_size > 1
            if vector and op.kind == "arith" and name != "power" and other.dtype == "float32":
                isa_elementwise.tensor_scalar(result, tile, function, other, reverse0=reverse)
                return result
        a, b = _broadcast(machine, name, x, shape), _broadcast(machine, name, y, shape)
        isa_elementwise.tensor_tensor(result, a, b, function)
        return result

    function.__doc__ = f"Return x <{name}> y, elementwise; also the operator nl.{name}."
    _named(name, function)


for _name in (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "equal", "not_equal",
    "less", "less_equal", "greater", "greater_equal", "bitwise_and", "bitwise_or", "bitwise_xor",
    "left_shift", "right_shift", "logical_and", "logical_or", "logical_xor", "abs_max", "abs_min",
    "mod", "fmod",
):  # fmt: skip
    _binary(_name)


def _unary(name: str, kind: str) -> None:
    def function(x: Any, dtype: Any = None) -> NkiTensor:
        machine = current()
        tile = _need_tile(machine, name, x)
        result = _new(machine, tile, tile.shape, dtype)
        if kind == "activation":
            isa_activation.activation(result, function, tile)
        else:
            isa_elementwise.tensor_scalar(result, tile, function, 0)
        return result

    function.__doc__ = f"Return {name}(x), elementwise; also the operator nl.{name}."
    _named(name, function)


for _name in (
    "exp", "log", "sqrt", "tanh", "sigmoid", "relu", "gelu", "gelu_apprx_sigmoid",
    "gelu_apprx_tanh", "gelu_dx", "gelu_apprx_sigmoid_dx", "silu", "silu_dx", "softplus", "mish",
    "erf", "erf_dx", "arctan", "square", "sign", "abs",
):  # fmt: skip
    _unary(_name, "activation")
for _name in ("rsqrt", "invert", "logical_not", "negative"):
    _unary(_name, "scalar")


def reciprocal(x: Any, dtype: Any = None) -> NkiTensor:
    """Return 1 / x; also the operator nl.reciprocal."""
    machine = current()
    tile = _need_tile(machine, "reciprocal", x)
    result = _new(machine, tile, tile.shape, dtype)
    isa_elementwise.reciprocal(result, tile)
    return result


def copy(x: Any, dtype: Any = None) -> NkiTensor:
    """Return a copy of a tile in SBUF; also the identity activation nl.copy."""
    machine = current()
    tile = _need_tile(machine, "copy", x)
    result = _new(machine, tile, tile.shape, dtype)
    isa_elementwise.tensor_copy(result, tile, engine=engines.vector)
    return result


_named("reciprocal", reciprocal)
_named("copy", copy)


class _OperatorOnly:
    """An operator that is no function: nl.bypass, nl.average, nl.prelu."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.nki_op = ops.BY_NAME[name]

    def __repr__(self) -> str:
        return f"nl.{self.__name__}"


bypass, average, prelu = _OperatorOnly("bypass"), _OperatorOnly("average"), _OperatorOnly("prelu")
for _operator in (bypass, average, prelu):
    FUNCTIONS[_operator.__name__] = _operator


def _periodic(name: str, shift: float) -> None:
    def function(x: Any, dtype: Any = None) -> NkiTensor:
        machine = current()
        tile = _need_tile(machine, name, x)
        wrapped = ndarray(tile.shape, float32, sbuf, "")
        turn = 2.0 * math.pi
        isa_elementwise.tensor_scalar(
            wrapped, tile, FUNCTIONS["add"], shift + math.pi, op1=FUNCTIONS["mod"], operand1=turn
        )
        isa_elementwise.tensor_scalar(wrapped, wrapped, FUNCTIONS["subtract"], np.float32(math.pi))
        isa_elementwise.tensor_scalar(
            wrapped, wrapped, FUNCTIONS["minimum"], math.pi - 1e-6,
            op1=FUNCTIONS["maximum"], operand1=-math.pi + 1e-6,
        )  # fmt: skip
        result = _new(machine, tile, tile.shape, dtype)
        isa_activation.activation(result, FUNCTIONS["sin"], wrapped)
        return result

    function.__doc__ = f"Return {name}(x) after range reduction; nl.sin is also an activation."
    _named(name, function)


_periodic("sin", 0.0)
_periodic("cos", math.pi / 2)


def tan(x: Any, dtype: Any = None) -> NkiTensor:
    """Return sin(x) / cos(x)."""
    machine = current()
    top = FUNCTIONS["sin"](x, dtype=float32)
    bottom = reciprocal(FUNCTIONS["cos"](x, dtype=float32))
    result = _new(machine, x, x.shape, dtype)
    isa_elementwise.tensor_tensor(result, top, bottom, FUNCTIONS["multiply"])
    return result


def _rounding(name: str, function: Callable[..., Any]) -> None:
    op = ops.Op(name, "unary", function)

    def rounded(x: Any, dtype: Any = None) -> NkiTensor:
        machine = current()
        tile = _need_tile(machine, name, x)
        result = _new(machine, tile, tile.shape, dtype)
        isa_elementwise.tensor_scalar(result, tile, rounded, 0)
        return result

    rounded.__doc__ = f"Return {name}(x), elementwise."
    _named(name, rounded)
    rounded.nki_op = op  # type: ignore[attr-defined]


_rounding("ceil", np.ceil)
_rounding("floor", np.floor)
_rounding("trunc", np.trunc)


def _axes(machine: Machine, name: str, x: NkiTensor, axis: Any) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(sorted(a + len(x.shape) if a < 0 else a for a in axes))
    rank = len(x.shape)
    if not axes or axes[0] < 1 or axes != tuple(range(axes[0], rank)):
        raise machine.error(
            TensorShapeError,
            f"nl.{name}: axis {axis} of {x.shape}; reduce the last contiguous free axes",
        )
    return axes


def _reduced(x: NkiTensor, axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple(1 if d in axes else s for d, s in enumerate(x.shape))
    kept = tuple(s for d, s in enumerate(x.shape) if d not in axes)
    return kept if len(kept) > 1 else (*kept, 1)


def _reduction(name: str, op: str) -> None:
    def function(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
        machine = current()
        tile = _need_tile(machine, name, x)
        axes = _axes(machine, name, tile, axis)
        result = _new(machine, tile, _reduced(tile, axes, keepdims), dtype)
        tensor_reduce(result, FUNCTIONS[op], tile, axes)
        return result

    function.__doc__ = f"Return the {name} over the last free axes; also a reduction operator."
    _named(name, function)


_reduction("sum", "add")
_reduction("max", "maximum")
_reduction("min", "minimum")
_reduction("prod", "multiply")


def mean(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the mean over the last free axes."""
    machine = current()
    axes = _axes(machine, "mean", x, axis)
    count = math.prod(x.shape[a] for a in axes)
    total = FUNCTIONS["sum"](x, axis, float32, keepdims)
    result = _new(machine, x, total.shape, dtype)
    isa_elementwise.tensor_scalar(result, total, FUNCTIONS["multiply"], 1.0 / count)
    return result


def var(x: Any, axis: Any, dtype: Any = None, keepdims: bool = False) -> NkiTensor:
    """Return the population variance over the last free axes."""
    machine = current()
    axes = _axes(machine, "var", x, axis)
    centre = mean(x, axis, float32, True)
    wide = _broadcast(machine, "var", centre, x.shape)
    apart = ndarray(x.shape, float32, sbuf, "")
    isa_elementwise.tensor_tensor(apart, x, wide, FUNCTIONS["subtract"])
    isa_elementwise.tensor_tensor(apart, apart, apart, FUNCTIONS["multiply"])
    return mean(apart, axes, dtype or x.dtype, keepdims)


def all_(x: Any, axis: Any, dtype: Any = None) -> NkiTensor:
    """Return 1 where all elements along the axes are nonzero."""
    machine = current()
    truth = FUNCTIONS["not_equal"](x, 0.0, dtype=float32)
    axes = _axes(machine, "all", x, axis)
    result = _new(machine, x, _reduced(x, axes, False), dtype)
    tensor_reduce(result, FUNCTIONS["minimum"], truth, axes)
    return result


def softmax(x: Any, axis: Any = -1, dtype: Any = None) -> NkiTensor:
    """Return softmax over the last free axes."""
    machine = current()
    top = FUNCTIONS["max"](x, axis, float32, True)
    apart = ndarray(x.shape, float32, sbuf, "")
    isa_elementwise.tensor_tensor(
        apart, x, _broadcast(machine, "softmax", top, x.shape), FUNCTIONS["subtract"]
    )
    powers = FUNCTIONS["exp"](apart)
    total = FUNCTIONS["sum"](powers, axis, float32, True)
    inverse = reciprocal(total)
    result = _new(machine, x, x.shape, dtype)
    isa_elementwise.tensor_tensor(
        result, powers, _broadcast(machine, "softmax", inverse, x.shape), FUNCTIONS["multiply"]
    )
    return result


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
    machine = current()
    kind = float32 if compute_dtype is None else dtype_of(machine, compute_dtype)
    squares = FUNCTIONS["square"](x, dtype=kind)
    total = FUNCTIONS["sum"](squares, axis, float32, True)
    scaled = ndarray(total.shape, float32, sbuf, "")
    isa_elementwise.tensor_scalar(
        scaled, total, FUNCTIONS["multiply"], 1.0 / n, op1=FUNCTIONS["add"], operand1=epsilon
    )
    isa_activation.activation(scaled, FUNCTIONS["rsqrt"], scaled)
    normal = ndarray(x.shape, kind, sbuf, "")
    isa_elementwise.tensor_tensor(
        normal, x, _broadcast(machine, "rms_norm", scaled, x.shape), FUNCTIONS["multiply"]
    )
    result = _new(machine, x, x.shape, dtype)
    weight = _broadcast(machine, "rms_norm", w, x.shape)
    isa_elementwise.tensor_tensor(result, normal, weight, FUNCTIONS["multiply"])
    return result


def where(condition: Any, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return x where condition is nonzero, else y."""
    machine = current()
    condition = _need_tile(machine, "where", condition)
    tile = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    result = _new(machine, tile, condition.shape, dtype)
    mask = FUNCTIONS["not_equal"](condition, 0.0, dtype="uint8")
    for value, reverse in ((y, True), (x, False)):
        if not isinstance(value, NkiTensor):
            isa_elementwise.tensor_copy_predicated(result, value, mask, reverse)
            continue
        source = _broadcast(machine, "where", value, condition.shape)
        if source.dtype != result.dtype:
            converted = ndarray(condition.shape, result.dtype, sbuf, "")
            isa_elementwise.tensor_copy(converted, source)
            source = converted
        isa_elementwise.tensor_copy_predicated(result, source, mask, reverse)
    return result


def load(src: Any, dtype: Any = None) -> NkiTensor:
    """Return an SBUF copy of an HBM tensor."""
    machine = current()
    tile = _need_tile(machine, "load", src)
    shape = tile.shape if len(tile.shape) > 1 else (1, *tile.shape)
    result = _new(machine, tile, shape, dtype)
    isa_dma.dma_copy(result, tile)
    return result


def store(dst: Any, value: Any) -> None:
    """Copy an SBUF tile to an HBM tensor."""
    isa_dma.dma_copy(dst, value)


def load_transpose2d(src: Any, dtype: Any = None) -> NkiTensor:
    """Return an SBUF tile with the transpose of a 2-D HBM tensor."""
    machine = current()
    tile = _need_tile(machine, "load_transpose2d", src)
    if len(tile.shape) != 2:
        raise machine.error(
            TensorShapeError, f"nl.load_transpose2d: src {tile.shape}; it must be 2-D"
        )
    result = ndarray((tile.shape[1], tile.shape[0]), tile.dtype, sbuf, "")
    isa_dma.dma_transpose(result, tile, (1, 0))
    if dtype is not None and dtype != tile.dtype:
        return copy(result, dtype)
    return result


def transpose(x: Any, dtype: Any = None) -> NkiTensor:
    """Return the transpose of a 2-D tile, in PSUM."""
    machine = current()
    tile = _need_tile(machine, "transpose", x)
    kind = tile.dtype if dtype is None else dtype_of(machine, dtype)
    result = ndarray((tile.free_size, tile.shape[0]), tile.dtype, psum, "")
    isa_tensor.nc_transpose(result, tile, engine=engines.tensor)
    return result if kind == tile.dtype else copy(result, kind)


def matmul(x: Any, y: Any, transpose_x: bool = False) -> NkiTensor:
    """Return x @ y, or x.T @ y with transpose_x, in PSUM (float32)."""
    machine = current()
    _need_tile(machine, "matmul", x)
    _need_tile(machine, "matmul", y)
    if not transpose_x:
        x = copy(transpose(x))
    result = ndarray((x.free_size, y.free_size), float32, psum, "")
    isa_tensor.nc_matmul(result, x, y)
    return result


def expand_dims(x: Any, axis: int) -> NkiTensor:
    """Return a view with a dimension of size 1 at `axis`."""
    return _need_tile(current(), "expand_dims", x).expand_dim(axis)


def broadcast_to(x: Any, shape: Any, dtype: Any = None) -> NkiTensor:
    """Return x broadcast to `shape`, in SBUF; over partitions by TensorE, other dtypes by DMA."""
    machine = current()
    tile = _need_tile(machine, "broadcast_to", x)
    shape = tuple(shape)
    if len(shape) != len(tile.shape):
        raise machine.error(
            TensorShapeError, f"nl.broadcast_to: {tile.shape} to {shape}; keep the rank"
        )
    if tile.shape == shape and (dtype is None or dtype == tile.dtype):
        return tile
    if tile.shape[0] != shape[0]:
        if tile.shape[0] != 1:
            raise machine.error(
                TensorShapeError, f"nl.broadcast_to: {tile.shape} to {shape} does not broadcast"
            )
        if tile.memory == "psum":
            tile = copy(tile)
        spread = ndarray((shape[0], *tile.shape[1:]), tile.dtype, sbuf, "")
        on_chip = tile.memory == "sbuf" and tile.access().partition_start == 0
        if on_chip and tile.dtype in EXACT_DTYPES:
            spread_by_product(machine, spread, tile, FUNCTIONS["copy"])
            if spread.shape == shape and (dtype is None or dtype == tile.dtype):
                return spread
        else:
            for partition in range(shape[0]):
                isa_dma.dma_copy(spread[partition], tile)
        tile = spread
    view = _broadcast(machine, "broadcast_to", tile, shape)
    result = _new(machine, tile, shape, dtype)
    isa_elementwise.tensor_copy(result, view)
    return result


def gather_flattened(data: Any, indices: Any, axis: int = 0, dtype: Any = None) -> NkiTensor:
    """Return data gathered along its flattened free dimensions, per partition."""
    from nmm_compiler.simulator.isa_gather import nc_n_gather

    machine = current()
    if axis not in (0, 1, -1):
        raise machine.error(
            UnsupportedInstructionError, f"nl.gather_flattened: axis {axis}; only the free axis"
        )
    wide = indices if indices.dtype == "uint32" else copy(indices, "uint32")
    result = ndarray(indices.shape, data.dtype, sbuf, "")
    nc_n_gather(result, data, wide)
    return result if dtype is None or dtype == data.dtype else copy(result, dtype)


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor filled with a constant."""
    machine = current()
    tensor = ndarray(shape, dtype, buffer, name)
    if tensor.memory != "hbm":
        if tensor.dtype.kind in ("int", "bool"):
            fill_value = int(fill_value)
        isa_elementwise.memset(tensor, fill_value)
        return tensor
    _fill_hbm(machine, tensor, fill_value)
    return tensor


def _fill_hbm(machine: Machine, tensor: NkiTensor, value: Any) -> None:
    """Fill HBM from a constant tile, 128 partitions at a time."""
    flat = tensor.reshape((tensor.size,))
    width = min(tensor.size, 2048)
    rows = min(128, max(tensor.size // width, 1))
    tile = ndarray((rows, width), tensor.dtype, sbuf, "")
    isa_elementwise.memset(tile, int(value) if tensor.dtype.kind != "float" else value)
    done = 0
    while done < tensor.size:
        left = tensor.size - done
        if left >= rows * width:
            count, source = rows * width, tile
        else:
            count = min(left, width)
            source = tile[0:1, 0:count]
        isa_dma.dma_copy(flat[done : done + count], source)
        done += count


def zeros(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: Any = sbuf, name: str = "") -> NkiTensor:
    """Return a tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def _region(x: NkiTensor, buffer: Any) -> Any:
    if buffer is not None:
        return buffer
    return x.buffer if isinstance(x.buffer, MemoryRegion) else sbuf


def zeros_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Return zeros of the shape and dtype of x."""
    return full(x.shape, 0, dtype or x.dtype, _region(x, buffer), name)


def empty_like(x: NkiTensor, dtype: Any = None, buffer: Any = None, name: str = "") -> NkiTensor:
    """Return an unwritten tensor of the shape and dtype of x."""
    return ndarray(x.shape, dtype or x.dtype, _region(x, buffer), name)


HBM_REGIONS = (private_hbm, shared_hbm)
