"""Every spelling of a low-rank chain, at every graph level: found, or declined and why.

    python examples/rewrite_gallery.py            # the table
    python examples/rewrite_gallery.py lora       # the cases whose name contains a word, with diffs

Levels: D the graph Dynamo hands to a backend, A the same after AOTAutograd (plain ATen), E
torch.export, C the same decomposed to core ATen, S torch.fx.symbolic_trace (`call_module`).
A case passes when each level finds what is written beside it; the rewritten graph must compute
what the original computes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from nmm_compiler.passes.pipeline import run
from nmm_compiler.passes.result import RewriteResult

F = nn.functional
LEVELS = ("D", "A", "E", "C", "S")
K, R, N, B, T = 64, 8, 48, 2, 5


class Conv1D(nn.Module):
    """The transposed linear of GPT-2: weight [inputs, outputs], applied by addmm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (*x.size()[:-1], self.outputs)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Holder(nn.Module):
    """Parameters under the names that the cases use, and a forward that is the case."""

    def __init__(self, function: Callable[[Holder, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) * shape[0] ** -0.5)

        self.u, self.v = weight(K, R), weight(R, N)
        self.a, self.b = weight(R, K), weight(N, R)  # as nn.Linear stores them
        self.w, self.w2 = weight(N, K), weight(N, R)
        self.s, self.one = nn.Parameter(torch.rand(R) + 0.5), nn.Parameter(torch.tensor(0.7))
        self.c, self.d = weight(R), weight(N)
        self.u2, self.v2 = weight(N, R), weight(R, K)
        self.heads = weight(4, K, R)
        self.conv_a, self.conv_b = weight(R, K, 1), weight(N, R, 1)
        self.conv_a2, self.conv_b2 = weight(R, K, 1, 1), weight(N, R, 1, 1)
        self.gate_a, self.up_a = weight(R, K), weight(R, K)
        self.gate_b, self.up_b = weight(N, R), weight(N, R)
        self.down_a, self.down_b = weight(R, N), weight(K, R)
        self.gain = nn.Parameter(torch.rand(R) + 0.5)
        self.first, self.second = nn.Linear(K, R), nn.Linear(R, N)
        self.pair = nn.Sequential(nn.Linear(K, R, bias=False), nn.Dropout(0.1), nn.Linear(R, N))
        self.gpt = nn.Sequential(Conv1D(K, R), Conv1D(R, N))
        self.b64 = nn.Parameter(torch.randn(N, R, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(R))
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


@dataclass(frozen=True)
class Case:
    """A spelling. expect: what to find, "kind kind" or "no:code"; per level where they differ."""

    name: str
    function: Callable[[Holder, torch.Tensor], Any]
    expect: str
    other: dict[str, str] = field(default_factory=dict)
    x: Callable[[], torch.Tensor] = lambda: torch.randn(B, T, K)
    train: bool = False

    def expected(self, level: str) -> str:
        """Return what to find at a level; "n/a" when the level does not have the case."""
        return self.other.get(level, self.expect)


def _x2() -> torch.Tensor:
    return torch.randn(T, K)


CASES: list[Case] = []


def case(expect: str, name: str = "", **more: Any) -> Callable[[Callable[..., Any]], Any]:
    """Add a function to the gallery."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        x = more.pop("x", None)
        shown = name or function.__name__.strip("_")
        extra = {"x": x} if x else {}
        train = more.pop("train", False)
        CASES.append(Case(shown, function, expect, dict(more), train=train, **extra))
        return function

    return add


def lam(expect: str, name: str, function: Callable[..., Any], **more: Any) -> None:
    """Add a one-line case."""
    case(expect, name, **more)(function)


# -- spellings of the plain chain -------------------------------------------------------------

lam("lowrank", "matmul_op", lambda p, x: x @ p.u @ p.v)
lam("lowrank", "torch_matmul", lambda p, x: torch.matmul(torch.matmul(x, p.u), p.v))
lam("lowrank", "method_matmul", lambda p, x: x.matmul(p.u).matmul(p.v))
lam("lowrank", "mm_2d", lambda p, x: torch.mm(torch.mm(x, p.u), p.v), x=_x2)
lam("lowrank", "method_mm_2d", lambda p, x: x.mm(p.u).mm(p.v), x=_x2)
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
lam("lowrank", "out_T", lambda p, x: (p.v.T @ (p.u.T @ x.T)).T, x=_x2)
lam("lowrank", "left_hand", lambda p, x: (p.b @ (p.a @ x.T)).T, x=_x2)
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
lam("lowrank", "einsum_implicit", lambda p, x: torch.einsum("ij,jk,kl", x, p.u, p.v), x=_x2)
lam(
    "lowrank",
    "tensordot",
    lambda p, x: torch.tensordot(torch.tensordot(x, p.u, dims=1), p.v, dims=([2], [0])),
)
lam("lowrank", "multi_dot", lambda p, x: torch.linalg.multi_dot([x, p.u, p.v]), x=_x2)
lam("lowrank", "chain_matmul", lambda p, x: torch.chain_matmul(x, p.u, p.v), x=_x2)
lam("lowrank", "inner", lambda p, x: torch.inner(torch.inner(x, p.a), p.b))
lam("lowrank", "addmm_bias", lambda p, x: torch.addmm(p.d, x @ p.u, p.v), x=_x2)
lam(
    "lowrank",
    "addmm_alpha_beta",
    lambda p, x: torch.addmm(p.d, x @ p.u, p.v, alpha=0.5, beta=2.0),
    x=_x2,
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
    A="no:weight_computed", S="no:rank_too_large")  # fmt: skip
lam("lowrank", "sum_of_products", lambda p, x: ((x @ p.u)[..., None, :] * p.b).sum(-1))
lam("-", "sum_of_repeated", lambda p, x: ((x @ p.u)[..., None, :1] * p.b).sum(-1))

# -- what lies between and around ---------------------------------------------------------------

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

# -- groups -------------------------------------------------------------------------------------

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
lam("lora", "lora_addmm", lambda p, x: torch.addmm(x @ p.w.t(), x @ p.u, p.v, alpha=0.5), x=_x2)
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
    F.silu(p.gate_b @ (p.gate_a @ x.T)) * (p.up_b @ (p.up_a @ x.T))))).T, x=_x2)  # fmt: skip


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

# -- what must not fuse -------------------------------------------------------------------------

lam("no:activation", "act_between", lambda p, x: F.linear(F.silu(F.linear(x, p.a)), p.b),
    C="no:activation_factor")  # fmt: skip
lam("no:activation", "relu_between", lambda p, x: torch.relu(x @ p.u) @ p.v)
lam("no:activation", "tanh_between", lambda p, x: torch.tanh(x @ p.u) @ p.v)
lam("no:opaque", "pow_between", lambda p, x: (x @ p.u).pow(2) @ p.v)
lam("no:opaque", "clamp_between", lambda p, x: (x @ p.u).clamp(-1, 1) @ p.v)
lam("no:opaque", "masked_fill", lambda p, x: (x @ p.u).masked_fill(x[..., :R] > 0, 0.0) @ p.v)
lam("no:opaque", "where", lambda p, x: torch.where(x[..., :R] > 0, x @ p.u, 0.0) @ p.v)
lam("no:opaque", "softmax_between", lambda p, x: torch.softmax(x @ p.u, -1) @ p.v)
lam("no:norm", "layer_norm_between", lambda p, x: F.layer_norm(x @ p.u, (R,)) @ p.v,
    A="no:opaque", C="no:opaque")  # fmt: skip
lam("no:dropout", "dropout_train", lambda p, x: F.dropout(x @ p.u, 0.5, True) @ p.v,
    A="no:opaque", C="no:opaque")  # fmt: skip
lam("no:other_user", "multi_user", lambda p, x: (lambda h: (h @ p.v, h.sum()))(x @ p.u))
lam("no:other_user", "middle_returned", lambda p, x: (lambda h: (h @ p.v, h))(x @ p.u))
lam("no:opaque", "slice_tokens", lambda p, x: (x @ p.u)[:, 1:] @ p.v)
lam("no:opaque", "slice_channels", lambda p, x: (x @ p.u)[..., :4] @ p.v[:4])
lam("no:opaque", "split_channels", lambda p, x: (x @ p.u).split([4, 4], -1)[0] @ p.v[:4])
lam("no:activation_factor", "times_activation", lambda p, x: ((x @ p.u) * x[..., :R]) @ p.v,
    A="no:factor_shape")  # fmt: skip
lam("no:activation_addend", "plus_activation", lambda p, x: ((x @ p.u) + x[..., :R]) @ p.v,
    A="no:factor_shape")  # fmt: skip
lam("no:inner_reshaped", "heads_between", lambda p, x: (x @ p.u).view(B, T, 2, 4) @ p.v[:4])
lam("no:features_mixed", "unbalanced", lambda p, x: p.w[:, :B * T] @ (x @ p.u).view(-1, R),
    A="lowrank")  # fmt: skip
lam("no:mutation", "inplace_between", lambda p, x: F.linear(F.linear(x, p.a).mul_(2.0), p.b),
    A="lowrank", C="lowrank")  # fmt: skip


@case("no:mutation", A="no:opaque", C="no:opaque", S="n/a")
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
    A="no:weight_computed")  # fmt: skip
lam("no:factors_multiplied", "right_associated", lambda p, x: x @ (p.u @ p.v),
    A="no:rank_too_large")  # fmt: skip
lam("no:weight_computed", "lora_delta_weight", lambda p, x: F.linear(x, p.w + 0.5 * p.b @ p.a),
    A="no:factor_shape")  # fmt: skip
lam("no:batched_weight", "per_head", lambda p, x: torch.matmul(
    torch.matmul(x[:, None], p.heads), p.heads.transpose(1, 2)))  # fmt: skip
lam("no:dtype_unsupported", "float64", lambda p, x: x @ p.u @ p.v,
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


@case("no:functorch", A="lowrank", C="lowrank", S="n/a")
def vmap(p: Holder, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(lambda row: row @ p.u @ p.v)(x)


@case("lowrank", S="n/a")
def checkpointed(p: Holder, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: y @ p.u @ p.v, x, use_reentrant=False)


# -- running ------------------------------------------------------------------------------------


def capture(one: Case, level: str) -> tuple[fx.GraphModule, list[Any]]:
    """Trace a case at a level; returns the graph and its inputs."""
    torch.manual_seed(1)
    model, x = Holder(one.function), one.x()
    if x.dtype == torch.float64:
        model = model.double()
    if level in "DA":
        seen: list[tuple[fx.GraphModule, list[Any]]] = []

        def collect(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            real: list[Any] = []
            seen.append((module, real))

            def compiled(*arguments: Any) -> Any:
                copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
                real.extend(copies)
                return module(*arguments)

            return compiled

        backend: Any = collect
        if level == "A":
            from torch._dynamo.backends.common import aot_autograd

            backend = aot_autograd(fw_compiler=collect)
        torch._dynamo.reset()
        with torch.no_grad() if level == "A" else torch.enable_grad():
            torch.compile(model, backend=backend, dynamic=False)(x)
        if len(seen) != 1:
            raise RuntimeError(f"{one.name}: {len(seen)} graphs")
        return seen[0]
    if level == "S":
        return fx.symbolic_trace(model), [x]
    program = torch.export.export(model, (x,))
    if level == "C":
        program = program.run_decompositions()
    return program.module(), [x]  # type: ignore[return-value]


def outcome(result: RewriteResult) -> str:
    """Return the kinds found, or the first reason for none."""
    kinds = Counter(m.kind for m in result.matches)
    if kinds:
        return " ".join(k if n == 1 else f"{n}x{k}" for k, n in sorted(kinds.items()))
    return f"no:{result.declined[0].code}" if result.declined else "-"


def largest_error(one: fx.GraphModule, two: fx.GraphModule, inputs: list[Any]) -> float:
    """Return the largest error of `two` against `one`, relative to the size of the values."""

    def flat(value: Any) -> list[torch.Tensor]:
        leaves = torch.utils._pytree.tree_leaves(value)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def fresh() -> list[Any]:
        return [i.detach().clone() if isinstance(i, torch.Tensor) else i for i in inputs]

    with torch.no_grad():
        torch.manual_seed(3)
        want = flat(one(*fresh()))
        torch.manual_seed(3)
        got = flat(two(*fresh()))
    worst = 0.0
    for a, b in zip(want, got, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        size = a.double().abs().max().clamp_min(1e-6)
        worst = max(worst, float((a.double() - b.double()).abs().max() / size))
    return worst


def try_case(one: Case, level: str) -> tuple[str, float, RewriteResult]:
    """Rewrite a case at a level; return the outcome, the error and the result."""
    module, inputs = capture(one, level)
    result = run(module, inputs)
    return outcome(result), largest_error(module, result.graph_module, inputs), result


def main() -> int:
    """Print the table; exit 1 when a level does not find what is written."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    wrong = 0
    print(f"{'spelling':24}" + "".join(f"{level:22}" for level in LEVELS) + "largest error")
    for one in CASES:
        if word not in one.name:
            continue
        cells, worst, shown = [], 0.0, ""
        for level in LEVELS:
            expected = one.expected(level)
            try:
                found, error, result = try_case(one, level)
            except Exception as problem:
                if expected == "n/a":
                    cells.append("n/a")
                    continue
                found, error, result = f"{type(problem).__name__}", 0.0, None
                if word:
                    raise
            right = found == expected or expected == "n/a"
            wrong += not right
            worst = max(worst, error)
            cells.append(found + ("" if right else f" != {expected}"))
            shown += f"\n--- {level}\n{result.diff()}\n{result}" if word and result else ""
        print(f"{one.name:24}" + "".join(f"{cell:22}" for cell in cells) + f"{worst:.1e}{shown}")
    print(f"{wrong} unexpected")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
