"""Rule `gated_mlp`: (activation(x gate) * (x up)) down, each low-rank or dense, as one call.

    h = mul(silu(linear(linear(x, Ga), Gb)), linear(linear(x, Ua), Ub)); linear(linear(h, Da), Db)
    -> nmm.gated_mlp(x, [Ga, Gb], [Ua, Ub], [Da, Db], activation="silu")

Three dense ones are a gated adapter where h is narrow: n (k + k) < k k. h stays in SBUF. The rule
declines, with the numbers, where h does not fit the target beside the kernel's other tensors, and
where two kernels are predicted to be faster: keeping h leaves room for fewer tokens at a time, so
weights may be read more often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.codegen.choose import refusal
from nmm_compiler.passes.chains.linear_map import is_whole_feature, path_nodes
from nmm_compiler.passes.chains.projections import (
    Projection,
    features_over_base,
    over_base,
    read_projection,
)
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.chains.safety import real_users, refuse
from nmm_compiler.passes.chains.steps import affine
from nmm_compiler.passes.emit.call_prices import spec_of
from nmm_compiler.passes.emit.fused_calls import GatedCall
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Add, Key, Product, Scale, owner_of
from nmm_compiler.passes.graph.views import Dims
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.gated_mlp_up import Gated, gates_at, read_gated
from nmm_compiler.passes.rules.lowrank import products_at

# From the end of a down projection to h: two products, and a bias after each.
_STEPS = 4


class GatedMLP(KernelRule):
    """The whole MLP, down projection included."""

    name = "gated_mlp"
    ends_at = (Product, Add)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products, and sums after them, that a product of two activations feeds."""
        h = _product_behind(graph, node)
        if h is not None and not _is_inner(graph, node):
            for gates in gates_at(graph, h):
                yield node, gates

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check that only the down projection reads h, and that one kernel pays."""
        node, gates = candidate
        down = read_projection(graph, node)
        if down is None or graph.base(down.first.x)[0] is not gates[0]:
            return None
        gated = read_gated(graph, gates, down)
        if not isinstance(gated, Gated):
            return None  # `gated_mlp_up` returns the reason
        out_dims = _over_tokens(graph, gated.gate.out_dims, down)
        if out_dims is None or not down.only_bias():
            return None
        down = dataclasses.replace(down, out_dims=out_dims)
        nodes = gated.nodes | down.nodes | path_nodes(graph, down.first.x)
        gated = dataclasses.replace(gated, node=owner_of(node), down=down, nodes=nodes)
        call = GatedCall.of(graph, gated)
        made = (
            refuse(graph, nodes, gated.node, gated.keys())
            or _no_kernel(graph, gated, call)
            or self.matched(graph, gated.node, nodes, call)
        )
        if isinstance(made, Match):
            return made
        pair = gated.gate.low_rank or gated.up.low_rank  # reported where two calls take its place
        return dataclasses.replace(made, report_even_if_superseded=True) if pair else None


def _product_behind(c: Canonical, node: fx.Node) -> fx.Node | None:
    """Return the product of two activations that a projection ending here would read."""
    key: Key = node
    for _ in range(_STEPS):
        form = c.forms.get(key)
        if isinstance(form, Product):
            sides = (form.lhs, form.rhs)
            data = [side for side in sides if not c.is_weight(side)]
            if len(data) != 1:
                return None
            key = c.base(data[0])[0]
        elif isinstance(form, Add):
            found = affine(c, key, form)
            if found is None:
                return None
            key = c.base(found[0])[0]
        else:
            break
    form = c.forms.get(key)
    gated = isinstance(form, Scale) and not isinstance(form.factor, float)
    return key if gated and key is not node and isinstance(key, fx.Node) else None


def _is_inner(c: Canonical, node: fx.Node) -> bool:
    """Return whether another product with a constant follows: then this is a first factor."""
    return any(
        c.is_weight(form.lhs) or c.is_weight(form.rhs)
        for user in real_users(node)
        for _, form in products_at(c, user)
    )


def _over_tokens(c: Canonical, h_dims: Dims, down: Projection) -> Dims | None:
    """Return the result's dimensions over the tokens that h lies over, None where h is mixed."""
    features = views.compose((features_over_base(c, down.first),), h_dims)
    if features is None or not is_whole_feature(features[0], down.k):
        return None
    dims = over_base(c, down.first, down.out_dims)
    dims = None if dims is None else views.compose(dims, h_dims)
    if dims is None or any(atom.axis == views.BROADCAST for dim in dims for atom in dim):
        return None
    return dims


def _no_kernel(c: Canonical, gated: Gated, call: GatedCall) -> Refusal | None:
    """Return why one kernel is not possible on the target, or None."""
    gate, _, down = gated.projections()
    if down.n != gate.k:
        text = f"the down projection returns {down.n} features, one kernel returns x's {gate.k}"
        return Refusal("no_kernel", text, gated.node)
    why = refusal(spec_of(c, call), c.chip)
    if why is None:
        return None
    return Refusal("no_kernel", f"the whole MLP has no kernel: {why}", gated.node)
