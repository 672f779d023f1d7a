"""Gradients shared by the ops: a chain of products, recomputed forward and differentiated.

Every formula uses differentiable PyTorch ops on saved operands. A gradient that is not needed is
not computed, so frozen weights under LoRA cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.ops.products import activate

Grads = list[Any]
_aten = torch.ops.aten


def rows_of(t: Tensor, layout: str) -> Tensor:
    """Return activations as a matrix with tokens in rows."""
    return t.t() if layout == "col" else t.reshape(-1, t.shape[-1])


def inputs_first(w: Tensor, layout: str) -> Tensor:
    """Return a weight as [inputs, outputs]; its own inverse."""
    return w if layout == "row" else w.t()


def back_to(x: Tensor, grad: Tensor | None, layout: str) -> Tensor | None:
    """Return the gradient of a matrix of tokens in the shape of x."""
    if grad is None:
        return None
    return grad.t() if layout == "col" else grad.reshape(x.shape)


def add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of gradients, either of which may be absent."""
    if left is None or right is None:
        return right if left is None else left
    return left + right


def activation_grad(grad: Tensor, y: Tensor, activation: str) -> Tensor:
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


class Chain:
    """A chain x w_1 ... w_j + bias on matrices: its recomputed forward pass and its gradients.

    inner_bias and inner_activation: what stands behind each product but the last one.
    """

    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        layouts: Sequence[str],
        inner_bias: Tensor | None = None,
        inner_activation: str = "identity",
    ) -> None:
        self.layouts = layouts
        self.weights = [inputs_first(w, at) for w, at in zip(weights, layouts, strict=True)]
        self.inner_activation = inner_activation
        self.sums: list[Tensor] = []
        self.grad_inner_bias: Tensor | None = None
        self.middles = [x]
        for w in self.weights[:-1]:
            total = self.middles[-1] @ w
            total = total if inner_bias is None else total + inner_bias
            self.sums.append(total)
            self.middles.append(activate(total, inner_activation))

    def output(self, bias: Tensor | None) -> Tensor:
        """Return x w_1 ... w_j + bias."""
        y = self.middles[-1] @ self.weights[-1]
        return y if bias is None else y + bias

    def backward(
        self,
        grad: Tensor,
        need_x: bool,
        need_weights: Sequence[bool],
        need_inner_bias: bool = False,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradient of x, and of each weight in the layout it is stored in.

        That of the inner bias is left in `grad_inner_bias`.
        """
        grads: list[Tensor | None] = [None] * len(self.weights)
        for index in reversed(range(len(self.weights))):
            if need_weights[index]:
                product = self.middles[index].t() @ grad
                grads[index] = inputs_first(product, self.layouts[index])
            if index == 0 and not need_x:
                return None, grads
            if index > 0 and not (need_x or need_inner_bias or any(need_weights[:index])):
                return None, grads
            grad = grad @ self.weights[index].t()
            if index > 0:
                grad = activation_grad(grad, self.sums[index - 1], self.inner_activation)
                self.grad_inner_bias = grad.sum(0) if need_inner_bias else None
        return grad, grads
