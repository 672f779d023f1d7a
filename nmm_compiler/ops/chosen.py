"""The ops whose weights an index chooses for each token: `nmm.adapters_matmul`, `nmm.experts`.

Both are differentiated by their references: no kernel computes them backward.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ShapeError
from nmm_compiler.kernels.base import ACTIVATIONS, check_name
from nmm_compiler.kernels.experts.spec import FACTORS, HALVES, ExpertsSpec
from nmm_compiler.kernels.linear.corrected import MULTIPLIED
from nmm_compiler.kernels.linear.specs import AdaptersSpec
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.definition import WHERE, Op, Operand
from nmm_compiler.ops.launches import (
    Launch,
    Transpose,
    dtype_name,
    turned,
)
from nmm_compiler.ops.linear import UV, LinearOfCall, LinearOp, of_one_dtype
from nmm_compiler.ops.operands import (
    Given,
    check_dtypes,
    check_same,
    read_layouts,
    tokens_of,
    weight_shape,
)
from nmm_compiler.ops.references import activate, tracing
from nmm_compiler.ops.stored import Matrix, stored_operands  # which also defines nmm.dequantize


def stacks(given: Given, name: str) -> dict[str, Matrix]:
    """Return the weights of gate_up or of down of all groups, by the letters u, v and w.

    given: the arguments of a call. Of factors alone the weight is the second one.
    """
    form, layout = given["format"], given["factor_layout"]
    w = Matrix(name, given[name], given["weight_layout"], form, given[f"{name}_scale"])
    u, v = (Matrix(f"{name}_{end}", given[f"{name}_{end}"], layout) for end in "uv")
    every = {"u": u, "v": v, "w": w}
    if form == FACTORS:
        every = {"u": u, "v": dataclasses.replace(w, name=v.name, form="")}
    return {letter: one for letter, one in every.items() if one.tensor is not None}


def of_group(weights: Mapping[str, Matrix], some: Any) -> dict[str, Matrix]:
    """Return the weights of one group, or of that of each pick."""
    return {
        letter: dataclasses.replace(
            one, tensor=one.tensor[some], scale=None if one.scale is None else one.scale[some]
        )
        for letter, one in weights.items()
    }


def times(x: Tensor, given: Given, name: str, some: Any) -> Tensor:
    """Return rows times the weight of gate_up or of down, or its factors, or both, plus the bias.

    some: one group, that of each row, or a slice of all; x then has a dimension more.
    """
    y: Any = 0
    weights = of_group(stacks(given, name), some)
    wide = {
        letter: one.wide(x.dtype).mT if one.layout == "col" else one.wide(x.dtype)
        for letter, one in weights.items()
    }

    def product(first: Tensor) -> Tensor:
        """Return x times a matrix; either may be filled up with zeros, as blocks are."""
        k = min(x.shape[-1], first.shape[-2])
        return x[..., :k] @ first[..., :k, :]

    if "w" in wide:
        y = product(wide["w"])
    if "u" in wide:
        y = y + product(wide["u"]) @ wide["v"]
    bias = given[f"{name}_bias"]
    if bias is not None:
        y = y + (bias[some].unsqueeze(1) if isinstance(some, Tensor) else bias[some])
    return y


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
) -> Given | None:  # fmt: skip
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
    """activation(x w + gains_i (x u_i) v_i + bias), i = index of the token, -1 for none.

    u: [k, groups r] or "col" [groups r, k], v: [groups r, n] or "col" [n, groups r], the factors of
    all adapters; index: [...], as the tokens of x; gains: [groups].
    """

    by_kernels = Op.by_kernels  # by its reference: no kernel computes it backward
    sharding = Op.sharding

    def reference(self, *args: Any, **kw: Any) -> Any:
        """Return what the op computes, in plain PyTorch."""
        given = self.bound(args, kw)
        x, gains = given["x"], given["gains"].to(given["x"].dtype)
        index = given["index"].reshape(tokens_of(x, given["x_layout"])[0]).unsqueeze(-1)
        chosen = index == torch.arange(gains.shape[0], device=x.device)
        each = torch.where(chosen, gains, torch.zeros_like(gains))
        rank = weight_shape("u", given["u"], given["u_layout"])[1] // gains.shape[0]
        return super().reference(*args, **kw, inner_factor=each.repeat_interleave(rank, -1))

    def fake(self, given: Given) -> Tensor:
        """Return an empty result; raises NmmError for operands that do not fit."""
        made: Tensor = super().fake(given)
        gains, rank = given["gains"], weight_shape("u", given["u"], given["u_layout"])[1]
        if gains.dim() != 1 or rank % gains.shape[0]:
            raise ShapeError(
                f"gains has shape {tuple(gains.shape)}; pass one for each adapter, whose ranks add "
                f"up to {rank}"
            )
        _check_index(given["index"], tokens_of(given["x"], given["x_layout"])[0])
        return made

    def lower(self, given: Given, rows: Tensor, m: int, transpose: Transpose | None) -> Launch:
        """Return the launch of a call."""
        rank = weight_shape("u", given["u"], given["u_layout"])[1] // given["gains"].shape[0]
        given["index"] = given["index"].reshape(-1).to(torch.int32)
        given["row_scale"] = given["gains"].float().repeat_interleave(rank)
        return super().lower(given, rows, m, transpose)

    def sizes(self, given: Given, linears: Sequence[LinearOfCall]) -> Given:
        """Return the sizes of a spec: r is the rank of one adapter."""
        made, groups = super().sizes(given, linears), given["gains"].shape[0]
        return {**made, "r": made["r"] // groups, "groups": groups}


class ExpertsOp(Op):
    """Gated MLPs that an index chooses for each token."""

    def reference(self, *args: Any, **kw: Any) -> Tensor:
        """Return the sum over j of gates[t, j] MLP_i(x[t]), i = index[t, j]; see `ExpertsSpec`.

        gate_up: [groups, k, 2 n], down: [groups, n, k], or transposed each with weight_layout
        "col". index, gates: [tokens, top_k]; -1 for no expert.

        format: "fp8", float8_e4m3fn numbers up to 240 with scales [groups, outputs] in x's dtype;
        MX blocks, bytes [groups, outputs, inputs bits / 8] and scales [groups, outputs,
        inputs / 32], layout "col", halves joined, inputs and features of h filled up with zeros to
        whole 128s; "factors", where gate_up and down are the second factors. Frozen but for the
        latter. gate_up_u, down_u: first factors, [groups, inputs, rank]; gate_up_v, down_v: second
        factors of branches beside gate_up and down, [groups, rank, outputs]; factor_layout: "col"
        for all of them transposed. With MX blocks they are filled up, too, but for the inputs of
        gate_up_u.
        """
        given = self.bound(args, kw)
        x, index, gates = given["x"], given["index"], given["gates"]
        if x.is_meta:
            return torch.empty_like(x)
        picks, top_k = index.reshape(-1), index.shape[-1]
        rows, groups = x.reshape(-1, x.shape[-1]), given["down"].shape[0]

        def mlp(rows: Tensor, some: Any) -> Tensor:
            both = times(rows, given, "gate_up", some)
            h = gated(both, **{name: given[name] for name in _SAID})
            return times(h, given, "down", some)

        if tracing() or torch.compiler.is_compiling():  # each pick's own weights: no shape is data
            y = mlp(rows.repeat_interleave(top_k, 0).unsqueeze(1), picks.clamp(min=0)).squeeze(1)
            each = torch.where(picks < 0, 0, gates.reshape(-1).to(y.dtype)).unsqueeze(-1)
            return (y * each).view(-1, top_k, y.shape[-1]).sum(1).to(x.dtype).reshape(x.shape)
        if rows.shape[0] == 0:
            return x.clone()  # without tokens too the result has a gradient
        total = torch.zeros(rows.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        total = total.to(x.device)
        for group in torch.unique(picks[picks != -1]).tolist():
            if not 0 <= group < groups:
                raise IndexError(f"experts: index {group} is none of {groups} experts")
            place = (picks == group).nonzero().squeeze(-1)
            token = torch.div(place, top_k, rounding_mode="floor")
            y = mlp(rows[token], group)
            total = total.index_add(0, token, (y * gates.reshape(-1, 1)[place]).to(total.dtype))
        return total.to(x.dtype).reshape(x.shape)

    def fake(self, given: Given) -> Tensor:
        """Return an empty result; raises NmmError for operands that do not fit."""
        read_layouts(given)
        check_name("halves", given["halves"], HALVES)
        check_name("format", given["format"], ("", FACTORS, *MULTIPLIED))
        x, picks = given["x"], given["index"]
        gate_up, down = (self._first(given, name) for name in ("gate_up", "down"))
        every = (*gate_up.weights.values(), *down.weights.values())
        scales = (one.scale for one in every if one.form not in MX)
        check_dtypes(x, *of_one_dtype(given, (gate_up, down)), *scales)
        k, filled = x.shape[-1], 128 * (-(-x.shape[-1] // 128))
        if given["format"] in MX:  # x w takes inputs filled up with zeros, x u those of x
            w = {"w": gate_up.weights.pop("w")}
            up = dataclasses.replace(gate_up, weights=w).outputs(filled)
        if gate_up.weights:
            up = gate_up.outputs(k)
        outputs = down.outputs(up // 2, "h, half of gate_up's outputs,")
        check_same("outputs of down and features of x", outputs, k)
        check_same("shapes of index and gates", tuple(picks.shape), tuple(given["gates"].shape))
        _check_index(picks[..., 0], x.shape[:-1])
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def _first(given: Given, name: str) -> LinearOfCall:
        """Return gate_up or down of the first group; ShapeError for what is no stack."""
        weights = stacks(given, name)
        for one in weights.values():
            if one.tensor.dim() != 3:
                raise ShapeError(f"{one.name}: {tuple(one.tensor.shape)} is no matrix an expert")
        bias = given[f"{name}_bias"]
        own = None if bias is None else bias[0]
        return LinearOfCall(name, of_group(weights, 0), own, "", "", {})

    def spec_of(self, given: Given, m: int, dtype: str) -> ExpertsSpec:
        """Return the spec of a call with m tokens; its stored weights lie as kernels take them."""
        form = given["format"]
        (_, first, _), (n, last, _) = (self._first(given, one).sizes for one in ("gate_up", "down"))
        return ExpertsSpec(
            m=m, k=given["x"].shape[-1], n=n, groups=given["down"].shape[0],
            top_k=given["index"].shape[-1], dtype=dtype, weight=form, ranks=(first, last),
            weight_layout="row" if form else given["weight_layout"],
            gate_up_bias=given["gate_up_bias"] is not None,
            down_bias=given["down_bias"] is not None, **{name: given[name] for name in _SAID},
        )  # fmt: skip

    def lower(self, given: Given, rows: Tensor, m: int, transpose: Transpose | None) -> Launch:
        """Return the launch of a call."""
        spec = self.spec_of(given, m, dtype_name(rows))
        # kernels take plain weights in either layout, and factors by rows
        kept = "w" if not given["format"] and transpose is None else ""
        if not kept:
            spec = dataclasses.replace(spec, weight_layout="row")
        named = given | {"x": rows, "index": given["index"].reshape(m, -1).to(torch.int32)}
        named["gates"] = given["gates"].reshape(m, -1).float()
        for name in ("gate_up", "down"):
            named |= stored_operands(stacks(given, name), transpose or turned, kept=kept)
        return Launch(spec, tuple(named[tensor.name] for tensor in spec.inputs()))


_SAID = ("halves", "activation", "limit", "slope", "plus")
_MORE = (
    "gate_up_bias", "down_bias", "gate_up_scale", "down_scale",
    "gate_up_u", "gate_up_v", "down_u", "down_v",
)  # fmt: skip
ADAPTERS = AdaptersOp(
    name="adapters_matmul", spec=AdaptersSpec,
    kept="u",  # a kernel gathers its rows
    operands=(
        Operand("x"), Operand("index"), Operand("u", letter="u"), Operand("v", letter="v"),
        Operand("gains"), Operand("bias", "Tensor?", "bias"), Operand("w", "Tensor?", "w"),
    ),
    keywords={"activation": "identity", **UV, "w_layout": "row", **WHERE},
)  # fmt: skip
EXPERTS = ExpertsOp(
    name="experts",
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
