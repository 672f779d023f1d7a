"""Rule `attention`: scaled_dot_product_attention becomes a kernel, under Options(attention=True).

    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
      ->   nmm.attention(q, k, v, causal=True)

It is off by default, since inner compilers bring an attention of their own. A mask that is a tensor
and dropout stay with PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.passes.chains.linear_map import Refusal
from nmm_compiler.passes.chains.safety import refuse
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Opaque
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.rules.base import Match, Rule

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@dataclass(frozen=True)
class _Call:
    """The operands of a call, and the spec of its kernel."""

    operands: tuple[fx.Node, ...]
    spec: AttentionSpec


class Attention(Rule):
    """scaled_dot_product_attention without a mask tensor and without dropout."""

    name = "attention"
    ends_at = (Opaque,)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose calls of scaled_dot_product_attention, where the option asks for them."""
        if graph.options.attention and target_name(node) == "scaled_dot_product_attention":
            given = dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
            yield node, given

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the call as a spec, and check that a kernel computes the same."""
        node, given = candidate
        operands = tuple(given.get(name) for name in _ARGUMENTS[:3])
        values = [graph.tensor(o) if isinstance(o, fx.Node) else None for o in operands]
        if any(value is None for value in values):
            return None
        q, k, v = values
        assert q is not None and k is not None and v is not None  # noqa: PT018
        why = _unlike(node, given, q, k)
        if why is not None:
            return why
        try:
            spec = AttentionSpec(
                m=q.shape[2], heads=q.shape[1], kv_heads=k.shape[1], context=k.shape[2],
                d=q.shape[3], batch=q.shape[0], dtype=str(q.dtype).removeprefix("torch."),
                causal=bool(given.get("is_causal", False)), scale=given.get("scale"),
            )  # fmt: skip
        except NmmError as error:
            return Refusal(
                "attention_spec", str(error), node, "nothing: the call stays with PyTorch"
            )
        unsafe = refuse(graph, [node], node, operands)
        if unsafe is not None:
            return unsafe
        info = {"m": spec.m, "context": spec.context, "heads": spec.heads, "d": spec.d}
        return Match(
            rule=self.name,
            node=node,
            nodes=frozenset({node}),
            data=_Call(operands, spec),
            info={**info, "kv_heads": spec.kv_heads, "causal": spec.causal},
            length=spec.d + spec.context,
        )

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        call: _Call = match.data
        q = editor.c.values[call.operands[0]]
        new = editor.call(
            torch.ops.nmm.attention.default,
            *call.operands,
            meta_value=q.new_empty(q.shape),
            causal=call.spec.causal,
            scale=call.spec.scale,
            target=editor.options.target,
            executor=editor.options.executor,
        )
        return editor.like(new, match.node)


def _unlike(
    node: fx.Node, given: dict[str, Any], q: torch.Tensor, k: torch.Tensor
) -> Refusal | None:
    """Return what of a call no kernel of the family computes, or None."""
    sizes = (*q.shape, *k.shape)
    if q.dim() != 4 or k.dim() != 4 or not all(isinstance(size, int) for size in sizes):
        return Refusal(
            "attention_shape",
            f"operands of shapes {tuple(q.shape)} and {tuple(k.shape)}",
            node,
            "pass [batch, heads, tokens, d] with static sizes",
        )
    if given.get("attn_mask") is not None:
        return Refusal("attention_mask", "the mask is a tensor", node, "pass is_causal=True")
    if given.get("dropout_p", 0.0) != 0.0:
        return Refusal("dropout", f"dropout_p is {given['dropout_p']}", node, "use eval mode")
    if given.get("is_causal", False) and q.shape[2] != k.shape[2]:
        # PyTorch counts from the first key, the kernel from the last
        return Refusal(
            "attention_length",
            f"{q.shape[2]} causal queries for {k.shape[2]} keys",
            node,
            "pass as many queries as keys",
        )
    if q.shape[1] != k.shape[1] and not given.get("enable_gqa", False):
        return Refusal(
            "attention_heads",
            f"{q.shape[1]} heads of q and {k.shape[1]} of k",
            node,
            "set enable_gqa",
        )
    return None
