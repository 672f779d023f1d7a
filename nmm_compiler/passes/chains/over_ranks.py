"""A chain that is cut by rows over devices: the devices sum x u, and then each multiplies by v.

    h = linear(x, u)                      # x and u cut by inputs, h is Partial
    h = h.redistribute([Replicate()])     # the sum, as wide as the rank
    y = linear(h, v)                      # v whole

One call computes this with the sum inside (`LowRankSpec(tp=, tp_axis="rows")`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import Chain, join_stages
from nmm_compiler.passes.chains.linear_map import read_stage
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.chains.steps import trace_back
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Key, Opaque, Product
from nmm_compiler.passes.graph.distributed import is_distributed
from nmm_compiler.passes.graph.torch_names import Call


def read_summed_chain(c: Canonical, key: Key, form: Product) -> Chain | None:
    """Read the chain that ends at a product and sums over the devices between its products."""
    node, dims = c.base(form.lhs)
    source = _summed(c, node)
    shape = c.shape(node)
    if source is None or shape is None or dims != views.identity(shape):
        return None
    second = read_stage(c, key, form, True)
    walk, inner = trace_back(c, source)
    if isinstance(second, Refusal) or isinstance(inner, Refusal) or walk.steps:
        return None
    assert isinstance(node, fx.Node)
    walk.nodes.add(node)
    chain = join_stages(c, second, walk, inner)
    if isinstance(chain, Refusal) or not _cut_by_rows(c, chain):
        return None
    return dataclasses.replace(chain, nodes=chain.nodes | {node})


def devices_of(c: Canonical, chain: Chain) -> tuple[int, str]:
    """Return how many devices sum, and the name of their process group."""
    mesh = _tensor(c, chain.first.x).device_mesh
    return int(mesh.size()), str(mesh.get_group().group_name)


def _summed(c: Canonical, node: Key) -> fx.Node | None:
    """Return the value whose sum over the devices a node is."""
    form = c.forms[node]
    if not (isinstance(form, Opaque) and form.name == "redistribute" and isinstance(node, fx.Node)):
        return None
    source = Call(node, form.name).get(0, "self")
    if not isinstance(source, fx.Node):
        return None
    old, new = c.tensor(source), c.tensor(node)
    if not (is_distributed(old) and is_distributed(new)):
        return None
    before, after = _tensor(c, source), _tensor(c, node)
    if before.device_mesh != after.device_mesh or before.device_mesh.ndim != 1:
        return None
    (was,), (now,) = before.placements, after.placements
    summed = was.is_partial() and getattr(was, "reduce_op", "") == "sum" and now.is_replicate()
    return source if summed else None


def _cut_by_rows(c: Canonical, chain: Chain) -> bool:
    """Return whether x and u are cut evenly by inputs, and v is whole."""
    x, u, v = (_tensor(c, one) for one in (chain.first.x, chain.u.key, chain.v.key))
    if not all(is_distributed(one) for one in (x, u, v)):
        return False
    rows = 0 if chain.u.layout == "row" else 1
    even = x.shape[-1] == chain.u.k and chain.u.k % x.device_mesh.size() == 0
    return (
        even
        and x.placements[0].is_shard(x.ndim - 1)
        and u.placements[0].is_shard(rows)
        and v.placements[0].is_replicate()
    )


def _tensor(c: Canonical, key: Key) -> Any:
    return c.tensor(key)
