"""Rule `quantized`: a product with a weight of few bits, without a branch, as one call.

    linear(x, nmm.dequantize(values, scale, "mxfp4", dtype), b)
      ->   nmm.corrected_matmul(x, values, scale, None, None, b, format="mxfp4")

Rule `lora` finds such a weight beside low-rank branches, and comes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import read_projection
from nmm_compiler.passes.chains.safety import Refusal, refuse
from nmm_compiler.passes.emit.corrected import alone
from nmm_compiler.passes.graph.canonical import Canonical, Product
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lowrank import products_at


class Quantized(KernelRule):
    """One product with a stored weight of few bits."""

    name = "quantized"
    ends_at = (Product,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every node that computes a product, with its bias where it adds one."""
        if any(True for _ in products_at(graph, node)):
            yield node

    def check(self, graph: Canonical, candidate: fx.Node) -> Match | Refusal | None:
        """Read the product, and check that its weight is of few bits and a kernel reads it."""
        chain = read_projection(graph, candidate)
        call = None if chain is None or chain.second is not None else alone(graph, chain)
        if chain is None or call is None:
            return None
        if call.kept.format:
            kept = call.kept
            why = f"the {kept.format} weight is multiplied out at each call: {kept.reason}"
            return Refusal("few_bits", why, chain.u.key)
        unsafe = refuse(graph, chain.nodes, candidate, chain.operands)
        return unsafe or self.matched(graph, call)
