"""`export_mlir`: a model as MLIR, each fused kernel as one call. Reads top to bottom.

    model --rewrite--> graph of ATen and nmm ops --torch-mlir--> torch dialect
      --calls--> func.call per kernel --lower--> torch | linalg | stablehlo --verify--> text

docs/mlir.md says what a toolchain must do with the calls. `python tests/mlir/mlir_golden.py` writes
the goldens anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram

from nmm_compiler.errors import ModelError, UnknownNameError
from nmm_compiler.mlir import lower
from nmm_compiler.mlir import program as importer
from nmm_compiler.mlir.module import ExportedKernel, KernelCall, MLIRModule, calls_of
from nmm_compiler.options import Options
from nmm_compiler.passes.graph.capture import arguments


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
    rewritten = _rewritten(model_or_graph, args, kwargs, dynamic_shapes, options)
    program = importer.export_program(rewritten, args, kwargs, dynamic_shapes, weights)
    calls = calls_of(program.graph)
    served: dict[str, list[KernelCall]] = {}
    for call in calls:
        served.setdefault(call.signature(), []).append(call)
    written = (kernels == "call") if sources is None else sources
    found = {one: ExportedKernel.of(same, options, written) for one, same in served.items()}
    if len({kernel.name for kernel in found.values()}) < len(found):
        raise ModelError("two kernels have one name; this is a bug in mlir/module.py")

    module = importer.import_graph(program, lower.context())
    importer.insert_calls(module, calls, lambda call: found[call.signature()].name)
    if kernels == "inline":
        for signature, kernel in found.items():
            importer.give_body(module, kernel.name, served[signature][0])
    lower.lower(module, dialect)
    importer.describe_kernels(module, tuple(found.values()))
    if dialect == "stablehlo" and kernels == "call":
        lower.to_custom_calls(module)
    lower.verify(module, dialect, len(calls))
    return MLIRModule(
        text=str(module),
        dialect=dialect,
        mode=kernels,
        kernels=tuple(found.values()),
        arguments=program.arguments,
        outputs=program.outputs,
    )


def _rewritten(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    options: Options,
) -> torch.nn.Module:
    """Trace the model, let the passes rewrite it, and return the new graph as a module."""
    from nmm_compiler.passes.pipeline import rewrite

    exported = model
    if not isinstance(model, ExportedProgram):
        exported = importer.exported_module(model, args, kwargs, dynamic_shapes)
    with importer.quiet():
        result = rewrite(exported.module(check_guards=False), options=options)
    return result.graph_module
