"""Rule `norm`: a norm that only our calls read goes into each of them.

    h = rms_norm(x, g); y = nmm.lowrank_matmul(h, u, v)
      ->   y = nmm.lowrank_matmul(x, u, v, ..., g, norm="rms", norm_eps=1e-6)

The norm may be one node or spelled out. Several calls that read it each take it in, and it is gone;
a norm that something else reads has to be computed anyway, and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.norm_before import NormBefore, read_norm
from nmm_compiler.passes.chains.prices import tokens_to_judge
from nmm_compiler.passes.chains.safety import DTYPES, Refusal, crossed, real_users, unsafe
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.emit.kernel_calls import KernelCall, call_us, kernel_call, pass_us
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical, Opaque, owner_of
from nmm_compiler.passes.rules.base import Match, Rule


@dataclass(frozen=True)
class _Found:
    call: KernelCall
    norm: NormBefore
    keywords: dict[str, Any]


class NormInside(Rule):
    """A norm of x inside of the calls that read it."""

    name = "norm"
    ends_at = (Opaque,)
    after_calls = True

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose our calls without a norm."""
        call = kernel_call(node) if graph.options.norms else None
        if call is not None and "norm" not in node.kwargs and isinstance(call.args[0], fx.Node):
            yield call

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the norm, and whether it can move into all that read it."""
        call: KernelCall = candidate
        node, x = call.node, call.args[0]
        norm = read_norm(graph, x)
        if norm is None or graph.dtype(norm.value) not in DTYPES:
            return None
        if not _along_features(graph, call):
            return Refusal(
                "shape", "the norm is over other dimensions than the features of x",
                norm.final,
            )  # fmt: skip
        readers = _readers(graph, norm.final)
        for reader in readers:
            other = kernel_call(reader)
            if other is None or "norm" in reader.kwargs or not _reads_as_x(graph, other, norm):
                return Refusal(
                    "other_user", f"the norm is also read by {reader.name}", norm.final,
                )  # fmt: skip
        path = {owner_of(key) for key in graph.through(x)}
        # inner values of the norm may have other readers: those are computed as before
        between = _between(graph, norm.final)
        moved = {*path, norm.final, node}
        operands = norm.operands()
        why = crossed(graph, {*norm.nodes, *moved}, node, operands) or unsafe(
            graph, moved, node, operands, redirected=[*readers, *between]
        )
        if why is not None:
            return why
        keywords: dict[str, Any] = {"norm": norm.kind, "norm_eps": norm.eps}
        if norm.offset:
            keywords["norm_offset"] = norm.offset
        price = _slower(graph, call, norm, keywords, len(readers))
        if price is not None:
            return price
        m = graph.tensor(x)
        assert m is not None
        return Match(
            rule=self.name,
            node=node,
            nodes=frozenset({node}),
            data=_Found(call, norm, keywords),
            info={"norm": norm.kind, "k": int(m.shape[-1 if _is_row(node) else 0])},
            notes=("the norm is rounded once, to the dtype of x",),
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call on the input of the norm."""
        found: _Found = match.data
        call, norm = found.call, found.norm
        base, dims = graph.base(call.args[0])
        have = views.identity(graph.shape(base) or ())
        x = editor.arrange(editor.operand(norm.value), have, dims)
        vectors = [None if key is None else editor.operand(key) for key in (norm.gain, norm.bias)]
        more = {0: x, call.gain: vectors[0], call.gain + 1: vectors[1]}
        change = call.ended(more, found.keywords)
        value = graph.values[call.node]
        return editor.call(call.node.target, *change.args, meta_value=value, **change.kwargs)  # type: ignore[arg-type]


def _is_row(node: fx.Node) -> bool:
    return node.kwargs.get("x_layout", "row") == "row"


def _along_features(c: Canonical, call: KernelCall) -> bool:
    """Return whether the features that a call contracts are the last axis of the norm."""
    base, dims = c.base(call.args[0])
    last = views.identity(c.shape(base) or ())[-1:]
    return bool(last) and dims[-1 if _is_row(call.node) else 0] == last[0]


def _between(c: Canonical, final: fx.Node) -> list[fx.Node]:
    """Return the views of a norm."""
    found, todo = [], [final]
    while todo:
        for user in real_users(todo.pop()):
            if user in c.sources and c.base(user)[0] is final:
                found.append(user)
                todo.append(user)
    return found


def _readers(c: Canonical, final: fx.Node) -> list[fx.Node]:
    """Return what reads a norm, or a view of it."""
    between = _between(c, final)
    every = (user for node in (final, *between) for user in real_users(node))
    return list(dict.fromkeys(user for user in every if user not in between))


def _reads_as_x(c: Canonical, call: KernelCall, norm: NormBefore) -> bool:
    """Return whether a call reads the norm as its x, and as nothing else."""
    x = call.args[0]
    if not isinstance(x, fx.Node) or c.base(x)[0] is not norm.final:
        return False
    others = [n for n in call.node.all_input_nodes if n is not x]
    own = all(n not in c.views or c.base(n)[0] is not norm.final for n in others)
    return own and _along_features(c, call)


def _slower(
    c: Canonical, call: KernelCall, norm: NormBefore, keywords: dict[str, Any], readers: int
) -> Refusal | None:
    """Return a refusal where the norm on its own is predicted to take less than inside.

    A call's share of the norm is its part of all that read it.
    """
    more = {call.gain: norm.gain, call.gain + 1: norm.bias}
    nodes = {p: v if v is None else owner_of(v) for p, v in more.items()}
    if any(node is not None and node.op == "call_module" for node in nodes.values()):
        nodes = dict.fromkeys(nodes)  # a parameter of a module that the graph calls
    plain = call_us(c, call, call.ended({}, {}))
    inside = call_us(c, call, call.ended(nodes, keywords))
    value = c.tensor(norm.value)
    if plain is None or inside is None or value is None:
        return Refusal("slower", "no kernel takes the norm in", norm.final)
    tokens = tokens_to_judge(value.numel() // value.shape[-1])
    moved = 2 * tokens * int(value.shape[-1]) * value.element_size()
    apart = pass_us(c.chip, moved) / readers
    if inside <= plain + apart:
        return None
    return Refusal(
        "slower",
        f"the call with the norm inside: {inside:,.1f} us on {c.chip.name}, without {plain:,.1f}, "
        f"its share of the norm {apart:,.1f} us (predicted, {c.options.price})",
        norm.final,
    )
