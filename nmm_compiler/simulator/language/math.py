"""`nki.language` functions that compute: each allocates its result and calls instructions.

The same functions serve as operator names (`op=nl.add`): they carry `nki_op`. The documented
gaps of the hardware hold here too, because the instructions below check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import TensorShapeError
from nmm_compiler.simulator.isa import activation, elementwise, operators
from nmm_compiler.simulator.isa.enums import engine as engines
from nmm_compiler.simulator.language.base import (
    dtype_of,
    ndarray,
    sbuf,
)
from nmm_compiler.simulator.machine import Machine, current
from nmm_compiler.simulator.tensors.dtypes import float32
from nmm_compiler.simulator.tensors.tensor import NkiTensor

FUNCTIONS: dict[str, Any] = {}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Enter the function under its name, as a function and as an operator."""
    function.__name__ = function.__qualname__ = name
    function.nki_op = operators.BY_NAME.get(name)  # type: ignore[attr-defined]
    FUNCTIONS[name] = function
    return function


def new_tile(machine: Machine, like: NkiTensor, shape: tuple[int, ...], dtype: Any) -> NkiTensor:
    """Return an SBUF tile of `dtype`, or of the dtype of `like`."""
    kind = like.dtype if dtype is None else dtype_of(machine, dtype)
    return ndarray(shape, kind, sbuf, "")


def need_tile(machine: Machine, name: str, x: Any) -> NkiTensor:
    """Return x; raise TensorShapeError unless it is a tile."""
    if not isinstance(x, NkiTensor):
        raise machine.error(
            TensorShapeError, f"nl.{name}: {type(x).__name__} given; pass an on-chip tile"
        )
    return x


def stretch(machine: Machine, name: str, x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """Return x as a view of `shape`: free dimensions of size 1 repeat."""
    for dim, (have, want) in enumerate(zip(x.shape, shape, strict=False)):
        if have != want:
            if have != 1 or dim == 0 or len(x.shape) != len(shape):
                raise machine.error(
                    TensorShapeError, f"nl.{name}: shapes {x.shape} and {shape} do not broadcast"
                )
            x = x.broadcast(dim, want)
    return x


def _binary(name: str) -> None:
    op = operators.BY_NAME[name]

    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        machine = current()
        tile, other, reverse = (x, y, False) if isinstance(x, NkiTensor) else (y, x, True)
        need_tile(machine, name, tile)
        if not isinstance(other, NkiTensor):
            result = new_tile(machine, tile, tile.shape, dtype)
            elementwise.tensor_scalar(result, tile, function, other, reverse0=reverse)
            return result
        if len(x.shape) != len(y.shape):
            raise machine.error(
                TensorShapeError, f"nl.{name}: shapes {x.shape} and {y.shape} differ in rank"
            )
        shape = tuple(max(a, b) for a, b in zip(x.shape, y.shape, strict=True))
        result = new_tile(machine, x, shape, dtype)
        for tile, other, reverse in ((x, y, False), (y, x, True)):
            vector = other.free_size == 1 and tile.shape == shape and tile.free_size > 1
            if vector and op.kind == "arith" and name != "power" and other.dtype == "float32":
                elementwise.tensor_scalar(result, tile, function, other, reverse0=reverse)
                return result
        a, b = stretch(machine, name, x, shape), stretch(machine, name, y, shape)
        elementwise.tensor_tensor(result, a, b, function)
        return result

    function.__doc__ = f"Return x <{name}> y, elementwise; also the operator nl.{name}."
    named(name, function)


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
        tile = need_tile(machine, name, x)
        result = new_tile(machine, tile, tile.shape, dtype)
        if kind == "activation":
            activation.activation(result, function, tile)
        else:
            elementwise.tensor_scalar(result, tile, function, 0)
        return result

    function.__doc__ = f"Return {name}(x), elementwise; also the operator nl.{name}."
    named(name, function)


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
    tile = need_tile(machine, "reciprocal", x)
    result = new_tile(machine, tile, tile.shape, dtype)
    elementwise.reciprocal(result, tile)
    return result


def copy(x: Any, dtype: Any = None) -> NkiTensor:
    """Return a copy of a tile in SBUF; also the identity activation nl.copy."""
    machine = current()
    tile = need_tile(machine, "copy", x)
    result = new_tile(machine, tile, tile.shape, dtype)
    elementwise.tensor_copy(result, tile, engine=engines.vector)
    return result


named("reciprocal", reciprocal)
named("copy", copy)


class _OperatorOnly:
    """An operator that is no function: nl.bypass, nl.average, nl.prelu."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.nki_op = operators.BY_NAME[name]

    def __repr__(self) -> str:
        return f"nl.{self.__name__}"


bypass, average, prelu = _OperatorOnly("bypass"), _OperatorOnly("average"), _OperatorOnly("prelu")
for _operator in (bypass, average, prelu):
    FUNCTIONS[_operator.__name__] = _operator


def _periodic(name: str, shift: float) -> None:
    def function(x: Any, dtype: Any = None) -> NkiTensor:
        machine = current()
        tile = need_tile(machine, name, x)
        wrapped = ndarray(tile.shape, float32, sbuf, "")
        turn = 2.0 * math.pi
        elementwise.tensor_scalar(
            wrapped, tile, FUNCTIONS["add"], shift + math.pi, op1=FUNCTIONS["mod"], operand1=turn
        )
        elementwise.tensor_scalar(wrapped, wrapped, FUNCTIONS["subtract"], np.float32(math.pi))
        elementwise.tensor_scalar(
            wrapped, wrapped, FUNCTIONS["minimum"], math.pi - 1e-6,
            op1=FUNCTIONS["maximum"], operand1=-math.pi + 1e-6,
        )  # fmt: skip
        result = new_tile(machine, tile, tile.shape, dtype)
        activation.activation(result, FUNCTIONS["sin"], wrapped)
        return result

    function.__doc__ = f"Return {name}(x) after range reduction; nl.sin is also an activation."
    named(name, function)


_periodic("sin", 0.0)
_periodic("cos", math.pi / 2)


def tan(x: Any, dtype: Any = None) -> NkiTensor:
    """Return sin(x) / cos(x)."""
    machine = current()
    top = FUNCTIONS["sin"](x, dtype=float32)
    bottom = reciprocal(FUNCTIONS["cos"](x, dtype=float32))
    result = new_tile(machine, x, x.shape, dtype)
    elementwise.tensor_tensor(result, top, bottom, FUNCTIONS["multiply"])
    return result


def _rounding(name: str, function: Callable[..., Any]) -> None:
    op = operators.Op(name, "unary", function)

    def rounded(x: Any, dtype: Any = None) -> NkiTensor:
        machine = current()
        tile = need_tile(machine, name, x)
        result = new_tile(machine, tile, tile.shape, dtype)
        elementwise.tensor_scalar(result, tile, rounded, 0)
        return result

    rounded.__doc__ = f"Return {name}(x), elementwise."
    named(name, rounded)
    rounded.nki_op = op  # type: ignore[attr-defined]


_rounding("ceil", np.ceil)
_rounding("floor", np.floor)
_rounding("trunc", np.trunc)


def where(condition: Any, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return x where condition is nonzero, else y."""
    machine = current()
    condition = need_tile(machine, "where", condition)
    tile = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    result = new_tile(machine, tile, condition.shape, dtype)
    mask = FUNCTIONS["not_equal"](condition, 0.0, dtype="uint8")
    for value, reverse in ((y, True), (x, False)):
        if not isinstance(value, NkiTensor):
            elementwise.tensor_copy_predicated(result, value, mask, reverse)
            continue
        source = stretch(machine, "where", value, condition.shape)
        if source.dtype != result.dtype:
            converted = ndarray(condition.shape, result.dtype, sbuf, "")
            elementwise.tensor_copy(converted, source)
            source = converted
        elementwise.tensor_copy_predicated(result, source, mask, reverse)
    return result
