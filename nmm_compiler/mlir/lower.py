"""torch-mlir: its importer, its pipelines, and the check of what they made.

`pip install 'nmm-compiler[mlir]'` brings it; an export loads this file when it begins. Its wheel
has the StableHLO dialect and passes compiled in but does not load them by itself; `context()` does.
The pipelines to torch (backend form), linalg or StableHLO are torch-mlir's own, read from it so
that they follow the installed version, without two steps. One is the check that no call is left,
since we keep calls (`verify` checks our contract instead). The other is StableHLO's refinement of
shapes, which crashes on a module that calls one declaration twice, and is not needed after
torch.export.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch_mlir import ir, passmanager
from torch_mlir._mlir_libs import _stablehlo
from torch_mlir.dialects import func, torch as torch_dialect
from torch_mlir.extras import fx_importer
from torch_mlir.extras.fx_decomp_util import get_decomposition_table

from nmm_compiler.errors import ModelError

_stablehlo.register_stablehlo_passes()

_TO_TORCH = "torchdynamo-export-to-torch-backend-pipeline"
_PIPELINES = {
    "torch": (_TO_TORCH,),
    "linalg": (_TO_TORCH, "torch-backend-to-linalg-on-tensors-backend-pipeline"),
    "stablehlo": (_TO_TORCH, "torch-backend-to-stablehlo-backend-pipeline"),
}
_CONTRACT_CHECK = re.compile(r",torch-verify-[\w-]+-backend-contract")
_REFINEMENT = ",stablehlo-refine-shapes"
_OF_IMPORT = ("no_inline", "torch.assume_strict_symbolic_shapes")
"""Attributes of functions while they are lowered."""

ALLOWED = {
    "torch": {"builtin", "func", "torch"},
    "linalg": {
        *("builtin", "func", "linalg", "tensor", "arith", "math", "complex", "affine"),
        *("cf", "scf", "shape", "ml_program", "memref", "tm_tensor"),
    },
    "stablehlo": {"builtin", "func", "stablehlo", "chlo", "tensor", "arith", "shape"},
}
"""Dialects that may appear in each form (torch-mlir's backend contracts, plus func calls)."""


def _var_mean(
    x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return variance and mean, computed in float32 as PyTorch does: torch-mlir's are float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    squares = (wide - wide.mean(dims, keepdim=True)).square().sum(dims, keepdim)
    terms = math.prod(x.shape[dim] for dim in dims or range(x.dim()))
    variance = squares / (terms - (1 if correction is None else correction))
    return variance.to(x.dtype), wide.mean(dims, keepdim).to(x.dtype)


DECOMPOSITIONS = {**get_decomposition_table(), torch.ops.aten.var_mean.correction: _var_mean}
"""torch-mlir's table with variances that stay in float32, which is the widest of Trainium."""


def context() -> Any:
    """Return a fresh MLIR context with the torch, StableHLO and upstream dialects."""
    new = ir.Context()
    new.enable_multithreading(False)  # diagnostics reach Python, which has one thread at a time
    torch_dialect.register_dialect(new)
    _stablehlo.register_dialect(new)
    return new


class Importer(fx_importer.FxImporter):
    """torch-mlir's importer into a new module, for which some nodes are calls.

    calls: node -> the name of a private function, declared unless it was imported before, and the
    nodes of its operands. Each operation has its node's name in front of the source line.
    """

    def __init__(self, calls: Mapping[fx.Node, tuple[str, Sequence[fx.Node]]]) -> None:
        super().__init__(context=context(), graph_node_importer_cls=_Nodes)
        self.calls = calls
        self.counted: list[torch.Tensor] = []  # torch-mlir knows constants by id(): they live on
        self._cc = _Locations(self._c)

    def take(
        self, program: ExportedProgram | fx.Graph, name: str, visibility: str | None = None
    ) -> None:
        """Import a program, or a graph of tensors, as a function of this name."""
        whole = isinstance(program, ExportedProgram)
        take = self.import_program if whole else self.import_stateless_graph
        try:
            module = take(program, func_name=name, func_visibility=visibility)
        except Exception as error:  # the importer raises many types; the error has the reason
            raise ModelError(f"torch-mlir cannot import {name}: {error}") from error
        for attribute in _OF_IMPORT:
            module.attributes[attribute] = ir.UnitAttr.get(self._c)


class _Locations(fx_importer.ContextCache):
    def get_node_location(self, node: fx.Node) -> Any:
        line = super().get_node_location(node)
        return ir.Location.name(node.name, childLoc=line, context=self._c)


class _Nodes(fx_importer.GraphNodeImporter):
    def _import_torch_op_overload(self, loc: Any, node: Any, target: Any = None) -> None:
        if node in self.fx_importer.calls:
            self._import_call(loc, node)
        elif node.target == torch.ops.aten.arange.start_step and not node.all_input_nodes:
            # torch-mlir counts its elements in float64
            self.fx_importer.counted.append(torch.arange(*node.args, **node.kwargs))
            self.import_constant(loc, node, self.fx_importer.counted[-1])
        else:
            super()._import_torch_op_overload(loc, node, target)

    def _import_call(self, loc: Any, node: fx.Node) -> None:
        name, tensors = self.fx_importer.calls[node]
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


def describe(module: Any, name: str, attributes: Mapping[str, str]) -> None:
    """Put attributes, which are MLIR's text, on a function."""
    function = ir.SymbolTable(module.operation)[name].operation
    for attribute, value in attributes.items():
        function.attributes[attribute] = ir.Attribute.parse(value, module.context)


def walk(module: Any) -> list[Any]:
    """Return every operation of a module, each before those inside it."""
    operations: list[Any] = []

    def note(operation: Any) -> Any:
        operations.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(note, ir.WalkOrder.PRE_ORDER)
    return operations


def lower(module: Any, dialect: str) -> None:
    """Lower a module of the torch dialect in place.

    Raises ModelError with torch-mlir's message and the FX node when it cannot.
    """
    for pipeline in _PIPELINES[dialect]:
        _run(module, pipeline)
    if dialect == "stablehlo":
        _fold_constants(module)
        _run(module, "canonicalize")
    for function in module.body.operations:
        for name in _OF_IMPORT:
            if name in function.attributes:
                del function.attributes[name]


def _run(module: Any, pipeline: str) -> None:
    with module.context:
        passes = str(passmanager.PassManager.parse(f"builtin.module({pipeline})"))
        passes = _CONTRACT_CHECK.sub("", passes).replace(_REFINEMENT, "")
        try:
            passmanager.PassManager.parse(passes).run(module.operation)
        except ir.MLIRError as error:
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
        for operation in walk(module):
            value = _constant(operation)
            if value is not None:
                replace(operation, "stablehlo.constant", {"value": value})


def _constant(operation: Any) -> Any:
    """Return the value of a constant of arith, or of a convert or reshape of one; else None."""
    kind: Any = operation.results[0].type if len(operation.results) else None
    if operation.name == "arith.constant" and "tensor" in str(kind):
        return operation.attributes["value"]
    if operation.name not in ("stablehlo.convert", "stablehlo.reshape"):
        return None
    source: Any = getattr(operation.operands[0].owner, "operation", None)
    if getattr(source, "name", "") != "stablehlo.constant":
        return None
    value = source.attributes["value"]
    if not (isinstance(value, ir.DenseElementsAttr) and value.is_splat):
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
    types = [result.type for result in operation.results]
    with ir.InsertionPoint(operation), operation.location:
        call = ir.Operation.create(
            name, results=types, operands=list(operands), attributes=attributes
        )
    for before, after in zip(operation.results, call.results, strict=True):
        before.replace_all_uses_with(after)
    operation.erase()


def to_custom_calls(module: Any) -> None:
    """StableHLO only: make each call of a declared kernel a custom_call with its attributes.

    The attributes stand in `backend_config` (a dictionary, API version 4), and the declaration
    goes away, as custom_call names no symbol.
    """
    declarations = {
        function.attributes["sym_name"].value: function.operation
        for function in module.body.operations
        if not function.regions[0].blocks
    }
    with module.context:
        for operation in walk(module):
            called = operation.name == "func.call" and operation.attributes["callee"].value
            if called not in declarations:
                continue
            given = declarations[called].attributes
            attributes = {
                "call_target_name": ir.StringAttr.get(called),
                "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
                "backend_config": ir.DictAttr.get(
                    {one: given[one] for one in given if one.startswith("nmm.")}
                ),
            }
            replace(operation, "stablehlo.custom_call", attributes, operation.operands)
        for declaration in declarations.values():
            declaration.erase()


def verify(module: Any, dialect: str) -> None:
    """Raise ModelError unless the module keeps the contract of its form, MLIRError unless it is
    MLIR."""
    module.operation.verify()
    for operation in walk(module):
        home = operation.name.partition(".")[0]
        if home not in ALLOWED[dialect]:
            raise ModelError(f"{operation.name} has no place in a {dialect} module")
        if operation.name == "torch.operator":
            name = operation.attributes["name"].value
            raise ModelError(f"torch-mlir does not know the operator {name}")
