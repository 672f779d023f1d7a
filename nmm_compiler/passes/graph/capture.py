"""Makes GraphModules of users' modules, functions, exported programs and Dynamo graphs.

`to_graph` gives the one graph that `rewrite` works on; `all_graphs` runs a model under
`torch.compile` and collects every graph that Dynamo makes of it, graph breaks included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from nmm_compiler.errors import CaptureError

_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Captured:
    """A graph to rewrite; program: the ExportedProgram that it came from, or None."""

    module: fx.GraphModule
    inputs: Sequence[Any] | None
    program: Any = None


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return example inputs as (args, kwargs): a tensor, a sequence, or a mapping of keywords."""
    if example_inputs is None:
        return (), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise CaptureError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tensor, a tuple of "
        "positional arguments or a dict of keyword arguments"
    )


def to_graph(model: Any, example_inputs: Any) -> Captured:
    """Return the one graph of a model.

    GraphModules are used unchanged. ExportedPrograms are unlifted (`program.module()`). Other
    modules and functions go through torch.export, which needs example_inputs.
    Raises CaptureError for anything else, and when torch.export cannot make one graph.
    """
    args, kwargs = arguments(example_inputs)
    if isinstance(model, fx.GraphModule):
        if kwargs:
            names = [str(n.target) for n in model.graph.nodes if n.op == "placeholder"]
            missing = [n for n in names if n not in kwargs]
            if missing:
                raise CaptureError(f"example_inputs lack {missing}; the graph takes {names}")
            args = tuple(kwargs[n] for n in names)
        return Captured(model, args if example_inputs is not None else None)
    if isinstance(model, torch.export.ExportedProgram):
        return Captured(model.module(), None, model)
    if not callable(model):
        raise CaptureError(
            f"cannot rewrite a {type(model).__name__}; pass an nn.Module, a function, a "
            "GraphModule or an ExportedProgram"
        )
    if example_inputs is None:
        raise CaptureError(
            "a model that is not a graph yet needs example_inputs to be traced; "
            "pass them as nmm_compiler.rewrite(model, (x,))"
        )
    module = model if isinstance(model, nn.Module) else _Function(model)
    try:
        program = torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        raise CaptureError(
            f"torch.export could not make one graph of {type(model).__name__}: {error}. "
            'Use torch.compile(model, backend="nmm"), which handles graph breaks, or explain()'
        ) from error
    return Captured(program.module(), None)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


def all_graphs(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[fx.GraphModule, list[Any]]]:
    """Run the model once and return every graph Dynamo makes, with its inputs.

    Compiled code that Dynamo holds for other models is dropped only for this function's wrapper.
    """
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def collect(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((module, inputs))
        return module.forward

    # Past its limits Dynamo runs the code uncompiled: a model class that was explained, or
    # compiled, eight times would seem to have no graph.
    limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
    with torch.no_grad(), torch._dynamo.config.patch(limits):
        torch.compile(model, backend=collect, dynamic=False)(*args, **kwargs)
    return graphs
