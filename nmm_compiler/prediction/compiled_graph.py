"""What a compiled graph takes, dense and low-rank: the headline of its report.

A graph says how many tokens it is for, and not whether it is a prefill or a decode, so the sentence
names the tokens. The rest of the graph is priced by `walk`, the calls as the passes priced them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from nmm_compiler.codegen.latency import LAUNCH_GAP_US
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import NmmError
from nmm_compiler.passes.low_rank_gain import calls_bring
from nmm_compiler.prediction.fault import fault_text
from nmm_compiler.prediction.prices import Machine, price
from nmm_compiler.prediction.walk import walk_graph
from nmm_compiler.report.headline import headline

REMEDY = "a smaller rank, larger layers or more tokens a call would help"


def graph_headline(
    graph: fx.GraphModule,
    predicted: Sequence[dict[str, Any]],
    target: str,
    *,
    strict: bool = False,
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
        machine = Machine(machine_target(target), price="closed_form")
        prices = [(piece.count, price(piece, machine)) for piece in walk_graph(graph)]
        rest = sum(n * (one.us + one.launches * LAUNCH_GAP_US) for n, one in prices)
    except NmmError as error:
        return f"{calls_bring(judged)}; the whole graph is not predicted: {error}"
    except Exception as error:  # a report is read whatever happens to its headline
        return f"{calls_bring(judged)}; {fault_text(error, strict=strict)}"
    saved = sum(one["dense"] - one["call"] for one in judged)
    tokens = max(int(one["tokens"]) for one in judged)
    what = f"for this graph ({tokens:,} token{'s' * (tokens != 1)} a call)"
    quality = "its quality is not judged here"
    return headline([((rest + saved) / rest, what)], f"on {target}", quality=quality, remedy=REMEDY)


def _is_symbolic(node: fx.Node) -> bool:
    """Return whether the value of a node is, or has, a size without a number."""
    value = node.meta.get("example_value", node.meta.get("val"))
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)
