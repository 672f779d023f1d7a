"""Rules `shared_x` and `shared_u`: several chains of one x as one call with several results.

    q, k, v = chains of one x   ->   q, k, v = nmm.lowrank_matmul_shared_x(x, [U...], [V...], ...)

    h = linear(x, U); y1 = linear(h, V1); y2 = linear(h, V2)     (or h written twice)
    -> y1, y2 = nmm.lowrank_matmul_shared_u(x, U, [V1, V2], ...)

The call is placed where the first result is needed. Results far apart in the graph stay separate,
because computing a late one early only keeps it in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import Chain, ended, read_chain, trace_end
from nmm_compiler.passes.chains.safety import Refusal, readings
from nmm_compiler.passes.emit.calls import Call
from nmm_compiler.passes.graph.canonical import Canonical, Key, Product, Virtual, owner_of
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lowrank import products_at

# Results further apart than this many nodes are not worth keeping alive.
NEAR = 48


def group(c: Canonical, rule: KernelRule, calls: list[Call]) -> Match | None:
    """Return the match of calls that become one, None when they may not move together."""
    position = c.effects.position
    calls = sorted(calls, key=lambda call: position[call.final])
    finals = [call.final for call in calls]
    places = [position[f] for f in finals]
    if any(b - a > NEAR for a, b in itertools.pairwise(places)):
        return None
    whole = Call.of_several(f"lowrank_matmul_{rule.name}", calls)
    keys = whole.keys()
    computed = {call.chain.first.x for call in calls}
    computed = computed.union(*(one.hidden for one in whole.chains))  # whose leaves are hoisted
    for key in [*(k for k in keys if k not in computed), calls[0].source.key]:
        owner = owner_of(key)
        if not isinstance(key, Virtual) and owner.op != "get_attr" and position[owner] >= places[0]:
            return None
    match = rule.matched(c, whole)
    return match if isinstance(match, Match) else None


class SharedX(KernelRule):
    """Several chains of one x; made of matches that other rules found."""

    name = "shared_x"
    ends_at = ()  # asked nowhere, since `combine` joins the matches of other rules

    def combine(self, graph: Canonical, matches: list[Match]) -> list[Match]:
        """Join plain chains of the same x that lie near each other."""
        position = graph.effects.position
        groups: dict[Any, list[list[Match]]] = {}
        for match in sorted(matches, key=lambda match: position[match.node]):
            call = match.data
            if not isinstance(call, Call) or call.op != "lowrank_matmul" or call.chain.tp > 1:
                continue  # no kernel of several chains sums over devices
            plain = call.is_whole and (bool(call.format) or call.chain.is_plain)
            alike = tuple(call.chain.ways.items())
            single = all(len(dim) <= 1 for dim in call.source.dims) and len(call.source.dims) > 1
            if plain and single and (call.source.is_row() or call.source.is_col()):
                runs = groups.setdefault((call.source.key, alike), [])
                if not runs or position[match.node] - position[runs[-1][-1].node] > NEAR:
                    runs.append([])
                runs[-1].append(match)
        out = list(matches)
        for near in itertools.chain(*groups.values()):
            whole = group(graph, self, [m.data for m in near]) if len(near) > 1 else None
            if whole is not None:
                out = [m for m in out if m not in near] + [whole]
        return out


class SharedU(KernelRule):
    """One first factor, several second ones."""

    name = "shared_u"
    ends_at = (Product,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products that several others read."""
        for key, form in products_at(graph, node):
            constant = graph.is_weight(form.lhs) or graph.is_weight(form.rhs)
            twins = graph.twins[key]
            if constant and twins[0] is key and len(_readers(graph, twins)) > 1:
                yield twins

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check that every reader is the second product of a chain."""
        twins: list[Key] = candidate
        chains_read = [_chain_at(graph, user, twins) for user in _readers(graph, twins)]
        chains = [chain for chain in chains_read if chain is not None and chain.is_plain]
        calls = [Call.of_chain(graph, chain) for chain in chains if chain.addend is None]
        if len(calls) < len(chains_read):
            return None
        if any(one.chain.ways != calls[0].chain.ways or one.chain.middle for one in calls):
            return None
        k, r, n = chains[0].u.k, chains[0].u.n, sum(chain.v.n for chain in chains)
        if r * (k + n) >= k * n:
            return None
        return group(graph, self, calls)


def _readers(c: Canonical, twins: list[Key]) -> list[fx.Node]:
    """Return the nodes that compute with equal values, through their rearrangements."""
    return list(dict.fromkeys(user for key in twins for _, user in readings(c, owner_of(key))))


def _chain_at(c: Canonical, user: fx.Node, firsts: list[Key]) -> Chain | None:
    walk, form = trace_end(c, user)
    chain = read_chain(c, walk.key, form) if isinstance(form, Product) else None
    if not isinstance(chain, Chain) or chain.first.key not in firsts:
        return None
    return ended(c, chain, walk, user)
