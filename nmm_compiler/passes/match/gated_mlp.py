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

from nmm_compiler.passes.calls import GatedCall
from nmm_compiler.passes.canonicalize import Canonical
from nmm_compiler.passes.forms import Activation, Key, Scale, owner_of
from nmm_compiler.passes.match.base import Match, Rule
from nmm_compiler.passes.match.obstacles import refuse
from nmm_compiler.passes.match.projections import Projection, read_projection, same_tokens
from nmm_compiler.passes.match.stages import Refusal, path_nodes
from nmm_compiler.passes.rewrite import Editor

GATES = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class Gated:
    """What stands at a product of two activations; node is where the call's result is needed."""

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
    """Read a value as activation(inner); silu may be spelled inner * sigmoid(inner)."""
    base, dims = c.base(key)
    form = c.forms[base]
    nodes = path_nodes(c, key) | {owner_of(base)}
    if dims != _plain(c, base):
        return None
    if isinstance(form, Activation) and form.name in GATES:
        return form.name, form.value, nodes
    if isinstance(form, Scale) and not isinstance(form.factor, float):
        for value, factor in ((form.value, form.factor), (form.factor, form.value)):
            inner = c.forms[c.base(factor)[0]]
            if isinstance(inner, Activation) and inner.name == "sigmoid":
                same = c.base(inner.value)[0] is c.base(value)[0]
                if same and c.base(inner.value)[1] == c.base(value)[1]:
                    more = path_nodes(c, factor) | {owner_of(c.base(factor)[0])}
                    return "silu", value, nodes | more
    return None


def _plain(c: Canonical, key: Key) -> Any:
    from nmm_compiler.passes.views import identity

    return identity(c.shape(key) or ())


def gates_at(c: Canonical, node: fx.Node) -> Iterator[Any]:
    """Yield (node, the activated factor, the other) for a product of two activations."""
    form = c.forms.get(node)
    if not isinstance(form, Scale) or isinstance(form.factor, float):
        return
    for gate, up in ((form.value, form.factor), (form.factor, form.value)):
        read = _activated(c, gate)
        if read is not None and c.shape(gate) == c.shape(up):
            yield node, read, up


def read_gated(c: Canonical, candidate: Any, down: Projection | None = None) -> Gated | Refusal:
    """Read a candidate of `gates_at` as gate and up of one x; its reason is empty for no match.

    At least one projection, `down` included, has to be low-rank.
    """
    node, (activation, inner, nodes), up_key = candidate
    gate, up = read_projection(c, inner), read_projection(c, up_key)
    if gate is None or up is None:
        return Refusal("", "", node, "")
    if not any(p is not None and p.low_rank for p in (gate, up, down)):
        return Refusal("", "", node, "")
    if not same_tokens(c, gate.first, gate.out_dims, up.first, up.out_dims):
        return Refusal(
            "other_x", "gate and up do not read the same x", node, "feed both the same tensor"
        )
    if gate.n != up.n or not gate.only_bias() or not up.only_bias():
        return Refusal(
            "scaled_gate",
            "a scale stands in the gate or up projection",
            node,
            "fold the scale into a factor",
        )
    return Gated(node, activation, gate, up, gate.nodes | up.nodes | nodes | {node})


class GatedMLPUp(Rule):
    """Gate and up projections with the product between them."""

    name = "gated_mlp_up"

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose each product of two activations, either factor being the gate."""
        yield from gates_at(graph, node)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal:
        """See that both factors project the same x and that nothing else reads them."""
        gated = read_gated(graph, candidate)
        if isinstance(gated, Refusal):
            return gated
        why = refuse(graph, gated.nodes, gated.node, gated.keys())
        if why is not None:
            return why
        call = GatedCall.of(graph, gated)
        return Match(
            rule=self.name,
            node=gated.node,
            nodes=gated.nodes,
            data=call,
            info=call.info(),
            notes=call.notes(),
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the fused call."""
        return match.data.emit(graph, editor)
