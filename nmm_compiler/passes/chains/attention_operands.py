"""What stands around a call of attention and is part of its kernel: mask, shared heads, RoPE.

mask    a tensor that depends on no input, causal or a sliding window
          ->  causal=True, window=w
k, v    repeat_kv spelled out: k[:, :, None].expand(b, kv, g, t, d).reshape(b, kv g, t, d),
        or repeat_interleave  ->  k [b, kv, t, d]
q, k    x * cos + cat(-x[..., d/2:], x[..., :d/2]) * sin, where both halves of cos, and of
        sin, are equal  ->  x, and the angles
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.constant_values import constant_value
from nmm_compiler.passes.graph.effects import fetch_attribute
from nmm_compiler.passes.graph.torch_names import target_name

# Additive masks hold the smallest number of their dtype, or about its half where two were added.
_HIDDEN = -1.0e4
_COPIES = ("clone", "contiguous")
_UNARY = ("cos", "sin", "to", "_to_copy", "type_as", "float", "unsqueeze", "contiguous", "clone")


@dataclass(frozen=True)
class Seen:
    """Which keys a query sees."""

    causal: bool
    window: int = 0


@dataclass(frozen=True)
class Rotated:
    """A value before its rotation, and the angles: cos and sin, equal in both halves."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def read_mask(graph: Canonical, call: fx.Node, mask: Any, sizes: tuple[int, int]) -> Seen | Refusal:
    """Return which of `context` keys the last m queries see, sizes being (m, context)."""
    if not isinstance(mask, fx.Node):
        return _unread(call, "the mask is no value of the graph")
    found = constant_value(graph, mask)
    if isinstance(found, fx.Node):
        return _unread(found, f"the mask is a tensor of unknown values, because of {found.name}")
    m, context = sizes
    seen = found if found.dtype == torch.bool else found == 0
    if found.dtype != torch.bool and bool((found.masked_fill(seen, _HIDDEN) > _HIDDEN).any()):
        return _unread(mask, "the mask adds numbers to scores, not only 0 and minus infinity")
    seen = seen.broadcast_to(torch.broadcast_shapes(seen.shape, (m, context)))
    each = seen.reshape(-1, m, context)
    if bool((each != each[0]).any()):
        return _unread(mask, "the mask differs between sequences or heads")
    (seen,) = each[:1]
    if bool(seen.all()):
        return Seen(causal=False)
    ahead = context - m
    window = int(seen[-1].sum())
    causal = torch.ones_like(seen).tril(ahead)
    if ahead >= 0 and torch.equal(seen, causal):
        return Seen(causal=True)
    if ahead >= 0 and window and torch.equal(seen, causal.triu(ahead - window + 1)):
        return Seen(causal=True, window=window)
    return _unread(mask, "the mask is neither causal nor a sliding window of the last queries")


def _unread(node: fx.Node, reason: str) -> Refusal:
    return Refusal(
        "no_kernel", reason, node,
    )  # fmt: skip


def before_repeat(graph: Canonical, node: fx.Node, heads: int) -> fx.Node:
    """Return keys or values [b, kv, t, d] that the graph repeats for all heads, else the node."""
    name = target_name(node)
    if name == "repeat_interleave":
        given: dict[Any, Any] = {**dict(enumerate(node.args)), **node.kwargs}
        source: Any = given.get(0)
        times: Any = given.get(1, given.get("repeats"))
        dim = given.get(2, given.get("dim"))
        fits = isinstance(source, fx.Node) and isinstance(times, int) and dim in (1, -3)
        return source if fits and _heads(graph, source) * times == heads else node
    if name not in ("reshape", "view", "_unsafe_view"):
        return node
    expanded = _through_copies(node.args[0])
    if target_name(expanded) != "expand" or not isinstance(expanded.args[0], fx.Node):
        return node
    one, many = graph.tensor(expanded.args[0]), graph.tensor(expanded)
    whole, kept_node = graph.tensor(node), _before_new_dim(expanded.args[0])
    if kept_node is None or one is None or many is None or whole is None:
        return node
    b, kv, group, t, d = many.shape if many.dim() == 5 else (0,) * 5
    kept = graph.tensor(kept_node)
    right = (
        tuple(one.shape) == (b, kv, 1, t, d)
        and tuple(whole.shape) == (b, kv * group, t, d)
        and kept is not None
        and tuple(kept.shape) == (b, kv, t, d)
    )
    return kept_node if right else node


def _before_new_dim(node: fx.Node) -> fx.Node | None:
    """Return x of x[:, :, None, :, :] or x.unsqueeze(2)."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    if target_name(node) == "unsqueeze":
        return source if (node.args[1:] or (node.kwargs.get("dim"),)) in ((2,), (-3,)) else None
    whole = slice(None, None, None)
    if node.target is operator.getitem and isinstance(node.args[1], tuple):
        index = (*node.args[1], *[whole] * (5 - len(node.args[1])))
        return source if index == (whole, whole, None, whole, whole) else None
    return None


def rotation(graph: Canonical, node: fx.Node) -> Rotated | None:
    """Return x and the angles of x * cos + rotate_half(x) * sin."""
    for straight, crossed in _orders(node, "add"):
        for x, cos in _orders(straight, "mul"):
            for half, sin in _orders(crossed, "mul"):
                if _is_half_turn(graph, half, x) and _fit(graph, node, x, cos, sin):
                    return Rotated(x, cos, sin)
    return None


def _orders(node: Any, name: str) -> list[tuple[fx.Node, fx.Node]]:
    """Return the two operands of a call in both orders; nothing if it is another call."""
    if not isinstance(node, fx.Node) or target_name(node) != name or len(node.args) != 2:
        return []
    left, right = node.args
    if node.kwargs or not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return []
    return [(left, right), (right, left)]


def _is_half_turn(graph: Canonical, node: fx.Node, x: fx.Node) -> bool:
    """Return whether a node is cat(-x[..., d/2:], x[..., :d/2])."""
    value = graph.tensor(x)
    if target_name(node) != "cat" or value is None or value.dim() != 4:
        return False
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if dim not in (-1, 3) or not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return False
    back, front = parts
    if not isinstance(back, fx.Node) or target_name(back) != "neg":
        return False
    d = value.shape[-1]
    return _is_part(back.args[0], x, d // 2, d) and _is_part(front, x, 0, d // 2)


def _is_part(node: Any, x: fx.Node, first: int, stop: int) -> bool:
    """Return whether a node is x[..., first:stop], `stop` being d or its half."""
    if not isinstance(node, fx.Node) or not node.args or node.args[0] is not x:
        return False
    where: Any = None
    if target_name(node) == "slice" and len(node.args) < 5 and not node.kwargs:
        dim, begin, end = (*node.args[1:], *(None,) * 3)[:3]
        where = slice(begin, end) if dim in (-1, 3) else None
    elif node.target is operator.getitem:
        index: Any = node.args[1]
        if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis:
            where = index[1]
    if not isinstance(where, slice) or where.step not in (None, 1):
        return False
    d = 2 * first or 2 * stop
    start: Any = where.start or 0
    stops: Any = d if where.stop is None else where.stop
    if not isinstance(start, int) or not isinstance(stops, int):
        return False
    return start == first and min(stops, d) == stop  # exported graphs end at the largest integer


def _fit(graph: Canonical, node: fx.Node, x: fx.Node, cos: fx.Node, sin: fx.Node) -> bool:
    """Return whether angles [1, 1, tokens, d] turn x [b, heads, tokens, d] as the kernel does."""
    made, value = graph.tensor(node), graph.tensor(x)
    if made is None or value is None or made.dtype != value.dtype or made.shape != value.shape:
        return False
    shape = (1, 1, *value.shape[2:])
    angles = [graph.tensor(each) for each in (cos, sin)]
    sizes = all(a is not None and tuple(a.shape) == shape for a in angles)
    same = all(a is not None and a.dtype == value.dtype for a in angles)
    return sizes and same and all(_halves_are_equal(graph, each) for each in (cos, sin))


def _halves_are_equal(graph: Canonical, node: fx.Node) -> bool:
    """Return whether a value is a function of cat((f, f), -1), element by element."""
    current: Any = node
    while isinstance(current, fx.Node):
        name = target_name(current)
        if name == "cat":
            parts: Any = current.args[0]
            dim = current.args[1] if len(current.args) > 1 else current.kwargs.get("dim", 0)
            same = isinstance(parts, (list, tuple)) and len(parts) == 2 and parts[0] is parts[1]
            return same and dim in (-1, 2)
        scaled = name == "mul" and any(isinstance(arg, (int, float)) for arg in current.args)
        if name == "getitem":
            current = _result_of_region(graph, current)
        elif name in _UNARY or scaled:
            current = next(arg for arg in current.args if isinstance(arg, fx.Node))
        else:
            return False
    return False


def _result_of_region(graph: Canonical, node: fx.Node) -> fx.Node | None:
    """Return the value in a submodule that a node takes out of its call, as under no_grad."""
    call, place = node.args
    if not isinstance(call, fx.Node) or not str(call.target).startswith("wrap_with_set_grad"):
        return None
    region = call.args[1]
    body = (
        fetch_attribute(graph.module, str(region.target)) if isinstance(region, fx.Node) else None
    )
    if not isinstance(body, fx.GraphModule) or not isinstance(place, int):
        return None
    results: Any = body.graph.output_node().args[0]
    found = results[place] if isinstance(results, (list, tuple)) else results
    return found if isinstance(found, fx.Node) else None


def _through_copies(node: Any) -> Any:
    while isinstance(node, fx.Node) and target_name(node) in _COPIES:
        node = node.args[0]
    return node


def _heads(graph: Canonical, node: Any) -> int:
    value = graph.tensor(node)
    return 0 if value is None or value.dim() != 4 else int(value.shape[1])
