"""Rule `chain`: reassociates x A B C ... into two factors, where that is cheapest.

    x @ (u @ v)              ->   nmm.lowrank_matmul(x, u, v)
    x @ a @ b @ c @ d        ->   nmm.lowrank_matmul(x, a @ b, c @ d)

It changes which values are rounded, so it runs under the switch "+reassociate", or inside one
`multi_dot` or `einsum`, which leave the order open. Without permission, products keep their order,
and `lowrank` takes the pairs that save work; such pairs never overlap, since
r1 (k + r2) < k r2 asks for r1 < r2, and the next pair for r2 < r1.

A kernel takes two factors, so a row x w1 w2 ... wn is cut once: u is the product of the matrices
left of the cut, v of those right of it, and the graph computes both at each call. Per token the cut
at the smallest inner dimension is best. Making u and v costs the same for any number of tokens, so
with few tokens fewer products of weights are best.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.kernels.linear.specs import LowRankSpec, MatmulSpec
from nmm_compiler.passes.chains.chain import (
    Chain,
    Stage,
    Weight,
    extend,
    join_stages,
    path_nodes,
    read_stage,
    trace_back,
)
from nmm_compiler.passes.chains.safety import (
    Refusal,
    call_ways,
    part_of_one,
    real_users,
    refuse,
    tokens_to_judge,
    too_wide,
)
from nmm_compiler.passes.emit.calls import LowRankCall
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Key, Product, Virtual, owner_of
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import FEATURE
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lowrank import products_at

# Operations that are defined for any order of association.
_OPEN = ("multi_dot", "chain_matmul", "einsum")


@dataclass(frozen=True)
class _Row:
    """x times groups of matrices; the graph multiplies a group of several first."""

    stage: Stage
    groups: tuple[tuple[Weight, ...], ...]
    products: tuple[Key, ...]


class Association(KernelRule):
    """x times two and more constant matrices, in another order than they are written in."""

    name = "chain"
    ends_at = (Product,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products whose order is free, by permission or by the operation's meaning."""
        if graph.options.reassociate or target_name(node) in _OPEN:
            yield from products_at(graph, node)

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the row, and check whether another cut is cheaper and permitted."""
        key, form = candidate
        return reassociated(graph, key, form, graph.options.reassociate)


def reassociated(c: Canonical, key: Key, form: Product, permitted: bool) -> Match | Refusal | None:
    """Return the match of the row that ends at a product, None where another order gains nothing.

    permitted: roundings may move between operations of the graph, not only inside of one.
    """
    row = _read(c, key, form)
    if row is None:
        return None
    weights = [weight for group in row.groups for weight in group]
    if len(weights) == len(row.groups) <= 2:
        return None  # as it is written: a pair, or one matrix
    inside = len({owner_of(p) for p in row.products}) == 1
    if not permitted and not inside:
        return None
    chain, cheaper = _cut(c, row, weights)
    wide = too_wide(c, chain.first, chain.u.n, chain.v.n, key)
    if wide is not None:
        return wide
    if not cheaper:
        return None
    found = extend(c, chain)
    why = refuse(c, found.nodes, owner_of(found.out), found.operands)
    if why is not None:
        return why
    call = LowRankCall.of(c, found)
    moved = () if inside else ("reassociated: the products are rounded in other places",)
    match = Association().matched(c, owner_of(found.out), found.nodes, call)
    if isinstance(match, Refusal):
        return match
    return dataclasses.replace(match, kind="lowrank", notes=(*match.notes, *moved))


def _cut(c: Canonical, row: _Row, weights: list[Weight]) -> tuple[Chain, bool]:
    """Return the row as a chain cut at the best place, and whether that is cheaper than the
    graph.

    A dtype that no kernel computes in costs what float32 does.
    """
    stage = row.stage
    dtype = str(c.dtype(stage.key)).removeprefix("torch.")
    dtype = dtype if dtype in LowRankSpec.dtypes else "float32"

    def us(m: int, k: int, n: int, r: int = 0) -> float:
        """Return the time of [m, k] times [k, n], or times [k, r] [r, n], the middle on chip."""
        sizes: dict[str, Any] = {"m": m, "k": k, "n": n, "dtype": dtype}
        return call_ways(c, LowRankSpec(**sizes, r=r) if r else MatmulSpec(**sizes)).fused

    def made(sizes: Sequence[int]) -> float:
        """Return the time of a product of matrices as `calls` emits it, from its narrow end on."""
        first, *_, last = sizes
        if first <= last:
            return sum(us(first, k, n) for k, n in itertools.pairwise(sizes[1:]))
        return sum(us(m, k, last) for m, k in itertools.pairwise(sizes[:-1]))

    m = tokens_to_judge(views.product(list(stage.tokens.values())))
    sizes = [weights[0].k, *(weight.n for weight in weights)]
    cuts = {
        cut: made(sizes[: cut + 1]) + made(sizes[cut:]) + us(m, sizes[0], sizes[-1], sizes[cut])
        for cut in range(1, len(weights))
    }
    cut = min(cuts, key=cuts.__getitem__)
    left = [[group[0].k, *(w.n for w in group)] for group in row.groups]
    written = sum(map(made, left))
    while left:
        k, *_, r = group = left.pop(0)
        n = left[0][-1] if left and len(group) == len(left[0]) == 2 else 0
        if r * (k + n) < k * n:  # rule `lowrank` will find this pair
            left.pop(0)
            written += us(m, k, n, r)
        else:
            written += us(m, k, r)
    first, second = (
        dataclasses.replace(stage, weight=_joined(part)) for part in (weights[:cut], weights[cut:])
    )
    chain = Chain(first, second, (), stage.key, stage.out_dims, stage.nodes)
    return chain, cuts[cut] < written


def _joined(weights: list[Weight]) -> Weight:
    if len(weights) == 1:
        return weights[0]
    return Weight(weights[0].key, weights[0].k, weights[-1].n, "row", tuple(weights))


def _read(c: Canonical, key: Key, form: Product) -> _Row | None:
    """Read the row that ends at a product, as far back as only views lie between."""
    side = _weight_side(c, form)
    stage = None if side is None else read_stage(c, key, form, side, computed=True)
    if not isinstance(stage, Stage):
        return None
    groups: list[tuple[Weight, ...]] = []
    nodes = set(stage.nodes)
    products = [key]
    last = _factors(c, stage.weight, nodes, products)
    if last is None:
        return None
    groups.append(tuple(last))
    while True:
        walk, inner = trace_back(c, stage.x)
        alone = isinstance(walk.key, Virtual) or len(real_users(walk.key)) == 1
        if not isinstance(inner, Product) or walk.steps or not alone:
            break
        found = join_stages(c, stage, walk, inner, computed=True)
        more_nodes, more_products = set[fx.Node](), [walk.key]
        if not isinstance(found, Chain):
            break
        made = _factors(c, found.u, more_nodes, more_products)
        if made is None:
            break
        groups.insert(0, tuple(made))
        nodes |= found.nodes | more_nodes
        products += more_products
        whole = Weight(found.u.key, found.u.k, stage.weight.n, "row")
        stage = dataclasses.replace(found.first, key=key, weight=whole, out_dims=found.out_dims)
    if part_of_one(stage.x) or (c.is_constant(stage.x) and not c.inputs_are_weights):
        return None  # a product of weights alone
    done = dataclasses.replace(stage, nodes=frozenset(nodes))
    return _Row(done, tuple(groups), tuple(products))


def _weight_side(c: Canonical, form: Product) -> bool | None:
    """Return whether the weight is the right operand; None when neither is made of constants."""
    if c.is_constant(form.rhs):
        return None if c.is_constant(form.lhs) else True
    if _is_made(c, form.rhs) and not c.is_constant(form.lhs):
        return True
    return False if c.is_constant(form.lhs) or _is_made(c, form.lhs) else None


def _is_made(c: Canonical, key: Key) -> bool:
    return isinstance(c.form(key), Product) and owner_of(key) in c.derived


def _factors(
    c: Canonical, weight: Weight, nodes: set[fx.Node], products: list[Key]
) -> list[Weight] | None:
    """Return the matrices whose product a weight is; None when it is made in another way."""
    form = c.forms[weight.key]
    if c.is_constant(weight.key):
        return [weight]
    if not isinstance(form, Product) or len(c.shape(weight.key) or ()) != 2:
        return None
    made = read_stage(c, weight.key, form, True, computed=True)
    if isinstance(made, Refusal) or len(made.x_dims) != 2:
        return None
    left = _matrix(c, made)
    if left is None:
        return None
    nodes |= made.nodes | {owner_of(weight.key)} | path_nodes(c, made.x)
    products.append(weight.key)
    parts = [_factors(c, part, nodes, products) for part in (left, made.weight)]
    if parts[0] is None or parts[1] is None:
        return None
    row = parts[0] + parts[1]
    return row if weight.layout == "row" else [w.transposed() for w in reversed(row)]


def _matrix(c: Canonical, made: Stage) -> Weight | None:
    """Return the data operand of a product of constants as a [rows, contracted] matrix."""
    base, over = c.base(made.x)
    shape = c.shape(base)
    if shape is None or len(shape) != 2 or not all(isinstance(s, int) for s in shape):
        return None
    features = [i for i, d in enumerate(made.x_dims) if d and d[0].axis == FEATURE]
    if len(features) != 1 or any(len(d) != 1 for d in over):
        return None
    axis = over[features[0]][0].axis
    rows, columns = int(shape[1 - axis]), int(shape[axis])
    if made.out_dims[0] and made.out_dims[0][0].axis == FEATURE:
        return None  # the result has its features first: another spelling, left alone
    return Weight(base, rows, columns, "row" if axis == 1 else "col")
