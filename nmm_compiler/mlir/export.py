"""`export_mlir`: a model as MLIR, each fused kernel as one call. Reads top to bottom.

    model --rewrite--> graph of ATen and nmm ops --torch-mlir--> torch dialect, func.call per kernel
      --lower--> torch | linalg | stablehlo --verify--> text

torch-mlir's pipelines refuse ops that they do not know, and lower a call of a private function like
any other code: so our ops are imported as calls. The function gets a body traced from the op's
PyTorch reference, or stays a declaration. Programs that change their inputs or buffers are refused:
MLIR values do not change.

docs/mlir.md says what a toolchain must do with the calls. `python tests/mlir/mlir_golden.py` writes
the goldens anew.
"""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from nmm_compiler.errors import MissingPackageError, ModelError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.mlir import DIALECTS, MODES, WEIGHTS
from nmm_compiler.mlir.module import (
    Argument,
    CustomCall,
    ExportedKernel,
    MLIRModule,
    calls_of,
    dtype_of,
    open_shape,
)
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.options import Options
from nmm_compiler.passes.graph.capture import arguments, export
from nmm_compiler.passes.pipeline import rewrite
from nmm_compiler.passes.result import grouped

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
    check_name("dialect", dialect, DIALECTS)
    check_name("kernels mode", kernels, MODES)
    check_name("weights mode", weights, WEIGHTS)
    options = Options.make(options)
    if importlib.util.find_spec("torch_mlir") is None:
        raise MissingPackageError("torch-mlir", "export to MLIR", "mlir")
    from nmm_compiler.mlir import lower

    inputs, table = (*arguments(example_inputs), dynamic_shapes), lower.DECOMPOSITIONS
    program = _rewritten(model_or_graph, inputs, options, table)
    written = (kernels == "call") if sources is None else sources
    served = [
        (ExportedKernel.of(same, options, written), same)
        for same in grouped((call.signature(), call) for call in calls_of(program.graph)).values()
    ]
    given = _arguments(program, weights)
    importer = lower.Importer(
        {call.node: (kernel.name, call.tensors) for kernel, same in served for call in same}
    )
    if kernels == "inline":
        for kernel, (call, *_) in served:
            importer.take(_body(call, table), kernel.name, "private")
    importer.take(program, MAIN)
    module = importer.module
    named = ", ".join(
        f"{{nmm.{one.kind} = {json.dumps(one.name, ensure_ascii=False)}}}" for one in given
    )
    lower.describe(module, MAIN, {"arg_attrs": f"[{named}]"})
    lower.lower(module, dialect)
    for kernel, _ in served:
        said = {f"nmm.{name}": json.dumps(value) for name, value in kernel.attributes().items()}
        lower.describe(module, kernel.name, said)
    if dialect == "stablehlo" and kernels == "call":
        lower.to_custom_calls(module)
    lower.verify(module, dialect)
    return MLIRModule(
        text=str(module),
        dialect=dialect,
        mode=kernels,
        kernels=tuple(kernel for kernel, _ in served),
        arguments=tuple(given),
        outputs=len(program.graph_signature.user_outputs),
    )


def _rewritten(model: Any, inputs: Any, options: Options, table: Any) -> ExportedProgram:
    """Trace the model, let the passes rewrite it, and return the new program, decomposed.

    inputs: the arguments of `export` behind the model.
    """
    program = model
    if not isinstance(model, ExportedProgram):
        program = _exported(model, inputs)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of torch.export's own
        graph = rewrite(program.module(check_guards=False), options=options).graph_module
        program = _exported(graph, inputs, table)
    outputs = program.graph_signature.output_specs
    changed = [str(o.target or o.arg) for o in outputs if o.kind != OutputKind.USER_OUTPUT]
    if changed:
        raise ModelError(
            f"the model changes {', '.join(changed)} in place, which MLIR values cannot express; "
            "export it with the cache or buffer passed in and returned"
        )
    return program


def _exported(model: Any, inputs: Any, table: Any = None) -> ExportedProgram:
    """Return the model as an ExportedProgram, decomposed by a table; ModelError, with PyTorch's
    reason, if impossible."""
    if isinstance(model, torch.nn.Module) and any(
        tensor.is_meta for tensor in (*model.parameters(), *model.buffers())
    ):
        raise ModelError(
            f"{type(model).__name__} is on the meta device, whose decompositions torch-mlir does "
            "not lower; call model.to_empty(device='cpu') first (with weights='args' no value is "
            "read)"
        )
    try:
        with torch.no_grad():
            program = export(model, *inputs)
            return program if table is None else program.run_decompositions(table)
    except Exception as error:  # torch.export raises many types; the reason is passed on
        raise ModelError(
            f"torch.export cannot trace {type(model).__name__}: {error}\n"
            "Pass a model, or the part of one, that torch.export accepts."
        ) from error


def _arguments(program: ExportedProgram, weights: str) -> list[Argument]:
    """Return the arguments of @main; weights="args" makes the weights inputs of the program.

    torch-mlir writes other weights, and constants, as resources.
    """
    arguments: list[Argument] = []
    nodes = program.graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, nodes, strict=True):
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and weights == "args":
            spec.kind = InputKind.USER_INPUT
        # A None or a Python number among the inputs is part of the trace, not an argument.
        if spec.kind != InputKind.USER_INPUT or isinstance(spec.arg, ConstantArgument):
            continue
        value, kind = node.meta["val"], "weight" if spec.target else "input"
        if not isinstance(value, Tensor):
            raise ModelError(f"input {node.name!r} is {value!r}; only tensors can be inputs")
        arguments.append(
            Argument(spec.target or node.name, kind, open_shape(value), dtype_of(value))
        )
    return arguments


def _body(call: CustomCall, table: Any) -> fx.Graph:
    """Return the op's PyTorch reference for a call, as a graph of its tensors."""

    def reference(*tensors: Tensor) -> Any:
        each = iter(tensors)
        given = pytree.tree_map_only(fx.Node, lambda _: next(each), call.given)
        return DEFINITIONS[call.op].reference(**given)

    values = [node.meta["val"] for node in call.tensors]
    return make_fx(reference, table, "symbolic")(*values).graph
