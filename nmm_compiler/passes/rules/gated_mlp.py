"""Rules of gated MLPs, activation(x gate) * (x up), and down: as one call, or the half before down.

    h = mul(silu(linear(linear(x, Ga), Gb)), linear(linear(x, Ua), Ub)); linear(linear(h, Da), Db)
    -> nmm.gated_mlp(x, [Ga, Gb], [Ua, Ub], [Da, Db], activation="silu")

    mul(silu(linear(linear(x, Ga), Gb)), linear(linear(x, Ua), Ub))
    -> nmm.gated_mlp_up(x, [Ga, Gb], [Ua, Ub], activation="silu")

    h = silu(nmm.dequantize(gate...) x + gate branch) * (nmm.dequantize(up...) x + up branch)
    nmm.dequantize(down...) h + down branch
    -> nmm.corrected_mlp(x, [gate, up, down], [scales...], [u...], [v...])

Each projection is low-rank or dense. Three dense ones are a gated adapter where h is narrow:
n (k + k) < k k. In `gated_mlp` h stays in SBUF. The rule declines, with the numbers, where h does
not fit the target beside the kernel's other tensors, and where two kernels are predicted to be
faster: keeping h leaves room for fewer tokens at a time, so weights may be read more often. Then
the down projection is a chain of its own, which takes the result of `gated_mlp_up` in the layout
that `layout` chooses. `corrected_mlp` has weights of few bits, with branches or without; it is
declined where gate and up as one call, and down as another, are predicted to be faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import (
    Chain,
    behind,
    is_whole_feature,
    over_base,
    read_projection,
    same_tokens,
)
from nmm_compiler.passes.chains.safety import Refusal, call_ways, real_users
from nmm_compiler.passes.emit.calls import Call, with_base
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Key,
    Product,
    Scale,
    describe,
)
from nmm_compiler.passes.graph.views import Dims
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lora import read_adapted
from nmm_compiler.passes.rules.lowrank import products_at

_PARTS = ("getitem", "slice", "narrow", "select")
GATES = ("silu", "gelu", "gelu_tanh", "relu", "identity")


def gates_at(c: Canonical, node: Key) -> Iterator[Any]:
    """Yield (node, the name and the argument of the activation, the other factor) for a product of
    two activations."""
    form = c.forms.get(node)
    if not isinstance(form, Scale) or isinstance(form.factor, float) or c.is_weight(form.factor):
        return
    if c.shape(form.value) != c.shape(form.factor):
        return
    for gate, up in form.orders:
        function = c.form(gate)
        if isinstance(function, Activation) and c.is_whole(gate):
            yield node, (function.name, function.value), up
    if all(isinstance(c.form(key), (Product, Add)) for key in (form.value, form.factor)):
        yield node, ("identity", form.value), form.factor


def mlps_at(
    c: Canonical, node: fx.Node, read: Callable[[Canonical, Key], Chain | None]
) -> Iterator[Any]:
    """Yield (node, the linear that ends at it, a candidate of `gates_at` that it reads)."""
    down = read(c, node) if node in c.forms else None
    h = None if down is None else c.base(down.first.x)[0]
    if isinstance(h, fx.Node) and h is not node:
        for gates in gates_at(c, h):
            yield node, down, gates


def read_gated(c: Canonical, candidate: Any, down: Chain | None = None) -> Call | Refusal | None:
    """Read a candidate of `gates_at` as gate and up of one x, or None.

    At least one projection, `down` included, has to be low-rank, or h so narrow that gate, up and
    down are a bottleneck.
    """
    node, (activation, inner), up_key = candidate
    gate, up = read_projection(c, inner), read_projection(c, up_key)
    if gate is None or up is None:
        return _no_projection(c, node, inner, up_key)
    low = any(p is not None and p.second for p in (gate, up, down))
    if down is not None:  # where h is so narrow that dense ones save work
        low = low or gate.n * (gate.u.k + down.n) < gate.u.k * down.n
    if not low:
        return None
    if not same_tokens(c, gate.first, gate.out_dims, up.first, up.out_dims):
        return Refusal("other_x", "gate and up do not read the same x", node)
    if activation not in GATES:
        return Refusal(
            "no_kernel",
            f"no kernel computes a gate with the activation {activation}",
            node,
        )
    if any(not p.second and not p.only_bias() for p in (gate, up)):
        return Refusal(
            "no_kernel",
            "a scale stands behind a dense gate or up projection",
            node,
        )
    return Call.of(c, "gated_mlp_up", (gate, up), node, gate.out_dims, activation=activation)


def _no_projection(c: Canonical, node: fx.Node, gate: Key, up: Key) -> Refusal | None:
    """Return why two values are no gate and up, if one comes from a low-rank projection."""
    parts = [c.base(c.uncast(key))[0] for key in (gate, up)]
    wholes = {c.base(one)[0] for part in parts for one in behind(c, part)}
    if len(wholes) == 1 and all(describe(c.forms[part]) in _PARTS for part in parts):
        merged = read_projection(c, *wholes)
        if merged is not None and merged.second:
            return Refusal(
                "no_kernel",
                "gate and up are halves of one projection, and share its first factor",
                node,
            )
    if any(one is not None and one.base for one in (read_adapted(c, gate), read_adapted(c, up))):
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
        call = read_gated(graph, candidate)
        return self.matched(graph, call) if isinstance(call, Call) else call


class GatedMLP(KernelRule):
    """The whole MLP, down projection included."""

    name = "gated_mlp"
    ends_at = (Product, Add)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products, and sums after them, that a product of two activations feeds."""
        if not _is_inner(graph, node):
            yield from mlps_at(graph, node, read_projection)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check that only the down projection reads h, and that one kernel pays."""
        node, down, gates = candidate
        half = read_gated(graph, gates, down)
        if not isinstance(half, Call):
            return None  # `gated_mlp_up` returns the reason
        out_dims = over_tokens(graph, half.out_dims, down)
        if out_dims is None or not down.only_bias():
            return None
        call = Call.of(
            graph, "gated_mlp", [*half.chains, down], node, out_dims, activation=half.activation
        )
        match = self.matched(graph, call)
        if isinstance(match, Match):
            return match
        pair = any(one.second for one in half.chains)  # reported where two calls take its place
        return dataclasses.replace(match, report_even_if_superseded=True) if pair else None


class CorrectedMLP(KernelRule):
    """A gated MLP of three linears whose dense weights are of few bits."""

    name = "corrected_mlp"
    ends_at = (Product, Add)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose linears that a product of two linears of one x feeds."""
        yield from mlps_at(graph, node, read_adapted)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the weights, which are stored alike, and check that one kernel pays."""
        node, down, (_, (activation, inner), key) = candidate
        chains = [read_adapted(graph, inner), read_adapted(graph, key), down]
        read = (with_base(graph, Call.of_chain(graph, one)) for one in chains if one is not None)
        calls = [one for one in read if isinstance(one, Call)]
        steps = [step for one in calls for step in one.chain.steps]
        if len(calls) < 3 or inner is key or any(step.kind == "bias" for step in steps):
            return None
        gate, up, _ = calls
        linears = tuple(one.chain for one in calls)
        ways = {way for one in linears for way in one.ways.items()}
        alike = len(ways) == len(dict(ways)) and len({"u" in one.bits for one in linears}) == 1
        same = same_tokens(graph, gate.chain.first, gate.out_dims, up.chain.first, up.out_dims)
        out_dims = over_tokens(graph, gate.out_dims, down)
        if not (alike and same) or out_dims is None or down.n != gate.source.k:
            return None
        whole = dataclasses.replace(
            gate, op="gated_mlp", chains=linears, final=node, out_dims=out_dims,
            activation=activation,
        )  # fmt: skip
        pair = Call.of_several("lowrank_matmul_shared_x", (gate, up))
        separate = sum(call_ways(graph, one.spec(graph)).fused for one in (pair, calls[2]))
        match = self.matched(graph, whole)
        if isinstance(match, Match) and match.info["predicted"]["fused"] > separate:
            return Refusal("slower", "the calls apart are predicted to be faster", node)
        return match


def _is_inner(c: Canonical, node: fx.Node) -> bool:
    """Return whether another product with a constant follows: then this is a first factor."""
    return any(
        c.is_weight(form.lhs) or c.is_weight(form.rhs)
        for user in real_users(node)
        for _, form in products_at(c, user)
    )


def over_tokens(c: Canonical, h_dims: Dims, down: Chain) -> Dims | None:
    """Return the result's dimensions over the tokens that h lies over, None where h is mixed."""
    over_h = over_base(c, down.first, down.out_dims)
    over_x = None if over_h is None else views.compose(over_h, h_dims)
    if over_x is None or not is_whole_feature(over_x[0], down.u.k):
        return None
    repeated = any(atom.axis == views.BROADCAST for dim in over_x[1:] for atom in dim)
    return None if repeated else over_x[1:]
