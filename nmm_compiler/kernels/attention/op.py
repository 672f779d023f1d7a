"""The op of family `attention`: `nmm.attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ShapeError
from nmm_compiler.kernels.attention.spec import AttentionSpec
from nmm_compiler.kernels.base import LAYOUTS, check_name
from nmm_compiler.ops.definition import WHERE, Op, Operand, Placements
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name
from nmm_compiler.ops.operands import Given, check_dtypes


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor | None = None,
    *,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    k_layout: str = "row",
    rotates: str = "none",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return softmax(scale q k^T + mask) v, as `AttentionSpec` says it.

    q, result: [batch, heads, m, d]. k, v: [batch, kv_heads, context, d]. rope: [2, tokens, d / 2].
    """
    if k_layout == "col":
        k = k.transpose(-1, -2)
    m, context = q.shape[-2], k.shape[-2]
    if rope is not None and rotates != "none":
        q = _rotated(q, rope[:, -m:])
        k = _rotated(k, rope) if rotates == "qk" else k
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    mask = _mask(q, context, window) if causal else None
    if not soft_cap:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=factor)
        return y.contiguous()  # its strides are those of q
    scores = torch.tanh((q.float() @ k.float().transpose(-1, -2)) * (factor / soft_cap)) * soft_cap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1).to(v.dtype) @ v


def _rotated(x: Tensor, rope: Tensor) -> Tensor:
    """Return x rotated in fp32: element j with element j + d / 2."""
    cos, sin = rope.float()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _mask(q: Tensor, context: Any, window: int) -> Tensor:
    """Return [m, context]: whether a query, one of the last m, sees a key."""
    ones = q.new_ones((q.shape[-2], context), dtype=torch.bool)
    ahead = context - q.shape[-2]
    seen = ones.tril(ahead)
    return seen & ones.triu(ahead - window + 1) if window else seen


class AttentionOp(Op):
    """softmax(scale q k^T + mask) v; no kernel computes its backward pass."""

    def fake(self, given: Given) -> Tensor:
        """Return an empty result; raises NmmError for operands that do not fit."""
        q, k, v, layout = (given[name] for name in ("q", "k", "v", "k_layout"))
        check_dtypes(q, k, v, given["rope"])
        check_name("k_layout", layout, LAYOUTS)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}; pass [batch, heads, .., d]"
                )
        keys = k.shape if layout == "row" else (*k.shape[:2], k.shape[3], k.shape[2])
        same = (q.shape[0], k.shape[1], keys[2], q.shape[3])
        if tuple(v.shape) != same or keys[3] != q.shape[3] or keys[0] != q.shape[0]:
            raise ShapeError(
                f"q {tuple(q.shape)}, k {tuple(k.shape)} ({layout}) and v {tuple(v.shape)} differ "
                "in batch, kv_heads, context or d"
            )
        if q.shape[1] % k.shape[1]:
            raise ShapeError(f"{q.shape[1]} heads of q do not share {k.shape[1]} heads of k evenly")
        return torch.empty_like(q, memory_format=torch.contiguous_format)

    def lower(self, given: Given, rows: Tensor, m: int, transpose: Transpose | None) -> Launch:
        """Return the launch of a call."""
        q, k, v, rope = (given[one.name] for one in self.operands)
        batch, heads, tokens, d = q.shape
        spec = AttentionSpec(
            m=tokens, heads=heads, kv_heads=k.shape[1], context=v.shape[2], d=d, batch=batch,
            dtype=dtype_name(q), rope="none" if rope is None else given["rotates"],
            **{name: given[name] for name in _OF_SPEC},
        )  # fmt: skip
        operands = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (q, k, v)]
        return Launch(spec, (*operands, *([] if rope is None else [rope])))

    def sharding(self, given: Given) -> Placements:
        """Return that sequences may be cut over devices, and heads where each has its own keys.

        Heads that share keys are not cut: devices may be more than the heads of k.
        """
        from torch.distributed.tensor import Replicate, Shard

        whole = None if given["rope"] is None else Replicate()
        own = given["q"].shape[1] == given["k"].shape[1]
        cuts = (Replicate(), Shard(0), *([Shard(1)] if own else []))
        return [([cut], [cut, cut, cut, whole]) for cut in cuts]


_OF_SPEC = ("causal", "window", "soft_cap", "scale", "k_layout")
OPS = (
    AttentionOp(
        name="attention", bare=attention,
        operands=(*map(Operand, "qkv"), Operand("rope", "Tensor?")),
        keywords={
            "causal": True, "window": 0, "soft_cap": 0.0, "scale": None, "k_layout": "row",
            "rotates": "none", **WHERE,
        },
    ),
)  # fmt: skip
