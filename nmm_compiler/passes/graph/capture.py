"""Makes GraphModules of users' modules, functions, exported programs and Dynamo graphs.

`to_graph` gives the one graph that `rewrite` works on; `all_graphs` runs a model under
`torch.compile` and collects every graph that Dynamo makes of it, graph breaks included.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import convert_frame, eval_frame
from torch._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from nmm_compiler.errors import ModelError, nearest

_NO_LIMIT = 1 << 30
_TRACED: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that was first compiled to look at its graphs."""


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
    raise ModelError(
        f"example_inputs is a {type(example_inputs).__name__}; pass a tensor, a tuple of "
        "positional arguments or a dict of keyword arguments"
    )


def to_graph(model: Any, example_inputs: Any) -> tuple[fx.GraphModule, Sequence[Any] | None]:
    """Return the one graph of a model, and its inputs where the graph may lack shapes.

    GraphModules are used unchanged. ExportedPrograms are unlifted (`program.module()`). Other
    modules and functions go through torch.export, which needs example_inputs.
    Raises ModelError for anything else, and when torch.export cannot make one graph.
    """
    args, kwargs = arguments(example_inputs)
    if isinstance(model, fx.GraphModule):
        if kwargs:
            names = [str(n.target) for n in model.graph.nodes if n.op == "placeholder"]
            missing = [n for n in names if n not in kwargs]
            if missing:
                taken = nearest(missing[0], names)
                raise ModelError(f"example_inputs lack {missing[0]!r}; the graph takes {taken}")
            args = tuple(kwargs[n] for n in names)
        return model, args if example_inputs is not None else None
    if isinstance(model, torch.export.ExportedProgram):
        return model.module(), None
    if not callable(model):
        raise ModelError(
            f"cannot rewrite a {type(model).__name__}; pass an nn.Module, a function, a "
            "GraphModule or an ExportedProgram"
        )
    if example_inputs is None:
        raise ModelError(
            "a model that is not a graph yet needs example_inputs to be traced; "
            "pass them as nmm_compiler.rewrite(model, (x,))"
        )
    module = model if isinstance(model, nn.Module) else Function(model)
    try:
        program = export(module, args, kwargs)
    except Exception as error:
        raise ModelError(
            f"torch.export could not make one graph of {type(model).__name__}: {error}. "
            'Use torch.compile(model, backend="nmm"), which handles graph breaks, or explain()'
        ) from error
    return program.module(), None


def export(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> ExportedProgram:
    """Return torch.export's program of a module; raises what torch.export raises.

    Caches of transformers, such as the DynamicCache in a causal language model's output, become
    trees of tensors, which torch.export passes in and out.
    """
    for kind in _cache_classes(module):
        if kind not in pytree.SUPPORTED_NODES:
            unflatten = functools.partial(_unflatten_attributes, kind)
            pytree.register_pytree_node(kind, _flatten_attributes, unflatten)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch.export's own deprecated internals
        return torch.export.export(
            module, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )


def _cache_classes(module: nn.Module) -> Iterator[type]:
    """Yield transformers' classes of caches and of their layers, and those of the model's file."""
    files = map(sys.modules.get, ("transformers.cache_utils", type(module).__module__))
    shared, own = (vars(file) if file is not None else {} for file in files)
    found = [*shared.values(), *(value for name, value in own.items() if name.endswith("Cache"))]
    for kind in found:
        if isinstance(kind, type) and kind.__module__.startswith("transformers."):
            yield kind


def _flatten_attributes(thing: Any) -> tuple[list[Any], Any]:
    """Return the attributes that can hold tensors, and the names of these with all others."""
    held = vars(thing)
    trees = {
        name: value
        for name, value in held.items()
        if isinstance(value, torch.Tensor) or type(value) in pytree.SUPPORTED_NODES
    }
    return list(trees.values()), (tuple(trees), {n: v for n, v in held.items() if n not in trees})


def _unflatten_attributes(kind: Any, values: Any, context: Any) -> Any:
    names, others = context
    made = kind.__new__(kind)
    vars(made).update(others, **dict(zip(names, values, strict=True)))
    return made


class Function(nn.Module):
    """A module of a function."""

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

    Compiled code that Dynamo holds for other models stays.
    """
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def collect(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((module, inputs))
        return module.forward

    # Past its limits Dynamo runs the code uncompiled: a model class that was explained, or
    # compiled, eight times would seem to have no graph.
    limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
    others = set(_compiled()) - set(_TRACED)
    # Code that once passed the limits is marked: Dynamo only runs it from then on.
    for code in others:
        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT))
    try:
        with torch.no_grad(), torch._dynamo.config.patch(limits):
            torch.compile(model, backend=collect, dynamic=False)(*args, **kwargs)
    finally:
        # What stays counts against the limit of a model that is compiled later and shares code,
        # as all models of transformers share a wrapper of their forward functions.
        for code in set(_compiled()) - others:
            _TRACED.add(code)
            eval_frame.reset_code(code)
    return graphs


def _compiled() -> list[CodeType]:
    """Return the code that Dynamo holds compiled forms of."""
    seen = (one() for one in convert_frame.input_codes.seen)
    return [code for code in seen if code is not None]
