"""The operators that instructions take: ALU operators and activation functions, on float32.

Kernels name an operator by the `nki.language` function (`op=nl.add`); that function carries an
`Operator` as its attribute `nki_op`. Arithmetic is float32, as on the engines; bit operators work
on integers as they are. Comparisons and logical operators give 1.0 or 0.0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nmm_compiler.errors import UnsupportedInstructionError, closest
from nmm_compiler.simulator.isa.operands import Issue

_F = np.float32


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One operator.

    kind: "arith", "bitvec", "unary" (ALU) or "" when it is no ALU operator.
    alu: function of (x, y) or, for "unary", of (x); None for none.
    activation: function of float32 x, or None.
    reduce: NumPy ufunc for reductions, or None; identity: its neutral element.
    valid: (low, high) of |x| or x that the hardware's approximation covers, or None.
    """

    name: str
    kind: str = ""
    alu: Any = None
    activation: Any = None
    reduce: Any = None
    identity: float = 0.0
    valid: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return f"nl.{self.name}"


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: function(x, y).astype(_F)


def _by_size(compare: Callable[..., Any], x: Any, y: Any) -> Any:
    return np.where(compare(np.abs(x), np.abs(y)), x, y)


_ERF = np.frompyfunc(math.erf, 1, 1)


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of float64, whatever it is given."""
    return lambda x: function(np.asarray(x, dtype=np.float64))


@_wide
def erf(x: Any) -> Any:
    """Return erf in float64."""
    return np.asarray(_ERF(x), np.float64)


@_wide
def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def _swish(scale: float) -> Callable[..., Any]:
    """Return x sigmoid(scale x)."""
    return _wide(lambda x: np.where(np.isneginf(x), 0.0, x * _sigmoid(scale * x)))


def _swish_dx(scale: float) -> Callable[..., Any]:
    """Return the derivative of `_swish`."""

    def function(x: Any) -> Any:
        s = _sigmoid(scale * x)
        return s * (1.0 + scale * x * (1.0 - s))

    return _wide(function)


@_wide
def _gelu(x: Any) -> Any:
    return x * 0.5 * (1.0 + erf(x / math.sqrt(2.0)))


@_wide
def _gelu_dx(x: Any) -> Any:
    density = np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + erf(x / math.sqrt(2.0))) + x * density


@_wide
def _gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@_wide
def _softplus(x: Any) -> Any:
    return np.logaddexp(0.0, x)


@_wide
def _mish(x: Any) -> Any:
    return x * np.tanh(_softplus(x))


@_wide
def _erf_dx(x: Any) -> Any:
    return 2.0 / math.sqrt(math.pi) * np.exp(-x * x)


@_wide
def _sin(x: Any) -> Any:
    """Return sin; outside [-pi, pi] the documented cubic around the nearer end."""
    d = np.where(x > 0, x - math.pi, x + math.pi)
    return np.where(np.abs(x) <= math.pi, np.sin(x), -d + d**3 / 6.0)


@_wide
def _rsqrt(x: Any) -> Any:
    return 1.0 / np.sqrt(x)


def _logical_shift(x: Any, y: Any, move: Callable[..., Any]) -> Any:
    """Shift bits: zeros come in, whatever the sign; all of them for as many bits as there are."""
    x = np.asarray(x)
    bits, unsigned = x.dtype.itemsize * 8, x.view(f"u{x.dtype.itemsize}")
    amount = np.asarray(y).astype(unsigned.dtype)
    moved = np.where(amount >= bits, 0, move(unsigned, amount % bits))
    return moved.astype(unsigned.dtype).view(x.dtype)


_INF = math.inf
_LIST = [
    *(Operator(name, "arith", function, None, function, identity) for name, function, identity in (
        ("add", np.add, 0.0), ("subtract", np.subtract, 0.0), ("multiply", np.multiply, 1.0),
        ("maximum", np.maximum, -_INF), ("minimum", np.minimum, _INF), ("max", np.maximum, -_INF),
        ("min", np.minimum, _INF),
    )),
    *(Operator(name, "bitvec", function, None, function, identity) for name, function, identity in (
        ("bitwise_and", np.bitwise_and, -1), ("bitwise_or", np.bitwise_or, 0),
        ("bitwise_xor", np.bitwise_xor, 0),
    )),
    *(Operator(name, "arith", _truth(function), None, function, identity)
      for name, function, identity in (
        ("logical_and", np.logical_and, 1.0), ("logical_or", np.logical_or, 0.0),
        ("logical_xor", np.logical_xor, 0.0),
    )),
    *(Operator(name, "arith", _truth(getattr(np, name))) for name in (
        "equal", "not_equal", "greater_equal", "greater", "less_equal", "less",
    )),
    *(Operator(name, "arith", getattr(np, name)) for name in ("divide", "power", "mod", "fmod")),
    Operator("average", "arith", None, None, np.add, 0.0),
    Operator("abs_max", "arith", functools.partial(_by_size, np.greater)),
    Operator("abs_min", "arith", functools.partial(_by_size, np.less)),
    Operator("left_shift", "bitvec", lambda x, y: _logical_shift(x, y, np.left_shift)),
    Operator("right_shift", "bitvec", lambda x, y: _logical_shift(x, y, np.right_shift)),
    Operator("invert", "bitvec unary", np.invert),
    Operator("logical_not", "unary", lambda x: (np.asarray(x) == 0).astype(_F)),
    Operator("bypass", "bypass", lambda x, y=None: x),
    Operator("negative", "unary", np.negative),
    *(Operator(name, "unary", function, function) for name, function in (
        ("abs", np.abs), ("square", np.square), ("relu", lambda x: np.maximum(x, _F(0))),
    )),
    Operator("rsqrt", "unary", _rsqrt, _rsqrt, valid=(2.0**-87, 2.0**97)),
    Operator("reciprocal", "unary", np.reciprocal, np.reciprocal, valid=(2.0**-42, 2.0**42)),
    Operator("log", activation=np.log, valid=(2.0**-64, 2.0**64)),
    Operator("sin", activation=_sin, valid=(-math.pi, math.pi)),
    Operator("arctan", activation=_wide(np.arctan), valid=(-math.pi / 2, math.pi / 2)),
    Operator("sqrt", activation=np.sqrt, valid=(2.0**-116, 2.0**118)),
    *(Operator(name, activation=function) for name, function in {
        "copy": lambda x: x, "exp": np.exp, "sign": np.sign, "tanh": _wide(np.tanh),
        "sigmoid": _sigmoid, "prelu": None, "gelu": _gelu, "gelu_dx": _gelu_dx,
        "gelu_apprx_tanh": _gelu_tanh, "gelu_apprx_sigmoid": _swish(1.702),
        "gelu_apprx_sigmoid_dx": _swish_dx(1.702), "silu": _swish(1.0), "silu_dx": _swish_dx(1.0),
        "softplus": _softplus, "mish": _mish, "erf": erf, "erf_dx": _erf_dx,
    }.items()),
]  # fmt: skip
_YOUNG = ("abs_max", "abs_min", "square", "relu")
"""Operators that the ALU has since trn3."""
BY_NAME: dict[str, Operator] = {op.name: op for op in _LIST}
_NUMPY_NAMES = {"absolute": "abs", "true_divide": "divide", "max": "maximum", "min": "minimum"}


@dataclasses.dataclass(frozen=True)
class Takes:
    """Which operators a parameter takes: those that have `part` ("" for any), or `names` of them.

    kinds: those of the operators, any unless said.
    default: what None means where the parameter's own default is None; "" for no operator.
    """

    part: str = ""
    names: tuple[str, ...] = ()
    default: str = ""
    kinds: tuple[str, ...] = ()

    def resolve(self, call: Issue, role: str, given: Any, default: Any) -> Operator | None:
        """Return the operator that an argument means, an `nki.language` function or a NumPy ufunc;
        refuse one that the parameter lacks."""
        if given is None and default is None:
            return BY_NAME.get(self.default)
        name, problem = getattr(given, "__name__", str(given)), ""
        known = BY_NAME.get(_NUMPY_NAMES.get(name, name))
        found: Any = given if isinstance(given, Operator) else getattr(given, "nki_op", known)
        if found is None:
            call.need(
                False,
                f"operator {name!r}{closest(name, BY_NAME)}; see the math operators and activation "
                "functions of nki.language",
                UnsupportedInstructionError,
            )
        has = getattr(found, self.part or "name") is not None
        if not has and not (self.part == "activation" and found.name == "prelu"):
            problem = _LACKS[self.part]
        elif self.names and found.name not in self.names:
            problem = f"not for {role}; use nl.{', nl.'.join(self.names)}"
        elif self.kinds and found.kind not in self.kinds:
            problem = f"not for {role}; {_KINDS[self.kinds]}"
        says = f"nl.{found.name} is {problem}"
        call.need(not problem, says, UnsupportedInstructionError)
        if self.part == "alu" and found.name in _YOUNG:
            call.machine.require("nl.abs_max, nl.abs_min, nl.square, nl.relu on the ALU")
        return found


_BINARY, _TWO = ("arith",), ("arith", "bitvec", "bypass")
_ARITHMETIC = ("arith", "unary", "bypass")
ALU, ACTIVATION, REDUCTION = Takes("alu"), Takes("activation"), Takes("reduce")
BINARY, TWO_OPERANDS = Takes("alu", kinds=_BINARY), Takes("alu", kinds=_TWO)
ARITHMETIC = Takes("alu", kinds=_ARITHMETIC)
_KINDS = {
    _BINARY: "it must be binary and arithmetic",
    _TWO: "it takes one operand, use nisa.tensor_scalar",
    _ARITHMETIC: "it must be arithmetic, bit operators are not supported",
}
_LACKS = {
    "alu": "no ALU operator; use nisa.activation for activation functions",
    "activation": "no activation function; use nisa.tensor_scalar or nisa.tensor_tensor for ALU "
    "operators",
    "reduce": "no reduction; use nl.add, nl.maximum, nl.minimum, nl.multiply or a bit operator",
}
