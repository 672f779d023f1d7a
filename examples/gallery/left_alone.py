"""What must not fuse, with the reason that the report gives."""

from __future__ import annotations

import torch
from torch import nn

from gallery.case import B, Holder, K, R, T, case, lam

F = nn.functional

lam("no:between", "tanh_between", lambda p, x: torch.tanh(x @ p.u) @ p.v)
lam("no:between", "pow_between", lambda p, x: (x @ p.u).pow(2) @ p.v)
lam("no:between", "clamp_between", lambda p, x: (x @ p.u).clamp(-1, 1) @ p.v)
lam("no:between", "masked_fill", lambda p, x: (x @ p.u).masked_fill(x[..., :R] > 0, 0.0) @ p.v)
lam("no:between", "where", lambda p, x: torch.where(x[..., :R] > 0, x @ p.u, 0.0) @ p.v)
lam("no:between", "softmax_between", lambda p, x: torch.softmax(x @ p.u, -1) @ p.v)
lam("no:between", "layer_norm_between", lambda p, x: F.layer_norm(x @ p.u, (R,)) @ p.v,
    A="no:between", C="no:between")  # fmt: skip
lam("no:training", "dropout_train", lambda p, x: F.dropout(x @ p.u, 0.5, True) @ p.v,
    A="no:between", C="no:between")  # fmt: skip
lam("no:other_user", "multi_user", lambda p, x: (lambda h: (h @ p.v, h.sum()))(x @ p.u))
lam("no:other_user", "middle_returned", lambda p, x: (lambda h: (h @ p.v, h))(x @ p.u))
lam("no:between", "slice_tokens", lambda p, x: (x @ p.u)[:, 1:] @ p.v)
lam("no:between", "slice_channels", lambda p, x: (x @ p.u)[..., :4] @ p.v[:4])
lam("no:between", "split_channels", lambda p, x: (x @ p.u).split([4, 4], -1)[0] @ p.v[:4])
lam("no:between", "times_activation", lambda p, x: ((x @ p.u) * x[..., :R]) @ p.v,
    A="no:between")  # fmt: skip
lam("no:between", "plus_activation", lambda p, x: ((x @ p.u) + x[..., :R]) @ p.v,
    A="no:between")  # fmt: skip
lam("no:shape", "heads_between", lambda p, x: (x @ p.u).view(B, T, 2, 4) @ p.v[:4])
lam("no:shape", "unbalanced", lambda p, x: p.w[:, :B * T] @ (x @ p.u).view(-1, R),
    A="lowrank")  # fmt: skip
lam("no:mutation", "inplace_between", lambda p, x: F.linear(F.linear(x, p.a).mul_(2.0), p.b),
    A="lowrank", C="lowrank")  # fmt: skip


@case("no:mutation", A="no:between", C="no:between", S="n/a")
def inplace_view(p: Holder, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, p.a)
    h[:, 0] = 0.0
    return F.linear(h, p.b)


@case("no:mutation", A="lowrank", C="lowrank", E="no:mutation")
def write_through_view(p: Holder, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(x, p.a)
    h.view(-1).mul_(2.0)
    return F.linear(h, p.b)


@case("no:mutation", A="lowrank", C="lowrank")
def write_to_x(p: Holder, x: torch.Tensor) -> torch.Tensor:
    z = x * 1.5
    h = F.linear(z, p.a)
    z.add_(1.0)
    return F.linear(h, p.b) + z.sum()


lam("-", "attention", lambda p, x: ((x @ p.u) @ (x @ p.u).mT) @ (x @ p.w.t()),
    A="no:order")  # fmt: skip  # where x may be a weight, too
lam("no:order", "right_associated", lambda p, x: x @ (p.u @ p.v),
    A="no:rank_too_large")  # fmt: skip
lam("no:order", "lora_delta_weight", lambda p, x: F.linear(x, p.w + 0.5 * p.b @ p.a),
    A="no:between")  # fmt: skip
lam("no:weight", "per_head", lambda p, x: torch.matmul(
    torch.matmul(x[:, None], p.heads), p.heads.transpose(1, 2)))  # fmt: skip
lam("no:dtype", "float64", lambda p, x: x @ p.u @ p.v,
    x=lambda: torch.randn(B, T, K, dtype=torch.float64))  # fmt: skip
lam("no:dtype", "float_between", lambda p, x: F.linear(
    F.linear(x, p.a).double(), p.b64))  # fmt: skip
lam("no:rank_too_large", "rank_too_large", lambda p, x: x @ p.w.t() @ p.w)


@case("lowrank", S="n/a")
def autocast(p: Holder, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(F.linear(x, p.a), p.b)


@case("no:region", A="lowrank", E="-", C="lowrank", S="n/a")
def no_grad_edge(p: Holder, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = F.linear(x, p.a)
    return F.linear(h, p.b)


@case("no:region", A="lowrank", C="lowrank", S="n/a")
def vmap(p: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: row @ p.u @ p.v)(x)


@case("lowrank", S="n/a")
def checkpointed(p: Holder, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: y @ p.u @ p.v, x, use_reentrant=False)
