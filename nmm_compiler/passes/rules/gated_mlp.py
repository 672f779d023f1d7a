"""Rule `gated_mlp`: (activation(x gate) * (x up)) down, each low-rank or dense, as one call.

    h = mul(silu(linear(linear(x, Ga), Gb)), linear(linear(x, Ua), Ub)); linear(linear(h, Da), Db)
    -> nmm.gated_mlp(x, [Ga, Gb], [Ua, Ub], [Da, Db], activation="silu")

Three dense ones are a gated adapter where h is narrow: n (k + k) < k k. h stays in SBUF. The rule
declines, with the numbers, where h does not fit the target beside the kernel's other tensors, and
where two kernels are predicted to be faster: keeping h leaves room for fewer tokens at a time, so
weights may be read more often. A symbolic token count is judged by the largest bucket.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.kernels.gated_mlp import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.options import LARGEST_BUCKET
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
from nmm_compiler.passes.emit.fused_calls import GatedCall
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Add, Key, Product, Scale, owner_of
from nmm_compiler.passes.graph.views import Dims
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.gated_mlp_up import Gated, gates_at, read_gated
from nmm_compiler.passes.rules.lowrank import products_at
from nmm_compiler.targets import Target

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
        why = refuse(graph, nodes, gated.node, gated.keys()) or _no_kernel(graph, gated)
        if why is not None:  # reported where two calls take its place
            pair = gated.gate.low_rank or gated.up.low_rank
            return dataclasses.replace(why, report_even_if_superseded=True) if pair else None
        call = GatedCall.of(graph, gated)
        return self.matched(graph, gated.node, nodes, call)


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


def _no_kernel(c: Canonical, gated: Gated) -> Refusal | None:
    """Return why one kernel is not possible or does not pay on the target, or None."""
    gate, up, down = gated.projections()
    if down.n != gate.k:
        return Refusal(
            "no_kernel",
            f"the down projection returns {down.n} features, one kernel returns x's {gate.k}",
            gated.node,
        )
    call = GatedCall.of(c, gated)
    m = call.tokens_count()
    if not isinstance(m, int):
        m = c.options.buckets[-1] if c.options.buckets else LARGEST_BUCKET
    ranks = tuple(p.weights[0].n if p.low_rank else 0 for p in (gate, up, down))
    dtype = c.dtype(gated.node)
    name = str(dtype).removeprefix("torch.")
    sizes = (max(1, m), gate.k, gate.n)
    fp8, options = bool(call.kept.stored), c.options
    why = decide(*sizes, ranks, name, c.chip, options.price, fp8, options.lnc)
    if why is None:
        return None
    return Refusal(why[0], why[1], gated.node)


@functools.lru_cache(maxsize=1024)
def decide(
    m: int,
    k: int,
    n: int,
    ranks: tuple[int, ...],
    dtype: str,
    chip: Target,
    price: str,
    fp8: bool = False,
    lnc: int = 1,
) -> tuple[str, str] | None:
    """Return (code, reason) against one kernel for the whole MLP, None for it.

    ranks: of gate, up and down, 0 for a dense one. price, lnc: as in Options. fp8: the weights are
    fp8.
    """
    from nmm_compiler.codegen.choose import refusal
    from nmm_compiler.codegen.latency import calls_us, price_on

    gate, up, down = ranks
    common: dict[str, Any] = {"m": m, "dtype": dtype}
    if fp8:
        common = {"m": m, "dtype": FP8, "scales": "channel", "x_dtype": dtype}
    gates: dict[str, Any] = {"k": k, "n": n, "gate_r": gate, "up_r": up}
    first = GatedMLPUpSpec(**common, **gates, out_layout="col")
    last: LowRankSpec | MatmulSpec = MatmulSpec(**common, k=n, n=k, x_layout="col")
    if down:
        last = LowRankSpec(**common, k=n, r=down, n=k, x_layout="col")
    whole = GatedMLPSpec(**common, **gates, down_r=down)
    why = refusal(whole, chip)
    if why is not None:
        return "no_kernel", f"the whole MLP has no kernel: {why}"
    if any(refusal(spec, chip) for spec in (first, last)):
        return None  # there is no pair to compare with
    one, *two = (calls_us((spec,), chip, price_on(price, lnc)) for spec in (whole, first, last))
    if one <= sum(two):
        return None
    reason = (
        f"one kernel for {m} tokens is predicted to take {one:,.1f} us on {chip.name}, "
        f"two take {two[0]:,.1f} + {two[1]:,.1f} us ({price})"
    )
    return "slower", reason
