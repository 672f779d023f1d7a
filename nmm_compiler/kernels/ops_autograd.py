"""First-order gradients of the `torch.ops.nmm.*` ops when a kernel computes the forward pass.

The kernel keeps its middle on chip, so only the operands are saved and the backward pass makes the
middle again: for y = (x u) v that is one product more, and no [m, r] tensor held in between.
Every formula is made of differentiable PyTorch ops on saved operands. Gradients that nobody asked
for are not computed: frozen weights under LoRA cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.kernels import ops_reference

Grads = list[Any]
_aten = torch.ops.aten


def _rows(t: Tensor, layout: str) -> Tensor:
    """Return activations as a matrix with tokens in rows."""
    return t.t() if layout == "col" else t.reshape(-1, t.shape[-1])


def _inputs_first(w: Tensor, layout: str) -> Tensor:
    """Return a weight as [inputs, outputs]; its own inverse."""
    return w if layout == "row" else w.t()


def _back_to(x: Tensor, grad: Tensor | None, layout: str) -> Tensor | None:
    if grad is None:
        return None
    return grad.t() if layout == "col" else grad.reshape(x.shape)


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def _activation_grad(grad: Tensor, y: Tensor, activation: str) -> Tensor:
    """Return grad times activation'(y)."""
    if activation == "identity":
        return grad
    if activation == "relu":
        return torch.where(y > 0, grad, 0)
    if activation == "silu":
        if not torch.is_grad_enabled():
            return _aten.silu_backward(grad, y)
        gate = torch.sigmoid(y)  # aten.silu_backward itself has no derivative
        return grad * gate * (1 + y * (1 - gate))
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return _aten.gelu_backward(grad, y, approximate=approximate)


class _Chain:
    """A chain x w_1 ... w_j + bias on matrices: the forward pass again, and its gradients."""

    def __init__(self, x: Tensor, weights: Sequence[Tensor], layouts: Sequence[str]) -> None:
        self.layouts = layouts
        self.weights = [_inputs_first(w, at) for w, at in zip(weights, layouts, strict=True)]
        self.middles = [x]
        for w in self.weights[:-1]:
            self.middles.append(self.middles[-1] @ w)

    def output(self, bias: Tensor | None) -> Tensor:
        y = self.middles[-1] @ self.weights[-1]
        return y if bias is None else y + bias

    def backward(
        self, grad: Tensor, need_x: bool, need_weights: Sequence[bool]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradient of x, and of each weight in the layout it is stored in."""
        grads: list[Tensor | None] = [None] * len(self.weights)
        for index in reversed(range(len(self.weights))):
            if need_weights[index]:
                product = self.middles[index].t() @ grad
                grads[index] = _inputs_first(product, self.layouts[index])
            if index == 0 and not need_x:
                return None, grads
            if index > 0 and not (need_x or any(need_weights[:index])):
                return None, grads
            grad = grad @ self.weights[index].t()
        return grad, grads


def _lowrank(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, u, v, bias, w = (*args, None, None)[:5]
    need = (*need, False, False)[:5]
    rows = _rows(x, kw["x_layout"])
    low = _Chain(rows, (u, v), (kw["u_layout"], kw["v_layout"]))
    scale, activation = kw.get("scale", 1.0), kw.get("activation", "identity")
    grad = _rows(grads[0], kw["out_layout"])
    dense = None if w is None else _Chain(rows, (w,), (kw["w_layout"],))
    if activation != "identity":
        y = low.output(None) * scale
        y = y if dense is None else y + dense.output(None)
        grad = _activation_grad(grad, y if bias is None else y + bias, activation)
    scaled = grad if scale == 1.0 else grad * scale
    grad_x, (grad_u, grad_v) = low.backward(scaled, need[0], need[1:3])
    grad_w = None
    if dense is not None:
        more, (grad_w,) = dense.backward(grad, need[0], need[4:5])
        grad_x = _add(grad_x, more)
    grad_bias = grad.sum(0) if need[3] else None
    return [_back_to(x, grad_x, kw["x_layout"]), grad_u, grad_v, grad_bias, grad_w][: len(args)]


def _lowrank_shared_x(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, us, vs, biases = args
    activations = kw.get("activations") or ["identity"] * len(us)
    layouts = ops_reference.layouts_of(kw["out_layout"], kw.get("out_layouts"), len(us))
    total: Tensor | None = None
    grad_us, grad_vs, grad_biases = [], [], []
    for i, grad in enumerate(grads):
        one = {**kw, "activation": activations[i], "out_layout": layouts[i]}
        parts = (x, us[i], vs[i], biases[i])
        needs = (need[0], need[1][i], need[2][i], need[3][i])
        gx, gu, gv, gb = _lowrank(parts, one, (grad,), needs)
        total = _add(total, gx)
        grad_us.append(gu)
        grad_vs.append(gv)
        grad_biases.append(gb)
    return [total, grad_us, grad_vs, grad_biases]


def _lowrank_shared_u(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, u, vs, _biases = args
    middle = _rows(x, kw["x_layout"]) @ _inputs_first(u, kw["u_layout"])
    need_middle = need[0] or need[1]
    layouts = ops_reference.layouts_of(kw["out_layout"], kw.get("out_layouts"), len(vs))
    total: Tensor | None = None
    grad_vs, grad_biases = [], []
    for i, grad in enumerate(grads):
        grad = _rows(grad, layouts[i])
        up = _Chain(middle, (vs[i],), (kw["v_layout"],))
        more, (grad_v,) = up.backward(grad, need_middle, (need[2][i],))
        total = _add(total, more)
        grad_vs.append(grad_v)
        grad_biases.append(grad.sum(0) if need[3][i] else None)
    grad_x, grad_u = None, None
    if total is not None:
        down = _Chain(_rows(x, kw["x_layout"]), (u,), (kw["u_layout"],))
        grad_x, (grad_u,) = down.backward(total, need[0], (need[1],))
    return [_back_to(x, grad_x, kw["x_layout"]), grad_u, grad_vs, grad_biases]


def _gated_up(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, gate, up, gate_bias, up_bias = (*args, None, None)[:5]
    need = (*need, False, False)[:5]
    layout = kw["weight_layout"]
    rows = _rows(x, kw["x_layout"])
    left = _Chain(rows, gate, [layout] * len(gate))
    right = _Chain(rows, up, [layout] * len(up))
    grad = _rows(grads[0], kw["out_layout"])
    activation = kw.get("activation", "silu")
    before = left.output(gate_bias)
    grad_left = _activation_grad(grad * right.output(up_bias), before, activation)
    grad_right = grad * ops_reference.activate(before, activation)
    x_left, grad_gate = left.backward(grad_left, need[0], need[1])
    x_right, grad_up = right.backward(grad_right, need[0], need[2])
    grad_x = _back_to(x, _add(x_left, x_right), kw["x_layout"])
    bias_left = grad_left.sum(0) if need[3] else None
    bias_right = grad_right.sum(0) if need[4] else None
    return [grad_x, grad_gate, grad_up, bias_left, bias_right][: len(args)]


def _gated(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, gate, up, down, gate_bias, up_bias, _down_bias = (*args, None, None, None)[:7]
    need = (*need, False, False, False)[:7]
    layout = kw["weight_layout"]
    middle = ops_reference.gated_mlp_up(
        x,
        gate,
        up,
        gate_bias,
        up_bias,
        activation=kw.get("activation", "silu"),
        x_layout=kw["x_layout"],
        weight_layout=layout,
    )
    grad = _rows(grads[0], kw["out_layout"])
    chain = _Chain(_rows(middle, "row"), down, [layout] * len(down))
    grad_middle, grad_down = chain.backward(grad, True, need[3])
    grad_bias = grad.sum(0) if need[6] else None
    assert grad_middle is not None
    first = _gated_up(
        (x, gate, up, gate_bias, up_bias),
        {**kw, "out_layout": "row"},
        (grad_middle,),
        (need[0], need[1], need[2], need[4], need[5]),
    )
    return [*first[:3], grad_down, *first[3:], grad_bias][: len(args)]


def _matmul(args: tuple, kw: dict, grads: tuple, need: tuple) -> Grads:
    x, w, bias = (*args, None)[:3]
    need = (*need, False)[:3]
    chain = _Chain(_rows(x, kw["x_layout"]), (w,), (kw["w_layout"],))
    activation = kw.get("activation", "identity")
    grad = _rows(grads[0], kw["out_layout"])
    if activation != "identity":
        grad = _activation_grad(grad, chain.output(bias), activation)
    grad_x, (grad_w,) = chain.backward(grad, need[0], (need[1],))
    grad_bias = grad.sum(0) if need[2] else None
    return [_back_to(x, grad_x, kw["x_layout"]), grad_w, grad_bias][: len(args)]


GRADIENTS: dict[str, Callable[[tuple, dict, tuple, tuple], Grads]] = {
    "lowrank_matmul": _lowrank,
    "lowrank_matmul_shared_x": _lowrank_shared_x,
    "lowrank_matmul_shared_u": _lowrank_shared_u,
    "gated_mlp_up": _gated_up,
    "gated_mlp": _gated,
    "matmul": _matmul,
}

_ROW = dict.fromkeys(
    ("x_layout", "out_layout", "u_layout", "v_layout", "w_layout", "weight_layout"), "row"
)


def _flatten(args: tuple) -> tuple[tuple[int | None, ...], list[Any]]:
    """Return each argument's length (None for a single one) and the flat list of all of them."""
    form = tuple(len(a) if isinstance(a, (list, tuple)) else None for a in args)
    flat: list[Any] = []
    for a in args:
        flat.extend(a if isinstance(a, (list, tuple)) else [a])
    return form, flat


def _unflatten(form: tuple[int | None, ...], flat: Sequence[Any]) -> tuple:
    args: list[Any] = []
    position = 0
    for count in form:
        if count is None:
            args.append(flat[position])
            position += 1
        else:
            args.append(list(flat[position : position + count]))
            position += count
    return tuple(args)


class KernelCall(torch.autograd.Function):
    """One op call whose forward pass is a kernel's and whose backward pass is GRADIENTS'."""

    @classmethod
    def call(cls, name: str, run: Callable[[tuple, dict], Any], args: tuple, kwargs: dict) -> Any:
        """Run op `name` so that autograd sees one node; returns a Tensor or a list of them.

        run computes it below autograd.
        """
        form, flat = _flatten(args)
        out = cls.apply(name, run, form, kwargs, *flat)
        return list(out) if isinstance(out, tuple) else out

    @staticmethod
    def forward(ctx: Any, name: str, run: Callable, form: tuple, kwargs: dict, *flat: Any) -> Any:
        """Run the op and save its operands."""
        out = run(_unflatten(form, flat), kwargs)
        ctx.name, ctx.form, ctx.kwargs = name, form, kwargs
        ctx.save_for_backward(*flat)
        return tuple(out) if isinstance(out, list) else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return one gradient, or None, for each flat operand."""
        args = _unflatten(ctx.form, ctx.saved_tensors)
        need = _unflatten(ctx.form, ctx.needs_input_grad[4:])
        found = GRADIENTS[ctx.name](args, {**_ROW, **ctx.kwargs}, grads, need)
        return (None, None, None, None, *_flatten(tuple(found))[1])
