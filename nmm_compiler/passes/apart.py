"""Names chains whose two products stand in two graphs, so that no rule sees both.

A graph break cuts a model in two: one graph returns the first product, and a later graph contracts
its input again. A higher-order operator (checkpoint, cond, a region without gradients) runs a graph
of its own, which takes the first product as an operand, or returns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.result import Opportunity, RewriteResult
from nmm_compiler.passes.rules.base import Declined
from nmm_compiler.passes.rules.lowrank import LowRank

CODE = "two_graphs"
_BREAK = "remove the graph break: TORCH_LOGS=graph_breaks says where and why Dynamo broke"
_OPERATOR = "keep both products inside of what the operator runs, or outside of it"
_VIEWS = frozenset(
    {"view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "mT", "contiguous",
     "clone", "squeeze", "unsqueeze", "getitem", "expand"}
)  # fmt: skip
# Rearrangements that are followed between a product and the edge of its graph.
_MOST_VIEWS = 4


@dataclass(frozen=True)
class Edges:
    """Dense products of one graph: those whose result it returns, and those of its inputs."""

    last: tuple[Opportunity, ...] = ()
    first: tuple[Opportunity, ...] = ()


def edges(graph: fx.Graph, found: Sequence[Opportunity]) -> Edges:
    """Return the dense products at the edges of a graph."""
    inputs = {node.name for node in graph.nodes if node.op == "placeholder"}
    last = [
        one
        for one, node in _placed(graph, found)
        if any(user.op == "output" for user in _readers(node))
    ]
    return Edges(tuple(last), tuple(one for one in found if one.x in inputs))


def across_breaks(results: Sequence[RewriteResult]) -> list[tuple[RewriteResult, Declined]]:
    """Return a refusal, with the result it belongs to, for each chain that a graph break cuts."""
    ends = [edges(result.original.graph, result.opportunities) for result in results]
    found = []
    for at, result in enumerate(results):
        earlier = [other for before in ends[:at] for other in before.last]
        why = "stand on two sides of a graph break"
        found += [(result, one) for one in _pairs(earlier, ends[at].first, why, _BREAK)]
    return found


def across_operators(
    graph: fx.Graph, found: Sequence[Opportunity], bodies: Mapping[str, Edges]
) -> Iterator[Declined]:
    """Yield a refusal for each chain with one product inside of a higher-order operator.

    bodies: the edges of each graph that nodes of this one run, by the name of its attribute.
    """
    for node in graph.nodes:
        inside = [bodies[str(a.target)] for a in node.all_input_nodes if str(a.target) in bodies]
        if node.op == "call_module" and str(node.target) in bodies:
            inside = [bodies[str(node.target)]]
        why = f"stand on two sides of the operator {node.name}"
        for body in inside:
            before = [one for one, made in _placed(graph, found) if node in _readers(made)]
            after = [one for one in found if _source(graph, one) is node]
            yield from _pairs(before, body.first, why, _OPERATOR)
            yield from _pairs(body.last, after, why, _OPERATOR)


def _placed(graph: fx.Graph, found: Iterable[Opportunity]) -> Iterator[tuple[Opportunity, fx.Node]]:
    nodes = {node.name: node for node in graph.nodes}
    yield from ((one, nodes[one.node]) for one in found if one.node in nodes)


def _pairs(
    firsts: Iterable[Opportunity], seconds: Iterable[Opportunity], why: str, remedy: str
) -> Iterator[Declined]:
    """Yield a refusal for each second product of which some first one makes a low-rank chain."""
    before = list(firsts)
    for two in seconds:
        one = next((one for one in before if _is_low(one, two)), None)
        if one is not None:
            reason = f"the two products, {one.node} and {two.node}, {why}"
            yield Declined(LowRank.name, CODE, reason, one.node, remedy, two.node, two.module)


def _is_low(one: Opportunity, two: Opportunity) -> bool:
    return one.n == two.k and one.n * (one.k + two.n) < one.k * two.n


def _readers(node: fx.Node) -> set[fx.Node]:
    """Return the users of a value, through rearrangements."""
    found, left = set[fx.Node](), [(node, 0)]
    while left:
        value, depth = left.pop()
        for user in value.users:
            found.add(user)
            if depth < _MOST_VIEWS and target_name(user) in _VIEWS:
                left.append((user, depth + 1))
    return found


def _source(graph: fx.Graph, product: Opportunity) -> fx.Node | None:
    """Return what a product contracts; of a part of several results, the node that made them."""
    node = next((node for node in graph.nodes if node.name == product.x), None)
    if node is not None and target_name(node) == "getitem" and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return node
