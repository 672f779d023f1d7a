"""A function between the two products, part of the call: adapters and what is like them."""

from __future__ import annotations

import torch
from torch import nn

from gallery.case import lam, two_dimensional

F = nn.functional

lam("adapter", "act_between", lambda p, x: F.linear(F.silu(F.linear(x, p.a)), p.b))
lam("adapter", "relu_between", lambda p, x: torch.relu(x @ p.u) @ p.v)
lam("adapter", "gelu_biases", lambda p, x: F.linear(F.gelu(F.linear(x, p.a, p.c)), p.b, p.d))
lam("adapter", "gelu_tanh", lambda p, x: F.gelu(x @ p.u + p.c, approximate="tanh") @ p.v)
lam("adapter", "silu_spelled", lambda p, x: (lambda h: h * torch.sigmoid(h) @ p.v)(x @ p.u + p.c))
lam("adapter", "adapter_modules", lambda p, x: p.second(F.relu(p.first(x))), x=two_dimensional)
lam("adapter", "adapter_residual", lambda p, x: x + F.linear(F.gelu(F.linear(x, p.gate_a)), p.u))
lam("adapter", "two_activations", lambda p, x: F.silu(F.relu(x @ p.u + p.c) @ p.v + p.d))
lam(
    "adapter",
    "squeeze_excite",
    lambda p, x: torch.sigmoid(F.relu(x.mean(1, keepdim=True) @ p.u + p.c) @ p.v)[..., :1] * x,
)
lam(
    "gated_mlp",
    "gated_adapter",
    lambda p, x: F.linear(F.silu(F.linear(x, p.gate_a)) * F.linear(x, p.up_a), p.u),
)
