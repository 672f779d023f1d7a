"""Checks the contract of an exported module, in place of torch-mlir's, which forbids calls.

MLIR's verifier checks types and that every callee exists. This module also checks that only
dialects of the chosen form are used, that no torch operation is left in the lowered ones, that
every kernel is described once, and that there are as many calls as the graph had fused ops.
"""

from __future__ import annotations

from typing import Any

from nmm_compiler.errors import ModelError
from nmm_compiler.mlir.bindings import load, text_attribute, walk

ALLOWED = {
    "torch": {"builtin", "func", "torch"},
    "linalg": {
        *("builtin", "func", "linalg", "tensor", "arith", "math", "complex", "affine"),
        *("cf", "scf", "shape", "ml_program", "memref", "tm_tensor"),
    },
    "stablehlo": {"builtin", "func", "stablehlo", "chlo", "tensor", "arith", "shape"},
}
"""Dialects that may appear in each form (torch-mlir's backend contracts, plus func calls)."""

REQUIRED = ("nmm.family", "nmm.spec", "nmm.target", "nmm.x_layout", "nmm.out_layout")
"""Attributes of every kernel function, or of every custom_call's backend_config."""


def verify(module: Any, dialect: str, calls: int) -> None:
    """Raise ModelError unless the module keeps the contract; `calls` kernel calls are expected."""
    ir = load().ir
    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise ModelError(f"the module does not verify: {error}") from None
    found = 0
    described = _described(module)
    for operation in walk(module.operation):
        home = operation.name.partition(".")[0]
        if home not in ALLOWED[dialect]:
            raise ModelError(f"{operation.name} has no place in a {dialect} module")
        if operation.name == "torch.operator":
            name = text_attribute(operation, "name")
            raise ModelError(f"torch-mlir does not know the operator {name}")
        if operation.name == "func.call":
            found += text_attribute(operation, "callee") in described
        elif operation.name == "stablehlo.custom_call" and "backend_config" in operation.attributes:
            config = operation.attributes["backend_config"]
            missing = [name for name in REQUIRED if name not in config]
            if missing:
                raise ModelError(f"a kernel call lacks {', '.join(missing)}")
            found += 1
    if found != calls:
        raise ModelError(f"{found} kernel calls left of {calls} in the graph")


def _described(module: Any) -> set[str]:
    """Return the names of the kernel functions, each with its attributes complete."""
    names = set()
    for function in module.body.operations:
        given = [name for name in function.attributes if name.startswith("nmm.")]
        if given:
            name = text_attribute(function, "sym_name")
            missing = [required for required in REQUIRED if required not in given]
            if missing:
                raise ModelError(f"kernel {name} lacks {', '.join(missing)}")
            names.add(name)
    return names
