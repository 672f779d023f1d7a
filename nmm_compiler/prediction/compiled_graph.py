"""What a compiled graph takes, dense and low-rank: the headline of its report.

A graph says how many tokens it is for, and not whether it is a prefill or a decode, so the sentence
names the tokens. Every kernel is simulated, as the report's table of kernels is, so that one call
has one price on a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import NmmError
from nmm_compiler.options import Options
from nmm_compiler.passes.result import calls_bring
from nmm_compiler.prediction.fault import fault_text
from nmm_compiler.prediction.prices import Machine, price
from nmm_compiler.prediction.walk import walk_graph
from nmm_compiler.prices.kernel import LAUNCH_GAP_US
from nmm_compiler.prices.ways import ERRORS, ways
from nmm_compiler.report.headline import headline

REMEDY = "a smaller rank, larger layers or more tokens a call would help"


def graph_headline(
    graph: fx.GraphModule, predicted: Sequence[dict[str, Any]], options: Options
) -> str:
    """Return the sentence for a rewritten graph; why there is none where it cannot be priced.

    predicted: `Match.info["predicted"]` of its calls, which have dense times. Raises
    InternalFaultError for a fault of this package under strict; otherwise the sentence names it.
    """
    judged = [one for one in predicted if one["dense"] is not None]
    if not judged:
        return "not predicted: no call of this graph stands for a dense product"
    if any(map(_is_symbolic, graph.graph.nodes)):  # to ask for a number would fix it by a guard
        return f"{calls_bring(judged)}; the whole graph is not predicted: its sizes are symbolic"
    try:
        low, dense = _both_us(graph, options)
    except NmmError as error:
        return f"{calls_bring(judged)}; the whole graph is not predicted: {error}"
    except Exception as error:  # a report is read whatever happens to its headline
        return f"{calls_bring(judged)}; {fault_text(error, strict=options.strict)}"
    tokens = max(int(one["tokens"]) for one in judged)
    what = f"for this graph ({tokens:,} token{'s' * (tokens != 1)} a call, simulated)"
    return headline(
        [(dense / low, what)],
        f"on {options.target}",
        error=ERRORS["simulated"],
        quality="its quality is not judged here",
        remedy=REMEDY,
    )


def _both_us(graph: fx.GraphModule, options: Options) -> tuple[float, float]:
    """Return the microseconds of a graph as it is, and with its calls in the fastest dense way."""
    chip = machine_target(options.target, options)
    machine = Machine(chip, lnc=options.lnc)
    low = dense = 0.0
    for piece in walk_graph(graph):
        one = price(piece, machine)
        us = one.us + one.launches * LAUNCH_GAP_US
        before: float | None = None
        if piece.kind == "kernel" and len(piece.ways) == 1 and len(piece.ways[0]) == 1:
            before = ways(piece.ways[0][0], chip, options.lnc, source=machine.price).dense
        low += piece.count * us
        dense += piece.count * (us if before is None else before + LAUNCH_GAP_US)
    return low, dense


def _is_symbolic(node: fx.Node) -> bool:
    """Return whether the value of a node is, or has, a size without a number."""
    value = node.meta.get("example_value", node.meta.get("val"))
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)
