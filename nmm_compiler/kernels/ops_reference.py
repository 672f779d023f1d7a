"""What each `torch.ops.nmm.*` op computes, in plain PyTorch: its meaning, and its CPU path.

Every function takes exactly the arguments of its op's schema (`ops.SCHEMAS`) and differentiates,
batches and casts like any PyTorch code, because it is made of `linear`, `matmul` and activations
only. `x u v` is two products with the middle rounded once to the operands' dtype, as in the model
that was rewritten. Written for few microseconds: no checks here, PyTorch's own products make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nmm_compiler.errors import UnknownNameError

_linear = torch._C._nn.linear
_matmul = torch.matmul
_tracing = torch._C._len_torch_dispatch_stack


def _gelu_tanh(y: Tensor) -> Tensor:
    return torch.nn.functional.gelu(y, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda y: y,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
}


def activate(y: Tensor, name: str) -> Tensor:
    """Return activation `name` of `y`; raises UnknownNameError for one that the ops do not have."""
    if name == "identity":
        return y
    function = ACTIVATIONS.get(name)
    if function is None:
        raise UnknownNameError("activation", name, tuple(ACTIVATIONS))
    return function(y)


def product(x: Tensor, w: Tensor, layout: str, bias: Tensor | None, out_layout: str) -> Tensor:
    """Return x [..., k] times w plus bias; "col" w is [n, k], a "col" result is a new [n, m]."""
    if out_layout == "row":
        if layout == "col":
            return _linear(x, w, bias)
        return _matmul(x, w) if bias is None else _linear(x, w.t(), bias)
    stationary = w if layout == "col" else w.t()
    moving = x.reshape(-1, x.shape[-1]).t()
    if bias is None:
        return torch.mm(stationary, moving)
    return torch.addmm(bias.unsqueeze(1), stationary, moving)


def layouts_of(out_layout: str, out_layouts: Sequence[str] | None, count: int) -> Sequence[str]:
    """Return the layout of each of `count` results."""
    return [out_layout] * count if out_layouts is None else out_layouts


def _chain(
    x: Tensor, weights: Sequence[Tensor], layout: str, bias: Tensor | None, out_layout: str = "row"
) -> Tensor:
    """Return x times [u, v], or x times a dense [w], plus bias."""
    for w in weights[:-1]:
        x = _linear(x, w) if layout == "col" else _matmul(x, w)
    return product(x, weights[-1], layout, bias, out_layout)


def lowrank_matmul(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    w: Tensor | None = None,
    *,
    scale: float = 1.0,
    activation: str = "identity",
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    w_layout: str = "row",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return activation(x w + scale * (x u) v + bias)."""
    if x_layout == "col":
        x = x.t()
    h = _linear(x, u) if u_layout == "col" else _matmul(x, u)
    if w is None and scale == 1.0:
        y = product(h, v, v_layout, bias, out_layout)
    elif w is None:
        y = product(h, v, v_layout, None, out_layout) * scale
        if bias is not None:
            y = y + (bias if out_layout == "row" else bias.unsqueeze(1))
    else:
        y = torch.add(
            product(x, w, w_layout, bias, out_layout),
            product(h, v, v_layout, None, out_layout),
            alpha=scale,
        )
    return y if activation == "identity" else activate(y, activation)


def lowrank_matmul_shared_x(
    x: Tensor,
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    activations: Sequence[str] | None = None,
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    out_layouts: Sequence[str] | None = None,
    target: str = "trn2",
    executor: str = "reference",
) -> list[Tensor]:
    """Return activation_i((x u_i) v_i + bias_i) for every i: factorized layers with one input."""
    if x_layout == "col":
        x = x.t()
    outs = []
    layouts = layouts_of(out_layout, out_layouts, len(us))
    for index, (u, v, bias) in enumerate(zip(us, vs, biases, strict=True)):
        h = _linear(x, u) if u_layout == "col" else _matmul(x, u)
        y = product(h, v, v_layout, bias, layouts[index])
        outs.append(y if activations is None else activate(y, activations[index]))
    return outs


def lowrank_matmul_shared_u(
    x: Tensor,
    u: Tensor,
    vs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    out_layouts: Sequence[str] | None = None,
    target: str = "trn2",
    executor: str = "reference",
) -> list[Tensor]:
    """Return (x u) v_i + bias_i for every i: layers that share a basis."""
    if x_layout == "col":
        x = x.t()
    h = _linear(x, u) if u_layout == "col" else _matmul(x, u)
    layouts = layouts_of(out_layout, out_layouts, len(vs))
    return [
        product(h, v, v_layout, bias, layout)
        for v, bias, layout in zip(vs, biases, layouts, strict=True)
    ]


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
    left = _chain(x, gate, weight_layout, gate_bias, out_layout)
    right = _chain(x, up, weight_layout, up_bias, out_layout)
    if activation == "silu" and not (left.requires_grad or right.requires_grad or _tracing()):
        # Both operands are fresh results that nobody else holds: spare two passes over memory.
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
    return _chain(h, down, weight_layout, down_bias, out_layout)


def matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "identity",
    x_layout: str = "row",
    out_layout: str = "row",
    w_layout: str = "row",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return activation(x w + bias)."""
    if x_layout == "col":
        x = x.t()
    y = product(x, w, w_layout, bias, out_layout)
    return y if activation == "identity" else activate(y, activation)


REFERENCES: dict[str, Callable] = {
    f.__name__: f
    for f in (
        lowrank_matmul,
        lowrank_matmul_shared_x,
        lowrank_matmul_shared_u,
        gated_mlp_up,
        gated_mlp,
        matmul,
    )
}
