"""From a model to an exported graph of ATen and nmm ops, ready for torch-mlir.

    model -> rewrite (the passes) -> torch.export -> torch-mlir's decompositions

LayerNorm is decomposed here, in float32 as PyTorch computes it: the table's own way ends in
float64, which no Trainium engine has. Programs that change their inputs or buffers are refused:
MLIR values do not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from nmm_compiler.errors import ModelError
from nmm_compiler.mlir.bindings import load
from nmm_compiler.passes.graph.capture import export


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of the exported function, in order.

    kind "weight": the parameter or buffer `name` of the model; kind "input": a tensor that the
    caller passes. shape has None for a size known at run time only.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Program:
    """An exported graph whose placeholders are exactly the arguments of the MLIR function.

    literals: placeholder name -> tensor written into the module instead of being an argument.
    """

    graph: torch.fx.Graph
    arguments: tuple[Argument, ...]
    literals: dict[str, Tensor]
    outputs: int


def export_program(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    weights: str,
) -> Program:
    """Export a module (rewritten or not) and decide what becomes an argument.

    Raises ModelError, with PyTorch's reason, when torch.export cannot trace the model.
    """
    exported = exported_module(model, args, kwargs, dynamic_shapes)
    try:
        with quiet():
            exported = exported.run_decompositions(decompositions())
    except Exception as error:  # torch.export raises many types; the reason is passed on
        raise ModelError(f"decomposition of the graph failed: {error}") from error
    _refuse_mutation(exported)
    _fold_ranges(exported.graph)
    return _program(exported, weights)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide torch.export's warnings about its own deprecated internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def decompositions() -> dict[Any, Any]:
    """Return torch-mlir's decomposition table with norms that stay in float32."""
    table = dict(load().decompositions())
    table[torch.ops.aten.layer_norm.default] = _layer_norm
    table[torch.ops.aten.native_layer_norm.default] = _native_layer_norm
    return table


def _native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide = x.to(torch.float32)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    y = centred * scale
    if weight is not None:
        y = y * weight.to(torch.float32)
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(x.dtype), mean, scale


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return _native_layer_norm(x, shape, weight, bias, eps)[0]


def exported_module(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """Return the model as an ExportedProgram; ModelError, with PyTorch's reason, if impossible."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"cannot export {type(model).__name__}; pass an nn.Module, a GraphModule or an "
            "ExportedProgram"
        )
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ModelError(
            f"{type(model).__name__} is on the meta device, whose decompositions torch-mlir does "
            "not lower; call model.to_empty(device='cpu') first (with weights='args' no value is "
            "read)"
        )
    try:
        with torch.no_grad():
            return export(model, args, kwargs, dynamic_shapes)
    except Exception as error:  # torch.export raises many types; the reason is passed on
        raise ModelError(
            f"torch.export cannot trace {type(model).__name__}: {error}\n"
            "Pass a model, or the part of one, that torch.export accepts."
        ) from error


def _refuse_mutation(exported: ExportedProgram) -> None:
    changed = [
        str(spec.target or spec.arg)
        for spec in exported.graph_signature.output_specs
        if spec.kind not in (OutputKind.USER_OUTPUT,)
    ]
    if changed:
        raise ModelError(
            f"the model changes {', '.join(changed)} in place, which MLIR values cannot express; "
            "export it with the cache or buffer passed in and returned"
        )


def _fold_ranges(graph: torch.fx.Graph) -> None:
    """Write `arange` of constants as a constant: torch-mlir counts its elements in float64."""
    made: dict[tuple[Any, ...], Tensor] = {}
    for node in list(graph.nodes):
        constant = not any(isinstance(a, torch.fx.Node) for a in node.args)
        if node.target == torch.ops.aten.arange.start_step and constant:
            key = (*node.args, node.kwargs.get("dtype"))
            if key not in made:
                made[key] = torch.arange(*node.args, dtype=node.kwargs.get("dtype"))
            node.replace_all_uses_with(made[key])
            graph.erase_node(node)


def _program(exported: ExportedProgram, weights: str) -> Program:
    signature = exported.graph_signature
    graph = exported.graph
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    literals: dict[str, Tensor] = {}
    arguments: list[Argument] = []
    for spec in signature.input_specs:
        if isinstance(spec.arg, ConstantArgument):
            # A None or a Python number among the inputs is part of the trace, not an argument.
            if spec.arg.name in nodes and not nodes[spec.arg.name].users:
                graph.erase_node(nodes[spec.arg.name])
            continue
        node = nodes[spec.arg.name]
        target = spec.target or ""
        if spec.kind == InputKind.USER_INPUT:
            kind, name = "input", node.name
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and weights == "args":
            kind, name = "weight", target
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            literals[node.name] = _state(exported, target)
            continue
        else:
            raise ModelError(f"input {node.name!r} of kind {spec.kind.name} cannot be exported")
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise ModelError(f"input {node.name!r} is {value!r}; only tensors can be inputs")
        shape = tuple(int(s) if isinstance(s, int) else None for s in value.shape)
        arguments.append(Argument(name, kind, shape, str(value.dtype).removeprefix("torch.")))
    return Program(graph, tuple(arguments), literals, len(signature.user_outputs))


def _state(exported: ExportedProgram, name: str) -> Tensor:
    found = exported.state_dict.get(name)
    if found is None:
        found = exported.constants[name]
    return found.detach()
