"""From an op call to the launch of its kernel: which spec, and which operands in which order.

The same function serves the backend, which asks for the kernels of a graph before it runs (on
tensors without data), and the executors, which launch them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, inputs_of
from nmm_compiler.ops.operands import Given, tokens_of
from nmm_compiler.ops.references import as_matrix
from nmm_compiler.ops.registration import DEFINITIONS, OPS

GraphCall = tuple[str, Any, dict[str, Any], Any]
"""An op's name, its positional and its keyword arguments, and its tokens: a number, or a SymInt."""


def tokens(x: Tensor, kwargs: Given) -> Any:
    """Return the token count of a call: an int, or a SymInt while tracing."""
    return math.prod(tokens_of(x, kwargs.get("x_layout", "row"))[0])


def lower(
    name: str,
    args: Sequence[Any],
    kwargs: Given,
    m: int,
    transpose: Transpose | None = None,
    *,
    lnc: int = 1,
) -> Launch:
    """Return the launch of op `name` for m tokens.

    lnc: physical cores that run the kernel; one runs what they cannot share.
    Raises SpecError, ShapeError or UnknownNameError where no kernel family can compute the call.
    """
    check_name("op", name, tuple(DEFINITIONS))
    op, x = DEFINITIONS[name], args[0]
    rows = as_matrix(x) if kwargs.get("x_layout", "row") == "row" else x
    launch = op.lower(op.bound(args, kwargs), rows, m, transpose)
    for tensor, operand in zip(inputs_of(launch.spec), launch.operands, strict=True):
        if dtype_name(operand) != tensor.dtype:
            raise SpecError(f"{name}: operands have dtypes {x.dtype} and {operand.dtype}")
    return replace(launch, spec=launch.spec.on_cores(lnc)) if lnc > 1 else launch


def reshaped(name: str, launch: Launch) -> dict[str, Tensor]:
    """Return the operands that a launch takes in fewer dimensions, by the names of op `name`."""
    seen = ("q", "k", "v") if name == "attention" else ("x", "residual")
    operands = zip(inputs_of(launch.spec), launch.operands, strict=True)
    return {one.name: operand for one, operand in operands if one.name in seen}


def graph_call(node: fx.Node, value: Callable[[fx.Node], Any]) -> GraphCall | None:
    """Return (op, args, kwargs, tokens) of a node of a graph; None where it calls no op of ours.

    value: of a node that it reads, a tensor without data.
    """
    name = op_name(node.target)
    if name is None:
        return None
    given: Any = fx.map_arg((node.args, node.kwargs), value)
    args, kwargs = given
    return name, args, kwargs, tokens(args[0], kwargs)


def op_name(target: Any) -> str | None:
    """Return the name of a graph target that is an op of this package, or None."""
    return _NAMES.get(target)


_NAMES = {target: name for name, op in OPS.items() for target in (op, op.overloadpacket)}
