"""`export_mlir`: a model as MLIR, each fused kernel as one call. Reads top to bottom.

    model --rewrite--> graph of ATen and nmm ops --torch-mlir--> torch dialect, func.call per kernel
      --lower--> torch | linalg | stablehlo --verify--> text

torch-mlir's pipelines refuse ops that they do not know, and lower a call of a private function like
any other code: so our ops are imported as calls. The function gets a body traced from the op's
PyTorch reference, or stays a declaration. LayerNorm is decomposed here, in float32 as PyTorch
computes it: the table's own way ends in float64, which no Trainium engine has. Programs that change
their inputs or buffers are refused: MLIR values do not change.

docs/mlir.md says what a toolchain must do with the calls. `python tests/mlir/mlir_golden.py` writes
the goldens anew.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from nmm_compiler.errors import ModelError, UnknownNameError
from nmm_compiler.mlir import lower
from nmm_compiler.mlir.module import (
    Argument,
    ExportedKernel,
    KernelCall,
    MLIRModule,
    calls_of,
    dtype_of,
    open_shape,
)
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.options import Options
from nmm_compiler.passes.graph.capture import Function, arguments, export

MAIN = "main"


def export_mlir(
    model_or_graph: Any,
    example_inputs: Any,
    *,
    dialect: str = "stablehlo",
    kernels: str = "call",
    options: Options | Mapping[str, Any] | None = None,
    weights: str = "args",
    dynamic_shapes: Any = None,
    sources: bool | None = None,
) -> MLIRModule:
    """Rewrite a model and return it as an MLIR module with one call per fused kernel.

    Args:
        model_or_graph: an nn.Module (or GraphModule) in eval mode, or an ExportedProgram; ops of
            namespace nmm that are in it already stay.
        example_inputs: a tensor, a tuple of positional or a dict of keyword inputs.
        dialect: "torch", "linalg" (linalg on tensors) or "stablehlo".
        kernels: "call" declares each distinct kernel and calls it (custom_call in StableHLO);
            "inline" gives the same functions the op's PyTorch reference as body, so that the
            module runs anywhere.
        options: of the rewrite.
        weights: "args" makes parameters and buffers the first arguments of @main, by name;
            "resources" writes them into the module.
        dynamic_shapes: as torch.export takes it; with kernels="call" the NKI sources are written
            for the token counts of options["buckets"].
        sources: write NKI sources for the kernels; by default for kernels="call" only.

    Returns:
        The module, which saves itself with its sources.

    Raises:
        UnknownNameError: a dialect, mode or option is not known.
        MissingPackageError: there is no torch-mlir.
        ModelError: the model cannot be traced or lowered; with the node and torch-mlir's
            message.
    """
    for kind, value, known in (
        ("dialect", dialect, lower.DIALECTS),
        ("kernels mode", kernels, lower.MODES),
        ("weights mode", weights, lower.WEIGHTS),
    ):
        if value not in known:
            raise UnknownNameError(kind, value, known)
    options = Options.make(options)
    lower.load()  # a missing package is reported before any work
    args, kwargs = arguments(example_inputs)
    program = _rewritten(model_or_graph, args, kwargs, dynamic_shapes, options)
    calls = calls_of(program.graph)
    served: dict[str, list[KernelCall]] = {}
    for call in calls:
        served.setdefault(call.signature(), []).append(call)
    written = (kernels == "call") if sources is None else sources
    found = {one: ExportedKernel.of(same, options, written) for one, same in served.items()}

    given = _arguments(program, weights)
    importer = lower.importer(
        {call.node: (found[call.signature()].name, call.tensors) for call in calls}
    )
    if kernels == "inline":
        for signature, kernel in found.items():
            lower.take(importer, _body(served[signature][0]), kernel.name, "private")
    lower.take(importer, program, MAIN)
    module = importer.module
    named = ", ".join(
        f"{{nmm.{one.kind} = {json.dumps(one.name, ensure_ascii=False)}}}" for one in given
    )
    lower.describe(module, MAIN, {"arg_attrs": f"[{named}]"})
    lower.lower(module, dialect)
    for kernel in found.values():
        said = {f"nmm.{name}": json.dumps(value) for name, value in kernel.attributes().items()}
        lower.describe(module, kernel.name, said)
    if dialect == "stablehlo" and kernels == "call":
        lower.to_custom_calls(module)
    lower.verify(module, dialect)
    return MLIRModule(
        text=str(module),
        dialect=dialect,
        mode=kernels,
        kernels=tuple(found.values()),
        arguments=tuple(given),
        outputs=len(program.graph_signature.user_outputs),
    )


def _rewritten(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    options: Options,
) -> ExportedProgram:
    """Trace the model, let the passes rewrite it, and return the new program, decomposed.

    Raises ModelError, with PyTorch's reason, when torch.export cannot trace the model.
    """
    from nmm_compiler.passes.pipeline import rewrite

    program = model
    if not isinstance(model, ExportedProgram):
        program = exported_module(model, args, kwargs, dynamic_shapes)
    with quiet():
        result = rewrite(program.module(check_guards=False), options=options)
    program = exported_module(result.graph_module, args, kwargs, dynamic_shapes)
    try:
        with quiet():
            program = program.run_decompositions(decompositions())
    except Exception as error:  # torch.export raises many types; the reason is passed on
        raise ModelError(f"decomposition of the graph failed: {error}") from error
    outputs = program.graph_signature.output_specs
    changed = [str(o.target or o.arg) for o in outputs if o.kind != OutputKind.USER_OUTPUT]
    if changed:
        raise ModelError(
            f"the model changes {', '.join(changed)} in place, which MLIR values cannot express; "
            "export it with the cache or buffer passed in and returned"
        )
    return program


def quiet() -> AbstractContextManager[Any]:
    """Hide torch.export's warnings about its own deprecated internals."""
    return warnings.catch_warnings(action="ignore", category=FutureWarning)


def decompositions() -> dict[Any, Any]:
    """Return torch-mlir's decomposition table with norms that stay in float32."""
    table = dict(lower.load().decompositions())
    table[torch.ops.aten.layer_norm.default] = lambda *given: _native_layer_norm(*given)[0]
    table[torch.ops.aten.native_layer_norm.default] = _native_layer_norm
    return table


def _native_layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
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


def _arguments(program: ExportedProgram, weights: str) -> list[Argument]:
    """Return the arguments of @main; weights="args" makes the weights inputs of the program.

    torch-mlir writes other weights, and constants, as resources.
    """
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: list[Argument] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and weights == "args":
            spec.kind, kind, name = InputKind.USER_INPUT, "weight", str(spec.target)
        else:
            kind, name = "input", spec.arg.name
        # A None or a Python number among the inputs is part of the trace, not an argument.
        if spec.kind != InputKind.USER_INPUT or isinstance(spec.arg, ConstantArgument):
            continue
        value = nodes[spec.arg.name].meta["val"]
        if not isinstance(value, Tensor):
            raise ModelError(f"input {name!r} is {value!r}; only tensors can be inputs")
        found.append(Argument(name, kind, open_shape(value), dtype_of(value)))
    return found


def _body(call: KernelCall) -> ExportedProgram:
    """Return the op's PyTorch reference for a call, as a program of its tensors."""
    sizes = itertools.count(7, 4)  # sizes that differ, so that none equals another
    automatic = torch.export.Dim.AUTO
    examples, free = [], []
    for node in call.tensors:
        shape = open_shape(node.meta["val"])
        given = [next(sizes) if size is None else size for size in shape]
        examples.append(torch.zeros(given, dtype=node.meta["val"].dtype))
        free.append({d: automatic for d, size in enumerate(shape) if size is None})

    def reference(*tensors: Tensor) -> Any:
        each = iter(tensors)
        given = pytree.tree_map_only(torch.fx.Node, lambda _: next(each), call.given)
        return DEFINITIONS[call.op].reference(**given)

    with quiet():
        exported = torch.export.export(
            Function(reference),
            tuple(examples),
            dynamic_shapes=(tuple(free),) if call.dynamic else None,
            strict=False,
        )
        return exported.run_decompositions(decompositions())
