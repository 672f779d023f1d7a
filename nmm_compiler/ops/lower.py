"""From an op call to kernel launches: which specs, and which operands in which order.

The same function serves the backend, which asks for the kernels of a graph before it runs (on
tensors without data), and the executors, which launch them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, inputs_of
from nmm_compiler.ops.references import as_matrix
from nmm_compiler.ops.registration import DEFINITIONS

GraphCall = tuple[str, Any, dict[str, Any], Any]
"""An op's name, its positional and its keyword arguments, and its tokens: a number, or a SymInt."""


@dataclass(frozen=True)
class Lowered:
    """An op call as launches on x, and how their results become the op's.

    lead: the token dimensions of a "row" result. many: the op returns a list.
    """

    launches: tuple[Launch, ...]
    lead: tuple[Any, ...]
    x_layout: str
    many: bool = False

    @property
    def out_layouts(self) -> tuple[str, ...]:
        """The layout of each result."""
        return tuple(way for launch in self.launches for way in launch.spec.result_layouts())


def tokens(x: Tensor, kwargs: dict[str, Any]) -> Any:
    """Return the token count of a call: an int, or a SymInt while tracing."""
    if kwargs.get("x_layout", "row") == "col":
        return x.shape[1]
    return math.prod(x.shape[:-1])


def lower(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    m: int,
    transpose: Transpose | None = None,
    *,
    lnc: int = 1,
) -> Lowered:
    """Return the launches of op `name` for m tokens.

    lnc: physical cores that run each kernel; one runs what they cannot share.
    Raises SpecError, ShapeError or UnknownNameError where no kernel family can compute the call.
    """
    op = DEFINITIONS.get(name)
    if op is None:
        raise UnknownNameError("op", name, tuple(DEFINITIONS))
    x = args[0]
    x_layout = kwargs.get("x_layout", "row")
    rows = as_matrix(x) if x_layout == "row" else x
    lead = tuple(x.shape[:-1]) if x_layout == "row" else (x.shape[1],)
    launches = op.lower(rows, args, kwargs, m, transpose)
    for launch in launches:
        for tensor, operand in zip(inputs_of(launch.spec), launch.operands, strict=True):
            if dtype_name(operand) != tensor.dtype:
                raise SpecError(f"{name}: operands have dtypes {x.dtype} and {operand.dtype}")
    if lnc > 1:
        launches = [replace(one, spec=one.spec.on_cores(lnc)) for one in launches]
    return Lowered(tuple(launches), lead, x_layout, op.many)


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
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        namespace, _, rest = str(target).partition(".")
        name = rest.partition(".")[0]
        if namespace == "nmm" and name in DEFINITIONS:
            return name
    return None
