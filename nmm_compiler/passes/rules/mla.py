"""Rule `mla`: down projection, RMSNorm, up projection (multi-head latent attention), as one call.

    y = linear(rms_norm(linear(x, A), g), B)
    -> nmm.lowrank_matmul(x, A, B, None, None, None, g, inner_eps=1e-6)

The norm may be one node or spelled out (pow, mean, add, rsqrt, mul). A latent that is one part of a
split is reported and left alone: the other part, the rotated keys, reads the down projection, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import Chain, read_with_function
from nmm_compiler.passes.chains.linear_map import read_stage
from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.emit.calls import LowRankCall
from nmm_compiler.passes.graph.canonical import (
    Canonical,
    Cast,
    Key,
    Norm,
    Opaque,
    Product,
    owner_of,
)
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lowrank import check_chain


class MLA(KernelRule):
    """Down - RMSNorm - up."""

    name = "mla"
    ends_at = (Product,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products with a constant weight."""
        for key in (*graph.virtuals.get(node, ()), node):
            form = graph.forms.get(key)
            if isinstance(form, Product) and graph.is_weight(form.rhs):
                yield key, form

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Walk back over the norm to a down projection."""
        key, form = candidate
        chain = read_with_function(graph, key, form, Norm)
        found = check_chain(graph, chain) if isinstance(chain, Chain) else chain
        if isinstance(found, Chain):
            call = LowRankCall.of(graph, found)
            return self.matched(graph, owner_of(found.out), found.nodes, call)
        return found or self._reported(graph, key, form)

    def _reported(self, graph: Canonical, key: Key, form: Product) -> Match | None:
        """Return a match that is not rewritten, where the latent is a part of a split."""
        latent = _before_norm(graph, form.lhs)
        if latent is None:
            return None
        inner_key = before_split(graph, latent)
        inner = graph.forms[inner_key]
        if not isinstance(inner, Product) or not graph.is_weight(inner.rhs):
            return None
        up = read_stage(graph, key, form, True)
        down = read_stage(graph, inner_key, inner, True)
        if isinstance(up, Refusal) or isinstance(down, Refusal) or up.weight.k > down.weight.n:
            return None
        if up.weight.k * (down.weight.k + up.weight.n) >= down.weight.k * up.weight.n:
            return None
        nodes = frozenset({owner_of(inner_key), owner_of(key)})
        split = down.weight.n != up.weight.k
        return Match(
            rule=self.name,
            kind="mla",
            node=owner_of(key),
            nodes=nodes,
            rewritten=False,
            info={"chains": 1, "k": down.weight.k, "r": up.weight.k, "n": up.weight.n},
            notes=(
                "the latent is one part of a split"
                if split
                else "no kernel takes this norm between the products",
            ),
        )


def _through(c: Canonical, key: Key) -> Key:
    """Return the base behind views and casts."""
    base = c.base(key)[0]
    while isinstance(c.forms[base], Cast):
        base = c.base(c.forms[base].value)[0]  # type: ignore[union-attr]
    return base


def _before_norm(c: Canonical, key: Key) -> Key | None:
    """Return the input of an RMSNorm, None when `key` is not one."""
    form = c.forms[_through(c, key)]
    return form.value if isinstance(form, Norm) and form.kind == "rms" else None


def before_split(c: Canonical, key: Key) -> Key:
    """Return the value that `key` is a part of, or its base."""
    base = _through(c, key)
    form = c.forms[base]
    names = ("getitem", "slice", "split", "split_with_sizes", "chunk", "narrow")
    while isinstance(form, Opaque) and form.name in names:
        source = owner_of(base).all_input_nodes
        if not source:
            break
        base = _through(c, source[0])
        form = c.forms[base]
    return base
