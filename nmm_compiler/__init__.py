"""A compiler for low-rank models on AWS Trainium.

Four ways in:

    torch.compile(model, backend="nmm")                serve: fused kernels, same outputs, a report
    nmm_compiler.rewrite(model, inputs), explain(...)  research: the graph, matches, refusals
    nmm_compiler.predict(model, "trn2", ratio=0.2)     what a model will take, dense and low-rank
    nmm_compiler.build_kernel(spec), simulate(...)     kernels: NKI source, checked, timed on a CPU

Only the names of this module are public. All but `targets` load on first use, so that importing the
package and `nmm --help` stay quick.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any

from nmm_compiler import targets as targets
from nmm_compiler.version import VERSION

if TYPE_CHECKING:
    from nmm_compiler.backend import last_report as last_report, reports as reports
    from nmm_compiler.codegen.build import build_kernel as build_kernel
    from nmm_compiler.errors import NmmError as NmmError
    from nmm_compiler.kernels.attention import AttentionSpec as AttentionSpec
    from nmm_compiler.kernels.linear.specs import (
        GatedMLPSpec as GatedMLPSpec,
        LowRankSpec as LowRankSpec,
        MatmulSpec as MatmulSpec,
    )
    from nmm_compiler.lowrank_models.hf import load as load, save as save
    from nmm_compiler.lowrank_models.modules import quantize_factors as quantize_factors
    from nmm_compiler.lowrank_models.recover import recover as recover
    from nmm_compiler.mlir.export import export_mlir as export_mlir
    from nmm_compiler.options import Options as Options
    from nmm_compiler.passes.pipeline import explain as explain, rewrite as rewrite
    from nmm_compiler.passes.rules import (
        Match as Match,
        Refusal as Refusal,
        Rule as Rule,
        rule as rule,
    )
    from nmm_compiler.prediction.headlines import compress as compress
    from nmm_compiler.prediction.predict import predict as predict
    from nmm_compiler.simulator.run import ArraySpec as ArraySpec, simulate as simulate

__version__ = VERSION

_HOMES = {
    "ArraySpec": "nmm_compiler.simulator.run",
    "AttentionSpec": "nmm_compiler.kernels.attention",
    "GatedMLPSpec": "nmm_compiler.kernels.linear.specs",
    "LowRankSpec": "nmm_compiler.kernels.linear.specs",
    "Match": "nmm_compiler.passes.rules",
    "MatmulSpec": "nmm_compiler.kernels.linear.specs",
    "NmmError": "nmm_compiler.errors",
    "Options": "nmm_compiler.options",
    "Refusal": "nmm_compiler.passes.rules",
    "Rule": "nmm_compiler.passes.rules",
    "build_kernel": "nmm_compiler.codegen.build",
    "compress": "nmm_compiler.prediction.headlines",
    "explain": "nmm_compiler.passes.pipeline",
    "export_mlir": "nmm_compiler.mlir.export",
    "last_report": "nmm_compiler.backend",
    "load": "nmm_compiler.lowrank_models.hf",
    "predict": "nmm_compiler.prediction.predict",
    "quantize_factors": "nmm_compiler.lowrank_models.modules",
    "recover": "nmm_compiler.lowrank_models.recover",
    "reports": "nmm_compiler.backend",
    "rewrite": "nmm_compiler.passes.pipeline",
    "rule": "nmm_compiler.passes.rules",
    "save": "nmm_compiler.lowrank_models.hf",
    "simulate": "nmm_compiler.simulator.run",
}

__all__ = [*sorted(_HOMES), "__version__", "targets"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nmm_compiler' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__


def _quiet_libraries() -> None:
    """Let loggers that no user of this package can act on say only errors, where no level is set.

    transformers imports torchao where it is installed; torchao then warns of GPU libraries that it
    cannot load, and torch of how torchao registers its classes. Nothing here uses either.
    """
    for logger in map(logging.getLogger, ("torchao", "torch.utils._pytree")):
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.ERROR)


def _register_saved_models() -> None:
    """Let transformers' `from_pretrained` load low-rank models; a version that does not fit warns.

    Where transformers comes later, `load` and `compress` register. Importing it here takes seconds.
    """
    try:
        importlib.import_module("nmm_compiler.lowrank_models.hf").register()
    except ImportError as error:  # its other models have to load all the same
        warnings.warn(
            f"transformers will refuse models that nmm_compiler saved: {error}", stacklevel=3
        )


_quiet_libraries()
if "transformers" in sys.modules:
    _register_saved_models()
