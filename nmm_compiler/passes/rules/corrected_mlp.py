"""Rule `corrected_mlp`: the calls of gate, up and down, all of few-bit weights, become one call.

h = silu(nmm.corrected_matmul(x, gate...)) * nmm.corrected_matmul(x, up...)
y = nmm.corrected_matmul(h, down...)
  ->   y = nmm.corrected_mlp(x, [gate, up, down], [scales...], [u...], [v...])

Gate and up may be the two results of one nmm.corrected_matmul_shared_x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.corrected import CORRECTED_MLP
from nmm_compiler.passes.chains.chain import path_nodes, same_tokens
from nmm_compiler.passes.chains.safety import Refusal, unsafe
from nmm_compiler.passes.emit.calls import Call
from nmm_compiler.passes.emit.corrected import CorrectedCall, lists_of
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Activation, Canonical, Key, Scale, owner_of
from nmm_compiler.passes.graph.views import Dims
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.gated_mlp import over_tokens

Calls = Mapping[Key, tuple[Match, CorrectedCall]]
"""The calls of one linear by their results, each with the match that it is a part of."""


@dataclasses.dataclass(frozen=True)
class _Side:
    """A factor of h: a linear of the match, its activation, its dims over tokens, and the nodes
    between."""

    match: Match
    call: CorrectedCall
    activation: str
    dims: Dims
    nodes: frozenset[fx.Node]


class CorrectedMLP(KernelRule):
    """A gated MLP of calls that read few-bit weights; made of matches that other rules found."""

    name = "corrected_mlp"
    ends_at = ()  # asked nowhere, since `combine` joins the matches of other rules

    def combine(self, graph: Canonical, matches: list[Match]) -> list[Match | Refusal]:
        """Join three linears, the last one of the product of the others."""
        calls: Calls = {
            one.final: (match, one)
            for match in matches if isinstance(match.data, Call)
            for one in match.data.results() if isinstance(one, CorrectedCall)
        }  # fmt: skip
        out: list[Match | Refusal] = list(matches)
        for match, down in calls.values():
            sides = _sides(graph, down, calls)
            call = None if sides is None else _joined(graph, down, *sides)
            if sides is None or call is None:
                continue
            parts = {id(one): one for one in (match, *(side.match for side in sides))}
            linears = [one.final for part in parts.values() for one in part.data.results()]
            if len(linears) > 3:
                continue
            operands = [key for one in call.each for key in one.chain.operands[1:]]
            why = unsafe(graph, call.covered, call.final, [call.source.key, *operands])
            found = why or self.matched(graph, call)
            apart = sum(part.info["predicted"]["fused"] for part in parts.values())
            if isinstance(found, Match) and found.info["predicted"]["fused"] > apart:
                reason = "the calls apart are predicted to be faster"
                found = Refusal("slower", reason, call.final)
            out.append(found)
            if isinstance(found, Match):
                out = [one for one in out if id(one) not in parts]
        return out


def _sides(c: Canonical, down: CorrectedCall, calls: Calls) -> tuple[_Side, _Side] | None:
    """Return gate and up of the product that a linear reads; None where it reads any other."""
    form = c.forms[c.base(down.chain.first.x)[0]]
    if not isinstance(form, Scale) or isinstance(form.factor, float):
        return None
    one, two = (_side(c, key, calls) for key in (form.value, form.factor))
    if one is None or two is None or one.call is two.call:
        return None
    return (two, one) if one.activation == "identity" else (one, two)


def _side(c: Canonical, key: Key, calls: Calls) -> _Side | None:
    """Return the linear whose result, or an activation of it, a value is; None for any other."""
    base, dims = c.base(key)
    form, activation, nodes = c.forms[base], "identity", path_nodes(c, key)
    if base not in calls and isinstance(form, Activation):
        activation = form.name
        nodes |= {owner_of(base), *path_nodes(c, form.value), *c.helpers.get(base, ())}
        base, inner = c.base(form.value)
        dims = views.compose(dims, inner) or ()
    if base not in calls:
        return None
    match, call = calls[base]
    over, own = views.compose(dims, call.out_dims), call.chain.activation
    if over is None or "identity" not in (activation, own):
        return None
    return _Side(match, call, own if activation == "identity" else activation, over, nodes)


def _joined(c: Canonical, down: CorrectedCall, gate: _Side, up: _Side) -> CorrectedMLPCall | None:
    """Return the call of three linears; None unless they are plain, alike and of one x."""
    each = (gate.call, up.call, down)
    plain = all(one.is_whole and not one.chain.biased for one in each)
    plain = plain and up.activation == down.chain.activation == "identity"
    ways = {way for one in each for way in one.ways.items()}
    alike = len(ways) == len(dict(ways)) and len({one.branch is None for one in each}) == 1
    if not (plain and alike):
        return None
    over = over_tokens(c, gate.dims, down.chain)
    one_x = same_tokens(c, gate.call.chain.first, gate.dims, up.call.chain.first, up.dims)
    if over is None or not one_x or down.n != gate.call.source.k:
        return None
    h = c.base(down.chain.first.x)[0]
    between = {owner_of(h), *gate.nodes, *up.nodes, *path_nodes(c, down.chain.first.x)}
    call = CorrectedMLPCall(
        op=CORRECTED_MLP.name, source=gate.call.source, final=down.final, out_dims=over, n=down.n,
        covered=frozenset(between).union(*(one.covered for one in each)), each=each,
        activation=gate.activation,
    )  # fmt: skip
    try:
        call.spec(c).check(c.chip)
    except NmmError:
        return None  # features that are no whole 512s
    return call


@dataclasses.dataclass
class CorrectedMLPCall(Call):
    """nmm.corrected_mlp; each: the calls of gate, up and down."""

    each: tuple[CorrectedCall, ...] = dataclasses.field(kw_only=True)
    activation: str = dataclasses.field(kw_only=True)

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call; n: output features of gate and up."""
        ranks = [0 if one.single else one.chain.r for one in self.each]
        return super().info() | {
            "r": "+".join(map(str, ranks)),
            "n": self.each[0].n,
            "activation": self.activation,
            "chains": sum(one.info()["chains"] for one in self.each),
            "base_weight": self.each[0].format,
        }

    def notes(self) -> tuple[str, ...]:
        """Return what the linears say, each once, and what is rounded between them."""
        said = [note for one in self.each for note in one.notes()]
        if self.each[0].format in MX:
            said.append("h is rounded to mxfp8 in the kernel")
        return tuple(dict.fromkeys(said))

    def spec(self, c: Canonical) -> KernelSpec:
        """Return the spec of three weights and their branches."""
        specs: list[Any] = [one.spec(c) for one in self.each]
        alike = {name: getattr(specs[0], name) for name in ("m", "k", "n", "dtype", "weight")}
        ranks = tuple(spec.rank for spec in specs)
        branch = specs[0].branch
        return CorrectedMLPSpec(**alike, rank=ranks, branch=branch, activation=self.activation)

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        return lists_of(editor, self.each) | {"activation": self.activation}
