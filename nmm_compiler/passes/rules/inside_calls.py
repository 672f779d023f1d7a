"""Rules `norm` and `residual`: what stands around our calls moves into them.

    h = rms_norm(x, g); y = nmm.lowrank_matmul(h, u, v)
      ->   y = nmm.lowrank_matmul(x, u, v, ..., g, norm="rms", norm_eps=1e-6)

    y = nmm.lowrank_matmul(x, u, v); z = h + y
      ->   z = nmm.lowrank_matmul(x, u, v, ..., residual=h)

Both change the calls that other rules have matched, before anything is emitted; the kind of such a
match says so ("lowrank norm residual"). A norm may be one node or spelled out. Several calls that
read it each take it in, and it is gone; a norm that something else reads has to be computed anyway,
and stays. A residual may be on either side. The call has no other reader, and the residual has the
sum's shape and dtype: one that is broadcast, or widens the sum, stays outside.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from torch import fx

from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.passes.chains.chain import feature_axis
from nmm_compiler.passes.chains.safety import (
    DTYPES,
    Refusal,
    call_ways,
    crossed,
    readings,
    tokens_to_judge,
    unsafe,
)
from nmm_compiler.passes.emit.calls import Call, under
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Add, Canonical, Key, Norm, owner_of
from nmm_compiler.passes.graph.views import Dim, Dims
from nmm_compiler.passes.rules.base import Match, Rule


def takes(match: Match | None, name: str) -> bool:
    """Return whether a match is a call, all of its result, whose op has an argument."""
    call = None if match is None else match.data
    return isinstance(call, Call) and call.is_whole and name in DEFINITIONS[call.op_name].defaults


def _slower(
    c: Canonical, call: Call, what: str, more: dict[str, Any], value: Key, passes: int, readers: int
) -> Refusal | None:
    """Return a refusal where a norm or a sum on its own is predicted to take less than inside.

    more: fields of the spec with it inside. Alone it moves the bytes of `value` so many times; a
    load and a store start one after the other, its own launch is not counted, and each of its
    readers has its part of it.
    """
    spec = call.spec(c)
    plain, inside = (call_ways(c, one).fused for one in (spec, dataclasses.replace(spec, **more)))
    tensor = c.tensor(value)
    if tensor is None or not math.isfinite(plain + inside):
        return Refusal("slower", f"no kernel takes the {what} in", value)
    features = int(tensor.shape[-1])
    moved = passes * tokens_to_judge(tensor.numel() // features) * features * tensor.element_size()
    start = 2 * (c.chip.dma_start_latency_seconds + c.chip.semaphore_seconds)
    alone = 1e6 * (start + moved / c.chip.memory_bytes_per_second) / readers
    if inside <= plain + alone:
        return None
    reason = (
        f"the call with the {what} inside: {inside:,.1f} us on {c.chip.name}, without "
        f"{plain:,.1f}, the {what} alone {alone:,.1f} (predicted, {c.options.price})"
    )
    return Refusal("slower", reason, value)


class NormInside(Rule):
    """A norm of x inside of the calls that read it."""

    name = "norm"
    ends_at = ()  # asked nowhere, since `combine` changes the matches of other rules

    def combine(self, graph: Canonical, matches: list[Match]) -> list[Match | Refusal]:
        """Let calls take in the norm of their x."""
        owners = {node: match for match in matches for node in match.nodes}
        given = [one for one in matches if graph.options.has("norms") and takes(one, "norm")]
        answers = [(match, self._inside(graph, match, owners)) for match in given]
        for match, ends in answers:
            if isinstance(ends, dict):
                call: Call = match.data
                norm: Any = graph.form(call.source.key)
                for one in (call, *call.members):
                    below: Any = under(graph, one.source)
                    one.source = dataclasses.replace(below, key=norm.value)
                call.said |= _said(norm)
                call.ends |= ends
                match.kind += " norm"
                match.info["norm"] = norm.kind
        return [*matches, *(why for _, why in answers if isinstance(why, Refusal))]

    def _inside(
        self, graph: Canonical, match: Match, owners: dict[fx.Node, Match]
    ) -> dict[str, Key] | Refusal | None:
        """Return the vectors of the norm that a call reads, if it can move into all that read it;
        None for other calls."""
        call = match.data
        final = graph.base(call.source.key)[0]
        norm = graph.forms[final]
        if not isinstance(norm, Norm) or not isinstance(final, fx.Node):
            return None
        shape, dtype = graph.sizes(final), graph.dtype(final)
        both = {"norm_gain": norm.weight, "norm_bias": norm.bias}
        ends = {name: vector for name, vector in both.items() if vector is not None}
        plain = all(
            (graph.shape(one), graph.dtype(one)) == (shape[-1:], dtype) and graph.is_constant(one)
            for one in ends.values()
        )
        if not plain or norm.eps is None or graph.dtype(norm.value) != dtype:
            return None
        if not _along_features(graph, call):
            reason = "the norm is over other dimensions than the features of x"
            return Refusal("shape", reason, final)
        reads = list(readings(graph, final))
        for _, reader in reads:
            other = owners.get(reader)
            alike = takes(other, "norm") and graph.base(other.data.source.key)[0] is final  # type: ignore[union-attr]
            if not alike or not _along_features(graph, other.data):  # type: ignore[union-attr]
                return Refusal("other_user", f"the norm is also read by {reader.name}", final)
        # inner values of the norm may have other readers: those are computed as before
        seen = {owner_of(key) for value, _ in reads for key in graph.through(value)}
        moved = {*(owner_of(key) for key in graph.through(call.source.key)), final, match.node}
        operands = [norm.value, *ends.values()]
        whole = {*graph.helpers.get(final, ()), *moved}
        readers = {reader for _, reader in reads}
        more = _said(norm) | dict.fromkeys(ends, True) | {"x_layout": "row"}
        calls = len({id(owners[reader]) for reader in readers})
        return (
            crossed(graph, whole, match.node, operands)
            or unsafe(graph, moved, match.node, operands, redirected=[*readers, *seen])
            or _slower(graph, call, "norm", more, norm.value, 2, calls)
            or ends
        )


def _said(norm: Norm) -> dict[str, Any]:
    """Return the keywords of a norm."""
    return {"norm": norm.kind, "norm_eps": norm.eps, "norm_offset": norm.offset}


def _along_features(c: Canonical, call: Call) -> bool:
    """Return whether the features that a call contracts are the last axis of what it reads."""
    source = under(c, call.source)
    return source is not None and source.is_row()


class ResidualInside(Rule):
    """A residual that is added to the result of a call."""

    name = "residual"
    ends_at = ()  # asked nowhere, since `combine` changes the matches of other rules

    def combine(self, graph: Canonical, matches: list[Match]) -> list[Match | Refusal]:
        """Let calls take in the sum of their result and another tensor, in either order."""
        given = [one for one in matches if graph.options.has("norms") and takes(one, "residual")]
        by_result = {match.data.final: match for match in given}
        taken = {node for match in matches for node in match.nodes}
        out: list[Match | Refusal] = list(matches)
        for node in reversed(graph.graph.nodes) if by_result else ():
            form = graph.forms.get(node)
            sums = form.orders if isinstance(form, Add) and node not in taken else ()
            answers = [
                (by_result[y], self._added(graph, by_result[y], node, value, residual), residual)
                for residual, value in sums
                if (y := owner_of(graph.base(value)[0])) in by_result
            ]
            fits = [(match, why, key) for match, why, key in answers if isinstance(why, tuple)]
            out += [why for _, why, _ in answers if isinstance(why, Refusal) and not fits]
            for match, (dims, nodes), residual in fits[:1]:
                call = match.data
                del by_result[call.final]
                call.final = match.node = node
                match.nodes |= nodes
                call.out_dims, call.ends["residual"] = dims, residual
                match.kind += " residual"
        return out

    def _added(
        self, graph: Canonical, match: Match, node: fx.Node, y: Key, residual: Key
    ) -> tuple[Dims, frozenset[fx.Node]] | Refusal:
        """Return the dimensions of a sum and the nodes from the call to it, or why it stays."""
        call = match.data
        dims = views.compose(graph.base(y)[1], call.out_dims)
        row = (*call.source.tokens(), feature_axis(call.n))
        if dims is None or _in_order(dims) != _in_order(row):
            return Refusal("shape", "the result is rearranged before the sum", node)
        shapes = {graph.shape(key) for key in (node, y, residual)}
        dtypes = {graph.dtype(key) for key in (node, y, residual)}
        if len(shapes) > 1 or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            reason = "the residual has another shape or dtype than the result"
            return Refusal("shape", reason, residual)
        nodes = frozenset({node, call.final, *(owner_of(key) for key in graph.through(y))})
        read = {one for inner in match.nodes for one in inner.all_input_nodes} - match.nodes
        return (
            unsafe(graph, nodes, node, [*read, residual])
            or _slower(graph, call, "sum", {"residual": True}, node, 3, 1)
            or (dims, nodes)
        )


def _in_order(dims: Dims) -> Dim:
    """Return what the dimensions of a value step along, from the first to the last."""
    return views.coalesce(tuple(itertools.chain(*dims)))
