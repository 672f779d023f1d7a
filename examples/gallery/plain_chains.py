"""Spellings of the plain chain, x times u times v."""

from __future__ import annotations

import torch
from torch import nn

from gallery.case import B, K, N, R, T, lam, two_dimensional

F = nn.functional

lam("lowrank", "matmul_op", lambda p, x: x @ p.u @ p.v)
lam("lowrank", "torch_matmul", lambda p, x: torch.matmul(torch.matmul(x, p.u), p.v))
lam("lowrank", "method_matmul", lambda p, x: x.matmul(p.u).matmul(p.v))
lam("lowrank", "mm_2d", lambda p, x: torch.mm(torch.mm(x, p.u), p.v), x=two_dimensional)
lam("lowrank", "method_mm_2d", lambda p, x: x.mm(p.u).mm(p.v), x=two_dimensional)
lam("lowrank", "f_linear", lambda p, x: F.linear(F.linear(x, p.a), p.b))
lam("lowrank", "f_linear_bias_mid", lambda p, x: F.linear(F.linear(x, p.a, p.c), p.b))
lam("lowrank", "f_linear_bias_out", lambda p, x: F.linear(F.linear(x, p.a), p.b, p.d))
lam("lowrank", "linear_both_biases", lambda p, x: p.second(p.first(x)))
lam("lowrank", "sequential_dropout", lambda p, x: p.pair(x))
lam("lowrank", "gpt2_conv1d", lambda p, x: p.gpt(x), S="n/a")
lam("lowrank", "weight_T", lambda p, x: x @ p.a.T @ p.b.T)
lam("lowrank", "weight_mT", lambda p, x: x @ p.a.mT @ p.b.mT)
lam("lowrank", "weight_transpose", lambda p, x: x @ p.a.transpose(0, 1) @ p.b.transpose(-1, -2))
lam("lowrank", "weight_permute", lambda p, x: x @ p.a.permute(1, 0) @ p.b.permute(1, 0))
lam("lowrank", "weight_adjoint", lambda p, x: x @ p.a.adjoint() @ p.b.H)
lam("lowrank", "weight_swap", lambda p, x: x @ p.a.swapaxes(0, 1) @ torch.swapdims(p.b, 0, 1))
lam("lowrank", "weight_movedim", lambda p, x: x @ p.a.movedim(0, 1) @ torch.moveaxis(p.b, 1, 0))
lam("lowrank", "contiguous_T", lambda p, x: x @ p.a.t().contiguous() @ p.b.t().contiguous())
lam("lowrank", "double_transpose", lambda p, x: x @ p.u.t().t() @ p.v.T.T)
lam("lowrank", "out_T", lambda p, x: (p.v.T @ (p.u.T @ x.T)).T, x=two_dimensional)
lam("lowrank", "left_hand", lambda p, x: (p.b @ (p.a @ x.T)).T, x=two_dimensional)
lam("lowrank", "feature_major", lambda p, x: p.b @ (p.a @ x), x=lambda: torch.randn(B, K, T))
lam(
    "lowrank",
    "feature_major_views",
    lambda p, x: torch.matmul(p.b, torch.matmul(p.a, x.transpose(1, 2))).transpose(1, 2),
)
lam(
    "lowrank",
    "einsum2",
    lambda p, x: torch.einsum("btr,rn->btn", torch.einsum("btk,kr->btr", x, p.u), p.v),
)
lam("lowrank", "einsum3", lambda p, x: torch.einsum("btk,kr,rn->btn", x, p.u, p.v))
# Eager einsum contracts from the left: v with x first, which is no chain once decomposed.
lam("lowrank", "einsum3_shuffled", lambda p, x: torch.einsum("rn,btk,kr->btn", p.v, x, p.u),
    A="-", C="-")  # fmt: skip
lam("lowrank", "einsum_stored", lambda p, x: torch.einsum("...k,rk,nr->...n", x, p.a, p.b))
lam(
    "lowrank",
    "einsum_implicit",
    lambda p, x: torch.einsum("ij,jk,kl", x, p.u, p.v),
    x=two_dimensional,
)
lam(
    "lowrank",
    "tensordot",
    lambda p, x: torch.tensordot(torch.tensordot(x, p.u, dims=1), p.v, dims=([2], [0])),
)
lam("lowrank", "multi_dot", lambda p, x: torch.linalg.multi_dot([x, p.u, p.v]), x=two_dimensional)
lam("lowrank", "chain_matmul", lambda p, x: torch.chain_matmul(x, p.u, p.v), x=two_dimensional)
lam("lowrank", "inner", lambda p, x: torch.inner(torch.inner(x, p.a), p.b))
lam("lowrank", "addmm_bias", lambda p, x: torch.addmm(p.d, x @ p.u, p.v), x=two_dimensional)
lam(
    "lowrank",
    "addmm_alpha_beta",
    lambda p, x: torch.addmm(p.d, x @ p.u, p.v, alpha=0.5, beta=2.0),
    x=two_dimensional,
)
lam(
    "lowrank",
    "bmm_expand",
    lambda p, x: torch.bmm(
        torch.bmm(x, p.u.unsqueeze(0).expand(B, -1, -1)), p.v.unsqueeze(0).expand(B, -1, -1)
    ),
)
lam(
    "lowrank",
    "baddbmm",
    lambda p, x: torch.baddbmm(torch.zeros(B, T, N), x @ p.u, p.v.expand(B, R, N), alpha=2.0),
)
lam("lowrank", "conv1d", lambda p, x: F.conv1d(F.conv1d(x, p.conv_a), p.conv_b, p.d),
    x=lambda: torch.randn(B, K, T))  # fmt: skip
lam("lowrank", "conv2d", lambda p, x: F.conv2d(F.conv2d(x, p.conv_a2), p.conv_b2),
    x=lambda: torch.randn(B, K, 3, 5))  # fmt: skip
lam("lowrank", "decode_vector", lambda p, x: x[0, 0] @ p.u @ p.v)
# Core ATen has no mv and no diag: they are a product and a sum, and a where, there.
lam("lowrank", "decode_vector_left", lambda p, x: p.b @ (p.a @ x[0, 0]))
lam("lowrank", "decode_mv", lambda p, x: torch.mv(p.b, torch.mv(p.a, x[0, 0])))
lam("lowrank", "decode_mv_diag", lambda p, x: p.b @ (torch.diag(p.s) @ torch.mv(p.a, x[0, 0])))
lam("lowrank", "decode_addmv", lambda p, x: torch.addmv(p.d, p.b, p.a @ x[0, 0], alpha=0.5))
lam("lowrank", "scale_diag_embed", lambda p, x: x @ p.u @ torch.diag_embed(p.s) @ p.v)
lam("lowrank", "scale_diag_weight", lambda p, x: F.linear(F.linear(x, p.a), torch.diag(p.s)) @ p.v)
lam("-", "masked_diagonal", lambda p, x: x @ p.w.t() @ torch.where(
    torch.ones(N, N, dtype=torch.bool).tril(), p.d, 0.0),
    A="no:order", S="no:rank_too_large")  # fmt: skip
lam("lowrank", "sum_of_products", lambda p, x: ((x @ p.u)[..., None, :] * p.b).sum(-1))
lam("-", "sum_of_repeated", lambda p, x: ((x @ p.u)[..., None, :1] * p.b).sum(-1))
