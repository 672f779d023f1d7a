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
    Walk,
    ended,
    read_chain,
    read_with_function,
    trace_addend,
    trace_end,
)
from nmm_compiler.passes.chains.safety import Refusal, part_of_one, too_wide
from nmm_compiler.passes.emit.calls import Call, with_base
from nmm_compiler.passes.emit.stored import Stored
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    DeviceSum,
    Key,
    Norm,
    Product,
    Scale,
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


class Adapter(KernelRule):
    """Down, an activation, up."""

    name = "adapter"
    ends_at: tuple[type, ...] = (Product, Add, Scale, Activation)
    between: type[Activation] | type[Norm] = Activation

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every product, with steps, an activation or an addend behind it."""
        walk, end = trace_end(graph, node)
        if walk.key is node or any(len(step.dims) > 1 for step in walk.steps):
            walk, end = trace_addend(graph, node) or (walk, end)
        if isinstance(end, Product) and node in graph.forms:
            yield node, walk, end

    def read(self, graph: Canonical, key: Key, form: Any) -> Chain | Refusal | None:
        """Read the chain that ends at a product."""
        return read_with_function(graph, key, form, self.between)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the chain and check whether it may move to the node; the node of the last product
        alone says why not."""
        node, walk, form = candidate
        chain: Any = self.read(graph, walk.key, form)
        if isinstance(chain, Chain):
            chain = self.ended(graph, chain, walk, node)
        return chain if isinstance(chain, Match) or owner_of(walk.key) is node else None

    def ended(
        self, graph: Canonical, chain: Chain, walk: Walk, node: fx.Node
    ) -> Match | Refusal | None:
        """Check a chain with what stands behind it, as far as a node."""
        wide = too_wide(graph, chain)
        whole = ended(graph, chain, walk, node)
        if wide is not None or whole is None:
            return wide or part_of_one(chain.out)
        call = Call.of_chain(graph, whole)
        of_bytes = with_base(graph, call)
        if isinstance(of_bytes, Stored):
            call.note = f"{of_bytes.format} weight is dequantized at each call: {of_bytes.reason}"
        return self.matched(graph, of_bytes if isinstance(of_bytes, Call) else call)


class MLA(Adapter):
    """Down, RMSNorm, up."""

    name = "mla"
    between = Norm


class LowRankChain(Adapter):
    """The plain chain of two products."""

    name = "lowrank"

    def read(self, graph: Canonical, key: Key, form: Any) -> Chain | Refusal | None:
        """Read the chain without a function between the products, one that sums over devices
        too."""
        chain: Chain | Refusal | None = read_chain(graph, key, form)
        if isinstance(chain, Refusal) and chain.code == "device":
            return self._over_ranks(graph, key, form) or chain
        return chain

    def _over_ranks(self, graph: Canonical, key: Key, form: Product) -> Chain | Refusal | None:
        """Return the chain that sums over devices; None where no call has the sum."""
        chain = read_with_function(graph, key, form, DeviceSum)
        if not isinstance(chain, Chain):
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
        return chain
