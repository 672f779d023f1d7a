"""What lies between the two products, and around them, and fuses with them."""

from __future__ import annotations

import torch
from torch import nn

from gallery.case import B, K, R, T, lam

F = nn.functional

lam("lowrank", "view_between", lambda p, x: ((x.view(-1, K) @ p.u).view(B, T, R)) @ p.v)
lam(
    "lowrank",
    "flatten_unflatten",
    lambda p, x: (x.flatten(0, 1) @ p.u).unflatten(0, (B, T)) @ p.v,
)
lam("lowrank", "contiguous_between", lambda p, x: (x @ p.u).contiguous() @ p.v)
lam("lowrank", "clone_between", lambda p, x: (x @ p.u).clone() @ p.v)
lam("lowrank", "to_same_dtype", lambda p, x: F.linear(F.linear(x, p.a).to(x.dtype), p.b))
lam("lowrank", "type_as_same", lambda p, x: F.linear(F.linear(x, p.a).type_as(x), p.b))
lam("lowrank", "dropout_eval", lambda p, x: F.dropout(x @ p.u, 0.1, False) @ p.v)
lam("lowrank", "balanced_transposes", lambda p, x: (x @ p.u).transpose(0, 1).transpose(0, 1) @ p.v)
lam("lowrank", "token_transpose", lambda p, x: (x @ p.u).transpose(0, 1) @ p.v)
lam("lowrank", "unsqueeze_squeeze", lambda p, x: ((x @ p.u).unsqueeze(1) @ p.v).squeeze(1))
lam("lowrank", "getitem_none", lambda p, x: (x @ p.u)[:, None, :, :] @ p.v)
lam("lowrank", "scale_mid", lambda p, x: F.linear(F.linear(x, p.a) * 0.5, p.b))
lam("lowrank", "scale_mid_left", lambda p, x: F.linear(0.5 * F.linear(x, p.a), p.b))
lam("lowrank", "scale_div", lambda p, x: (x @ p.u) / 4.0 @ p.v)
lam("lowrank", "scale_neg", lambda p, x: -(x @ p.u) @ p.v)
lam("lowrank", "scale_out", lambda p, x: F.linear(F.linear(x, p.a), p.b) * 2.0)
lam("lowrank", "scale_in", lambda p, x: (x * 0.5) @ p.u @ p.v)
lam("lowrank", "scale_tensor", lambda p, x: (x @ p.u) * p.one @ p.v)
lam("lowrank", "scale_vector", lambda p, x: F.linear(F.linear(x, p.a) * p.s, p.b))
lam("lowrank", "scale_vector_left", lambda p, x: p.s * (x @ p.u) @ p.v)
lam("lowrank", "scale_vector_stored", lambda p, x: F.linear(x @ p.u * p.s, p.b))
lam("lowrank", "scale_diag", lambda p, x: x @ p.u @ torch.diag(p.s) @ p.v)
lam("lowrank", "scale_buffer", lambda p, x: (x @ p.u) * p.mask @ p.v)
lam("lowrank", "bias_add", lambda p, x: ((x @ p.u) + p.c) @ p.v + p.d)
lam("lowrank", "bias_sub", lambda p, x: ((x @ p.u) - p.c) @ p.v - p.d)
lam("lowrank", "bias_then_scale", lambda p, x: (((x @ p.u) * 2 + p.c) * 0.5) @ p.v * 3 + p.d)
lam("lowrank", "epilogue_gelu", lambda p, x: F.gelu(F.linear(F.linear(x, p.a), p.b, p.d)))
lam("lowrank", "epilogue_residual", lambda p, x: x @ p.u @ p.v @ p.w + x @ p.w.t() @ p.w)
