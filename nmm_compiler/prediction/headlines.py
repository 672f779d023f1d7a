"""The sentences that reports begin with: what low rank brings to a whole model, or to a graph.

`compress` here is the public one: that of `lowrank_models/apply.py`, whose report predicts the
whole model. A prediction takes seconds of tracing, so it is made when a report is first shown. An
exception of this package while it predicts is told as a fault, not as "not predicted".
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import ModelError, NmmError, internal_fault, one_line
from nmm_compiler.lowrank_models import apply
from nmm_compiler.lowrank_models.meta_copies import without_data
from nmm_compiler.lowrank_models.report import CompressionReport
from nmm_compiler.options import Options
from nmm_compiler.passes.result import calls_bring
from nmm_compiler.prediction.meta_models import prepare
from nmm_compiler.prediction.predict import predict
from nmm_compiler.prediction.prices import Cores, price
from nmm_compiler.prediction.walk import walk_graph
from nmm_compiler.prices.kernel import LAUNCH_GAP_US
from nmm_compiler.prices.ways import ERRORS, ways
from nmm_compiler.report.headline import headline, told_apart

REMEDY = "a smaller rank, larger layers or more tokens a call would help"


@functools.wraps(apply.compress)
def compress(model: nn.Module, ratio: float | None = None, **keywords: Any) -> CompressionReport:
    """Make a model low-rank, as `apply.compress` says; the report predicts the whole model."""
    before = _copied(model)
    report = apply.compress(model, ratio, **keywords)
    said = functools.partial(_model_headline, before, _copied(model), report)
    return dataclasses.replace(report, whole=functools.cache(said))


def _copied(model: nn.Module) -> nn.Module | ModelError:
    """Return the model without data, or why it cannot be copied; the report says so."""
    try:
        return without_data(model)
    except Exception as error:  # a module may hold what no copy can be made of
        text = f"{type(error).__name__}: {one_line(error, 120)}"
        return ModelError(f"it cannot be copied: {text}")


def _model_headline(
    before: Any, after: Any, report: CompressionReport, quality: str
) -> tuple[str, str]:
    """Return (sentence for the whole model, ""), or ("", reason).

    Kernels are priced by the closed form, and simulated where that does not tell the two apart.
    """

    def said() -> str:
        for copied in (before, after):
            if isinstance(copied, ModelError):
                raise copied
        prompt = max((timed.tokens for timed in report.workload), default=512)
        low, dense = (prepare(one, None, "bfloat16", 1) for one in (after, before))  # traced once
        made = predict(low, report.target, prompt=prompt, dense=dense, price="closed_form")
        error = ERRORS["closed_form"]
        if not any(told_apart(gain, error) for gain in made.gain.values()):
            made = predict(low, report.target, prompt=prompt, dense=dense)
        return made.headline(quality)

    text, why = _said_or_why(said)
    return text, why.partition(": pass")[0]


def graph_headline(
    graph: fx.GraphModule, predicted: Sequence[dict[str, Any]], options: Options
) -> str:
    """Return the sentence for a rewritten graph; why there is none where it cannot be priced.

    A graph says how many tokens it is for, and not whether it is a prefill or a decode, so the
    sentence names the tokens. Every kernel is simulated, as the report's table of kernels is.

    predicted: `Match.info["predicted"]` of its calls, which have dense times. Raises
    InternalFaultError for a fault of this package under strict; otherwise the sentence names it.
    """
    judged = [one for one in predicted if one["dense"] is not None]
    if not judged:
        return "not predicted: no call of this graph stands for a dense product"
    if any(map(_is_symbolic, graph.graph.nodes)):  # to ask for a number would fix it by a guard
        return f"{calls_bring(judged)}; the whole graph is not predicted: its sizes are symbolic"

    def said() -> str:
        chip = machine_target(options.target, options)
        machine = Cores(chip, lnc=options.lnc)
        low = dense = 0.0  # with its calls as they are, and in the fastest dense way
        for piece in walk_graph(graph):
            us = sum(line.each_us + LAUNCH_GAP_US for line in price(piece, machine))
            before: float | None = None
            if piece.kind == "kernel" and len(piece.ways) == 1 and len(piece.ways[0]) == 1:
                before = ways(piece.ways[0][0], chip, options.lnc, source=machine.price).dense
            low += piece.count * us
            dense += piece.count * (us if before is None else before + LAUNCH_GAP_US)
        tokens = max(int(one["tokens"]) for one in judged)
        what = f"for this graph ({tokens:,} token{'s' * (tokens != 1)} a call, simulated)"
        return headline(
            [(dense / low, what)],
            f"on {options.target}",
            error=ERRORS["simulated"],
            quality="its quality is not judged here",
            remedy=REMEDY,
        )

    text, why = _said_or_why(said, strict=options.strict)
    not_predicted = why if _FAULT in why else f"the whole graph is not predicted: {why}"
    return text or f"{calls_bring(judged)}; {not_predicted}"


def _is_symbolic(node: fx.Node) -> bool:
    """Return whether the value of a node is, or has, a size without a number."""
    value = node.meta.get("example_value", node.meta.get("val"))
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


_FAULT = "a fault in nmm_compiler"


def _said_or_why(say: Callable[[], str], *, strict: bool = False) -> tuple[str, str]:
    """Return (sentence, "") or ("", why there is none); a fault of this package also warns.

    Raises InternalFaultError for a fault under strict.
    """
    try:
        return say(), ""
    except NmmError as error:
        return "", str(error)
    except Exception as error:  # a report is read whatever happens to its headline
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        what = f"{type(error).__name__} while predicting at {where}: {one_line(error, 120)}"
        if strict:
            raise internal_fault(what) from error
        said = f"{_FAULT}, {what}; please report it"
        warnings.warn(
            f"nmm: {said}. Outputs are right; only the prediction is missing", stacklevel=3
        )
        return "", said
