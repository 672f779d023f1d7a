"""The ops of families `gated_mlp_up` and `gated_mlp`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec
from nmm_compiler.ops.backward_products import Products
from nmm_compiler.ops.definition import GATED, WHERE, Op
from nmm_compiler.ops.gradients import Chain, Grads, activation_grad, add, back_to, rows_of
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, features, layouts, weight
from nmm_compiler.ops.norm_and_residual import ended
from nmm_compiler.ops.operands import (
    chain_outputs,
    check_dtypes,
    check_same,
    check_vector,
    empty_result,
    read_layouts,
    tokens_of,
)
from nmm_compiler.ops.products import activate, chain
from nmm_compiler.ops.scaled import OF_X, SAID, SCALED, scaled_op, widened
from nmm_compiler.ops.sharding import GATED_MLP, GATED_UP, Placements, factors, placements

tracing = torch._C._len_torch_dispatch_stack


def gated_mlp_up(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    x_layout: str = "row",
    out_layout: str = "row",
    weight_layout: str = "row",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return activation(x gate + gate_bias) * (x up + up_bias); gate and up are [u, v] or [w]."""
    if x_layout == "col":
        x = x.t()
    left = chain(x, gate, weight_layout, gate_bias, out_layout)
    right = chain(x, up, weight_layout, up_bias, out_layout)
    if activation == "silu" and not (left.requires_grad or right.requires_grad or tracing()):
        # Both operands are new results without other readers, so work in place: that saves two
        # passes over memory.
        return torch.nn.functional.silu(left, inplace=True).mul_(right)
    return activate(left, activation) * right


def gated_mlp(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    x_layout: str = "row",
    out_layout: str = "row",
    weight_layout: str = "row",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return (activation(x gate + gate_bias) * (x up + up_bias)) down + down_bias."""
    h = gated_mlp_up(
        x,
        gate,
        up,
        gate_bias,
        up_bias,
        activation=activation,
        x_layout=x_layout,
        weight_layout=weight_layout,
    )
    return chain(h, down, weight_layout, down_bias, out_layout)


def _fake_up(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return an empty result of `gated_mlp_up`."""
    said = read_layouts(keywords)
    layout = said["weight_layout"]
    check_dtypes(x, *gate, *up, gate_bias, up_bias)
    tokens, k = tokens_of(x, said["x_layout"])
    n = chain_outputs("gate", k, gate, layout)
    check_same("output features of gate and up", n, chain_outputs("up", k, up, layout))
    check_vector("gate_bias", gate_bias, n)
    check_vector("up_bias", up_bias, n)
    return empty_result(x, tokens, n, said["out_layout"])


def _fake(
    x: Tensor,
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return an empty result of `gated_mlp`."""
    said = read_layouts(keywords)
    check_dtypes(x, *down, down_bias)
    h = _fake_up(x, gate, up, gate_bias, up_bias, **{**keywords, "out_layout": "row"})
    n = chain_outputs("down", h.shape[-1], down, said["weight_layout"])
    check_vector("down_bias", down_bias, n)
    return empty_result(x, tuple(h.shape[:-1]), n, said["out_layout"])


class _GatedGradients:
    """The gradients of activation(x gate + gate_bias) * (x up + up_bias), both recomputed."""

    def __init__(self, args: tuple, kw: dict, need: tuple) -> None:
        x, gate, up, gate_bias, up_bias = args
        self.x, self.kw, self.need = x, kw, need
        rows, layout, products = rows_of(x, kw["x_layout"]), kw["weight_layout"], Products.of(kw)
        self.left = Chain(rows, gate, [layout] * len(gate), products=products)
        self.right = Chain(rows, up, [layout] * len(up), products=products)
        self.activation = kw.get("activation", "silu")
        self.before = self.left.output(gate_bias, need[1])
        self.up = self.right.output(up_bias, need[2])
        self.gate = activate(self.before, self.activation)

    def backward(self, grad: Tensor) -> Grads:
        """Return the gradients of x, gate, up and the biases for that of the result in rows."""
        need = self.need
        grad_left = activation_grad(grad * self.up, self.before, self.activation)
        grad_right = grad * self.gate
        x_left, grad_gate = self.left.backward(grad_left, need[0], need[1])
        x_right, grad_up = self.right.backward(grad_right, need[0], need[2])
        grad_x = back_to(self.x, add(x_left, x_right), self.kw["x_layout"])
        bias_left = grad_left.sum(0) if need[3] else None
        bias_right = grad_right.sum(0) if need[4] else None
        return [grad_x, grad_gate, grad_up, bias_left, bias_right]


def _gradient_up(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    padded, needed = (*args, None, None)[:5], (*need, False, False)[:5]
    found = _GatedGradients(padded, kw, needed).backward(rows_of(grads[0], kw["out_layout"]))
    return found[: len(args)]


def _gradient(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, gate, up, down, gate_bias, up_bias, _down_bias = (*args, None, None, None)[:7]
    need = (*need, False, False, False)[:7]
    layout = kw["weight_layout"]
    first = _GatedGradients((x, gate, up, gate_bias, up_bias), kw, (*need[:3], *need[4:6]))
    grad = rows_of(grads[0], kw["out_layout"])
    middle = first.gate * first.up
    last = Chain(middle, down, [layout] * len(down), products=Products.of(kw))
    above = need[0] or any(need[1]) or any(need[2]) or need[4] or need[5]
    grad_middle, grad_down = last.backward(grad, above, need[3])
    grad_bias = grad.sum(0) if need[6] else None
    found: Grads = [None, [None] * len(gate), [None] * len(up), None, None]
    if grad_middle is not None:
        found = first.backward(grad_middle)
    return [*found[:3], grad_down, *found[3:], grad_bias][: len(args)]


def _lower(
    rows: Tensor,
    args: Sequence[Any],
    kw: dict[str, Any],
    m: int,
    transpose: Transpose | None,
    *,
    names: Sequence[str],
) -> list[Launch]:
    """Return the launch of projections: their weights in order, then their biases in that order."""
    given: list[Any] = [*args[1:], *[None] * len(names)]
    biases = dict(zip(names, given[len(names) :], strict=False))
    stored = kw.get("weight_layout", "row")
    weights: dict[str, list[Tensor]] = {}
    layout = stored
    for name, projection in zip(names, given, strict=False):
        laid = [weight(w, stored, transpose) for w in projection]
        weights[name] = [w for w, _ in laid]
        layout = laid[0][1]
    k = features(weights["gate"][0], layout)[0]
    fields: dict[str, Any] = {
        "m": m,
        "k": k,
        "n": features(weights["gate"][-1], layout)[1],
        "dtype": dtype_name(rows),
        "activation": kw.get("activation", "silu"),
        "weight_layout": layout,
        **layouts(kw),
    }
    for name, ws in weights.items():
        fields[f"{name}_r"] = features(ws[0], layout)[1] if len(ws) == 2 else 0
        fields[f"{name}_bias"] = biases[name] is not None
    if "down" in weights and features(weights["down"][-1], layout)[1] != k:
        raise SpecError("gated_mlp: a kernel's down projection returns to the input's features")
    spec = GatedMLPSpec(**fields) if "down" in weights else GatedMLPUpSpec(**fields)
    flat = [w for ws in weights.values() for w in ws]
    operands = (rows, *flat, *biases.values())
    return [Launch(spec, tuple(t for t in operands if t is not None))]


def _placements_up(
    x: Any, gate: Any, up: Any, gate_bias: Any = None, up_bias: Any = None, **kw: Any
) -> Placements:
    biases = [("bias", gate_bias, ""), ("bias", up_bias, "")]
    return placements(x, [*factors("", gate), *factors("", up), *biases], kw, GATED_UP)


def _placements(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    gate_bias: Any = None,
    up_bias: Any = None,
    down_bias: Any = None,
    **kw: Any,
) -> Placements:
    weights = [*factors("", gate), *factors("", up), *factors("down_", down)]
    biases = [("bias", gate_bias, ""), ("bias", up_bias, ""), ("down_bias", down_bias, "")]
    return placements(x, [*weights, *biases], kw, GATED_MLP)


def gated_mlp_up_scaled(
    x: Tensor,
    scales: Sequence[Tensor],
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return activation(x gate + gate_bias) * (x up + up_bias) for fp8 weights."""
    said = SAID | keywords
    layout = said["weight_layout"]
    x, wide = widened(x, scales, [(w, layout) for w in (*gate, *up)], said)
    x = x.t() if said["x_layout"] == "col" else x
    left = chain(x, wide[: len(gate)], layout, gate_bias, said["out_layout"])
    right = chain(x, wide[len(gate) :], layout, up_bias, said["out_layout"])
    return activate(left, said.get("activation", "silu")) * right


def gated_mlp_scaled(
    x: Tensor,
    scales: Sequence[Tensor],
    gate: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Return (activation(x gate + gate_bias) * (x up + up_bias)) down + down_bias, fp8 weights."""
    before = len(gate) + len(up)
    said = SAID | keywords
    first = said | {"out_layout": "row"}
    h = gated_mlp_up_scaled(x, scales[:before], gate, up, gate_bias, up_bias, **first)
    layout = said["weight_layout"]
    _, wide = widened(h, scales[before:], [(w, layout) for w in down], SAID)
    return chain(h, wide, layout, down_bias, said["out_layout"])


GATED_MLP_UP, WHOLE_MLP = (
    Op(
        schema="(Tensor x, Tensor[] gate, Tensor[] up, Tensor? gate_bias=None, "
        f"Tensor? up_bias=None, *, {GATED}, {WHERE}) -> Tensor",
        reference=gated_mlp_up,
        fake=_fake_up,
        gradient=_gradient_up,
        lower=functools.partial(_lower, names=("gate", "up")),
        sharding=_placements_up,
    ),
    Op(
        schema="(Tensor x, Tensor[] gate, Tensor[] up, Tensor[] down, Tensor? gate_bias=None, "
        f"Tensor? up_bias=None, Tensor? down_bias=None, *, {GATED}, {WHERE}) -> Tensor",
        reference=gated_mlp,
        fake=_fake,
        gradient=_gradient,
        lower=functools.partial(_lower, names=("gate", "up", "down")),
        sharding=_placements,
    ),
)
OPS = (
    ended(GATED_MLP_UP, residual=False),
    ended(WHOLE_MLP),
    scaled_op(
        GATED_MLP_UP,
        f"(Tensor x, {SCALED}, Tensor[] gate, Tensor[] up, Tensor? gate_bias=None, "
        f"Tensor? up_bias=None, *, {OF_X}, {GATED}, {WHERE}) -> Tensor",
        gated_mlp_up_scaled,
        ((1, "weight_layout"), (2, "weight_layout")),
    ),
    scaled_op(
        WHOLE_MLP,
        f"(Tensor x, {SCALED}, Tensor[] gate, Tensor[] up, Tensor[] down, "
        "Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, "
        f"*, {OF_X}, {GATED}, {WHERE}) -> Tensor",
        gated_mlp_scaled,
        ((1, "weight_layout"), (2, "weight_layout"), (3, "weight_layout")),
    ),
)
