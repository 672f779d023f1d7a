"""Rule `corrected_mlp`: gate, up and down of MX weights, found apart before, are one call.

h = silu(nmm.corrected_matmul(x, gate...)) * nmm.corrected_matmul(x, up...)
y = nmm.corrected_matmul(h, down...)
  ->   y = nmm.corrected_mlp(x, [gate, up, down], [scales...], [u...], [v...])
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.ops.corrected import CORRECTED, CORRECTED_MLP
from nmm_compiler.passes.chains.safety import Refusal, call_ways, tokens_to_judge, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Activation, Canonical, Key, Opaque, Scale, owner_of
from nmm_compiler.passes.rules.base import Match, Rule
from nmm_compiler.passes.rules.inside_calls import KernelCall, kernel_call

_PLAIN = ("bias", "norm_gain", "norm_bias", "residual")
_SAME = ("format", "u_layout", "v_layout")


class CorrectedMLP(Rule):
    """A gated MLP of calls that read MX weights."""

    name = "corrected_mlp"
    ends_at = (Opaque,)
    after_calls = True

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose a call that reads the product of two others, with what is between them."""
        down = _call(node)
        h = None if down is None else _whole(graph, down.args[0])
        form = None if h is None else graph.forms.get(h)
        if not isinstance(form, Scale) or isinstance(form.factor, float):
            return
        sides = [_activated(graph, key) for key in (form.value, form.factor)]
        if all(side is not None for side in sides):
            gate, up = sorted(sides, key=lambda side: side[1] == "identity")  # type: ignore[index]
            yield down, h, gate, up

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check that all three are plain, of one x and one format, and that one call is faster."""
        from nmm_compiler.ops.lower import lower, tokens

        down, h, (gate, activation, between), (up, other, _) = candidate
        calls = (gate, up, down)
        alike = all(
            one.node.kwargs.get(name) == gate.node.kwargs.get(name)
            for one in calls for name in _SAME
        )  # fmt: skip
        same_x = gate.args[0] is up.args[0] and gate.is_row("x_layout") == up.is_row("x_layout")
        ways = {gate.is_row("out_layout"), up.is_row("out_layout"), down.is_row("x_layout")}
        same_x = same_x and len(ways) == 1  # h is written as it is read
        bare = not any(value is not None for one in calls for value in one.args[5:])
        bare = bare and not any("norm" in one.node.kwargs for one in calls)
        if other != "identity" or not (alike and same_x and bare) or gate.node is up.node:
            return None
        args, kwargs = _arguments(calls, activation)
        values, said = fx.map_arg((args, kwargs), graph.values.__getitem__)
        try:
            m = tokens_to_judge(tokens(values[0], said))
            (launch,) = lower(CORRECTED_MLP.name, values, said, m).launches
            launch.spec.check(graph.chip)
        except (NmmError, ValueError, TypeError):
            return None  # symbolic sizes, or features that are no whole 512s
        apart = sum(one.us(graph, {}, {}) for one in calls)
        times = call_ways(graph, launch.spec)
        if times.fused > apart:
            return Refusal("slower", "three calls are predicted to be faster", down.node)
        nodes = frozenset({owner_of(h), *(one.node for one in calls), *between})
        operands = list(gate.node.all_input_nodes)
        return unsafe(graph, nodes, down.node, operands) or Match(
            rule=self.name, node=down.node, nodes=nodes, data=(args, kwargs),
            info={"m": m, "k": launch.spec.k, "n": launch.spec.n, "predicted": times.to_dict()},
            notes=("h is rounded to mxfp8 in the kernel",),
        )  # fmt: skip

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        args, kwargs = match.data
        value = graph.values[match.node]
        op = torch.ops.nmm.corrected_mlp.default
        return editor.call(op, *args, meta_value=value, **kwargs)


def _call(node: Key) -> KernelCall | None:
    call = kernel_call(node)
    return call if call is not None and call.op is CORRECTED else None


def _whole(c: Canonical, key: Key) -> Key | None:
    """Return the base of a value that has its elements in its order, in other dimensions or not."""
    base, dims = c.base(key)
    own = views.identity(c.shape(base) or ())
    return base if list(itertools.chain(*dims)) == list(itertools.chain(*own)) else None


def _activated(c: Canonical, key: Key) -> tuple[KernelCall, str, set[fx.Node]] | None:
    """Return (call, the activation of its result, the nodes of that) of a value, or None."""
    base = _whole(c, key)
    if base is None:
        return None
    form, between = c.forms.get(base), set[fx.Node]()
    name = "identity"
    if isinstance(form, Activation):
        name, between = form.name, {owner_of(base)}
        base = _whole(c, form.value)
    call = None if base is None else _call(base)
    if call is None:
        return None
    inside = str(call.node.kwargs.get("activation", "identity"))
    if inside != "identity" and name != "identity":
        return None
    return call, inside if name == "identity" else name, between


def _arguments(
    calls: tuple[KernelCall, ...], activation: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    gate, _, down = calls
    lists = ([one.args[place] for one in calls] for place in range(1, 5))
    kwargs = {name: down.node.kwargs[name] for name in (*_SAME, "target", "executor", "out_layout")
              if name in down.node.kwargs}  # fmt: skip
    kwargs |= {"activation": activation, "x_layout": gate.node.kwargs.get("x_layout", "row")}
    return (gate.args[0], *lists), kwargs
