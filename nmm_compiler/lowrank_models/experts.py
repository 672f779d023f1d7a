"""Mixtures of experts that stack their weights: [experts, n, k], or [experts, k, n] in GPT-OSS.

transformers 5 keeps the experts of a layer in two parameters, `gate_up_proj` (or `up_proj`) and
`down_proj`. `apart` puts a `SplitExperts` in the place of such a layer, with an `nn.Linear` per
expert that is a view of its slice, so that experts are selected, calibrated and compressed as any
linear. Then it stacks what came out: the layer keeps its name, its weights become `StackedFactors`,
a `StackedBase`, or both, and its forward one `nmm.experts`.

Where that call cannot say what a layer computes (another function between the products, one weight
dense and the other factors alone) its products are batched, of [experts, tokens, k], in which the
tokens that did not choose an expert are zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmm_compiler.kernels.experts.spec import FACTORS, HALVES
from nmm_compiler.kernels.linear.corrected import MULTIPLIED
from nmm_compiler.kernels.packed_formats import FORMATS, MX
from nmm_compiler.lowrank_models.modules import (
    LowRankLinear,
    QuantizedLinear,
    distinct_modules,
    put,
)
from nmm_compiler.ops import (
    chosen,
    registration as registration,  # defines torch.ops.nmm
)

_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed")
_SAMPLE = (*(0.5 * n for n in range(-24, 25)), 7.3, -7.3, 50.0, -50.0, 1000.0, -1000.0)


class ExpertLinear(nn.Linear):
    """One expert's slice of a stacked weight; computes what `nn.Linear` does."""


class SplitExperts(nn.Module):
    """Stands in for a layer of stacked experts, `base`, while its experts are being factorized."""

    base: Any

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        # as no child, so that its parameters are not registered a second time
        object.__setattr__(self, "base", base)
        for name in _projections(self.base):
            slices = (self._slice(name, i) for i in range(self.base.num_experts))
            self.add_module(name, nn.ModuleList(slices))

    def _slice(self, name: str, i: int) -> ExpertLinear:
        """Return the linear of an expert, whose weight and bias are views of the stacked ones."""
        stacked, bias = getattr(self.base, name), getattr(self.base, f"{name}_bias", None)
        weight = stacked.detach()[i].T if self.base.is_transposed else stacked.detach()[i]
        linear = ExpertLinear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, stacked.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach()[i], bias.requires_grad)
        return linear.train(self.base.training)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Mix the experts: hidden [tokens, k], index and weights [tokens, experts a token]."""
        base, out = self.base, torch.zeros_like(hidden)
        first, second = (getattr(self, name) for name in _projections(base))
        for expert in range(base.num_experts):
            tokens, places = torch.where(index == expert)
            if len(tokens):
                y = second[expert](_gated(base, first[expert](hidden[tokens])))
                y = y * weights[tokens, places, None]
                out = out.index_add(0, tokens, y.to(out.dtype))
        return out


class StackedFactors(nn.Module):
    """The factors of all experts: down [experts, r, k] and up [experts, n, r]."""

    def __init__(self, down: Tensor, up: Tensor, trains: bool) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down, trains), nn.Parameter(up, trains)
        self.rank = down.shape[1]


class StackedBase(nn.Module):
    """A weight of few bits of all experts: values [experts, n, k bits / 8], uint8, and scale
    [experts, n, k / block] or [experts, n, 1], as `QuantizedLinear` has those of one.

    Of MX formats the outputs of each half, and the inputs, are filled up with zeros to whole 128s.
    """

    values: Tensor
    scale: Tensor

    def __init__(self, values: Tensor, scale: Tensor, format: str) -> None:
        super().__init__()
        self.format = format
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    def extra_repr(self) -> str:
        """Show the format."""
        return self.format

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [experts, n, k] in a dtype."""
        return torch.ops.nmm.dequantize(self.values, self.scale, self.format, dtype)


def is_stacked(module: nn.Module) -> bool:
    """Return whether a module is a layer of stacked experts as transformers 5 has them."""
    if not all(hasattr(module, flag) for flag in _FLAGS):
        return False
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", 0):
        return False
    weights = [getattr(module, name, None) for name in _projections(module)]
    return all(
        isinstance(w, nn.Parameter) and w.dim() == 3 and w.dtype.itemsize > 1 for w in weights
    )


@contextlib.contextmanager
def apart(model: nn.Module) -> Iterator[None]:
    """Have a `SplitExperts` in the place of every layer of stacked experts inside the block.

    After it the layers are back, with stacks of what all experts of a weight have become. A layer
    whose experts have become different things, after an interrupt, stays split, and works.
    """
    for module, names in distinct_modules(model):
        if names[0] and is_stacked(module):
            put(model, names, SplitExperts(module))
    try:
        yield
    finally:
        for module, names in distinct_modules(model):
            if not isinstance(module, SplitExperts):
                continue
            stacks = {name: getattr(module, name) for name in _projections(module.base)}
            if any(len(set(map(_kind, stack))) > 1 for stack in stacks.values()):
                continue
            for name, stack in stacks.items():
                if not isinstance(stack[0], ExpertLinear):
                    install(module.base, name, stack)
            put(model, names, module.base.train(module.training))


def _kind(expert: nn.Module) -> tuple[type, str | None]:
    """Return what an expert's linear is, and the format of its base."""
    return type(expert), getattr(_base_of(expert), "format", None)


def _base_of(expert: nn.Module) -> QuantizedLinear | None:
    return expert if isinstance(expert, QuantizedLinear) else getattr(expert, "base", None)


def install(layer: Any, name: str, experts: nn.ModuleList) -> None:
    """Give a layer what its experts have become in the place of one of its weights.

    That is factors, those of lower ranks filled up with zeros, a base, or both. MX weights lie as
    kernels take them: the outputs of gate, then those of up, and all inputs are filled up with
    zeros to whole 128s.
    """
    if not isinstance(layer, CompressedExperts):
        adopt(layer)
    delattr(layer, name)
    bases = [one for one in map(_base_of, experts) if one is not None]
    blocks = bool(bases) and bases[0].format in MX and layer.said is not None
    halved = blocks and name == "gate_up_proj"
    turns = halved and layer.said["halves"] == HALVES[1]

    def outputs(each: Iterable[Tensor]) -> Tensor:
        """Return the rows [n, ..] of each expert as they lie: of gate, then of up, filled up."""
        rows = torch.stack([one.detach() for one in each])
        if not halved:
            return rows
        halves = (rows[:, ::2], rows[:, 1::2]) if turns else rows.chunk(2, 1)
        return torch.cat([_filled(half, 1, 128) for half in halves], 1)

    if halved:
        layer.said = layer.said | {"halves": HALVES[0]}
        if layer.has_bias:
            bias = getattr(layer, f"{name}_bias")
            setattr(layer, f"{name}_bias", nn.Parameter(outputs(bias), bias.requires_grad))
    if bases:
        values = outputs(one.values for one in bases)
        scale = outputs(one.scale for one in bases)
        if blocks:
            values = _filled(values, 2, 16 * FORMATS[bases[0].format].bits)
            scale = _filled(scale, 2, 4)
        base = StackedBase(values, scale, bases[0].format)
        layer.add_module(name.replace("_proj", "_base"), base)
    low = [one for one in experts if isinstance(one, LowRankLinear)]
    if low:
        rank = max(one.rank for one in low)
        down = torch.stack([_filled(one.down.weight.detach(), 0, rank) for one in low])
        up = outputs(_filled(one.up.weight, 1, rank) for one in low)
        down = _filled(down, 2, 128) if blocks and not halved else down
        factors = StackedFactors(down, up, low[0].up.weight.requires_grad)
        layer.add_module(name.replace("_proj", "_factors"), factors)


def adopt(layer: Any) -> None:
    """Make a layer of stacked experts one that computes by `nmm.experts`; its attributes and its
    weights stay. What its gate computes is found by its values."""
    layer.dense_class, layer.dense_transposed = type(layer), layer.is_transposed
    if not isinstance(layer, CompressedExperts):
        layer.__class__ = CompressedExperts
    layer.said = None
    if not layer.has_gate:
        return
    with torch.device("cpu"):  # also where a model without weights is loaded
        points = torch.tensor(_SAMPLE, dtype=torch.float64)
        drawn = torch.randint(len(points), (64, 256), generator=torch.Generator().manual_seed(0))
        sample = points[drawn]
    with contextlib.suppress(RuntimeError, TypeError):  # a gate that has weights of its own
        adopted = _gated(layer, sample)
        limits, slopes = (
            [float(getattr(layer, key))] if hasattr(layer, key) else []
            for key in ("limit", "alpha")
        )
        layer.said = chosen.said_of(sample, adopted, limits, slopes, (1.0,))


def _filled(tensor: Tensor, dim: int, step: int) -> Tensor:
    """Return a tensor filled up with zeros along a dimension to whole steps."""
    more = -tensor.shape[dim] % step
    zeros = [0, 0] * (tensor.dim() - 1 - dim) + [0, more]
    return functional.pad(tensor, zeros).contiguous()


class CompressedExperts(nn.Module):
    """A layer of experts with stacks of few bits, factors, or both, made of a dense one by
    `install`.

    dense_class: the original class, whose gate it uses. It is no subclass of it, since transformers
    would then initialize the removed weights. said: how `nmm.experts` says its gate, None where it
    cannot.
    """

    def forward(self: Any, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Mix the experts: hidden [.., k], index and weights [tokens, experts a token]."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        call, formats = _call(self, hidden.dtype)
        if self.said is not None and formats[0] == formats[1]:
            y = torch.ops.nmm.experts(hidden, call.pop("gate_up"), call.pop("down"), index, weights,
                                      format=formats[0], **call, **self.said)  # fmt: skip
            return cast(Tensor, y).view_as(hidden_states)

        def product(name: str, x: Tensor, form: str) -> Tensor:
            bias = call[f"{name}_bias"]
            own = None if bias is None else bias[:, None]
            given = {**call, "format": form, f"{name}_bias": own}
            return chosen.times(x, given, name, slice(None))

        marks = functional.one_hot(index, self.num_experts)
        shares = (marks * weights[..., None]).sum(1).mT[..., None]
        y = torch.where(marks.sum(1).mT[..., None] > 0, hidden, 0)
        y = product("gate_up", y, formats[0])
        y = _gated(self, y) if self.said is None else chosen.gated(y, **self.said)
        y = product("down", y, formats[1])
        mixed = (y * shares.to(y.dtype)).sum(0)
        return mixed.view_as(hidden_states).to(hidden_states.dtype)


def _call(layer: Any, dtype: torch.dtype) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors and layouts of a layer's `nmm.experts`, and the formats of both weights,
    which one call has alike."""
    arguments: dict[str, Any] = {"weight_layout": "col", "factor_layout": "col"}
    formats = []
    for name, weight in zip(("gate_up", "down"), _projections(layer), strict=True):
        arguments |= dict.fromkeys([f"{name}_{end}" for end in ("bias", "scale", "u", "v")])
        # such as gate_up_factors, gate_up_base and gate_up_proj: what the weight has of these
        names = (weight.replace("_proj", end) for end in ("_factors", "_base", "_proj"))
        parts: list[Any] = [getattr(layer, part, None) for part in names]
        factors, base, dense = parts
        if layer.has_bias:
            arguments[f"{name}_bias"] = getattr(layer, f"{weight}_bias")
        if factors is not None:
            arguments[f"{name}_u"] = factors.down
            arguments[f"{name}_v" if base is not None or dense is not None else name] = factors.up
        if base is None and dense is None:
            formats.append(FACTORS)
            continue
        formats.append("" if base is None else base.format)
        if base is None:
            arguments[name] = dense.mT if layer.dense_transposed else dense
        elif base.format not in MULTIPLIED:
            formats[-1], arguments[name] = "", base.dequantized(dtype)
        elif base.format in MX:
            arguments |= {name: base.values, f"{name}_scale": base.scale}
        else:
            arguments[name] = base.values.view(torch.float8_e4m3fn)
            arguments[f"{name}_scale"] = base.scale.squeeze(-1)
    return arguments, formats


def _gated(base: Any, y: Tensor) -> Tensor:
    if not base.has_gate:
        return cast(Tensor, base.act_fn(y))
    return cast(Tensor, getattr(base, "dense_class", type(base))._apply_gate(base, y))


def _projections(base: Any) -> tuple[str, str]:
    return ("gate_up_proj" if base.has_gate else "up_proj", "down_proj")
