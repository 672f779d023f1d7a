"""Rule `residual`: the sum of one of our calls and a residual, as one call.

    y = nmm.lowrank_matmul(x, u, v); z = h + y
      ->   z = nmm.lowrank_matmul(x, u, v, ..., residual=h)

The call may be on either side. It has no other reader, and the residual has the sum's shape and
dtype: one that is broadcast, or widens the sum, stays outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.prices import tokens_to_judge
from nmm_compiler.passes.chains.safety import DTYPES, Refusal, real_users, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.emit.kernel_calls import KernelCall, call_us, kernel_call, pass_us
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Add, Canonical, Key, owner_of
from nmm_compiler.passes.graph.views import Dims, Size
from nmm_compiler.passes.rules.base import Match, Rule


@dataclass(frozen=True)
class _Found:
    call: KernelCall
    y: Key
    residual: Key


class ResidualInside(Rule):
    """A residual that is added to the result of a call."""

    name = "residual"
    ends_at = (Add,)
    after_calls = True

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose sums of a call and another tensor, in either order."""
        form = graph.forms.get(node)
        if not graph.options.norms or not isinstance(form, Add) or isinstance(form.b, float):
            return
        if (form.alpha, form.beta) == (1.0, 1.0):
            for y, residual in ((form.b, form.a), (form.a, form.b)):
                base = graph.base(y)[0]
                call = kernel_call(base) if isinstance(base, fx.Node) else None
                if call is not None and call.adds_residual and call.args[call.gain + 2] is None:
                    yield node, call, y, residual

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Check shapes and dtypes, the call's readers, and what is written in between."""
        node, call, y, residual = candidate
        base, dims = graph.base(y)
        if not _in_order(dims, graph.shape(base) or ()) or not _is_row(call.node):
            return Refusal(
                "shape", "the result is rearranged before the sum", node,
            )  # fmt: skip
        shapes = {graph.shape(key) for key in (node, y, residual)}
        dtypes = {graph.dtype(key) for key in (node, y, residual)}
        if len(shapes) > 1 or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            return Refusal(
                "shape", "the residual has another shape or dtype than the result",
                owner_of(residual),
            )  # fmt: skip
        path = {owner_of(key) for key in graph.through(y)}
        nodes = {node, call.node, *path}
        others = [u for n in (call.node, *path) for u in real_users(n) if u not in nodes]
        if others:
            return Refusal(
                "other_user", f"the result is also used by {others[0].name}", call.node,
            )  # fmt: skip
        why = unsafe(graph, nodes, node, [*call.node.all_input_nodes, residual])
        if why is not None:
            return why
        price = _slower(graph, call, node, residual)
        if price is not None:
            return price
        return Match(
            rule=self.name,
            node=node,
            nodes=frozenset(nodes),
            data=_Found(call, y, residual),
            info={"n": int((graph.shape(node) or (0,))[-1])},
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call at the place of the sum, on the residual in the shape of its result."""
        found: _Found = match.data
        call = found.call
        base, dims = graph.base(found.y)
        have = views.identity(graph.shape(base) or ())
        residual = editor.arrange(editor.operand(found.residual), dims, have)
        change = call.ended({call.gain + 2: residual}, {})
        value = graph.values[call.node]
        made = editor.call(call.node.target, *change.args, meta_value=value, **change.kwargs)  # type: ignore[arg-type]
        return editor.arrange(made, have, dims)


def _in_order(dims: Dims, shape: tuple[Size, ...]) -> bool:
    """Return whether dimensions over a value are its own, split or joined, in their order."""
    if dims == views.identity(shape):
        return True
    atoms = [atom for dim in dims for atom in dim]
    sizes = [size for atom in atoms for size in (atom.size, atom.inner)]
    if not all(isinstance(size, int) for size in (*sizes, *shape)):
        return False
    order = [(atom.axis, -atom.inner) for atom in atoms]
    whole = math.prod(atom.size for atom in atoms) == math.prod(shape)
    return whole and order == sorted(order) and all(atom.axis >= 0 for atom in atoms)


def _is_row(node: fx.Node) -> bool:
    return node.kwargs.get("out_layout", "row") == "row"


def _slower(c: Canonical, call: KernelCall, node: fx.Node, residual: Key) -> Refusal | None:
    """Return a refusal where the sum on its own is predicted to take less than inside."""
    plain = call_us(c, call, call.ended({}, {}))
    inside = call_us(c, call, call.ended({call.gain + 2: call.node}, {}))  # of the same shape
    value = c.tensor(node)
    if plain is None or inside is None or value is None:
        return Refusal("slower", "no kernel adds the residual", node)
    tokens = tokens_to_judge(value.numel() // value.shape[-1])
    apart = pass_us(c.chip, 3 * tokens * int(value.shape[-1]) * value.element_size())
    if inside <= plain + apart:
        return None
    return Refusal(
        "slower",
        f"the call with the residual inside: {inside:,.1f} us on {c.chip.name}, without "
        f"{plain:,.1f}, the sum {apart:,.1f} us (predicted, {c.options.price})",
        owner_of(residual),
    )
