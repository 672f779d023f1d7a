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
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.emit.calls import Call, with_base
from nmm_compiler.passes.emit.stored import Stored
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
        if chain is None or chain.second is not None or not chain.only_bias():
            return None
        call = with_base(graph, Call.of_chain(graph, chain))
        if isinstance(call, Stored):
            why = f"the {call.format} weight is multiplied out at each call: {call.reason}"
            return Refusal("few_bits", why, chain.u.key)
        if call is None:
            return None
        return self.matched(graph, call)
