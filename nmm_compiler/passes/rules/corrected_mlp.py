"""Rule `corrected_mlp`: gate, up and down of few-bit weights, found apart before, are one call.

h = silu(nmm.corrected_matmul(x, gate...)) * nmm.corrected_matmul(x, up...)
y = nmm.corrected_matmul(h, down...)
  ->   y = nmm.corrected_mlp(x, [gate, up, down], [scales...], [u...], [v...])

Gate and up may be the two results of one nmm.corrected_matmul_shared_x.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.corrected import CORRECTED, CORRECTED_MLP, CORRECTED_SHARED
from nmm_compiler.passes.chains.safety import Refusal, call_ways, tokens_to_judge, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Activation, Canonical, Key, Opaque, Scale, owner_of
from nmm_compiler.passes.rules.base import Match, Rule
from nmm_compiler.passes.rules.inside_calls import KernelCall, kernel_call

_SAME = ("format", "u_layout", "v_layout", "w_layout")


@dataclasses.dataclass(frozen=True)
class _Linear:
    """One linear of a call: w, w_scale, u, v and branch_scale; what stands behind it; the nodes it
    goes with.

    out_layout: of its result.
    """

    call: KernelCall
    operands: tuple[Any, ...]
    bias: Any
    activation: str
    out_layout: str
    nodes: frozenset[fx.Node]

    @property
    def plain(self) -> bool:
        """Whether the call has nothing beside weights, branches and activations."""
        beside = (self.call.given.get(name) for name in ("norm_gain", "norm_bias", "residual"))
        alone = self.bias is None and all(value is None for value in beside)
        return alone and "norm" not in self.call.node.kwargs


class CorrectedMLP(Rule):
    """A gated MLP of calls that read few-bit weights."""

    name = "corrected_mlp"
    ends_at = (Opaque,)
    after_calls = True

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose a call that reads the product of two others, with what is between them."""
        call = kernel_call(node)
        if call is None or call.op is not CORRECTED:
            return
        h, down = _whole(graph, call.given["x"]), _linear(node)
        form = None if h is None else graph.forms.get(h)
        if down is None or not isinstance(form, Scale) or isinstance(form.factor, float):
            return
        sides = [_activated(graph, key) for key in (form.value, form.factor)]
        if all(side is not None for side in sides):
            gate, up = sorted(sides, key=lambda side: side.activation == "identity")  # type: ignore[union-attr]
            yield down, h, gate, up

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check that all three are plain, of one x and one format, and that one call is faster."""
        from nmm_compiler.ops.lower import lower, tokens

        down, h, gate, up = candidate
        linears = (gate, up, down)
        calls = {one.call.node: one.call for one in linears}
        same_x = gate.call.given["x"] is up.call.given["x"]
        said: dict[str, Any] = {}
        alike = gate.call.is_row("x_layout") == up.call.is_row("x_layout")
        read = down.call.given["x_layout"]
        alike = alike and gate.out_layout == up.out_layout == read  # h is written as it is read
        for name in _SAME:
            # a call without a branch has no layouts of factors
            each = [call.node.kwargs.get(name) for call in calls.values()]
            found = set(each) if name == "format" else set(each) - {None}
            alike = alike and len(found) < 2
            said[name] = next(iter(found), None)
        said = {name: value for name, value in said.items() if value is not None}
        whole = all(len(one.call.given["ws"]) == 2 for one in (gate, up) if one.call.op.many)
        one_gate = up.activation == down.activation == "identity"
        apart = gate.operands[0] is not up.operands[0]
        plain = all(one.plain for one in linears)
        if not (same_x and alike and whole and one_gate and apart and plain):
            return None
        *lists, scales = map(list, zip(*(one.operands for one in linears), strict=True))
        args = (gate.call.given["x"], *lists)
        if any(scale is not None for scale in scales):
            if any(scale is None for scale in scales):
                return None  # of fp8 branches and others
            args = (*args, None, None, None, scales)
        own = ("target", "executor", "out_layout")
        kwargs = said | {"activation": gate.activation}
        kwargs |= {n: value for n, value in down.call.node.kwargs.items() if n in own}
        kwargs["x_layout"] = gate.call.given["x_layout"]
        values, known = fx.map_arg((args, kwargs), graph.values.__getitem__)
        try:
            m = tokens_to_judge(tokens(values[0], known))
            (launch,) = lower(CORRECTED_MLP.name, values, known, m).launches
            launch.spec.check(graph.chip)
        except (NmmError, ValueError, TypeError):
            return None  # symbolic sizes, or features that are no whole 512s
        times = call_ways(graph, launch.spec)
        if times.fused > sum(call.us(graph, {}) for call in calls.values()):
            return Refusal("slower", "the calls apart are predicted to be faster", down.call.node)
        nodes = frozenset({owner_of(h)}).union(*(one.nodes for one in linears))
        operands = [node for call in (gate.call, up.call) for node in call.node.all_input_nodes]
        notes = ("h is rounded to mxfp8 in the kernel",) * (said.get("format", "mxfp4") in MX)
        return unsafe(graph, nodes, down.call.node, operands) or Match(
            rule=self.name, node=down.call.node, nodes=nodes, data=(args, kwargs), notes=notes,
            info={"m": m, "k": launch.spec.k, "n": launch.spec.n, "predicted": times.to_dict()},
        )  # fmt: skip

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        args, kwargs = match.data
        value = graph.values[match.node]
        op = torch.ops.nmm.corrected_mlp.default
        return editor.call(op, *args, meta_value=value, **kwargs)


def _linear(key: Key) -> _Linear | None:
    """Return the linear of few bits whose result a value is, or None."""
    node = owner_of(key)
    place: Any = node.args[1] if node.target is operator.getitem else None
    call = kernel_call(node if place is None else node.args[0])  # type: ignore[arg-type]
    if call is None or call.op is not (CORRECTED if place is None else CORRECTED_SHARED):
        return None
    given = call.given
    if place is None:
        operands = tuple(given[n] for n in ("w", "w_scale", "u", "v", "branch_scale"))
        activation, layout = given["activation"], given["out_layout"]
        return _Linear(call, operands, given["bias"], activation, layout, frozenset({node}))
    names = ("ws", "w_scales", "us", "vs", "biases")
    *own, bias = (given[name][place] for name in names)
    scales = given["branch_scales"]
    operands = (*own, None if scales is None else scales[place])
    activation = (given["activations"] or ["identity"] * (place + 1))[place]
    layout = (given["out_layouts"] or [given["out_layout"]] * (place + 1))[place]
    nodes = frozenset({node, call.node})
    return _Linear(call, operands, bias, activation, layout, nodes)


def _whole(c: Canonical, key: Key) -> Key | None:
    """Return the base of a value that has its elements in its order, in other dimensions or not."""
    base, dims = c.base(key)
    same = list(itertools.chain(*dims)) == list(itertools.chain(*c.whole(base)))
    return base if same else None


def _activated(c: Canonical, key: Key) -> _Linear | None:
    """Return the linear whose result, or an activation of it, a value is; None for any other."""
    base = _whole(c, key)
    form = None if base is None else c.forms.get(base)
    if base is None or not isinstance(form, Activation):
        return None if base is None else _linear(base)
    inner = _whole(c, form.value)
    found = None if inner is None else _linear(inner)
    if found is None or found.activation != "identity":
        return None
    nodes = found.nodes | {owner_of(base)}
    return dataclasses.replace(found, activation=form.name, nodes=nodes)
