"""The public `compress`: that of `lowrank_models/apply.py`, whose report predicts the whole model.

The prediction needs both models without their data, and seconds of tracing, so it is made when the
report is first shown.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from nmm_compiler.errors import ModelError, NmmError
from nmm_compiler.lowrank_models import apply
from nmm_compiler.lowrank_models.config import CompressionConfig
from nmm_compiler.lowrank_models.meta_copies import without_data
from nmm_compiler.lowrank_models.report import CompressionReport
from nmm_compiler.prediction.fault import fault_text
from nmm_compiler.prediction.predict import predict


@functools.wraps(apply.compress)
def compress(
    model: nn.Module, ratio: float | CompressionConfig | None = None, **keywords: Any
) -> CompressionReport:
    """Make a model low-rank, as `apply.compress` says; the report predicts the whole model."""
    before = _copied(model)
    report = apply.compress(model, ratio, **keywords)
    said = functools.partial(_headline, before, _copied(model), report)
    return report.with_headline(functools.cache(said))


def _copied(model: nn.Module) -> nn.Module | ModelError:
    """Return the model without data, or why it cannot be copied; the report says so."""
    try:
        return without_data(model)
    except Exception as error:  # a module may hold what no copy can be made of
        text = " ".join(str(error).split())[:120]
        return ModelError(f"it cannot be copied: {type(error).__name__}: {text}")


def _headline(before: Any, after: Any, report: CompressionReport, quality: str) -> tuple[str, str]:
    """Return (sentence for the whole model, ""), or ("", reason).

    Kernels are priced by the closed form, and simulated where that does not tell the two apart.
    """
    prompt = max((timed.tokens for timed in report.workload), default=512)
    try:
        for copied in (before, after):
            if isinstance(copied, ModelError):
                raise copied
        made = predict(after, report.target, prompt=prompt, dense=before, price="closed_form")
        if not made.told_apart:
            made = predict(after, report.target, prompt=prompt, dense=before)
    except NmmError as error:
        return "", str(error).partition(": pass")[0]
    except Exception as error:  # a report is read whatever happens to its headline
        return "", fault_text(error)
    return made.headline(quality), ""
