"""Results keep the strides that the original graph gave them, where a reader depends on them.

A fused call may return a contiguous result where the model's was transposed. Few readers inside the
graph depend on strides, but pointwise operations pass strides on, a later `view` may need them, and
so may the caller that gets a returned tensor. So this pass follows the change forward on fake
tensors, until an operation returns its original strides. Where the change reaches the output, an
operation that fails on it, or one that cannot run on fakes, one copy restores the old strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from nmm_compiler.passes.emit.editor import STRIDE_READERS, Editor, stride_key
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import is_contiguous

# Their result depends on the memory order, so that has to be the original one. A view is no such
# reader: it returns the same values in every order in which it is possible.
_ORDER_READERS = STRIDE_READERS - {"view", "view_as"}


def settle_strides(editor: Editor) -> list[fx.Node]:
    """Restore strides where readers depend on them; return the nodes that read other ones now."""
    if not editor.restrided:
        return []
    readers: list[fx.Node] = []
    values, key = editor.c.values, editor.value_key
    # For each value whose strides differ now: the value that it had in the original graph.
    changed: dict[fx.Node, torch.Tensor] = dict(editor.restrided)
    restored: dict[fx.Node, fx.Node] = {}
    for node in list(editor.graph.nodes):
        touched = [n for n in node.all_input_nodes if n in changed]
        if not touched or node in changed:
            continue
        old = values.get(node)
        new = None if node.op == "output" else _again(node, values)
        if new is None or not _same_kind(old, new):
            for operand in touched:
                if operand not in restored:
                    editor.at = node
                    restored[operand] = editor.restride(operand, changed[operand])
                node.replace_input_with(operand, restored[operand])
            continue
        readers.append(node)
        if isinstance(old, torch.Tensor) and stride_key(new) != stride_key(old):
            node.meta[key] = values[node] = new
            if editor.c.effects.is_written(node):
                _restore_here(editor, node, old)  # a copy further on would miss the write
            else:
                changed[node] = old
    return readers


def _restore_here(editor: Editor, node: fx.Node, old: torch.Tensor) -> None:
    """Let every reader of a value read it in its old strides."""
    readers = list(node.users)
    editor.at = node.next
    copy = editor.restride(node, old)
    for reader in readers:
        reader.replace_input_with(node, copy)


def _same_kind(old: Any, new: Any) -> bool:
    """Return whether the pass can follow: a tensor, or several whose strides did not change."""
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)):
        pairs = [(a, b) for a, b in zip(old, new, strict=False) if isinstance(a, torch.Tensor)]
        return all(isinstance(b, torch.Tensor) and stride_key(a) == stride_key(b) for a, b in pairs)
    return isinstance(old, torch.Tensor) == isinstance(new, torch.Tensor)


def _again(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """Return a node's value for the current strides of its operands, None when it is unknown."""
    if node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    given: Any = fx.map_arg((node.args, node.kwargs), lambda n: values.get(n))
    args, kwargs = given
    if target_name(node) in _ORDER_READERS:
        return None
    if target_name(node) in STRIDE_READERS:
        viewed = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)), None)
        if viewed is None or not is_contiguous(viewed):
            return None
    try:
        with torch.no_grad():
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # an operation that fakes cannot run
        return None
