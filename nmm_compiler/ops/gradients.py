"""Gradients shared by the ops: a chain of products, recomputed forward and differentiated.

Every formula uses differentiable ops on saved operands: products are calls of this package's ops
where the forward pass ran through a kernel (backward_products.py); activations, norms, biases and
sums of gradients are PyTorch's. A gradient that is not needed is not computed, so frozen weights
under LoRA cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.ops.backward_products import BY_TORCH, Products
from nmm_compiler.ops.backward_products import inputs_first as inputs_first
from nmm_compiler.ops.products import activate, as_matrix, rms_norm

Grads = list[Any]
_aten = torch.ops.aten


def rows_of(t: Tensor, layout: str) -> Tensor:
    """Return activations as a matrix with tokens in rows."""
    return t.t() if layout == "col" else as_matrix(t)


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


class Inner:
    """What stands behind each product of a chain but the last one, and the gradients of it.

    An activation of the sum and the bias, or with a gain their RMS norm.
    """

    def __init__(
        self,
        bias: Tensor | None = None,
        activation: str = "identity",
        gain: Tensor | None = None,
        eps: float = 0.0,
        need_bias: bool = False,
        need_gain: bool = False,
    ) -> None:
        self.bias, self.activation, self.gain, self.eps = bias, activation, gain, eps
        self.need_bias, self.need_gain = need_bias, need_gain
        self.grad_bias: Tensor | None = None
        self.grad_gain: Tensor | None = None

    @property
    def is_identity(self) -> bool:
        """Whether nothing stands there."""
        return self.bias is None and self.gain is None and self.activation == "identity"

    @property
    def needed(self) -> bool:
        """Whether a gradient of a vector of its own is needed."""
        return self.need_bias or self.need_gain

    def value(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum with the bias, and what is made of it."""
        total = total if self.bias is None else total + self.bias
        made = activate(total, self.activation)
        return total, made if self.gain is None else rms_norm(made, self.gain, self.eps)

    def backward(self, grad: Tensor, total: Tensor) -> Tensor:
        """Return the gradient of the sum."""
        if self.gain is not None:
            made = activate(total, self.activation)
            inverse = torch.rsqrt(made.square().mean(-1, keepdim=True) + self.eps)
            unit = made * inverse
            if self.need_gain:
                self.grad_gain = (grad * unit).sum(0)
            grad = grad * self.gain
            grad = inverse * (grad - unit * (grad * unit).mean(-1, keepdim=True))
        grad = activation_grad(grad, total, self.activation)
        if self.need_bias:
            self.grad_bias = grad.sum(0)
        return grad


class Chain:
    """A chain x w_1 ... w_j + bias on matrices: its recomputed forward pass and its gradients.

    inner: what stands behind each product but the last one. products: who computes them.
    """

    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        layouts: Sequence[str],
        inner: Inner | None = None,
        products: Products = BY_TORCH,
    ) -> None:
        self.weights, self.layouts = weights, layouts
        self.inner = inner or Inner()
        self.products = products
        self.sums: list[Tensor] = []
        self.middles = [x]

    def _left_of(self, index: int) -> Tensor:
        """Return what weight `index` multiplies: x, or an intermediate, which is then kept."""
        while len(self.middles) <= index:
            last = len(self.middles) - 1
            total = self.products.times(
                self.middles[-1], self.weights[last], self.layouts[last], out="col"
            )
            total, made = self.inner.value(total)
            self.sums.append(total)
            self.middles.append(made)
        return self.middles[index]

    @property
    def _is_pair(self) -> bool:
        """Whether the chain is two factors with nothing between them."""
        return len(self.weights) == 2 and self.inner.is_identity

    def output(self, bias: Tensor | None, need_weights: Sequence[bool] | None = None) -> Tensor:
        """Return x w_1 ... w_j + bias.

        need_weights: those that `backward` will be asked for; None for all.
        """
        if need_weights is not None and not need_weights[-1] and self._is_pair:
            return self.products.chain(self.middles[0], self.weights, self.layouts, bias)
        last = len(self.weights) - 1
        return self.products.times(
            self._left_of(last), self.weights[last], self.layouts[last], bias
        )

    def backward(
        self, grad: Tensor, need_x: bool, need_weights: Sequence[bool]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return the gradient of x, and of each weight in the layout it is stored in.

        Those of inner vectors are left in `inner`.
        """
        grads: list[Tensor | None] = [None] * len(self.weights)
        for index in reversed(range(len(self.weights))):
            layout = self.layouts[index]
            if need_weights[index]:
                grads[index] = self.products.summed_over_tokens(self._left_of(index), grad, layout)
            if index == 0 and not need_x:
                return None, grads
            below = need_x or self.inner.needed or any(need_weights[:index])
            if index > 0 and not below:
                return None, grads
            if index == 1 and self._is_pair and not need_weights[0]:
                return self.products.chain_transposed(grad, self.weights, self.layouts), grads
            out = "col" if index else "row"
            grad = self.products.times_transposed(grad, self.weights[index], layout, out)
            if index > 0 and not self.inner.is_identity:
                self._left_of(index)
                grad = self.inner.backward(grad, self.sums[index - 1])
        return grad, grads
