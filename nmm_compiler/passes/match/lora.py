"""Rule `lora`: a dense product plus scaled low-rank branches of the same x, as one call.

    y = linear(x, W, b) + s * linear(linear(x, A), B)
    -> nmm.lowrank_matmul(x, A, B, b, W, scale=s)

The base may stand on either side, and the sum may be in place. Of several adapters the first is
fused with the base; the others become plain chains that are added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.calls import LowRankCall
from nmm_compiler.passes.canonicalize import Canonical
from nmm_compiler.passes.forms import Add, Key, Leaf, Product, Virtual
from nmm_compiler.passes.match.base import Match, Rule
from nmm_compiler.passes.match.chains import Chain, Step, read_chain, trace_back
from nmm_compiler.passes.match.epilogue import extend
from nmm_compiler.passes.match.lowrank import chain_operands
from nmm_compiler.passes.match.obstacles import refuse, too_wide
from nmm_compiler.passes.match.projections import Projection, read_projection, same_tokens, scaled
from nmm_compiler.passes.match.stages import Refusal
from nmm_compiler.passes.rewrite import Editor


class LoRA(Rule):
    """Base product plus adapter."""

    name = "lora"

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every sum of two values, either way round."""
        form = graph.forms.get(node)
        if isinstance(form, Add) and not isinstance(form.b, float):
            yield node, form.b, form.beta, form.a, form.alpha
            yield node, form.a, form.alpha, form.b, form.beta

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal:
        """Read branch and base, and see that both are projections of one x."""
        node, branch_key, branch_factor, base_key, base_factor = candidate
        quiet = Refusal("", "", node, "")
        branch = _branch(graph, branch_key)
        if branch is None or base_factor != 1.0 or graph.is_constant(base_key):
            return quiet
        base = read_projection(graph, base_key)
        if base is None or base.low_rank or not base.only_bias():
            return quiet
        chain, dims = branch
        if not same_tokens(graph, chain.first, dims, base.first, base.out_dims):
            return Refusal(
                "other_x",
                "base and branch do not read the same x in the same way",
                base_key,
                "feed base and adapter the same tensor, in one dtype",
            )
        wide = too_wide(chain.u.k, chain.u.n, chain.v.n, chain.second.key)
        if wide is not None:
            return wide
        readers = _later_readers(graph, node)
        after = (*chain.after, *_factor(branch_factor), *_biases(base))
        nodes = chain.nodes | base.nodes | {node}
        whole = dataclasses.replace(
            chain,
            after=after,
            out=node,
            out_dims=dims,
            nodes=nodes,
            base=base.first,
            inplace=node if node in graph.effects.writers else None,
        )
        why: Refusal | None = None
        tries = (extend(graph, whole), extend(graph, whole, activations=False), whole)
        for final in tries if not readers else (whole,):
            why = _in_place(graph, node, whole.nodes, readers) or refuse(
                graph,
                final.nodes,
                _owner(final.out),
                chain_operands(final),
                allowed=(node,),
                redirected=readers,
            )
            if why is None:
                call = LowRankCall.of(graph, final)
                return Match(
                    rule=self.name,
                    node=_owner(final.out),
                    nodes=final.nodes,
                    data=call,
                    info=call.info(),
                    notes=call.notes(),
                )
        assert why is not None
        return why

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the fused call; what read the memory of an in-place sum reads its value."""
        base = match.data.chain.inplace
        if base is not None:
            for reader in _later_readers(graph, base):
                reader.replace_input_with(base.args[0], base)
        return match.data.emit(graph, editor)


def _owner(key: Key) -> fx.Node:
    return key.owner if isinstance(key, Virtual) else key


def _branch(c: Canonical, key: Key) -> tuple[Chain, Any] | None:
    """Read the adapter: a chain followed by scalars, seen through views."""
    walk, form = trace_back(c, key)
    if not isinstance(form, Product):
        return None
    chain = read_chain(c, walk.key, form)
    if not isinstance(chain, Chain):
        return None
    projection = read_projection(c, key)
    if projection is None or not projection.low_rank:
        return None
    if any(s.kind == "bias" for s in (*projection.after, *projection.middle)):
        return None
    whole = dataclasses.replace(chain, after=projection.after, nodes=projection.nodes)
    return whole, projection.out_dims


def _factor(number: float) -> tuple[Step, ...]:
    return () if number == 1.0 else (Step("scale", number),)


def _biases(base: Projection) -> tuple[Step, ...]:
    assert scaled(base.after) == 1.0
    return tuple(s for s in base.after if s.kind == "bias")


def _later_readers(c: Canonical, node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read, after an in-place sum, the memory it wrote by its old name."""
    target = node.args[0] if node.args else None
    if node not in c.effects.writers or not isinstance(target, fx.Node):
        return []
    position = c.effects.position
    return [u for u in target.users if position.get(u, -1) > position[node]]


def _in_place(
    c: Canonical, node: fx.Node, nodes: frozenset[fx.Node], readers: list[fx.Node]
) -> Refusal | None:
    """Refuse a sum in place unless what it writes is seen by nobody else."""
    if node not in c.effects.writers:
        return None
    target = node.args[0] if node.args else None
    why = Refusal("mutation", "the sum writes memory that others see", node, "add out of place")
    if not isinstance(target, fx.Node) or isinstance(c.form(target), Leaf):
        return why
    own, position = c.effects.storages(target), c.effects.position
    for other in c.graph.nodes:
        if other is node or not c.effects.storages(other) & own:
            continue
        # Views made before the sum would show it; those made of its result are its own.
        if position[other] < position[node] and other not in nodes:
            return why
    for other in nodes:
        late = [u for u in other.users if position[u] > position[node] and u not in nodes]
        if other is not node and any(u not in readers for u in late):
            return why
    return None
