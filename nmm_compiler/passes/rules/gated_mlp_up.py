"""Rule `gated_mlp_up`: activation(x gate) * (x up), each projection low-rank or dense, as one call.

    mul(silu(linear(linear(x, Ga), Gb)), linear(linear(x, Ua), Ub))
    -> nmm.gated_mlp_up(x, [Ga, Gb], [Ua, Ub], activation="silu")

At least one of the two has to be low-rank. Where `gated_mlp` declines the whole MLP, the down
projection is a chain of its own: it takes the result in the layout that `layout` chooses, which
needs no transpose between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.linear_map import path_nodes
from nmm_compiler.passes.chains.projections import Projection, read_projection, same_tokens
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.chains.safety import refuse
from nmm_compiler.passes.emit.fused_calls import GatedCall
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import (
    Activation,
    Add,
    Key,
    Product,
    Scale,
    Virtual,
    owner_of,
)
from nmm_compiler.passes.graph.views import identity
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lora import is_adapted
from nmm_compiler.passes.rules.mla import before_split

GATES = ("silu", "gelu", "gelu_tanh", "relu", "identity")


@dataclass(frozen=True)
class Gated:
    """A gate and an up projection; node is the first node that needs the call's result."""

    node: fx.Node
    activation: str
    gate: Projection
    up: Projection
    nodes: frozenset[fx.Node]
    down: Projection | None = None

    def projections(self) -> tuple[Projection, ...]:
        """Return gate, up and, in a whole MLP, down."""
        return (self.gate, self.up) if self.down is None else (self.gate, self.up, self.down)

    def keys(self) -> list[Key]:
        """Return the values that the fused call reads."""
        keys = [*self.gate.keys(), *self.up.keys()]
        return keys + (self.down.keys()[1:] if self.down is not None else [])


def _activated(c: Canonical, key: Key) -> tuple[str, Key, frozenset[fx.Node]] | None:
    """Read a value as activation(inner), however the activation is spelled."""
    base, dims = c.base(key)
    form = c.forms[base]
    if not isinstance(form, Activation) or dims != identity(c.shape(base) or ()):
        return None
    nodes = path_nodes(c, key) | {owner_of(base)} | c.helpers.get(base, frozenset())
    return form.name, form.value, nodes


def _is_product(c: Canonical, key: Key) -> bool:
    form = c.form(key)
    inner = isinstance(form, Add) and isinstance(form.a, Virtual)
    return inner or isinstance(form, Product)


def gates_at(c: Canonical, node: fx.Node) -> Iterator[Any]:
    """Yield (node, the activated factor, the other) for a product of two activations."""
    form = c.forms.get(node)
    if not isinstance(form, Scale) or isinstance(form.factor, float):
        return
    if c.is_weight(form.factor) or c.shape(form.value) != c.shape(form.factor):
        return
    for gate, up in ((form.value, form.factor), (form.factor, form.value)):
        read = _activated(c, gate)
        if read is not None:
            yield node, read, up
    if _is_product(c, form.value) and _is_product(c, form.factor):
        yield node, ("identity", form.value, path_nodes(c, form.value)), form.factor


def read_gated(
    c: Canonical, candidate: Any, down: Projection | None = None
) -> Gated | Refusal | None:
    """Read a candidate of `gates_at` as gate and up of one x, or None.

    At least one projection, `down` included, has to be low-rank, or h so narrow that gate, up and
    down are a bottleneck.
    """
    node, (activation, inner, nodes), up_key = candidate
    gate, up = read_projection(c, inner), read_projection(c, up_key)
    if gate is None or up is None:
        return _no_projection(c, node, inner, up_key)
    low = any(p is not None and p.low_rank for p in (gate, up, down))
    if not low and not (down is not None and _is_bottleneck(gate, down)):
        return None
    if not same_tokens(c, gate.first, gate.out_dims, up.first, up.out_dims):
        return Refusal("other_x", "gate and up do not read the same x", node)
    if activation not in GATES:
        return Refusal(
            "no_kernel",
            f"no kernel computes a gate with the activation {activation}",
            node,
        )
    if gate.n != up.n:
        return None
    if any(not p.low_rank and not p.only_bias() for p in (gate, up)):
        return Refusal(
            "no_kernel",
            "a scale stands behind a dense gate or up projection",
            node,
        )
    return Gated(node, activation, gate, up, gate.nodes | up.nodes | nodes | {node})


def _is_bottleneck(gate: Projection, down: Projection) -> bool:
    """Return whether the product of gate and up is so narrow that it saves work."""
    return gate.n * (gate.k + down.n) < gate.k * down.n


def _no_projection(c: Canonical, node: fx.Node, gate: Key, up: Key) -> Refusal | None:
    """Return why two values are no gate and up, if one comes from a low-rank projection."""
    sources = [before_split(c, key) for key in (gate, up)]
    if sources[0] is sources[1] and sources[0] is not c.base(gate)[0]:
        merged = read_projection(c, sources[0])
        if merged is not None and merged.low_rank:
            return Refusal(
                "no_kernel",
                "gate and up are halves of one projection, and share its first factor",
                node,
            )
    if is_adapted(c, gate) or is_adapted(c, up):
        return Refusal(
            "no_kernel",
            "gate or up is a dense product with adapters",
            node,
        )
    return None


class GatedMLPUp(KernelRule):
    """Gate and up projections with the product between them."""

    name = "gated_mlp_up"
    ends_at = (Scale,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose each product of two activations, either factor being the gate."""
        yield from gates_at(graph, node)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check that both factors project the same x and have no other readers."""
        gated = read_gated(graph, candidate)
        if not isinstance(gated, Gated):
            return gated
        why = refuse(graph, gated.nodes, gated.node, gated.keys())
        if why is not None:
            return why
        call = GatedCall.of(graph, gated)
        return self.matched(graph, gated.node, gated.nodes, call)
