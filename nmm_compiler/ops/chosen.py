"""The ops whose weights an index chooses for each token: `nmm.adapters_matmul`, `nmm.experts`.

Both are differentiated by their references: no kernel computes them backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ShapeError
from nmm_compiler.kernels.base import ACTIVATIONS, check_name
from nmm_compiler.kernels.experts.spec import FACTORS, HALVES, ExpertsSpec
from nmm_compiler.kernels.linear.corrected import MULTIPLIED
from nmm_compiler.kernels.linear.specs import AdaptersSpec
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.corrected import stored_operands  # that room also defines nmm.dequantize
from nmm_compiler.ops.definition import LAYOUTS, WHERE, Op, Operand
from nmm_compiler.ops.launches import (
    Launch,
    Transpose,
    dtype_name,
    turned,
)
from nmm_compiler.ops.linear import LinearOp
from nmm_compiler.ops.operands import (
    check_dtypes,
    check_same,
    read_layouts,
    tokens_of,
    weight_shape,
)
from nmm_compiler.ops.references import activate, product, tracing


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
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    gate_up_u: Tensor | None = None,
    gate_up_v: Tensor | None = None,
    down_u: Tensor | None = None,
    down_v: Tensor | None = None,
    *,
    format: str = "",
    weight_layout: str = "row",
    factor_layout: str = "row",
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

    format: "fp8", float8_e4m3fn numbers up to 240 with scales [groups, outputs] in x's dtype; MX
    blocks, bytes [groups, outputs, inputs bits / 8] and scales [groups, outputs, inputs / 32],
    layout "col", halves joined, inputs and features of h filled up with zeros to whole 128s;
    "factors", where gate_up and down are the second factors. Frozen but for the latter. gate_up_u,
    down_u: first factors, [groups, inputs, rank]; gate_up_v, down_v: second factors of branches
    beside gate_up and down, [groups, rank, outputs]; factor_layout: "col" for all of them
    transposed. With MX blocks they are filled up, too, but for the inputs of gate_up_u.
    """
    if x.is_meta:
        return torch.empty_like(x)
    picks, top_k = index.reshape(-1), index.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    first = gate_up, gate_up_scale, gate_up_u, gate_up_v, gate_up_bias
    second = down, down_scale, down_u, down_v, down_bias
    said = format, weight_layout == "col", factor_layout == "col"

    def mlp(rows: Tensor, some: Any) -> Tensor:
        both = _times(rows, first, some, *said)
        h = gated(both, halves, activation, limit, slope, plus)
        return _times(h, second, some, *said)

    if tracing() or torch.compiler.is_compiling():  # each pick's own weights: no shape is data
        y = mlp(rows.repeat_interleave(top_k, 0).unsqueeze(1), picks.clamp(min=0)).squeeze(1)
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
        y = mlp(rows[token], group)
        total = total.index_add(0, token, (y * gates.reshape(-1, 1)[place]).to(total.dtype))
    return total.to(x.dtype).reshape(x.shape)


def _times(
    x: Tensor, side: Sequence[Any], some: Any, format: str, col: bool, factors_col: bool
) -> Tensor:
    """Return rows times the weight of gate_up or of down, or its factors, or both, plus the bias.

    side: the weight, its scale, factors and bias, of all groups. some: one group, or that of each
    row, of which x has one more dimension.
    """
    picked: list[Any] = [None if one is None else one[some] for one in side]
    w, scale, u, v, bias = picked
    if factors_col:
        u, v = (None if one is None else one.mT for one in (u, v))
    if format in MX:
        w = torch.ops.nmm.dequantize(w, scale, format, x.dtype).mT
    elif col:
        w = w.mT
    if format == FACTORS:
        w, v = None, w
    elif format not in MX and scale is not None:
        w = w.to(x.dtype) * scale.to(x.dtype).unsqueeze(-2)
    y: Any = 0
    if w is not None:
        y = x @ w[..., : x.shape[-1], :]  # blocks are filled up with zeros
    if u is not None:
        y = y + (x @ u) @ v
    if bias is not None:
        y = y + (bias.unsqueeze(1) if isinstance(some, Tensor) else bias)
    made: Tensor = y
    return made


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


def said_of(
    sample: Tensor, made: Tensor, limits: Collection[float] = (), slopes: Collection[float] = (),
    pluses: Collection[float] = (),
) -> dict[str, Any] | None:  # fmt: skip
    """Return how `gated` says a function that made something of a sample; None for another one.

    limits, slopes, pluses: numbers that the function may hold, beside plain ones.
    """
    plain = itertools.product(HALVES, ACTIVATIONS, (0.0,), (1.0,), (0.0,))
    clamped = itertools.product(HALVES, ("silu",), limits, (1.0, *slopes), (0.0, *pluses))
    for said in itertools.chain(plain, clamped):
        wanted = gated(sample, *said)
        if wanted.shape == made.shape and torch.allclose(made, wanted, 1e-6, 1e-9):
            return dict(zip(("halves", "activation", "limit", "slope", "plus"), said, strict=True))
    return None


def _check_index(index: Tensor, tokens: Sequence[Any]) -> None:
    wanted = math.prod(tokens)
    if index.dtype.is_floating_point or index.numel() != wanted:
        raise ShapeError(
            f"index is {index.dtype}{list(index.shape)}; pass a whole number for each of {wanted} "
            "tokens"
        )


class AdaptersOp(LinearOp):
    """A linear layer of all tokens, and for each the branch of its adapter."""

    by_kernels = Op.by_kernels  # by its reference: no kernel computes it backward
    sharding = Op.sharding

    def of_one_dtype(self, given: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the tensors, or None, that have the dtype of x."""
        yield from (given[name] for name in ("u", "v", "bias", "w"))

    def fake(self, *args: Any, **kw: Any) -> Tensor:
        """Return an empty result; raises NmmError for operands that do not fit."""
        given = self.bound(args, kw)
        made: Tensor = super().fake(*args, **kw)
        gains, rank = given["gains"], weight_shape("u", given["u"], given["u_layout"])[1]
        if gains.dim() != 1 or rank % gains.shape[0]:
            raise ShapeError(
                f"gains has shape {tuple(gains.shape)}; pass one for each adapter, whose ranks add "
                f"up to {rank}"
            )
        _check_index(given["index"], tokens_of(given["x"], given["x_layout"])[0])
        return made

    def lower(
        self, rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int,
        transpose: Transpose | None,
    ) -> list[Launch]:  # fmt: skip
        """Return the launch of a call."""
        given = self.bound(args, kw)
        groups = given["gains"].shape[0]
        rank = weight_shape("u", given["u"], given["u_layout"])[1] // groups
        given["index"] = given["index"].reshape(-1).to(torch.int32)
        given["gains"] = given["gains"].float().repeat_interleave(rank)
        return [self.launch(rows, given, m, transpose, {"r": rank, "groups": groups})]


class ExpertsOp(Op):
    """Gated MLPs that an index chooses for each token."""

    def fake(self, *args: Any, **kw: Any) -> Tensor:
        """Return an empty result; raises NmmError for operands that do not fit."""
        given = self.bound(args, kw)
        read_layouts(kw)
        check_name("halves", given["halves"], HALVES)
        check_name("format", given["format"], ("", FACTORS, *MULTIPLIED))
        x, picks = given["x"], given["index"]
        form, dtypes = given["format"], []
        for name in ("gate_up", "down"):
            dtypes += [given[name]] if form in ("", FACTORS) else []
            dtypes += [given[f"{name}_scale"]] if form not in MX else []
            dtypes += [given[f"{name}_{end}"] for end in ("bias", "u", "v")]
        check_dtypes(x, *dtypes)
        gate_up, down = (self._sizes(given, name) for name in ("gate_up", "down"))
        inputs = 128 * (-(-x.shape[-1] // 128)) if form in MX else x.shape[-1]
        check_same("features of x and gate_up", inputs, gate_up[0])
        check_same(
            "outputs of gate and up, and two for each input of down", gate_up[1], 2 * down[0]
        )
        check_same("outputs of down and features of x", down[1], x.shape[-1])
        check_same("shapes of index and gates", tuple(picks.shape), tuple(given["gates"].shape))
        _check_index(picks[..., 0], x.shape[:-1])
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def _sizes(given: Mapping[str, Any], name: str) -> tuple[Any, Any]:
        """Return (inputs, outputs) of gate_up or down; raise ShapeError for what does not fit."""
        w, form, layout = given[name], given["format"], given["weight_layout"]
        u, v, scale = (given[f"{name}_{end}"] for end in ("u", "v", "scale"))
        if any(one is not None and one.dim() != 3 for one in (w, u, v)):
            shapes = [tuple(one.shape) for one in (w, u, v) if one is not None]
            raise ShapeError(f"{name}: shapes {shapes} are not one matrix for each expert")
        inputs, outputs = weight_shape(name, w[0], "col" if form in MX else layout)
        wanted: tuple[Any, ...] = (w.shape[0], outputs)
        if form in MX:
            inputs = inputs * 8 // MX[form].bits
            wanted = (*wanted, inputs // 32)
        if form in ("", FACTORS):
            wanted = ()
        check_same(f"shapes of {name}_scale", () if scale is None else tuple(scale.shape), wanted)
        if u is not None:
            k, rank = weight_shape(f"{name}_u", u[0], given["factor_layout"])
            if form == FACTORS:
                check_same(f"ranks of {name}_u and {name}", rank, inputs)
                return k, outputs
            check_same(
                f"inputs of {name}_u", k, given["x"].shape[-1] if name == "gate_up" else inputs
            )
        check_same(f"factors {name}_u and {name}_v", u is None, v is None or form == FACTORS)
        if v is not None:
            shape = weight_shape(f"{name}_v", v[0], given["factor_layout"])
            check_same(f"shapes of {name}_u and {name}_v", shape, (rank, outputs))
        return inputs, outputs

    def spec_of(self, given: Mapping[str, Any], m: int, dtype: str) -> ExpertsSpec:
        """Return the spec of a call with m tokens; its stored weights lie as kernels take them."""
        form, n = given["format"], self._sizes(given, "down")[0]
        layout = given["factor_layout"]
        first, last = (
            0 if given[name] is None else weight_shape(name, given[name][0], layout)[1]
            for name in ("gate_up_u", "down_u")
        )
        return ExpertsSpec(
            m=m, k=given["x"].shape[-1], n=n, groups=given["down"].shape[0],
            top_k=given["index"].shape[-1], dtype=dtype, weight=form, ranks=(first, last),
            weight_layout="row" if form else given["weight_layout"],
            gate_up_bias=given["gate_up_bias"] is not None,
            down_bias=given["down_bias"] is not None, **{name: given[name] for name in _SAID},
        )  # fmt: skip

    def lower(
        self, rows: Tensor, args: Sequence[Any], kw: dict[str, Any], m: int,
        transpose: Transpose | None,
    ) -> list[Launch]:  # fmt: skip
        """Return the launch of a call."""
        given = self.bound(args, kw)
        form, layout = given["format"], given["factor_layout"]
        spec = self.spec_of(given, m, dtype_name(rows))
        ways = {"w": given["weight_layout"], "u": layout, "v": layout}
        if not form and transpose is None:  # kernels take plain weights in either layout
            ways["w"] = "row"
        else:
            spec = dataclasses.replace(spec, weight_layout="row")
        named = {"x": rows, "index": given["index"].reshape(m, -1).to(torch.int32)}
        named["gates"] = given["gates"].reshape(m, -1).float()
        for name in ("gate_up", "down"):
            one = {end: given[f"{name}_{end}"] for end in ("u", "v", "bias")}
            one |= {"w": given[name], "w_scale": given[f"{name}_scale"], "branch_scale": None}
            made = stored_operands(one, form, ways, transpose or turned)
            if form == FACTORS:
                made["v"] = made.pop("w")
            ends = {"w": name, "w_scale": f"{name}_scale"}
            named |= {ends.get(end, f"{name}_{end}"): tensor for end, tensor in made.items()}
        return [Launch(spec, tuple(named[tensor.name] for tensor in spec.inputs()))]


_SAID = ("halves", "activation", "limit", "slope", "plus")
_MORE = (
    *(f"{name}_{end}" for end in ("bias", "scale") for name in ("gate_up", "down")),
    *(f"{name}_{end}" for name in ("gate_up", "down") for end in ("u", "v")),
)
ADAPTERS = AdaptersOp(
    name="adapters_matmul", bare=adapters_matmul, spec=AdaptersSpec,
    operands=(  # u as it is stored: a kernel gathers its rows
        *map(Operand, ("x", "index", "u")), Operand("v", layout="v_layout"),
        Operand("gains", kernel="row_scale"), Operand("bias", "Tensor?"),
        Operand("w", "Tensor?", layout="w_layout"),
    ),
    keywords={
        "activation": "identity", **LAYOUTS, "u_layout": "row", "v_layout": "row",
        "w_layout": "row", **WHERE,
    },
)  # fmt: skip
EXPERTS = ExpertsOp(
    name="experts",
    bare=experts,
    operands=(
        *map(Operand, ("x", "gate_up", "down", "index", "gates")),
        *(Operand(name, "Tensor?") for name in _MORE),
    ),
    keywords={
        "format": "",
        "weight_layout": "row",
        "factor_layout": "row",
        "halves": "joined",
        "activation": "silu",
        "limit": 0.0,
        "slope": 1.0,
        "plus": 0.0,
        **WHERE,
    },
)
