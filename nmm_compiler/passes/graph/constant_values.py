"""The values of nodes that depend on no input, found by running them on the CPU.

transformers computes its masks inside of the graph, from `arange` and comparisons: which positions
a query sees is known before the model runs, although the mask is a tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.torch_names import target_name

LARGEST_ELEMENTS = 1 << 26  # of a value that is computed to be read: 8192 queries and keys
# Functions of their arguments alone: nothing random, nothing that writes, no memory as it is.
_PURE = frozenset(
    {
        "add", "alias", "all", "any",
        "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bool", "cat",
        "chunk", "clamp", "clone", "constant_pad_nd", "contiguous", "cumsum", "detach", "diff",
        "eq", "expand", "expand_as", "flatten", "float", "full", "full_like", "ge", "getitem",
        "gt", "index", "int", "le", "logical_and",
        "logical_not", "logical_or", "long", "lt", "masked_fill", "maximum", "minimum", "mul",
        "ne", "neg", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute",
        "repeat", "reshape", "rsub", "scalar_tensor", "select", "slice", "squeeze", "stack",
        "sub", "t", "to", "transpose", "tril", "triu", "type", "unsqueeze", "view", "where",
        "zeros", "zeros_like",
    }
)  # fmt: skip


def constant_value(graph: Canonical, node: fx.Node) -> torch.Tensor | fx.Node:
    """Return the value of a node, or the node because of which it is not known."""
    cone, waiting = {node}, [node]
    while waiting:
        current = waiting.pop()
        unknown = target_name(current) not in _PURE or graph.effects.is_written(current)
        if unknown or _elements(graph, current) > LARGEST_ELEMENTS:
            return current
        new = [source for source in current.all_input_nodes if source not in cone]
        cone.update(new)
        waiting += new
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for current in graph.graph.nodes:
            if current in cone:
                try:
                    values[current] = _run(current, values)
                except (TypeError, RuntimeError, ValueError, IndexError):
                    return current
    found = values[node]
    return found if isinstance(found, torch.Tensor) else node


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.node.map_aggregate(
        fx.node.map_arg(node.args, values.__getitem__), lambda value: _on_cpu(value)
    )
    kwargs = fx.node.map_aggregate(
        fx.node.map_arg(node.kwargs, values.__getitem__), lambda value: _on_cpu(value)
    )
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if node.op == "call_method":
        own, *rest = args
        return getattr(own, str(node.target))(*rest, **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _elements(graph: Canonical, node: fx.Node) -> float:
    """Return how many elements a value has; infinitely many where a size is symbolic."""
    value = graph.tensor(node)
    sizes = () if value is None else tuple(value.shape)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf
