"""Rules `lowrank`, `adapter` and `mla`: two products, and what stands between them, as one call.

    y = linear(linear(x, A), B, b)            with foldable steps before, between and after
      ->   nmm.lowrank_matmul(x, A, B, b)
    y = linear(gelu(linear(x, A, a)), B, b)   a bottleneck with an activation
      ->   nmm.lowrank_matmul(x, A, B, b, None, a, inner_activation="gelu")
    y = linear(rms_norm(linear(x, A), g), B)  multi-head latent attention; any spelling of the norm
      ->   nmm.lowrank_matmul(x, A, B, None, None, None, g, inner_eps=1e-6)

A latent that is one part of a split is left alone: the other part, the rotated keys, reads the down
projection, too. DTensors that are cut by rows are summed between the products: the
call has tp and tp_axis then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from nmm_compiler.ops.registration import is_reference
from nmm_compiler.passes.chains.chain import (
    Chain,
    devices_of,
    extend,
    read_chain,
    read_summed_chain,
    read_with_function,
)
from nmm_compiler.passes.chains.safety import Refusal, part_of_one, refuse, too_wide
from nmm_compiler.passes.emit.calls import LowRankCall
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Canonical,
    Key,
    Norm,
    Product,
    Virtual,
    owner_of,
)
from nmm_compiler.passes.rules.base import KernelRule, Match

ONE_PROCESS = ("simulator", "nki_simulate")
"""Executors that run no kernel of several ranks."""


def products_at(c: Canonical, node: fx.Node) -> Iterator[tuple[Key, Product]]:
    """Yield the products that a node computes, its own value last."""
    for key in (*c.virtuals.get(node, ()), node):
        form = c.forms.get(key)
        if isinstance(form, Product):
            yield key, form


def check_chain(c: Canonical, chain: Chain) -> Chain | Refusal:
    """Return the chain with its epilogue, or why it may not be fused."""
    wide = too_wide(c, chain.first, chain.u.n, chain.n, chain.last.key)
    if wide is not None:
        return wide
    plain = chain if isinstance(chain.out, fx.Node) else extend(c, chain, activations=False)
    why: Refusal | None = None
    for candidate in (extend(c, chain), extend(c, chain, activations=False), plain):
        if isinstance(candidate.out, Virtual):
            why = why or part_of_one(candidate.out)
            continue
        why = refuse(c, candidate.nodes, owner_of(candidate.out), candidate.operands)
        if why is None:
            return candidate
    assert why is not None
    return why


class Adapter(KernelRule):
    """Down, an activation, up."""

    name = "adapter"
    ends_at = (Product,)
    between: type[Activation] | type[Norm] = Activation

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every product at the node."""
        yield from products_at(graph, node)

    def read(self, graph: Canonical, key: Key, form: Product) -> Chain | Match | Refusal | None:
        """Read the chain that ends at a product."""
        return read_with_function(graph, key, form, self.between)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the chain and check whether it may move to its end."""
        chain = self.read(graph, *candidate)
        found = check_chain(graph, chain) if isinstance(chain, Chain) else chain
        return self.called(graph, found) if isinstance(found, Chain) else found

    def called(
        self, graph: Canonical, chain: Chain, tp: int = 1, group: str = ""
    ) -> Match | Refusal:
        """Return the match of a chain that may move."""
        call = LowRankCall.of(graph, chain, "lowrank_matmul", tp=tp, group=group)
        return self.matched(graph, call)


class MLA(Adapter):
    """Down, RMSNorm, up."""

    name = "mla"
    between = Norm


class LowRank(Adapter):
    """The plain chain of two products."""

    name = "lowrank"

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the chain, one that sums over devices too, and check whether it may move."""
        found = super().check(graph, candidate)
        if isinstance(found, Refusal) and found.code == "device":
            return self._over_ranks(graph, *candidate) or found
        return found

    def read(self, graph: Canonical, key: Key, form: Product) -> Chain | Match | Refusal | None:
        """Read the chain without a function between the products."""
        return read_chain(graph, key, form, False)

    def _over_ranks(self, graph: Canonical, key: Key, form: Product) -> Match | Refusal | None:
        """Return the match of a chain that sums over devices; None where no call has the sum."""
        chain = read_summed_chain(graph, key, form)
        if chain is None:
            return None
        if graph.options.executor in ONE_PROCESS:
            return Refusal(
                "device",
                f"executor {graph.options.executor!r} runs one process, and the devices sum "
                "between the products",
                key,
                "use executor 'auto'",
            )
        x = graph.tensor(chain.first.x)
        by_kernel = x is not None and not is_reference(graph.options.executor, x)
        if by_kernel and graph.trains and torch.is_grad_enabled():
            return Refusal(
                "device",
                "the model trains, and no kernel that sums over devices has gradients",
                key,
                "use executor 'reference', or torch.no_grad() and parameters without gradients",
            )
        found = check_chain(graph, chain)
        if isinstance(found, Refusal):
            return found
        match = self.called(graph, found, *devices_of(graph, chain))
        return None if isinstance(match, Match) and match.data.kept.stored else match
