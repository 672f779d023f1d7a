"""Attention that a graph spells out, as transformers' eager attention does.

    softmax(mask + cap(scale * (q @ k.transpose(2, 3))), -1).to(dtype) @ v
      ->   the arguments of scaled_dot_product_attention, and the soft cap

cap(s) is s, or c tanh(s / c). Dropout that is off and casts of the weights are passed over: the
kernel's softmax is in fp32.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from nmm_compiler.passes.chains.safety import Refusal
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.torch_names import target_name

_CASTS = ("to", "_to_copy", "type_as", "float", "clone", "contiguous")
_PRODUCTS = ("matmul", "bmm")


def spelled_out(graph: Canonical, node: fx.Node) -> dict[str, Any] | Refusal | None:
    """Return the arguments of the call that a product of weights and v spells out.

    None: the product has no softmax on its left. Refusal: it has, and scores of another kind.
    """
    value = graph.tensor(node)
    if target_name(node) not in _PRODUCTS or value is None or value.dim() != 4:
        return None
    weights, v = (*node.args, None, None)[:2]
    passed = _through(weights, (*_CASTS, "dropout"))
    if not isinstance(passed, fx.Node) or target_name(passed) not in ("softmax", "_softmax"):
        return None
    dropped = _dropout(weights)
    if dropped is not None:
        return Refusal("training", "dropout of the weights is on", dropped)
    dim = passed.args[1] if len(passed.args) > 1 else passed.kwargs.get("dim")
    scores = _through(passed.args[0], _CASTS)
    for inner, mask in _with_mask(scores):
        found = _scores(inner)
        if found is not None and dim in (-1, 3) and isinstance(v, fx.Node):
            more = {"value": v, "attn_mask": mask, "enable_gqa": True}
            return found | more
    return Refusal(
        "no_kernel", "the scores below the softmax are not scale q k^T, capped and masked",
        passed,
    )  # fmt: skip


def _with_mask(scores: Any) -> list[tuple[Any, Any]]:
    """Return (scores, what is added to them) in the orders that a sum allows."""
    if target_name(scores) != "add" if isinstance(scores, fx.Node) else True:
        return [(scores, None)]
    left, right = (*scores.args, None)[:2]
    return [(left, right), (right, left)]


def _scores(node: Any) -> dict[str, Any] | None:
    """Return query, key, scale and soft cap of c tanh(scale q k^T / c), or of scale q k^T."""
    node, cap = _through(node, _CASTS), 0.0
    factor, inner = _factor(node)
    if isinstance(inner, fx.Node) and target_name(inner) == "tanh":
        share, inner = _factor(inner.args[0])
        scale, product = _factor(inner)
        cap = factor
        scale *= share * cap  # what the kernel multiplies scores by before it divides by the cap
    else:
        scale, product = factor, inner
    if not isinstance(product, fx.Node) or target_name(product) not in _PRODUCTS or scale <= 0:
        return None
    q, turned = (*product.args, None)[:2]
    k = _turned_back(turned)
    if not isinstance(q, fx.Node) or k is None or cap < 0:
        return None
    return {"query": q, "key": k, "scale": scale, "soft_cap": cap}


def _factor(node: Any) -> tuple[float, Any]:
    """Return (c, x) of x * c or x / c with numbers, (1, x) of anything else."""
    if isinstance(node, fx.Node) and target_name(node) in ("mul", "div") and len(node.args) == 2:
        left, right = node.args
        if isinstance(right, (int, float)) and right:
            return (float(right) if target_name(node) == "mul" else 1.0 / right), left
        if isinstance(left, (int, float)) and target_name(node) == "mul":
            return float(left), right
    return 1.0, node


def _turned_back(node: Any) -> fx.Node | None:
    """Return k of k.transpose(2, 3)."""
    if not isinstance(node, fx.Node) or target_name(node) not in ("transpose", "permute"):
        return None
    source, *dims = node.args
    flat = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else tuple(dims)
    swaps = {frozenset(pair) for pair in ((2, 3), (-1, -2), (2, -1), (-2, 3))}
    swapped = frozenset(flat) in swaps if target_name(node) == "transpose" else False
    turned = swapped or flat in ((0, 1, 3, 2), (0, 1, -1, -2))
    return source if turned and isinstance(source, fx.Node) else None


def _dropout(node: Any) -> fx.Node | None:
    """Return a dropout that is on, between a product and its softmax."""
    while isinstance(node, fx.Node) and target_name(node) in (*_CASTS, "dropout"):
        if target_name(node) == "dropout":
            p, training = (*node.args[1:], *(None,) * 2)[:2]
            p = node.kwargs.get("p", 0.5 if p is None else p)
            training = node.kwargs.get("training", True if training is None else training)
            if training and p:
                return node
        node = node.args[0]
    return None


def _through(node: Any, names: tuple[str, ...]) -> Any:
    while isinstance(node, fx.Node) and target_name(node) in names:
        node = node.args[0]
    return node
