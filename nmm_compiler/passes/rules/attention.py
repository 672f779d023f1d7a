"""Rule `attention`: scaled_dot_product_attention becomes a kernel, under "+attention".

    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
      ->   nmm.attention(q, k, v, causal=True)

    softmax(mask + cap(scale * (q @ k.transpose(2, 3))), -1).to(dtype) @ v
      ->   the same, cap(s) being s or c tanh(s / c), as transformers' eager attention spells it

It is off by default, since inner compilers bring an attention of their own. What stands around the
call is part of its kernel:

mask    a tensor that depends on no input, causal or a sliding window
          ->  causal=True, window=w
k, v    a view that repeats the heads of keys for all heads  ->  k [b, kv, t, d]
q, k    x * cos + cat(-x[..., d/2:], x[..., :d/2]) * sin, where both halves of cos, and of
        sin, are equal  ->  x, and the angles

Other masks and dropout stay with PyTorch. Dropout that is off and casts of the weights are passed
over: the kernel's softmax is in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.passes.chains.safety import Refusal, operands, refuse
from nmm_compiler.passes.emit.calls import Lowering
from nmm_compiler.passes.emit.editor import Editor, aten
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Cast,
    Concatenation,
    Key,
    Opaque,
    Product,
    Scale,
    Softmax,
    describe,
    owner_of,
)
from nmm_compiler.passes.graph.capture import collect_values
from nmm_compiler.passes.graph.effects import fetch_attribute, upstream
from nmm_compiler.passes.graph.read_graph import constant_value, matmul_labels, read_graph
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import BROADCAST, Dims
from nmm_compiler.passes.graph.written import memory_of
from nmm_compiler.passes.rules.base import Match, Rule

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
# Additive masks hold the smallest number of their dtype, or about its half where two were added.
_HIDDEN = -1.0e4


class Attention(Rule):
    """scaled_dot_product_attention, causal, with a sliding window or seen whole; no dropout."""

    name = "attention"
    ends_at = (Opaque, Product)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose calls of scaled_dot_product_attention, where the option asks for them."""
        if not graph.options.has("attention"):
            return
        if target_name(node) == "scaled_dot_product_attention":
            yield node, dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
        elif isinstance(graph.forms.get(node), Product):
            spelled = _spelled_out(graph, node)
            if spelled is not None:
                yield node, spelled

    def check(self, graph: Canonical, candidate: Any) -> Match | Refusal | None:
        """Read the call as a spec, and check that a kernel computes the same."""
        node, given = candidate
        if isinstance(given, Refusal):
            return given
        q, k, v = read = tuple(given.get(name) for name in _ARGUMENTS[:3])
        shape, keys, values = (graph.sizes(operand) for operand in read)
        mask, unlike = given.get("attn_mask"), _unlike(node, given, shape, keys, values)
        is_causal = bool(given.get("is_causal"))
        seen = unlike or _read_mask(graph, mask, (shape[2], keys[2]), is_causal)
        if isinstance(seen, Refusal):
            return seen
        shared = _before_repeat(graph, k), _before_repeat(graph, v)
        if graph.shape(shared[0]) == graph.shape(shared[1]):
            k, v = shared
        rope, q, k, angles = unrotated(graph, q, k)
        call = {
            "q": q, "k": k, "v": v, "rope": angles, "rotates": rope, "causal": seen[0],
            "window": seen[1], "scale": given.get("scale"), "soft_cap": given.get("soft_cap", 0.0),
        }  # fmt: skip
        lowering = Lowering(graph, node, shape[2])
        try:
            spec = lowering.kernel("attention", _named(lowering, call))
        except NmmError as error:
            return Refusal("no_kernel", str(error), node)
        read = (q, k, v, *angles)
        inner = frozenset(upstream([node], {*read, mask}))
        fields = ("m", "context", "heads", "d", "window", "rope", "kv_heads", "causal")
        info = {name: getattr(spec, name) for name in fields}
        why = refuse(graph, inner, node, read)
        return why or Match(self.name, node, inner, data=call, info=info)

    def rewrite(self, graph: Canonical, match: Match, editor: Editor) -> fx.Node:
        """Emit the call."""
        return editor.like(editor.kernel("attention", _named(editor, match.data)), match.node)


def _named(editor: Editor, call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the op, with the first halves of cos and sin [1, 1, tokens, d] as
    rope [2, tokens, d / 2]."""
    halves = []
    for angles in call["rope"]:
        node = editor.node(angles)
        tokens, d = editor.shape(node)[2:]
        half = editor.call(aten.slice.Tensor, node, 3, 0, d // 2)
        halves.append(editor.reshape(half, (tokens, d // 2)))
    given: dict[str, Any] = {name: editor.node(call[name]) for name in "qkv"}
    given["rope"] = editor.call(aten.stack.default, halves) if halves else None
    return call | given


def _unlike(node: fx.Node, given: dict[str, Any], q: Any, k: Any, v: Any) -> Refusal | None:
    """Return what of a call of such shapes no kernel of the family computes, or None."""
    if len(q) != 4 or len(k) != 4 or not all(isinstance(size, int) for size in (*q, *k)):
        return Refusal("shape", f"operands of shapes {tuple(q)} and {tuple(k)}", node)
    if given.get("dropout_p", 0.0) != 0.0:
        return Refusal("training", f"dropout_p is {given['dropout_p']}", node)
    reasons = {
        # PyTorch counts from the first key, the kernel from the last
        f"{q[2]} causal queries for {k[2]} keys": given.get("is_causal") and q[2] != k[2],
        f"{q[1]} heads of q and {k[1]} of k": q[1] != k[1] and not given.get("enable_gqa"),
        f"values of {v[-1]} features, queries of {q[-1]}": v[-1] != q[-1],
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    return None if reason is None else Refusal("no_kernel", reason, node)


# -- attention that is spelled out ------------------------------------------------------------


def _spelled_out(c: Canonical, node: fx.Node) -> dict[str, Any] | Refusal | None:
    """Return the arguments of the call that a product of weights and v spells out.

    None: the product has no softmax on its left. Refusal: it has, and scores of another kind.
    """
    form = c.forms[node]
    if not isinstance(form, Product) or not _is_matmul(c, form):
        return None
    weights = c.uncast(form.lhs)
    soft: Any = c.forms[weights]
    if not isinstance(soft, Softmax):
        return None
    scores = c.uncast(soft.inputs[0])
    for inner, mask in [(scores, None), *_orders(c, scores, Add)]:
        parts = _scores(c, inner)
        if parts is not None and isinstance(form.rhs, fx.Node):
            return parts | {"value": form.rhs, "attn_mask": mask, "enable_gqa": True}
    reason = "the scores below the softmax are not scale q k^T, capped and masked"
    return Refusal("no_kernel", reason, weights)


def _is_matmul(c: Canonical, form: Product) -> bool:
    """Return whether a product is that of [b, heads, m, k] and [b, heads, k, n]."""
    labels = [form.lhs_labels, form.rhs_labels], form.out_labels
    shapes = c.sizes(form.lhs), c.sizes(form.rhs)
    return labels == matmul_labels(4, 4) and shapes[0][:2] == shapes[1][:2]


def _scores(c: Canonical, key: Key) -> dict[str, Any] | None:
    """Return query, key, scale and soft cap of c tanh(scale q k^T / c), or of scale q k^T."""
    scale, inner = _factor(c, key)
    form, cap = c.forms[inner], 0.0
    if isinstance(form, Activation) and form.name == "tanh":
        cap = scale
        scale, inner = _factor(c, form.value)
        scale *= cap  # what the kernel multiplies scores by before it divides by the cap
        form = c.forms[inner]
    if not isinstance(form, Product) or not _is_matmul(c, form) or scale <= 0 or cap < 0:
        return None
    *outer, keys, features = c.base(form.rhs)[1]
    k = _behind(c, form.rhs, (*outer, features, keys))
    if k is None:
        return None
    return {"query": form.lhs, "key": k, "scale": scale, "soft_cap": cap}


def _behind(c: Canonical, key: Key, dims: Dims) -> fx.Node | None:
    """Return the value behind a view, or its base, that has these dimensions over the base."""
    base = c.base(key)[0]
    value = next((one for one in (*c.through(key), base) if c.views[one] == (base, dims)), None)
    return value if isinstance(value, fx.Node) else None


def _factor(c: Canonical, key: Key) -> tuple[float, Key]:
    """Return the numbers that multiply a value, as one, and the value."""
    number, base = 1.0, c.uncast(key)
    form = c.forms[base]
    while isinstance(form, Scale) and isinstance(form.factor, float):
        number, base = number * form.factor, c.uncast(form.value)
        form = c.forms[base]
    return number, base


def _same(c: Canonical, key: Key) -> Key:
    """Return the base of a value that is its base as it lies, else the value."""
    return c.base(key)[0] if c.is_whole(key) else key


def _orders(c: Canonical, key: Key, kind: type[Add] | type[Scale]) -> tuple[tuple[Key, Key], ...]:
    """Return both orders of the operands of a sum or a product, element by element."""
    form = c.forms.get(_same(c, key))
    return form.orders if isinstance(form, kind) else ()


# -- masks, shared heads, rotations -----------------------------------------------------------


def _read_mask(
    graph: Canonical, mask: fx.Node | None, sizes: tuple[int, int], is_causal: bool
) -> tuple[bool, int] | Refusal:
    """Return (causal, window): which of `context` keys the last m queries see.

    sizes: m and context. is_causal: what the call says where it has no mask.
    """
    if mask is None:
        return is_causal, 0
    constant = constant_value(graph, mask)
    if isinstance(constant, fx.Node):
        reason = f"the mask is a tensor of unknown values, because of {constant.name}"
        return Refusal("no_kernel", reason, constant)
    m, context = sizes
    seen = constant if constant.dtype == torch.bool else constant == 0
    if constant.dtype != torch.bool and bool((constant.masked_fill(seen, _HIDDEN) > _HIDDEN).any()):
        reason = "the mask adds numbers to scores, not only 0 and minus infinity"
        return Refusal("no_kernel", reason, mask)
    seen = seen.broadcast_to(torch.broadcast_shapes(seen.shape, (m, context)))
    each = seen.reshape(-1, m, context)
    if bool((each != each[0]).any()):
        return Refusal("no_kernel", "the mask differs between sequences or heads", mask)
    seen, ahead = each[0], context - m
    if bool(seen.all()):
        return False, 0
    causal, window = torch.ones_like(seen).tril(ahead), int(seen[-1].sum())
    for width in (context, window) if ahead >= 0 and window else ():
        if torch.equal(seen, causal.triu(ahead - width + 1)):
            return True, width if width < context else 0
    reason = "the mask is neither causal nor a sliding window of the last queries"
    return Refusal("no_kernel", reason, mask)


def _before_repeat(c: Canonical, node: fx.Node) -> fx.Node:
    """Return keys or values [b, kv, t, d] that the graph repeats for all heads, else the node."""
    dims = c.base(node)[1]
    if len(dims[1]) < 2 or dims[1][-1].axis != BROADCAST:
        return node
    return _behind(c, node, (dims[0], dims[1][:-1], *dims[2:])) or node


def unrotated(
    c: Canonical, q: fx.Node, k: fx.Node
) -> tuple[str, fx.Node, fx.Node, tuple[fx.Node, ...]]:
    """Return which operands the kernel rotates, q and k before that, and the angles.

    A rotated value that others read, as a cache does the keys, stays as it is.
    """
    of_q, of_k = (_rotation(c, node) if len(node.users) == 1 else None for node in (q, k))
    if of_q is None:
        return "none", q, k, ()
    if of_k is not None and of_k[1:] == of_q[1:]:
        return "qk", of_q[0], of_k[0], of_q[1:]
    return "q", of_q[0], k, of_q[1:]


def _rotation(c: Canonical, node: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return x, cos and sin of x * cos + rotate_half(x) * sin."""
    for straight, crossed in _orders(c, node, Add):
        for x, cos in _orders(c, straight, Scale):
            for half, sin in _orders(c, crossed, Scale):
                angles = all(_are_angles(c, one, x) for one in (cos, sin))
                if angles and _is_half_turn(c, half, x):
                    return x, cos, sin  # type: ignore[return-value]
    return None


def _is_half_turn(c: Canonical, key: Key, x: Key) -> bool:
    """Return whether a value is cat(-x[..., d/2:], x[..., :d/2])."""
    form, shape = c.form(key), c.sizes(x)
    if not isinstance(form, Concatenation) or len(form.inputs) != 2 or len(shape) != 4:
        return False
    half, (sign, back) = shape[3] // 2, _factor(c, form.inputs[0])
    halves = _is_half(c, back, x, half) and _is_half(c, form.inputs[1], x, 0)
    return halves and sign == -1.0 and form.axis == 3


def _is_half(c: Canonical, key: Key, x: Key, start: int) -> bool:
    """Return whether a value is x[..., start:start + d/2], as its memory says it."""
    node = owner_of(_same(c, key))
    source = next(iter(node.all_input_nodes), None)
    if source is None or c.views.get(source) != c.views[x]:
        return False
    (_, sizes, steps), begin, memory = memory_of(c, node)
    (_, whole, wide), origin, held = memory_of(c, source)
    half = (*whole[:-1], whole[-1] // 2)
    return (sizes, steps, memory) == (half, wide, held) and begin - origin == start * wide[-1]


def _are_angles(c: Canonical, key: Key, x: Key) -> bool:
    """Return whether angles [1, 1, tokens, d] turn x [b, heads, tokens, d] as the kernel does."""
    shape = c.sizes(x)
    fits = c.shape(key) == (1, 1, *shape[2:]) and c.dtype(key) == c.dtype(x)
    return isinstance(key, fx.Node) and fits and _halves_are_equal(c, key)


def _halves_are_equal(c: Canonical, key: Key) -> bool:
    """Return whether a value is a function of cat((f, f), -1), element by element."""
    base, dims = c.base(key)
    if dims[-1:] != c.whole(base)[-1:]:
        return False
    form = c.forms[base]
    if isinstance(form, Concatenation):
        whole = form.axis == len(c.sizes(base)) - 1
        return whole and len(form.inputs) == 2 and form.inputs[0] is form.inputs[1]
    plain = isinstance(form, (Cast, Scale)) or describe(form) in ("cos", "sin")
    values = operands(form) if plain else []
    if len(values) == 1:
        return _halves_are_equal(c, values[0])
    region = _region_of(c, base)
    return region is not None and _halves_are_equal(*region)


def _region_of(c: Canonical, node: Any) -> tuple[Canonical, Key] | None:
    """Return the graph and the value in it that a node takes out of a call, as under no_grad."""
    call: Any = node.args[0] if target_name(node) == "getitem" else None
    if not str(getattr(call, "target", "")).startswith("wrap_with_set_grad"):
        return None
    body = fetch_attribute(c.module, str(call.args[1].target))
    results = body.graph.output_node().args[0]
    return read_graph(body, collect_values(body, None)), results[node.args[1]]
