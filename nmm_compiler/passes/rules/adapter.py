"""Rule `adapter`: a bottleneck with an activation between its products, as one call.

h = gelu(linear(x, A, a)); y = linear(h, B, b)
-> nmm.lowrank_matmul(x, A, B, b, None, a, inner_activation="gelu")
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import Chain, read_with_function
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.emit.calls import LowRankCall
from nmm_compiler.passes.graph.canonical import Activation, Canonical, Product, owner_of
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lowrank import check_chain, products_at


class Adapter(KernelRule):
    """Down, an activation, up."""

    name = "adapter"
    ends_at = (Product,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every product at the node."""
        yield from products_at(graph, node)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the adapter and check whether it may move to its end."""
        key, form = candidate
        chain = read_with_function(graph, key, form, Activation)
        found = check_chain(graph, chain) if isinstance(chain, Chain) else chain
        if not isinstance(found, Chain):
            return found
        call = LowRankCall.of(graph, found)
        return self.matched(graph, owner_of(found.out), found.nodes, call)
