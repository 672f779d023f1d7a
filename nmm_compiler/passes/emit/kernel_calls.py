"""Calls of our ops that stand in a graph: their arguments, and their predicted times."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.ops.definition import Op
from nmm_compiler.passes.chains.prices import call_ways, tokens_to_judge
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.targets import Target

_US = 1e6


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call of an op whose calls may have a norm of x and a residual.

    args: its operands, those of a norm and a residual too, None for each that it does not have.
    """

    node: fx.Node
    op: Op
    args: tuple[Any, ...]

    @property
    def gain(self) -> int:
        """The place of the gain among the operands; the bias and the residual follow."""
        return self.op.own

    @property
    def adds_residual(self) -> bool:
        """Whether the op adds one."""
        return "Tensor? residual" in self.op.schema

    def ended(self, more: dict[int, Any], keywords: dict[str, Any]) -> KernelChange:
        """Return the arguments with other operands, by place, and more keywords."""
        args = [more.get(place, value) for place, value in enumerate(self.args)]
        while args and args[-1] is None:
            args.pop()
        return KernelChange(tuple(args), {**self.node.kwargs, **keywords})


@dataclasses.dataclass(frozen=True)
class KernelChange:
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def kernel_call(node: fx.Node) -> KernelCall | None:
    """Return the call of a product's op that a node is, or None."""
    from nmm_compiler.ops.registration import DEFINITIONS

    space, _, name = (target_name(node) or "").partition("::")
    op = DEFINITIONS.get(name) if space == "nmm" else None
    if op is None or op.own == 0:
        return None
    count = op.own + 2 + ("Tensor? residual" in op.schema)
    args = (*node.args, *[None] * (count - len(node.args)))
    return KernelCall(node, op, args)


def has_kernel_calls(graph: fx.Graph) -> bool:
    """Return whether a graph calls an op that may have a norm of x."""
    return any(kernel_call(node) is not None for node in graph.nodes)


def call_us(c: Canonical, call: KernelCall, change: KernelChange) -> float | None:
    """Return the predicted microseconds of a call with these arguments; None without a kernel."""
    from nmm_compiler.ops.lower import lower, tokens

    values = c.values
    args, kwargs = fx.map_arg((change.args, change.kwargs), lambda n: values[n])
    try:
        m = tokens_to_judge(tokens(args[0], kwargs))
        (launch,) = lower(call.op.name, args, kwargs, m).launches
        spec: KernelSpec = launch.spec
    except (NmmError, ValueError, TypeError):
        return None  # symbolic sizes
    us = call_ways(c, spec).fused
    return us if math.isfinite(us) else None


def pass_us(chip: Target, moved_bytes: float) -> float:
    """Return the microseconds of an elementwise pass over so many bytes in HBM.

    A load and a store start one after the other; the launch of a kernel of its own is not counted.
    """
    start = chip.dma_start_latency_seconds + chip.semaphore_seconds
    return (2 * start + moved_bytes / chip.memory_bytes_per_second) * _US
