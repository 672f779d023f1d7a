"""`export_mlir`: a model as MLIR, each fused kernel as one call. Reads top to bottom.

    model --rewrite--> graph of ATen and nmm ops --torch-mlir--> torch dialect
      --calls--> func.call per kernel --lower--> torch | linalg | stablehlo --verify--> text

    %r = torch.operator "torch.nmm.lowrank_matmul"(%x, %u, %v, %none, ..., %str, ...)
      ->
    %r = func.call @lowrank_...(%x, %u, %v)

torch-mlir imports our ops under their own names; its pipelines refuse names that they do not know,
and lower a call of a private function like any other code. The function gets a body traced from the
op's PyTorch reference, or stays a declaration. LayerNorm is decomposed here, in float32 as PyTorch
computes it: the table's own way ends in float64, which no Trainium engine has. Programs that change
their inputs or buffers are refused: MLIR values do not change.

docs/mlir.md says what a toolchain must do with the calls. `python tests/mlir/mlir_golden.py` writes
the goldens anew.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from nmm_compiler.errors import ModelError, UnknownNameError
from nmm_compiler.mlir import lower
from nmm_compiler.mlir.lower import load, replace, text_attribute, walk
from nmm_compiler.mlir.module import (
    Argument,
    ExportedKernel,
    KernelCall,
    MLIRModule,
    TensorType,
    calls_of,
)
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.options import Options
from nmm_compiler.passes.graph.capture import Function, arguments, export

MAIN = "main"
_OPERATOR = "torch.nmm."


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
    module = _import(program.graph, lower.context(), MAIN, None)
    ir = load().ir
    with module.context:
        function = _function(module, MAIN)
        said = ({f"nmm.{one.kind}": ir.StringAttr.get(one.name)} for one in given)
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(one) for one in said])
    insert_calls(module, calls, lambda call: found[call.signature()].name)
    if kernels == "inline":
        for signature, kernel in found.items():
            give_body(module, kernel.name, served[signature][0])
    lower.lower(module, dialect)
    describe_kernels(module, tuple(found.values()))
    if dialect == "stablehlo" and kernels == "call":
        lower.to_custom_calls(module)
    lower.verify(module, dialect, len(calls))
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
    _fold_ranges(program.graph)
    return program


def quiet() -> AbstractContextManager[Any]:
    """Hide torch.export's warnings about its own deprecated internals."""
    return warnings.catch_warnings(action="ignore", category=FutureWarning)


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


def _arguments(program: ExportedProgram, weights: str) -> list[Argument]:
    """Return the arguments of @main: the placeholders that stay in the graph.

    Tensors that are none stand in place of their nodes: torch-mlir writes them as resources.
    """
    graph = program.graph
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    found: list[Argument] = []
    for spec in program.graph_signature.input_specs:
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
            value = {**program.constants, **program.state_dict}[target]
            node.replace_all_uses_with(value.detach())
            graph.erase_node(node)
            continue
        else:
            raise ModelError(f"input {node.name!r} of kind {spec.kind.name} cannot be exported")
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            raise ModelError(f"input {node.name!r} is {value!r}; only tensors can be inputs")
        like = TensorType.of(value)
        found.append(Argument(name, kind, like.shape, like.dtype))
    return found


def insert_calls(
    module: Any, calls: list[KernelCall], name_of: Callable[[KernelCall], str]
) -> None:
    """Replace each imported nmm operator by a call of the private function that serves it.

    calls: the graph's kernel calls in order, as many as the module has operators. One declaration
    is made per name; the module verifies afterwards.
    """
    ir = load().ir
    operators = [
        operation
        for operation in walk(module.operation)
        if operation.name == "torch.operator"
        and text_attribute(operation, "name").startswith(_OPERATOR)
    ]
    declared: set[str] = set()
    with module.context:
        for operator, call in zip(operators, calls, strict=True):
            name, operands, unpack = name_of(call), _operands(operator), _unpack(operator)
            results = (unpack or operator).results
            types = ir.FunctionType.get([o.type for o in operands], [r.type for r in results])
            if name not in declared:
                declared.add(name)
                with ir.InsertionPoint(module.body), ir.Location.name(name):
                    function = load().func.FuncOp(name, types, visibility="private")
                function.attributes["no_inline"] = ir.UnitAttr.get()
            callee = {"callee": ir.FlatSymbolRefAttr.get(name)}
            replace(operator, "func.call", callee, operands, unpack)


def give_body(module: Any, name: str, call: KernelCall) -> None:
    """Replace the declaration of a kernel by a function with the op's PyTorch reference as body."""
    sizes = itertools.count(7, 4)  # sizes that differ, so that none equals another
    automatic = torch.export.Dim.AUTO
    examples, free = [], []
    for operand in call.operands:
        shape = [next(sizes) if size is None else size for size in operand.shape]
        examples.append(torch.zeros(shape, dtype=getattr(torch, operand.dtype)))
        free.append({d: automatic for d, size in enumerate(operand.shape) if size is None})

    def reference(*tensors: Tensor) -> Any:
        args, kwargs = call.rebuild(tensors.__getitem__)
        return DEFINITIONS[call.op].reference(*args, **kwargs)

    with quiet():
        exported = torch.export.export(
            Function(reference),
            tuple(examples),
            dynamic_shapes=(tuple(free),) if call.dynamic else None,
            strict=False,
        )
        graph = exported.run_decompositions(decompositions()).graph
    _function(module, name).erase()
    _import(graph, module.context, name, module)
    _function(module, name).attributes["no_inline"] = load().ir.UnitAttr.get(module.context)


def describe_kernels(module: Any, kernels: Sequence[ExportedKernel]) -> None:
    """Put the description of each kernel on its function, as attributes that start with "nmm."."""
    with module.context:
        for kernel in kernels:
            function = _function(module, kernel.name)
            for name, value in kernel.attributes().items():
                function.attributes[f"nmm.{name}"] = _attribute(value)


def _attribute(value: Any) -> Any:
    ir = load().ir
    if isinstance(value, (list, tuple)):
        return ir.ArrayAttr.get([_attribute(item) for item in value])
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    return ir.StringAttr.get(value)


def _import(graph: torch.fx.Graph, context: Any, name: str, module: Any) -> Any:
    """Import a graph as function `name` into `module` (or a new one) and return the module."""
    bindings = load()

    class NodeLocations(bindings.ContextCache):  # type: ignore[name-defined]
        """Puts the FX node's name in front of the source line of every operation."""

        def get_node_location(self, node: torch.fx.Node) -> Any:
            line = super().get_node_location(node)
            return bindings.ir.Location.name(node.name, childLoc=line, context=context)

    where = {"context": context} if module is None else {"module": module}
    importer = bindings.FxImporter(**where)
    importer._cc = NodeLocations(context)
    try:
        importer.import_stateless_graph(
            graph, func_name=name, func_visibility=None if module is None else "private"
        )
    except Exception as error:  # the importer raises many types; the error has the reason
        raise ModelError(f"torch-mlir cannot import {name}: {error}") from error
    function = _function(importer.module, name)
    function.attributes["torch.assume_strict_symbolic_shapes"] = bindings.ir.UnitAttr.get(context)
    return importer.module


def _function(module: Any, name: str) -> Any:
    return load().ir.SymbolTable(module.operation)[name].operation


def _operands(operator: Any) -> list[Any]:
    """Return the tensor operands of an imported operator, lists of tensors opened."""
    found = []
    for operand in operator.operands:
        kind = str(operand.type)
        if kind.startswith("!torch.vtensor"):
            found.append(operand)
        elif kind.startswith("!torch.list"):
            made_by = operand.owner
            found += [o for o in made_by.operands if str(o.type).startswith("!torch.vtensor")]
    return found


def _unpack(operator: Any) -> Any:
    """Return the operation that unpacks the list that an imported operator makes, if it does."""
    only = operator.results[0]
    if not str(only.type).startswith("!torch.list"):
        return None
    users = [use.owner.operation for use in only.uses]
    if len(users) != 1 or users[0].name != "torch.prim.ListUnpack":
        used_by = ", ".join(user.name for user in users) or "nothing"
        raise ModelError(f"the list that {operator.name} makes is used by {used_by}")
    return users[0]
