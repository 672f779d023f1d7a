"""The torch-mlir package, loaded when first needed, and contexts with the emitted dialects.

torch-mlir's wheel has the StableHLO dialect and passes compiled in but does not load them by
itself; `context()` does. Nothing here is imported with the package: `pip install
'nmm-compiler[mlir]'` brings it.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from nmm_compiler.errors import MissingPackageError


@functools.cache
def load() -> types.SimpleNamespace:
    """Return torch-mlir's modules: ir, passmanager, FxImporter, ContextCache, decompositions.

    Raises MissingPackageError when torch-mlir is not installed.
    """
    try:
        from torch_mlir import ir, passmanager
        from torch_mlir._mlir_libs import _stablehlo
        from torch_mlir.dialects import func, torch
        from torch_mlir.extras.fx_decomp_util import get_decomposition_table
        from torch_mlir.extras.fx_importer import ContextCache, FxImporter
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch_mlir":
            raise
        raise MissingPackageError("torch-mlir", "export to MLIR", "mlir") from None
    _stablehlo.register_stablehlo_passes()
    return types.SimpleNamespace(
        ir=ir,
        passmanager=passmanager,
        func=func,
        torch=torch,
        stablehlo=_stablehlo,
        FxImporter=FxImporter,
        ContextCache=ContextCache,
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
