"""The ops whose weights an index chooses for each token: `nmm.adapters_matmul`, `nmm.experts`.

Both are differentiated by their references: no kernel computes them backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ShapeError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.kernels.experts.spec import HALVES, ExpertsSpec
from nmm_compiler.kernels.linear.adapters_spec import AdaptersSpec
from nmm_compiler.ops.definition import LAYOUTS, WHERE, Op, Operand, Placements
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, features, weight
from nmm_compiler.ops.operands import (
    check_dtypes,
    check_same,
    check_vector,
    empty_result,
    read_layouts,
    tokens_of,
    weight_shape,
)
from nmm_compiler.ops.references import activate, product

tracing = torch._C._len_torch_dispatch_stack


def adapters_matmul(
    x: Tensor,
    index: Tensor,
    u: Tensor,
    v: Tensor,
    gains: Tensor,
    bias: Tensor | None = None,
    w: Tensor | None = None,
    *,
    activation: str = "identity",
    x_layout: str = "row",
    out_layout: str = "row",
    u_layout: str = "row",
    v_layout: str = "row",
    w_layout: str = "row",
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return activation(x w + gains_i (x u_i) v_i + bias), i = index of the token, -1 for none.

    u: [k, groups r] or "col" [groups r, k], v: [groups r, n] or "col" [n, groups r], the factors of
    all adapters; index: [...], as the tokens of x; gains: [groups].
    """
    if x_layout == "col":
        x = x.t()
    groups = gains.shape[0]
    h = product(x, u, u_layout, None, "row")
    chosen = index.reshape(x.shape[:-1]).unsqueeze(-1) == torch.arange(groups, device=x.device)
    each = torch.where(chosen, gains.to(h.dtype), torch.zeros((), dtype=h.dtype, device=x.device))
    h = h * each.repeat_interleave(h.shape[-1] // groups, -1)
    y = product(h, v, v_layout, None, out_layout)
    if w is not None:
        y = product(x, w, w_layout, None, out_layout) + y
    if bias is not None:
        y = y + (bias if out_layout == "row" else bias.unsqueeze(1))
    return y if activation == "identity" else activate(y, activation)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    gates: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    weight_layout: str = "row",
    halves: str = "joined",
    activation: str = "silu",
    limit: float = 0.0,
    slope: float = 1.0,
    plus: float = 0.0,
    target: str = "trn2",
    executor: str = "reference",
) -> Tensor:
    """Return the sum over j of gates[t, j] MLP_i(x[t]), i = index[t, j], as `ExpertsSpec` says it.

    gate_up: [groups, k, 2 n], down: [groups, n, k], or transposed each with weight_layout "col".
    index, gates: [tokens, top_k]; -1 for no expert.
    """
    if x.is_meta:
        return torch.empty_like(x)
    if weight_layout == "col":
        gate_up, down = gate_up.mT, down.mT
    picks, top_k = index.reshape(-1), index.shape[-1]
    rows = x.reshape(-1, x.shape[-1])

    def shape(both: Tensor) -> Tensor:
        return gated(both, halves, activation, limit, slope, plus)

    if tracing() or torch.compiler.is_compiling():  # each pick's own weights: no shape is data
        some = picks.clamp(min=0)
        h = _batched(rows.repeat_interleave(top_k, 0), gate_up, gate_up_bias, some)
        y = _batched(shape(h), down, down_bias, some)
        each = torch.where(picks < 0, 0, gates.reshape(-1).to(y.dtype)).unsqueeze(-1)
        return (y * each).view(-1, top_k, y.shape[-1]).sum(1).to(x.dtype).reshape(x.shape)
    if rows.shape[0] == 0:
        return x.clone()  # without tokens too the result has a gradient
    total = torch.zeros(rows.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    total = total.to(x.device)
    for group in torch.unique(picks[picks != -1]).tolist():
        if not 0 <= group < gate_up.shape[0]:
            raise IndexError(f"experts: index {group} is none of {gate_up.shape[0]} experts")
        place = (picks == group).nonzero().squeeze(-1)
        token = torch.div(place, top_k, rounding_mode="floor")
        h = rows[token] @ gate_up[group]
        h = shape(h if gate_up_bias is None else h + gate_up_bias[group])
        y = h @ down[group]
        y = y if down_bias is None else y + down_bias[group]
        total = total.index_add(0, token, (y * gates.reshape(-1, 1)[place]).to(total.dtype))
    return total.to(x.dtype).reshape(x.shape)


def _batched(x: Tensor, weights: Tensor, bias: Tensor | None, picks: Tensor) -> Tensor:
    y = torch.bmm(x.unsqueeze(1), weights[picks]).squeeze(1)
    return y if bias is None else y + bias[picks]


def gated(
    both: Tensor, halves: str, activation: str, limit: float, slope: float, plus: float
) -> Tensor:
    """Return h of a token from its gate and up, as `ExpertsSpec` says it."""
    if halves == "interleaved":
        gate, up = both[..., ::2], both[..., 1::2]
    else:
        gate, up = both.chunk(2, -1)
    if not limit:
        return activate(gate, activation) * up
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + plus) * (gate * torch.sigmoid(gate * slope))


def _check_index(index: Tensor, tokens: Sequence[Any]) -> None:
    wanted: Any = 1
    for size in tokens:
        wanted = wanted * size
    if index.dtype.is_floating_point or index.numel() != wanted:
        raise ShapeError(
            f"index is {index.dtype}{list(index.shape)}; pass a whole number for each of {wanted} "
            "tokens"
        )


class ChosenOp(Op):
    """An op whose weights an index chooses; DTensor gets whole tensors."""

    def sharding(self, *args: Any, **kw: Any) -> Placements:
        """Return that every tensor is whole on each device."""
        from torch.distributed.tensor import Replicate

        return [([Replicate()], [None if one is None else Replicate() for one in args])]


class AdaptersOp(ChosenOp):
    """A linear layer of all tokens, and for each the branch of its adapter."""

    def reference(self, *args: Any, **kw: Any) -> Tensor:
        """Return what the op computes."""
        return adapters_matmul(*args, **kw)

    def fake(self, *args: Any, **kw: Any) -> Tensor:
        """Return an empty result; raises NmmError for operands that do not fit."""
        given = self.bound(args, kw)
        read_layouts(kw)
        x, u, v, w, gains = (given[name] for name in ("x", "u", "v", "w", "gains"))
        check_dtypes(x, u, v, given["bias"], w)
        tokens, k = tokens_of(x, given["x_layout"])
        inputs, rank = weight_shape("u", u, given["u_layout"])
        check_same("features of x and u", k, inputs)
        rows, n = weight_shape("v", v, given["v_layout"])
        check_same("rank of u and v", rank, rows)
        if gains.dim() != 1 or rank % gains.shape[0]:
            raise ShapeError(
                f"gains has shape {tuple(gains.shape)}; pass one for each adapter, whose ranks add "
                f"up to {rank}"
            )
        _check_index(given["index"], tokens)
        if w is not None:
            shape = weight_shape("w", w, given["w_layout"])
            check_same("shapes of the dense w and of u v", shape, (k, n))
        check_vector("bias", given["bias"], n)
        return empty_result(x, tokens, n, given["out_layout"])

    def lower(
        self, rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int,
        transpose: Transpose | None,
    ) -> list[Launch]:  # fmt: skip
        """Return the launch of a call."""
        given = self.bound(args, kw)
        v, v_layout = weight(given["v"], given["v_layout"], transpose)
        w, w_layout = given["w"], "row"
        if w is not None:
            w, w_layout = weight(w, given["w_layout"], transpose)
        groups, bias = given["gains"].shape[0], given["bias"]
        k, rank = features(given["u"], given["u_layout"])
        spec = AdaptersSpec(
            m=m, k=k, r=rank // groups, n=features(v, v_layout)[1], groups=groups,
            dtype=dtype_name(rows), x_layout=given["x_layout"], out_layout=given["out_layout"],
            u_layout=given["u_layout"], v_layout=v_layout, w_layout=w_layout,
            bias=bias is not None, base=w is not None, activation=given["activation"],
        )  # fmt: skip
        chosen = given["index"].reshape(-1).to(torch.int32)
        gains = given["gains"].float().repeat_interleave(spec.r)
        operands = (rows, given["u"], v, w, bias, chosen, gains)
        return [Launch(spec, tuple(t for t in operands if t is not None))]


class ExpertsOp(ChosenOp):
    """Gated MLPs that an index chooses for each token."""

    def reference(self, *args: Any, **kw: Any) -> Tensor:
        """Return what the op computes."""
        return experts(*args, **kw)

    def fake(self, *args: Any, **kw: Any) -> Tensor:
        """Return an empty result; raises NmmError for operands that do not fit."""
        given = self.bound(args, kw)
        read_layouts(kw)
        check_name("halves", given["halves"], HALVES)
        x, gate_up, down, layout = (given[n] for n in ("x", "gate_up", "down", "weight_layout"))
        check_dtypes(x, gate_up, down, given["gate_up_bias"], given["down_bias"])
        if gate_up.dim() != 3 or down.dim() != 3:
            raise ShapeError(
                f"gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} are not one matrix "
                "for each expert"
            )
        k, both = weight_shape("gate_up", gate_up[0], layout)
        n, outputs = weight_shape("down", down[0], layout)
        check_same("features of x and gate_up", x.shape[-1], k)
        check_same("outputs of gate and up, and two for each input of down", both, 2 * n)
        check_same("outputs of down and features of x", outputs, k)
        picks = given["index"]
        check_same("shapes of index and gates", tuple(picks.shape), tuple(given["gates"].shape))
        _check_index(picks[..., 0], x.shape[:-1])
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def lower(
        self, rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int,
        transpose: Transpose | None,
    ) -> list[Launch]:  # fmt: skip
        """Return the launch of a call."""
        given = self.bound(args, kw)
        up, down, layout = given["gate_up"], given["down"], given["weight_layout"]
        if layout == "col" and transpose is not None:
            up, down, layout = up.mT.contiguous(), down.mT.contiguous(), "row"
        biases = given["gate_up_bias"], given["down_bias"]
        own = ("halves", "activation", "limit", "slope", "plus")
        spec = ExpertsSpec(
            m=m, k=rows.shape[1], n=down.shape[1 if layout == "row" else 2], groups=down.shape[0],
            top_k=given["index"].shape[-1], dtype=dtype_name(rows), weight_layout=layout,
            gate_up_bias=biases[0] is not None, down_bias=biases[1] is not None,
            **{name: given[name] for name in own},
        )  # fmt: skip
        index = given["index"].reshape(m, -1).to(torch.int32)
        operands = (rows, up, down, *biases, index, given["gates"].reshape(m, -1).float())
        return [Launch(spec, tuple(t for t in operands if t is not None))]


_BIASES = Operand("gate_up_bias", "Tensor?"), Operand("down_bias", "Tensor?")
ADAPTERS = AdaptersOp(
    name="adapters_matmul",
    operands=(
        *map(Operand, ("x", "index", "u", "v", "gains")),
        Operand("bias", "Tensor?"), Operand("w", "Tensor?"),
    ),
    keywords={
        "activation": "identity", **LAYOUTS, "u_layout": "row", "v_layout": "row",
        "w_layout": "row", **WHERE,
    },
)  # fmt: skip
EXPERTS = ExpertsOp(
    name="experts",
    operands=(*map(Operand, ("x", "gate_up", "down", "index", "gates")), *_BIASES),
    keywords={
        "weight_layout": "row",
        "halves": "joined",
        "activation": "silu",
        "limit": 0.0,
        "slope": 1.0,
        "plus": 0.0,
        **WHERE,
    },
)
