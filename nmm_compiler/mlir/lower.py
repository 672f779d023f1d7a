"""From the torch dialect with kernel calls to torch (backend form), linalg or StableHLO.

torch-mlir's own pipelines do the work, without two steps. One is the check that no call is left,
since we keep calls (`verify.py` checks our contract instead). The other is StableHLO's refinement
of shapes, which crashes on a module that calls one declaration twice, and is not needed after
torch.export. The pass lists come from torch-mlir itself, so that they follow the installed version.
"""

from __future__ import annotations

import re
from typing import Any

from nmm_compiler.errors import ModelError
from nmm_compiler.mlir.bindings import load, text_attribute, walk

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
        passes, removed = _CONTRACT_CHECK.subn("", passes)
        if ("backend-to" in pipeline) != bool(removed):
            raise ModelError(f"the passes of {pipeline} are not as expected: {passes}")
        passes = passes.replace(_REFINEMENT, "")
        try:
            bindings.passmanager.PassManager.parse(passes).run(module.operation)
        except bindings.ir.MLIRError as error:
            reasons = [f"{d.message} at {_place(str(d.location))}" for d in error.error_diagnostics]
            raise ModelError(
                f"torch-mlir cannot lower the graph: {'; '.join(reasons) or error}"
            ) from None


def _place(location: str) -> str:
    """Return `node "relu" (model.py:12)` of a location `loc("relu"("model.py":12:0))`."""
    names = re.findall(r'"([^"]*)"(?!:)', location)
    lines = re.findall(r'"([^"]*)":(\d+)', location)
    node = f'node "{names[0]}"' if names else "an unnamed operation"
    return f"{node} ({lines[0][0]}:{lines[0][1]})" if lines else node


def _fold_constants(module: Any) -> None:
    """Write arith constants of tensors as StableHLO's, and convert scalars while compiling.

    `convert(constant 1.0e-05 : f64) : f32` becomes `constant 1.0e-05 : f32`: torch-mlir keeps
    Python's float64 scalars, which no Trainium engine computes with.
    """
    ir = load().ir
    with module.context:
        for operation in walk(module.operation):
            if operation.name == "arith.constant" and "tensor" in str(operation.results[0].type):
                _replace(operation, operation.attributes["value"])
        changed = True
        while changed:
            changed = False
            for operation in walk(module.operation):
                value = _constant_of(operation)
                folded = None if value is None else _folded(operation, value, ir)
                if folded is not None:
                    _replace(operation, folded)
                    changed = True


def _constant_of(operation: Any) -> Any:
    """Return the value of the constant that a convert or reshape reads, or None."""
    if operation.name not in ("stablehlo.convert", "stablehlo.reshape"):
        return None
    source = operation.operands[0].owner
    source = getattr(source, "operation", source)
    if getattr(source, "name", "") != "stablehlo.constant":
        return None
    return source.attributes["value"]


def _folded(operation: Any, value: Any, ir: Any) -> Any:
    kind = operation.results[0].type
    if (
        not isinstance(value, ir.DenseElementsAttr)
        or not value.is_splat
        or not kind.has_static_shape
    ):
        return None
    scalar = value.get_splat_value()
    element = kind.element_type
    if scalar.type == element:
        return ir.DenseElementsAttr.get_splat(kind, scalar)
    if isinstance(element, (ir.F32Type, ir.F16Type, ir.BF16Type, ir.F64Type)):
        with operation.location:
            number = ir.FloatAttr.get(element, float(scalar.value))
        return ir.DenseElementsAttr.get_splat(kind, number)
    return None


def _replace(operation: Any, value: Any) -> None:
    ir = load().ir
    with ir.InsertionPoint(operation), operation.location:
        made = ir.Operation.create(
            "stablehlo.constant",
            results=[operation.results[0].type],
            attributes={"value": value},
        )
    operation.results[0].replace_all_uses_with(made.results[0])
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
            attributes = declarations[name].attributes
            with ir.InsertionPoint(operation), operation.location:
                made = ir.Operation.create(
                    "stablehlo.custom_call",
                    results=[result.type for result in operation.results],
                    operands=list(operation.operands),
                    attributes={
                        "call_target_name": ir.StringAttr.get(name),
                        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
                        "backend_config": ir.DictAttr.get(kernel_attributes(attributes)),
                    },
                )
            for old, new in zip(operation.results, made.results, strict=True):
                old.replace_all_uses_with(new)
            operation.erase()
        for declaration in declarations.values():
            declaration.erase()


def kernel_attributes(attributes: Any) -> dict[str, Any]:
    """Return the attributes of an operation whose names start with "nmm."."""
    return {name: attributes[name] for name in attributes if name.startswith("nmm.")}
