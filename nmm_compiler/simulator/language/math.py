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
from nmm_compiler.simulator.language.base import dtype_of, ndarray, sbuf
from nmm_compiler.simulator.language.exports import exported
from nmm_compiler.simulator.machine import current
from nmm_compiler.simulator.tensors.dtypes import float32
from nmm_compiler.simulator.tensors.tensor import NkiTensor

FUNCTIONS: dict[str, Any] = {}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Enter the function under its name, as a function and as an operator."""
    function.__name__ = function.__qualname__ = name
    function.nki_op = operators.BY_NAME.get(name)  # type: ignore[attr-defined]
    FUNCTIONS[name] = function
    return function


def new_tile(like: NkiTensor, dtype: Any = None, shape: tuple[int, ...] = ()) -> NkiTensor:
    """Return an SBUF tile; its dtype and shape are those of `like` unless given."""
    kind = like.dtype if dtype is None else dtype_of(current(), dtype)
    return ndarray(shape or like.shape, kind, sbuf, "")


def need_tile(name: str, x: Any) -> NkiTensor:
    """Return x; raise TensorShapeError unless it is a tile."""
    if not isinstance(x, NkiTensor):
        raise current().error(
            TensorShapeError, f"nl.{name}: {type(x).__name__} given; pass an on-chip tile"
        )
    return x


def stretch(name: str, x: NkiTensor, shape: tuple[int, ...]) -> NkiTensor:
    """Return x as a view of `shape`: free dimensions of size 1 repeat."""
    for dim, (have, want) in enumerate(zip(x.shape, shape, strict=False)):
        if have != want:
            if have != 1 or dim == 0 or len(x.shape) != len(shape):
                raise current().error(
                    TensorShapeError, f"nl.{name}: shapes {x.shape} and {shape} do not broadcast"
                )
            x = x.broadcast(dim, want)
    return x


def combine(name: str, op: str, x: NkiTensor, y: NkiTensor, dtype: Any) -> NkiTensor:
    """Return x <op> y, elementwise, where y is stretched to the shape of x."""
    result = new_tile(x, dtype)
    elementwise.tensor_tensor(result, x, stretch(name, y, x.shape), FUNCTIONS[op])
    return result


def _binary(name: str) -> None:
    op = operators.BY_NAME[name]

    def function(x: Any, y: Any, dtype: Any = None) -> NkiTensor:
        tile, other, reverse = (x, y, False) if isinstance(x, NkiTensor) else (y, x, True)
        need_tile(name, tile)
        if not isinstance(other, NkiTensor):
            result = new_tile(tile, dtype)
            elementwise.tensor_scalar(result, tile, function, other, reverse0=reverse)
            return result
        if len(x.shape) != len(y.shape):
            raise current().error(
                TensorShapeError, f"nl.{name}: shapes {x.shape} and {y.shape} differ in rank"
            )
        shape = tuple(max(a, b) for a, b in zip(x.shape, y.shape, strict=True))
        result = new_tile(x, dtype, shape)
        for tile, other, reverse in ((x, y, False), (y, x, True)):
            vector = other.free_size == 1 and tile.shape == shape and tile.free_size > 1
            if vector and op.kind == "arith" and name != "power" and other.dtype == "float32":
                elementwise.tensor_scalar(result, tile, function, other, reverse0=reverse)
                return result
        elementwise.tensor_tensor(
            result, stretch(name, x, shape), stretch(name, y, shape), function
        )
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


Issue = Callable[[NkiTensor, NkiTensor, Any], Any]
"""Issues an instruction: (result, tile, operator)."""


def _unary(name: str, issue: Issue) -> Callable[..., Any]:
    """Enter a function of a tile that issues one instruction."""

    def function(x: Any, dtype: Any = None) -> NkiTensor:
        result = new_tile(need_tile(name, x), dtype)
        issue(result, x, function)
        return result

    function.__doc__ = f"Return {name}(x), elementwise; also the operator nl.{name}."
    return named(name, function)


def _activate(result: NkiTensor, x: NkiTensor, op: Any) -> None:
    activation.activation(result, op, x)


def _on_the_alu(result: NkiTensor, x: NkiTensor, op: Any) -> None:
    elementwise.tensor_scalar(result, x, op, 0)


for _name in (
    "exp", "log", "sqrt", "tanh", "sigmoid", "relu", "gelu", "gelu_apprx_sigmoid",
    "gelu_apprx_tanh", "gelu_dx", "gelu_apprx_sigmoid_dx", "silu", "silu_dx", "softplus", "mish",
    "erf", "erf_dx", "arctan", "square", "sign", "abs",
):  # fmt: skip
    _unary(_name, _activate)
for _name in ("rsqrt", "invert", "logical_not", "negative"):
    _unary(_name, _on_the_alu)
for _name, _rounds in {"ceil": np.ceil, "floor": np.floor, "trunc": np.trunc}.items():
    _unary(_name, _on_the_alu).nki_op = operators.Op(_name, "unary", _rounds)  # type: ignore[attr-defined]
reciprocal = _unary("reciprocal", lambda result, x, op: elementwise.reciprocal(result, x))
copy = _unary(
    "copy", lambda result, x, op: elementwise.tensor_copy(result, x, engine=engines.vector)
)


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
        wrapped = new_tile(need_tile(name, x), float32)
        elementwise.tensor_scalar(
            wrapped, x, FUNCTIONS["add"], shift + math.pi, op1=FUNCTIONS["mod"],
            operand1=2.0 * math.pi,
        )  # fmt: skip
        elementwise.tensor_scalar(wrapped, wrapped, FUNCTIONS["subtract"], np.float32(math.pi))
        elementwise.tensor_scalar(
            wrapped, wrapped, FUNCTIONS["minimum"], math.pi - 1e-6,
            op1=FUNCTIONS["maximum"], operand1=-math.pi + 1e-6,
        )  # fmt: skip
        result = new_tile(x, dtype)
        _activate(result, wrapped, FUNCTIONS["sin"])
        return result

    function.__doc__ = f"Return {name}(x) after range reduction; nl.sin is also an activation."
    named(name, function)


_periodic("sin", 0.0)
_periodic("cos", math.pi / 2)


@exported
def tan(x: Any, dtype: Any = None) -> NkiTensor:
    """Return sin(x) / cos(x)."""
    top = FUNCTIONS["sin"](x, dtype=float32)
    bottom = reciprocal(FUNCTIONS["cos"](x, dtype=float32))
    return combine("tan", "multiply", top, bottom, x.dtype if dtype is None else dtype)


@exported
def where(condition: Any, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """Return x where condition is nonzero, else y."""
    condition = need_tile("where", condition)
    tile = x if isinstance(x, NkiTensor) else y if isinstance(y, NkiTensor) else condition
    result = new_tile(tile, dtype, condition.shape)
    mask = FUNCTIONS["not_equal"](condition, 0.0, dtype="uint8")
    for value, reverse in ((y, True), (x, False)):
        if not isinstance(value, NkiTensor):
            elementwise.tensor_copy_predicated(result, value, mask, reverse)
            continue
        source = stretch("where", value, condition.shape)
        if source.dtype != result.dtype:
            converted = new_tile(result)
            elementwise.tensor_copy(converted, source)
            source = converted
        elementwise.tensor_copy_predicated(result, source, mask, reverse)
    return result
