"""Norms before chains and residuals behind them, under the switch "+norms"."""

from __future__ import annotations

import torch
from torch import nn

from gallery.case import Holder, K, case, lam

F = nn.functional
ON = {"rules": ("+norms",)}


def spelled(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Return the norm as transformers' Llama spells it."""
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gain * h.to(x.dtype)


lam("lowrank norm", "norm_spelled_out", lambda p, x: spelled(x, p.norm_gain) @ p.u @ p.v,
    options=ON)  # fmt: skip
lam("lowrank norm", "norm_offset_one", lambda p, x: (x * torch.rsqrt(
    x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + p.norm_gain)) @ p.u @ p.v,
    options=ON)  # fmt: skip
lam("lowrank norm", "norm_rms", lambda p, x: F.rms_norm(x, (K,), p.norm_gain, 1e-6) @ p.u @ p.v,
    options=ON)  # fmt: skip
lam("lowrank norm", "norm_layer", lambda p, x: F.layer_norm(x, (K,), p.norm_gain) @ p.u @ p.v,
    options=ON, A="lowrank", C="lowrank")  # fmt: skip
lam("lowrank norm residual", "norm_and_residual",
    lambda p, x: x + spelled(x, p.norm_gain) @ p.u @ p.v2, options=ON)  # fmt: skip
lam("lowrank residual", "residual_behind", lambda p, x: x @ p.u @ p.v2 + x, options=ON)
lam("lowrank", "norm_left_by_default", lambda p, x: x + spelled(x, p.norm_gain) @ p.u @ p.v2)


@case("lowrank", "norm_read_elsewhere", options=ON)
def _elsewhere(p: Holder, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = spelled(x, p.norm_gain)
    return h @ p.u @ p.v, h.sum(-1)


@case("lowrank", "residual_read_elsewhere", options=ON)
def _result_elsewhere(p: Holder, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ p.u @ p.v2
    return x + y, y
