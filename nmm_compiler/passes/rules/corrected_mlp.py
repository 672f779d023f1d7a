"""Rule `corrected_mlp`: a gated MLP of few-bit weights, with branches or without, as one call.

h = silu(nmm.dequantize(gate...) x + gate branch) * (nmm.dequantize(up...) x + up branch)
y = nmm.dequantize(down...) h + down branch
  ->   y = nmm.corrected_mlp(x, [gate, up, down], [scales...], [u...], [v...])

It is declined where gate and up as one call, and down as another, are predicted to be faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import same_tokens
from nmm_compiler.passes.chains.safety import Refusal, call_ways, covered
from nmm_compiler.passes.emit.calls import Call, with_base
from nmm_compiler.passes.graph.canonical import (
    Add,
    Canonical,
    Product,
)
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.gated_mlp import mlps_at, over_tokens
from nmm_compiler.passes.rules.lora import read_adapted


class CorrectedMLP(KernelRule):
    """A gated MLP of three linears whose dense weights are of few bits."""

    name = "corrected_mlp"
    ends_at = (Product, Add)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose linears that a product of two linears of one x feeds."""
        yield from mlps_at(graph, node, read_adapted)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the weights, which are stored alike, and check that one kernel pays."""
        node, down, (_, (activation, inner), key) = candidate
        chains = [read_adapted(graph, inner), read_adapted(graph, key), down]
        read = (with_base(graph, Call.of_chain(graph, one)) for one in chains if one is not None)
        calls = [one for one in read if isinstance(one, Call)]
        steps = [step for one in calls for step in one.chain.steps]
        if len(calls) < 3 or inner is key or any(step.kind == "bias" for step in steps):
            return None
        gate, up, _ = calls
        linears = tuple(one.chain for one in calls)
        ways = {way for one in linears for way in one.ways.items()}
        alike = len(ways) == len(dict(ways)) and len({"u" in one.bits for one in linears}) == 1
        tokens = (gate.chain.first, gate.out_dims, up.chain.first, up.out_dims)
        out_dims = over_tokens(graph, gate.out_dims, down)
        if not alike or out_dims is None or down.n != gate.source.k:
            return None
        if not same_tokens(graph, *tokens):
            return None
        whole = dataclasses.replace(
            gate, op="gated_mlp", chains=linears, final=node, out_dims=out_dims,
            activation=activation,
        )  # fmt: skip
        whole.covered = covered(graph, node, whole.keys())
        pair = Call.of_several("lowrank_matmul_shared_x", (gate, up))
        separate = sum(call_ways(graph, one.spec(graph)).fused for one in (pair, calls[2]))
        found = self.matched(graph, whole)
        if isinstance(found, Match) and found.info["predicted"]["fused"] > separate:
            return Refusal("slower", "the calls apart are predicted to be faster", node)
        return found
