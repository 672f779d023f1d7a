"""Chains with others: adapters, gated MLPs, projections of one x, latent attention."""

from __future__ import annotations

import torch
from torch import nn

from gallery.case import Holder, R, case, lam, two_dimensional

F = nn.functional

lam("lora", "lora_at", lambda p, x: x @ p.w.t() + (x @ p.u @ p.v) * 0.5)
lam("lora", "lora_linear", lambda p, x: F.linear(x, p.w, p.d) + F.linear(F.linear(x, p.a), p.b) * 2)
lam(
    "lora", "lora_branch_first", lambda p, x: 2 * F.linear(F.linear(x, p.a), p.b) + F.linear(x, p.w)
)
lam(
    "lora",
    "lora_add_alpha",
    lambda p, x: torch.add(F.linear(x, p.w), F.linear(F.linear(x, p.a), p.b), alpha=0.5),
)
lam(
    "lora",
    "lora_dropout_branch",
    lambda p, x: F.linear(x, p.w) + F.linear(F.linear(F.dropout(x, 0.1, False), p.a), p.b) * 2,
)
lam(
    "lora",
    "lora_addmm",
    lambda p, x: torch.addmm(x @ p.w.t(), x @ p.u, p.v, alpha=0.5),
    x=two_dimensional,
)
lam("lora", "lora_sub", lambda p, x: F.linear(x, p.w) - F.linear(F.linear(x, p.a), p.b))


@case("lora")
def lora_iadd(p: Holder, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, p.w)
    y += F.linear(F.linear(x, p.a), p.b) * 2
    return y


@case("lora", "lora_addmm_in_place")
def _addmm_in_place(p: Holder, x: torch.Tensor) -> torch.Tensor:
    z = x[0]
    y = z @ p.w.t()
    y.addmm_(z @ p.u, p.v, alpha=0.5)
    return y


@case("lora")
def lora_two_adapters(p: Holder, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, p.w)
    y = y + F.linear(F.linear(x, p.a), p.b) * 2
    return y + (x @ p.u @ p.v) * 0.5


lam("gated_mlp_up", "swiglu_up", lambda p, x: F.silu(F.linear(F.linear(x, p.gate_a), p.gate_b))
    * F.linear(F.linear(x, p.up_a), p.up_b))  # fmt: skip
lam("gated_mlp_up", "geglu_up_first", lambda p, x: F.linear(F.linear(x, p.up_a), p.up_b)
    * F.gelu(x @ p.u @ p.v, approximate="tanh"))  # fmt: skip
lam("gated_mlp_up", "gate_dense", lambda p, x: F.silu(F.linear(x, p.w))
    * F.linear(F.linear(x, p.up_a), p.up_b, p.d))  # fmt: skip
lam("gated_mlp", "swiglu_mlp", lambda p, x: F.linear(F.linear(
    F.silu(F.linear(F.linear(x, p.gate_a), p.gate_b)) * F.linear(F.linear(x, p.up_a), p.up_b),
    p.down_a), p.down_b))  # fmt: skip
lam("gated_mlp", "swiglu_transposed", lambda p, x: (p.down_b @ (p.down_a @ (
    F.silu(p.gate_b @ (p.gate_a @ x.T)) * (p.up_b @ (p.up_a @ x.T))))).T,
    x=two_dimensional)  # fmt: skip


@case("shared_x", "qkv")
def _qkv(p: Holder, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        F.linear(F.linear(x, p.gate_a), p.gate_b),
        F.linear(F.linear(x, p.up_a), p.up_b, p.d),
        F.linear(F.linear(x, p.a, p.c), p.b),
    )


@case("shared_u", "one_u_two_v")
def _fan(p: Holder, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = F.linear(x, p.a)
    return F.linear(h, p.b), F.linear(h, p.gate_b, p.d)


@case("mla")
def mla(p: Holder, x: torch.Tensor) -> torch.Tensor:
    latent = F.linear(x, p.a)
    scale = torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.linear(p.gain * (latent * scale), p.b)


lam("mla", "mla_rms_norm", lambda p, x: F.linear(F.rms_norm(F.linear(x, p.a), (R,), p.gain), p.b))
