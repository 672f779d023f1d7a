"""torch-mlir: its package, its importer, its pipelines, and the check of what they made.

The package is loaded when first needed: `pip install 'nmm-compiler[mlir]'` brings it. Its wheel has
the StableHLO dialect and passes compiled in but does not load them by itself; `context()` does. The
pipelines to torch (backend form), linalg or StableHLO are torch-mlir's own, read from it so that
they follow the installed version, without two steps. One is the check that no call is left, since
we keep calls (`verify` checks our contract instead). The other is StableHLO's refinement of shapes,
which crashes on a module that calls one declaration twice, and is not needed after torch.export.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nmm_compiler.errors import MissingPackageError, ModelError

if TYPE_CHECKING:
    from torch import fx

DIALECTS = ("torch", "linalg", "stablehlo")
MODES = ("call", "inline")
WEIGHTS = ("args", "resources")

_TO_TORCH = "torchdynamo-export-to-torch-backend-pipeline"
_FROM_TORCH = {
    "torch": "",
    "linalg": "torch-backend-to-linalg-on-tensors-backend-pipeline",
    "stablehlo": "torch-backend-to-stablehlo-backend-pipeline",
}
_CONTRACT_CHECK = re.compile(r",torch-verify-[\w-]+-backend-contract")
_REFINEMENT = ",stablehlo-refine-shapes"

ALLOWED = {
    "torch": {"builtin", "func", "torch"},
    "linalg": {
        *("builtin", "func", "linalg", "tensor", "arith", "math", "complex", "affine"),
        *("cf", "scf", "shape", "ml_program", "memref", "tm_tensor"),
    },
    "stablehlo": {"builtin", "func", "stablehlo", "chlo", "tensor", "arith", "shape"},
}
"""Dialects that may appear in each form (torch-mlir's backend contracts, plus func calls)."""


@functools.cache
def load() -> types.SimpleNamespace:
    """Return torch-mlir's modules: ir, passmanager, fx_importer, decompositions and dialects.

    Raises MissingPackageError when torch-mlir is not installed.
    """
    try:
        from torch_mlir import ir, passmanager
        from torch_mlir._mlir_libs import _stablehlo
        from torch_mlir.dialects import func
        from torch_mlir.dialects import torch as torch_dialect
        from torch_mlir.extras import fx_importer
        from torch_mlir.extras.fx_decomp_util import get_decomposition_table
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch_mlir":
            raise
        raise MissingPackageError("torch-mlir", "export to MLIR", "mlir") from None
    _stablehlo.register_stablehlo_passes()
    return types.SimpleNamespace(
        ir=ir,
        passmanager=passmanager,
        func=func,
        torch=torch_dialect,
        stablehlo=_stablehlo,
        fx_importer=fx_importer,
        decompositions=get_decomposition_table,
    )


def context() -> Any:
    """Return a fresh MLIR context with the torch, StableHLO and upstream dialects."""
    bindings = load()
    made = bindings.ir.Context()
    made.enable_multithreading(False)  # diagnostics reach Python, which has one thread at a time
    bindings.torch.register_dialect(made)
    bindings.stablehlo.register_dialect(made)
    return made


def importer(calls: Mapping[fx.Node, tuple[str, Sequence[fx.Node]]]) -> Any:
    """Return torch-mlir's importer into a new module, for which some nodes are calls.

    calls: node -> the name of a private function, declared unless it was imported before, and the
    nodes of its operands. Each operation has its node's name in front of the source line.
    """
    import torch  # a command reads this file for its names
    from torch.utils import _pytree as pytree

    bindings, made = load(), context()
    ir, func, base = bindings.ir, bindings.func, bindings.fx_importer
    counted: list[torch.Tensor] = []  # torch-mlir knows constants by id(): they live as long

    class Locations(base.ContextCache):  # type: ignore[name-defined]
        def get_node_location(self, node: fx.Node) -> Any:
            line = super().get_node_location(node)
            return ir.Location.name(node.name, childLoc=line, context=made)

    class Nodes(base.GraphNodeImporter):  # type: ignore[name-defined]
        def _import_torch_op_overload(self, loc: Any, node: Any, target: Any = None) -> None:
            if node in calls:
                self._import_call(loc, node)
            elif node.target == torch.ops.aten.arange.start_step and not node.all_input_nodes:
                # torch-mlir counts its elements in float64
                counted.append(torch.arange(*node.args, **node.kwargs))
                self.import_constant(loc, node, counted[-1])
            else:
                super()._import_torch_op_overload(loc, node, target)

        def _import_call(self, loc: Any, node: fx.Node) -> None:
            name, tensors = calls[node]
            results = node.meta["val"]
            if isinstance(results, (list, tuple)):
                self._multi_result_nodes.add(node)
            operands = [self._import_argument(loc, one) for one in tensors]
            types = [self._cc.value_info_to_type(one) for one in pytree.tree_leaves(results)]
            table, place = self.fx_importer.symbol_table, self.fx_importer.module.body
            with loc:
                if name not in table:
                    kind = ir.FunctionType.get([one.type for one in operands], types)
                    ip = ir.InsertionPoint(place)
                    table.insert(func.FuncOp(name, kind, visibility="private", ip=ip))
                call = func.CallOp(types, ir.FlatSymbolRefAttr.get(name), operands)
            for number, one in enumerate(call.results):
                self.bind_node_value(node, one, number)

    found = base.FxImporter(context=made, graph_node_importer_cls=Nodes)
    found._cc = Locations(made)
    return found


def take(importer: Any, program: Any, name: str, visibility: str | None = None) -> None:
    """Import an ExportedProgram as a function of this name."""
    try:
        made = importer.import_program(program, func_name=name, func_visibility=visibility)
    except Exception as error:  # the importer raises many types; the error has the reason
        raise ModelError(f"torch-mlir cannot import {name}: {error}") from error
    made.attributes["no_inline"] = load().ir.UnitAttr.get(made.context)


def describe(module: Any, name: str, attributes: Mapping[str, str]) -> None:
    """Put attributes, which are MLIR's text, on a function."""
    ir = load().ir
    function = ir.SymbolTable(module.operation)[name].operation
    for attribute, value in attributes.items():
        function.attributes[attribute] = ir.Attribute.parse(value, module.context)


def walk(operation: Any) -> list[Any]:
    """Return every operation inside `operation`, in order, as plain Operations."""
    found: list[Any] = []
    for region in operation.regions:
        for block in region:
            for child in block.operations:
                found.append(child.operation)
                found.extend(walk(child.operation))
    return found


def text_attribute(operation: Any, name: str) -> str:
    """Return the value of a string or symbol attribute of an operation."""
    return str(operation.attributes[name].value)


def lower(module: Any, dialect: str) -> None:
    """Lower a module of the torch dialect in place.

    Raises ModelError with torch-mlir's message and the FX node when it cannot.
    """
    _run(module, _TO_TORCH)
    if _FROM_TORCH[dialect]:
        _run(module, _FROM_TORCH[dialect])
    if dialect == "stablehlo":
        _fold_constants(module)
        _run(module, "canonicalize")
    for function in module.body.operations:
        for name in ("no_inline", "torch.assume_strict_symbolic_shapes"):
            if name in function.attributes:
                del function.attributes[name]


def _run(module: Any, pipeline: str) -> None:
    bindings = load()
    with module.context:
        passes = str(bindings.passmanager.PassManager.parse(f"builtin.module({pipeline})"))
        passes = _CONTRACT_CHECK.sub("", passes).replace(_REFINEMENT, "")
        try:
            bindings.passmanager.PassManager.parse(passes).run(module.operation)
        except bindings.ir.MLIRError as error:
            reasons = [f"{d.message} at {d.location}" for d in error.error_diagnostics]
            raise ModelError(
                f"torch-mlir cannot lower the graph: {'; '.join(reasons) or error}"
            ) from None


def _fold_constants(module: Any) -> None:
    """Write arith constants of tensors as StableHLO's, and convert scalars while compiling.

    `convert(constant 1.0e-05 : f64) : f32` becomes `constant 1.0e-05 : f32`: torch-mlir keeps
    Python's float64 scalars, which no Trainium engine computes with. What an operation reads stands
    before it, and is folded before it.
    """
    with module.context:
        for operation in walk(module.operation):
            value = _constant(operation)
            if value is not None:
                replace(operation, "stablehlo.constant", {"value": value})


def _constant(operation: Any) -> Any:
    """Return the value of a constant of arith, or of a convert or reshape of one; else None."""
    ir: Any = load().ir
    kind: Any = operation.results[0].type if len(operation.results) else None
    if operation.name == "arith.constant" and "tensor" in str(kind):
        return operation.attributes["value"]
    if operation.name not in ("stablehlo.convert", "stablehlo.reshape"):
        return None
    source: Any = getattr(operation.operands[0].owner, "operation", None)
    if getattr(source, "name", "") != "stablehlo.constant":
        return None
    value = source.attributes["value"]
    splat = isinstance(value, ir.DenseElementsAttr) and value.is_splat
    if not (splat and kind.has_static_shape):
        return None
    scalar, element = value.get_splat_value(), kind.element_type
    if scalar.type == element:
        return ir.DenseElementsAttr.get_splat(kind, scalar)
    if not isinstance(element, (ir.F32Type, ir.F16Type, ir.BF16Type, ir.F64Type)):
        return None
    with operation.location:
        number = ir.FloatAttr.get(element, float(scalar.value))
    return ir.DenseElementsAttr.get_splat(kind, number)


def replace(
    operation: Any, name: str, attributes: dict[str, Any], operands: Sequence[Any] = ()
) -> None:
    """Put a new operation of the same results in the place of one."""
    ir, old = load().ir, list(operation.results)
    types = [result.type for result in old]
    with ir.InsertionPoint(operation), operation.location:
        made = ir.Operation.create(
            name, results=types, operands=list(operands), attributes=attributes
        )
    for before, after in zip(old, made.results, strict=True):
        before.replace_all_uses_with(after)
    operation.erase()


def to_custom_calls(module: Any) -> None:
    """StableHLO only: make each call of a declared kernel a custom_call with its attributes.

    The attributes stand in `backend_config` (a dictionary, API version 4), and the declaration
    goes away, as custom_call names no symbol.
    """
    ir = load().ir
    declarations = {
        text_attribute(function, "sym_name"): function.operation
        for function in module.body.operations
        if not function.regions[0].blocks
    }
    with module.context:
        for operation in walk(module.operation):
            name = text_attribute(operation, "callee") if operation.name == "func.call" else ""
            if name not in declarations:
                continue
            given = declarations[name].attributes
            attributes = {
                "call_target_name": ir.StringAttr.get(name),
                "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
                "backend_config": ir.DictAttr.get(
                    {one: given[one] for one in given if one.startswith("nmm.")}
                ),
            }
            replace(operation, "stablehlo.custom_call", attributes, operation.operands)
        for declaration in declarations.values():
            declaration.erase()


def verify(module: Any, dialect: str) -> None:
    """Raise ModelError unless the module keeps the contract of its form."""
    try:
        module.operation.verify()
    except load().ir.MLIRError as error:
        raise ModelError(f"the module does not verify: {error}") from None
    for operation in walk(module.operation):
        home = operation.name.partition(".")[0]
        if home not in ALLOWED[dialect]:
            raise ModelError(f"{operation.name} has no place in a {dialect} module")
        if operation.name == "torch.operator":
            name = text_attribute(operation, "name")
            raise ModelError(f"torch-mlir does not know the operator {name}")
