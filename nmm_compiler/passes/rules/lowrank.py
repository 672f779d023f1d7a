"""Rule `lowrank`: y = (x u) v, with foldable steps before, between and after, as one call.

h = linear(x, A); y = linear(h, B, bias)   ->   nmm.lowrank_matmul(x, A, B, bias, "col", "col")

DTensors that are cut by rows are summed between the products: the call has tp and tp_axis then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from nmm_compiler.ops.registration import is_reference
from nmm_compiler.passes.chains.chain import Chain, extend, read_chain, read_summed_chain
from nmm_compiler.passes.chains.prices import too_wide
from nmm_compiler.passes.chains.safety import Refusal, part_of_one, refuse, unsafe
from nmm_compiler.passes.emit.calls import LowRankCall, RowsCall
from nmm_compiler.passes.emit.editor import WEIGHT_ONLY
from nmm_compiler.passes.graph.canonical import (
    Canonical,
    Key,
    Product,
    Virtual,
    owner_of,
)
from nmm_compiler.passes.rules.base import KernelRule, Match

ONE_PROCESS = ("simulator", "nki_simulate")
"""Executors that run no kernel of several ranks."""


def products_at(c: Canonical, node: fx.Node) -> Iterator[tuple[Key, Product]]:
    """Yield the products that a node computes, its own value last."""
    if WEIGHT_ONLY in node.meta:
        return
    for key in c.virtuals.get(node, ()):
        form = c.forms.get(key)
        if isinstance(form, Product):
            yield key, form
    form = c.forms.get(node)
    if isinstance(form, Product):
        yield node, form


def check_chain(c: Canonical, chain: Chain) -> Chain | Refusal:
    """Return the chain with its epilogue, or why it may not be fused."""
    wide = too_wide(c, chain.first, chain.u.n, chain.v.n, chain.second.key)
    if wide is not None:
        return wide
    plain = chain if isinstance(chain.out, fx.Node) else extend(c, chain, activations=False)
    why: Refusal | None = None
    for candidate in (extend(c, chain), extend(c, chain, activations=False), plain):
        if isinstance(candidate.out, Virtual):
            why = why or (_bias_behind(candidate.out) if candidate.per_token else None)
            why = why or part_of_one(candidate.out)
            continue
        operands = chain_operands(candidate)
        final = owner_of(candidate.out)
        why = refuse(c, candidate.nodes, final, operands)
        factors = [step.key for step in candidate.per_token if step.key is not None]
        if why is None and factors:  # outside of the kernel, so of any dtype
            why = unsafe(c, candidate.nodes, final, [*operands, *factors])
        if why is None:
            return candidate
    assert why is not None
    return why


def _bias_behind(key: Key) -> Refusal:
    return Refusal(
        "between",
        "the last product adds a bias of its own behind a factor of each token",
        key,
    )


def chain_operands(chain: Chain) -> list[Key]:
    """Return the values that the kernel reads."""
    steps = (*chain.middle, *chain.after)
    keys = [chain.first.x, *chain.u.keys, *chain.v.keys]
    keys += [s.key for s in steps if s.key is not None]
    keys += [chain.base.weight.key] if chain.base else []
    keys += [chain.inner.gain] if chain.inner and chain.inner.gain is not None else []
    for other in chain.more:
        keys += chain_operands(other)
    return keys + ([chain.addend[0]] if chain.addend else [])


class LowRank(KernelRule):
    """The plain chain of two products."""

    name = "lowrank"
    ends_at = (Product,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every product at the node."""
        yield from products_at(graph, node)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the chain and check whether it may move to its end."""
        key, form = candidate
        chain = read_chain(graph, key, form)
        if isinstance(chain, Refusal) and chain.code == "device":
            return self._over_ranks(graph, key, form) or chain
        found = check_chain(graph, chain) if isinstance(chain, Chain) else chain
        if not isinstance(found, Chain):
            return found
        call = LowRankCall.of(graph, found)
        return self.matched(graph, owner_of(found.out), found.nodes, call)

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
        call = RowsCall.over(graph, found)
        if call.kept.stored:
            return None
        return self.matched(graph, owner_of(found.out), found.nodes, call)
