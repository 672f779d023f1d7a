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
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.linear import CORRECTED_MLP
from nmm_compiler.passes.chains.chain import path_nodes, same_tokens
from nmm_compiler.passes.chains.safety import Refusal, unsafe
from nmm_compiler.passes.emit.calls import Call
from nmm_compiler.passes.emit.corrected import CorrectedCall, lists_of
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Activation, Canonical, Key, owner_of
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.gated_mlp import gates_at, over_tokens


class CorrectedMLP(KernelRule):
    """A gated MLP of calls that read few-bit weights; made of matches that other rules found."""

    name = "corrected_mlp"
    ends_at = ()  # asked nowhere, since `combine` joins the matches of other rules

    def combine(self, graph: Canonical, matches: list[Match]) -> list[Match | Refusal]:
        """Join three linears, the last one of the product of the others."""
        calls: dict[Key, CorrectedCall] = {}
        wholes: dict[fx.Node, Match] = {}
        for match in matches:
            for one in match.data.results() if isinstance(match.data, Call) else ():
                if isinstance(one, CorrectedCall):
                    calls[_before_activation(graph, one)] = one
                    wholes[one.final] = match
        out: list[Match | Refusal] = list(matches)
        for down in calls.values():
            call = _joined(graph, down, calls)
            if call is None:
                continue
            parts = {id(wholes[one.final]): wholes[one.final] for one in call.each}
            if sum(len(part.data.results()) for part in parts.values()) > len(call.each):
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


def _before_activation(c: Canonical, call: CorrectedCall) -> Key:
    """Return the value that the activation of a call is of; its result where it has none."""
    form = c.forms[call.final]
    whole = isinstance(form, Activation) and c.is_whole(form.value)
    return c.base(form.value)[0] if isinstance(form, Activation) and whole else call.final


def _joined(
    c: Canonical, down: CorrectedCall, calls: Mapping[Key, CorrectedCall]
) -> CorrectedMLPCall | None:
    """Return the call of a linear and of the two whose product it reads; None unless all are plain,
    alike and of one x.

    calls: by the values that they compute before their activations.
    """
    h = c.base(down.chain.first.x)[0]
    for _, read, key in gates_at(c, h, lambda c, key: c.base(key)[0] in calls):
        activation, inner, nodes = read
        gate, up = (calls.get(c.base(one)[0]) for one in (inner, key))
        if gate is not None and up is not None:
            break
    else:
        return None
    each = (gate, up, down)
    plain = all(one.is_whole and not one.chain.biased for one in each) and gate is not up
    plain = plain and up.chain.activation == down.chain.activation == "identity"
    ways = {way for one in each for way in one.ways.items()}
    alike = len(ways) == len(dict(ways)) and len({one.branch is None for one in each}) == 1
    dims, up_dims = (
        views.compose(c.base(value)[1], one.out_dims) for value, one in ((inner, gate), (key, up))
    )
    if not (plain and alike) or dims is None or up_dims is None:
        return None
    over = over_tokens(c, dims, down.chain)
    one_x = same_tokens(c, gate.chain.first, dims, up.chain.first, up_dims)
    if over is None or not one_x or down.n != gate.source.k:
        return None
    views_between = (path_nodes(c, value) for value in (inner, key, down.chain.first.x))
    covered = nodes.union({owner_of(h)}, *views_between, *(one.covered for one in each))
    call = CorrectedMLPCall(
        op=CORRECTED_MLP.name, source=gate.source, final=down.final, out_dims=over, n=down.n,
        covered=covered, each=each, activation=activation,
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

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        return lists_of(editor, self.each) | {"activation": self.activation}
