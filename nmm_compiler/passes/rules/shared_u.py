"""Rule `shared_u`: several chains with one x and one first factor as one call.

    h = linear(x, U); y1 = linear(h, V1); y2 = linear(h, V2)     (or h written twice)
    -> y1, y2 = nmm.lowrank_matmul_shared_u(x, U, [V1, V2], ...)

The place of the call and the distance of results are as in `shared_x`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import Chain, read_chain
from nmm_compiler.passes.chains.epilogue import extend
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.chains.safety import real_users
from nmm_compiler.passes.emit.fused_calls import LowRankCall
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, Product, owner_of
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lowrank import products_at
from nmm_compiler.passes.rules.shared_x import group, only_bias


class SharedU(KernelRule):
    """One first factor, several second ones."""

    name = "shared_u"
    ends_at = (Product,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products that several others read."""
        for key, form in products_at(graph, node):
            constant = graph.is_weight(form.lhs) or graph.is_weight(form.rhs)
            twins = graph.twins(key)
            if constant and twins[0] is key and len(_readers(graph, twins)) > 1:
                yield twins

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check that every reader is the second product of a chain."""
        twins: list[Key] = candidate
        chains: list[Chain] = []
        for user in _readers(graph, twins):
            chain = _chain_at(graph, user, twins)
            if chain is None:
                return None
            chains.append(chain)
        chains = [extend(graph, chain, activations=False) for chain in chains]
        if len(chains) < 2 or not all(only_bias(chain) for chain in chains):
            return None
        if any(c.v.layout != chains[0].v.layout or c.middle for c in chains):
            return None
        k, r, n = chains[0].u.k, chains[0].u.n, sum(chain.v.n for chain in chains)
        if r * (k + n) >= k * n:
            return None
        return group(graph, self.name, [LowRankCall.of(graph, c) for c in chains])


def _readers(c: Canonical, twins: list[Key]) -> list[fx.Node]:
    """Return the nodes that compute with equal values, through their rearrangements."""
    found: dict[fx.Node, None] = {}
    queue = [owner_of(key) for key in twins]
    while queue:
        value = queue.pop()
        for user in real_users(value):
            if c.is_view_of(user, value) and c.base(user)[0] in twins:
                queue.append(user)
            else:
                found[user] = None
    return list(found)


def _chain_at(c: Canonical, user: fx.Node, firsts: list[Key]) -> Chain | None:
    for key, form in products_at(c, user):
        if isinstance(form, Product):
            chain = read_chain(c, key, form)
            if isinstance(chain, Chain) and chain.first.key in firsts:
                return chain
    return None
