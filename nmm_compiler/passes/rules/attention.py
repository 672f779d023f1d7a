"""Rule `attention`: scaled_dot_product_attention becomes a kernel, under Options(attention=True).

    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
      ->   nmm.attention(q, k, v, causal=True)

It is off by default, since inner compilers bring an attention of their own. A mask that is a tensor
is read where it depends on no input (causal, sliding window), keys and values that the graph
repeats for all heads are taken as they were before, and RoPE on q, or on q and k, moves into the
kernel (`chains/attention_operands.py`). Attention that is spelled out, a softmax between two
products, is read as such a call with a soft cap (`chains/spelled_attention.py`). Other masks and
dropout stay with PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.passes.chains.attention_operands import (
    Rotated,
    Seen,
    before_repeat,
    read_mask,
    rotation,
)
from nmm_compiler.passes.chains.safety import Refusal, refuse
from nmm_compiler.passes.chains.spelled_attention import spelled_out
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Canonical, Opaque, Product
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.rules.base import Match, Rule

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class _Call:
    """The operands of a call, the rotation that moves into it, and the spec of its kernel."""

    operands: tuple[fx.Node, ...]
    angles: tuple[fx.Node, fx.Node] | None
    spec: AttentionSpec


class Attention(Rule):
    """scaled_dot_product_attention, causal, with a sliding window or seen whole; no dropout."""

    name = "attention"
    ends_at = (Opaque, Product)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose calls of scaled_dot_product_attention, where the option asks for them."""
        if not graph.options.attention:
            return
        if target_name(node) == "scaled_dot_product_attention":
            given = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
            yield node, given
            return
        found = spelled_out(graph, node)
        if found is not None:
            yield node, found

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the call as a spec, and check that a kernel computes the same."""
        node, given = candidate
        if isinstance(given, Refusal):
            return given
        operands: tuple[Any, ...] = tuple(given.get(name) for name in _ARGUMENTS[:3])
        values = [graph.tensor(o) if isinstance(o, fx.Node) else None for o in operands]
        if any(value is None for value in values):
            return None
        q, k, v = values
        assert q is not None and k is not None and v is not None  # noqa: PT018
        why = _unlike(node, given, q, k, v)
        if why is not None:
            return why
        seen = Seen(causal=bool(given.get("is_causal", False)))
        if given.get("attn_mask") is not None:
            found = read_mask(graph, node, given["attn_mask"], (q.shape[2], k.shape[2]))
            if isinstance(found, Refusal):
                return found
            seen = found
        operands = (operands[0], *_shared_keys(graph, operands[1:], q.shape[1]))
        operands, rope, angles = _unrotated(graph, operands)
        k = graph.tensor(operands[1])
        assert k is not None
        try:
            spec = AttentionSpec(
                m=q.shape[2], heads=q.shape[1], kv_heads=k.shape[1], context=k.shape[2],
                d=q.shape[3], batch=q.shape[0], dtype=str(q.dtype).removeprefix("torch."),
                causal=seen.causal, window=seen.window, scale=given.get("scale"), rope=rope,
                soft_cap=given.get("soft_cap", 0.0),
            )  # fmt: skip
        except NmmError as error:
            return Refusal("no_kernel", str(error), node)
        mask = given.get("attn_mask")
        read = (*operands, *(angles or ()), *([mask] if isinstance(mask, fx.Node) else []))
        inner = _between(node, read)
        unsafe = refuse(graph, inner, node, [*operands, *(angles or ())])
        if unsafe is not None:
            return unsafe
        info: dict[str, Any] = {
            "m": spec.m,
            "context": spec.context,
            "heads": spec.heads,
            "d": spec.d,
        }
        info |= {"window": spec.window, "rope": spec.rope}
        return Match(
            rule=self.name,
            node=node,
            nodes=frozenset(inner),
            data=_Call(operands, angles, spec),
            info={**info, "kv_heads": spec.kv_heads, "causal": spec.causal},
            length=spec.d + spec.context,
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        call: _Call = match.data
        q = editor.c.values[call.operands[0]]
        rope = () if call.angles is None else (_stacked(editor, call.angles),)
        more: dict[str, Any] = {"window": call.spec.window} if call.spec.window else {}
        if call.spec.soft_cap:
            more["soft_cap"] = call.spec.soft_cap
        if rope:
            more |= {"rotates": call.spec.rope}
        new = editor.call(
            torch.ops.nmm.attention.default,
            *call.operands,
            *rope,
            meta_value=q.new_empty(q.shape),
            causal=call.spec.causal,
            scale=call.spec.scale,
            **more,
            target=editor.options.target,
            executor=editor.options.executor,
        )
        return editor.like(new, match.node)


def _between(node: fx.Node, stops: tuple[fx.Node, ...]) -> list[fx.Node]:
    """Return the nodes from `stops` to a node, with it: what the call replaces."""
    found, waiting = {node: None}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found and source not in stops:
                found[source] = None
                waiting.append(source)
    return list(found)


def _shared_keys(graph: Canonical, pair: tuple[Any, ...], heads: int) -> tuple[fx.Node, fx.Node]:
    """Return keys and values as they are before the graph repeats both for all heads."""
    k, v = pair
    before = before_repeat(graph, k, heads), before_repeat(graph, v, heads)
    shapes = [graph.tensor(node) for node in before]
    same = shapes[0] is not None and shapes[1] is not None and shapes[0].shape == shapes[1].shape
    return before if same else (k, v)


def _unrotated(
    graph: Canonical, operands: tuple[fx.Node, ...]
) -> tuple[tuple[fx.Node, ...], str, tuple[fx.Node, fx.Node] | None]:
    """Return operands before their rotation, which of them the kernel rotates, and the angles.

    A rotated value that others read, as a cache does the keys, stays as it is.
    """
    q, k, v = operands
    of_q, of_k = _rotation_of(graph, q), _rotation_of(graph, k)
    if of_q is None:
        return operands, "none", None
    angles = (of_q.cos, of_q.sin)
    if of_k is not None and (of_k.cos, of_k.sin) == angles:
        return (of_q.x, of_k.x, v), "qk", angles
    return (of_q.x, k, v), "q", angles


def _rotation_of(graph: Canonical, node: fx.Node) -> Rotated | None:
    return rotation(graph, node) if len(node.users) == 1 else None


def _stacked(editor: Editor, angles: tuple[fx.Node, fx.Node]) -> fx.Node:
    """Return the first halves of cos and sin [1, 1, tokens, d] as [2, tokens, d / 2]."""
    halves = []
    for node in angles:
        tokens, d = editor.c.values[node].shape[2:]
        half = editor.call(torch.ops.aten.slice.Tensor, node, 3, 0, d // 2)
        halves.append(editor.reshape(half, (tokens, d // 2)))
    return editor.call(torch.ops.aten.stack.default, halves)


def _unlike(
    node: fx.Node, given: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Refusal | None:
    """Return what of a call no kernel of the family computes, or None."""
    sizes = (*q.shape, *k.shape)
    if q.dim() != 4 or k.dim() != 4 or not all(isinstance(size, int) for size in sizes):
        return Refusal(
            "shape",
            f"operands of shapes {tuple(q.shape)} and {tuple(k.shape)}",
            node,
        )
    if given.get("dropout_p", 0.0) != 0.0:
        return Refusal("training", f"dropout_p is {given['dropout_p']}", node)
    if given.get("is_causal", False) and q.shape[2] != k.shape[2]:
        # PyTorch counts from the first key, the kernel from the last
        return Refusal(
            "no_kernel",
            f"{q.shape[2]} causal queries for {k.shape[2]} keys",
            node,
        )
    if q.shape[1] != k.shape[1] and not given.get("enable_gqa", False):
        return Refusal(
            "no_kernel",
            f"{q.shape[1]} heads of q and {k.shape[1]} of k",
            node,
        )
    if v.shape[-1] != q.shape[-1]:
        wide = f"values of {v.shape[-1]} features, queries of {q.shape[-1]}"
        return Refusal("no_kernel", wide, node)
    return None
