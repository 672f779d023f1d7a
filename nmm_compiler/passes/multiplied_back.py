"""Factors that a graph multiplies back into a dense weight at each call, before it is used.

    w = u @ v; linear(x, w)        multi_head_attention_forward(x, ..., q_proj_weight=u @ v)

A module that reads the `.weight` of a low-rank layer, in place of calling the layer, makes such a
graph. It computes more than the dense model, and has no chain to fuse. Each use becomes a refusal
with the names of both parameters, the FLOPs of the product, and the way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes.chains.product_order import TYPICAL_TOKENS
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Cast, Key, Opaque, Product, Scale, owner_of
from nmm_compiler.passes.graph.torch_names import argument_names, parameter_name
from nmm_compiler.passes.graph.views import product
from nmm_compiler.passes.rules.base import Declined, Match, module_path
from nmm_compiler.passes.rules.lowrank import LowRank, products_at
from nmm_compiler.passes.rules.reassociate import reassociated

CODE = "factors_multiplied"
# Operations that a weight passes on its way from its product to its use.
_CARRIES = frozenset(
    {"pad", "constant_pad_nd", "cat", "concat", "concatenate", "stack", "getitem", "split",
     "split_with_sizes", "chunk", "narrow", "slice", "clone", "contiguous"}
)  # fmt: skip
_MOST_STEPS = 32
_OF_ORDER = ("rank_too_large", "weight_computed")
_REASSOCIATE = "set Options(reassociate=True): the factors in a row become two"


@dataclass(frozen=True)
class _Use:
    """A node that contracts an activation of `tokens` x `k` with a weight made of two factors."""

    node: fx.Node
    tokens: int
    k: int


def multiplied_back(c: Canonical, taken: set[fx.Node]) -> list[Declined]:
    """Return a refusal for each pair of factors and each use of their product.

    taken: nodes of matches, which are left out.
    """
    found: list[Declined] = []
    for node in c.graph.nodes:
        if node in taken or node in c.derived or not any(n in c.derived for n in _inputs(node)):
            continue
        for use, weight in _uses(c, node):
            for made, form in _products_behind(c, weight):
                refusal = _refusal(c, use, made, form)
                if refusal is not None:
                    found.append(refusal)
    return found


def with_order(c: Canonical, declined: list[Declined]) -> list[Declined]:
    """Return the refusals, those that another order of the products would mend with that remedy.

    Refusals of products inside of such a row of factors are left out.
    """
    nodes = {node.name: node for node in c.graph.nodes}
    out: list[Declined] = []
    inside: set[str] = set()
    for one in declined:
        found = None
        if one.code in _OF_ORDER and one.at in nodes and not c.options.reassociate:
            products = products_at(c, nodes[one.at])
            tried = (reassociated(c, key, form, permitted=True) for key, form in products)
            found = next((match for match in tried if isinstance(match, Match)), None)
        if found is not None:
            inside |= {node.name for node in found.nodes} - {one.at}
            one = dataclasses.replace(one, remedy=_REASSOCIATE)
        out.append(one)
    return [one for one in out if one.code != "rank_too_large" or one.at not in inside]


def _inputs(node: fx.Node) -> list[fx.Node]:
    return [] if node.op == "output" else node.all_input_nodes


def _uses(c: Canonical, node: fx.Node) -> Iterator[tuple[_Use, Key]]:
    """Yield the computed weights that a node contracts an activation with."""
    for _, form in products_at(c, node):
        sides = ((form.lhs, form.rhs, form.lhs_labels), (form.rhs, form.lhs, form.rhs_labels))
        for data, weight, labels in sides:
            shape = c.shape(data) or ()
            if owner_of(weight) in c.derived and owner_of(data) not in c.derived:
                inner = [s for s, x in zip(shape, labels, strict=True) if x not in form.out_labels]
                yield _use(node, shape, product(inner)), weight
    if isinstance(c.forms.get(node), Opaque):
        x = next((a for a in node.all_input_nodes if _is_activation(c, a)), None)
        shape = () if x is None else c.shape(x) or ()
        for name, made in argument_names(node) if len(shape) > 1 else ():
            if name.endswith("weight") and made in c.derived and c.shape(made):
                yield _use(node, shape, shape[-1]), made


def _is_activation(c: Canonical, node: fx.Node) -> bool:
    dtype = c.dtype(node)
    given = node in c.derived or c.is_constant(node)
    return dtype is not None and dtype.is_floating_point and not given


def _use(node: fx.Node, shape: tuple[object, ...], k: object) -> _Use:
    total = product(shape)
    static = isinstance(total, int) and isinstance(k, int) and k > 0
    return _Use(node, total // k if static else TYPICAL_TOKENS, k if isinstance(k, int) else 0)


def _products_behind(c: Canonical, weight: Key) -> Iterator[tuple[Key, Product]]:
    """Yield the products of two constant matrices that a weight is made of."""
    queue, seen = [weight], {weight}
    while queue and len(seen) < _MOST_STEPS:
        base = c.base(queue.pop(0))[0]
        form = c.forms[base]
        behind: list[Key] = []
        if isinstance(form, Product):
            if c.is_constant(form.lhs) and c.is_constant(form.rhs):
                yield base, form
        elif isinstance(form, Cast) or (isinstance(form, Scale) and not _is_made(c, form.factor)):
            behind = [form.value]
        elif isinstance(form, Opaque) and form.name in _CARRIES:
            behind = list(owner_of(base).all_input_nodes)
        queue += [key for key in behind if key not in seen]
        seen.update(behind)


def _is_made(c: Canonical, factor: float | Key) -> bool:
    return not isinstance(factor, float) and not c.is_constant(factor)


def _refusal(c: Canonical, use: _Use, made: Key, form: Product) -> Declined | None:
    """Return the refusal with the cost of the product, None where it costs nothing."""
    sizes = [
        [s for s, x in zip(c.shape(side) or (), labels, strict=True) if x in form.out_labels]
        for side, labels in ((form.lhs, form.lhs_labels), (form.rhs, form.rhs_labels))
    ]
    inner = [
        s for s, x in zip(c.shape(form.lhs) or (), form.lhs_labels, strict=True)
        if x not in form.out_labels
    ]  # fmt: skip
    a, b, r = product(sizes[0]), product(sizes[1]), product(inner)
    if not all(isinstance(s, int) for s in (a, b, r)):
        return None
    k, n = (b, a) if use.k == b else (a, b)
    m = use.tokens
    spent, needed = 2 * k * r * n + 2 * m * k * n, 2 * m * r * (k + n)
    if needed >= spent:
        return None
    names = [parameter_name(owner_of(c.base(key)[0])) for key in (form.lhs, form.rhs)]
    free = any(
        isinstance(reassociated(c, key, used, permitted=True), Match)
        for key, used in products_at(c, use.node)
        if not c.options.reassociate
    )
    call = "call the module instead of reading its weight, or exclude it from compress"
    return Declined(
        rule=LowRank.name,
        code=CODE,
        reason=(
            f"{names[0]} and {names[1]} are multiplied back into a dense weight at each call: "
            f"{_flops(spent)} for {m} tokens, {_flops(needed)} one after the other"
        ),
        node=owner_of(made).name,
        remedy="set Options(reassociate=True), or " + call if free else call,
        at=use.node.name,
        module=module_path(use.node) or module_path(owner_of(made)),
    )


def _flops(count: int) -> str:
    return f"{count / 1e6:,.3f} MFLOP"
