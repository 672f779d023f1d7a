"""Mixtures of experts that stack their weights: [experts, n, k], or [experts, k, n] in GPT-OSS.

transformers 5 keeps the experts of a layer in two parameters, `gate_up_proj` (or `up_proj`) and
`down_proj`. `split` puts a `SplitExperts` in the place of such a layer, with an `nn.Linear` per
expert that is a view of its slice, so that experts are selected, calibrated and factorized as any
linear. `join` stacks the factors again: the layer keeps its name and its biases, its weights become
`StackedFactors` [experts, r, k] and [experts, n, r], and its forward a chain of batched products.

Tokens are laid out by expert, [experts, capacity, k], padded with zeros. The capacity is the token
count of the busiest expert. In a traced graph, where shapes are fixed, it is the count of all
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.lowrank_models.modules import LowRankLinear, distinct_modules, put

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_FLAGS = ("num_experts", "has_gate", "has_bias", "is_transposed")


class ExpertLinear(nn.Linear):
    """One expert's slice of a stacked weight; computes what `nn.Linear` does."""


class SplitExperts(nn.Module):
    """Stands in for a layer of stacked experts while its experts are being factorized."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._base = [base]  # in a list, so that its parameters are not registered a second time
        for name in _projections(base):
            self.add_module(name, nn.ModuleList(_slices(base, name)))

    @property
    def base(self) -> Any:
        """The layer that this one stands in for."""
        return self._base[0]

    def forward(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Mix the experts: hidden [tokens, k], index and weights [tokens, experts a token]."""
        base, out = self.base, torch.zeros_like(hidden)
        first, second = (cast(nn.ModuleList, getattr(self, n)) for n in _projections(base))
        for expert in range(base.num_experts):
            tokens, places = torch.where(index == expert)
            if len(tokens):
                y = second[expert](_gated(base, first[expert](hidden[tokens])))
                y = y * weights[tokens, places, None]
                out = out.index_add(0, tokens, y.to(out.dtype))
        return out


class StackedFactors(nn.Module):
    """The factors of all experts: down [experts, r, k] and up [experts, n, r]."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(down, down.requires_grad)
        self.up = nn.Parameter(up, up.requires_grad)

    @property
    def rank(self) -> int:
        """Rank r."""
        return self.down.shape[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [experts, tokens, k] to [experts, tokens, n]."""
        return torch.bmm(torch.bmm(x, self.down.mT), self.up.mT)


def is_stacked(module: nn.Module) -> bool:
    """Return whether a module is a layer of stacked experts as transformers 5 has them."""
    if isinstance(module, SplitExperts) or not all(hasattr(module, flag) for flag in _FLAGS):
        return False
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", 0):
        return False
    weights = [getattr(module, name, None) for name in _projections(module)]
    return all(
        isinstance(w, nn.Parameter) and w.dim() == 3 and w.dtype.itemsize > 1 for w in weights
    )


def split(model: nn.Module) -> None:
    """Put a `SplitExperts` in the place of every layer of stacked experts."""
    for module, names in distinct_modules(model):
        if names[0] and is_stacked(module):
            put(model, names, SplitExperts(module))


def join(model: nn.Module) -> None:
    """Put the layers back, with stacked factors where all experts are low-rank now.

    A layer with only some low-rank experts, after an interrupt, stays split, and works.
    """
    for module, names in distinct_modules(model):
        if not isinstance(module, SplitExperts):
            continue
        kinds = {
            name: {isinstance(expert, LowRankLinear) for expert in getattr(module, name)}
            for name in _projections(module.base)
        }
        if any(len(kind) > 1 for kind in kinds.values()):
            continue
        for name, kind in kinds.items():
            if kind == {True}:
                install(module.base, name, *_stacked(getattr(module, name)))
        put(model, names, module.base.train(module.training))


def install(base: nn.Module, name: str, down: torch.Tensor, up: torch.Tensor) -> None:
    """Give a layer of experts factors in the place of one of its weights."""
    delattr(base, name)
    base.add_module(factors_name(name), StackedFactors(down, up))
    if not isinstance(base, LowRankExperts):
        cast(Any, base).dense_class = type(base)
        base.__class__ = LowRankExperts  # its attributes and its remaining weights stay


def install_empty(base: nn.Module, name: str, rank: int) -> None:
    """Give a layer of experts factors without values, for weights to be loaded to."""
    weight = getattr(base, name)
    experts, n, k = weight.mT.shape if cast(Any, base).is_transposed else weight.shape
    where = {"device": weight.device, "dtype": weight.dtype}
    install(
        base, name, torch.empty(experts, rank, k, **where), torch.empty(experts, n, rank, **where)
    )


def expert_ranks(model: nn.Module) -> dict[str, int]:
    """Return {name of the stacked weight: rank} of the layers with stacked factors."""
    return {
        f"{name}.{weight}": getattr(module, factors_name(weight)).rank
        for name, module in model.named_modules()
        if isinstance(module, LowRankExperts)
        for weight in _PROJECTIONS
        if hasattr(module, factors_name(weight))
    }


def stacked_home(model_modules: Mapping[str, nn.Module], name: str) -> nn.Module | None:
    """Return the layer of experts that a stacked weight's name is of, or None."""
    home, _, weight = name.rpartition(".")
    module = model_modules.get(home)
    if module is None or weight not in _PROJECTIONS:
        return None
    half = isinstance(module, LowRankExperts) and hasattr(
        module, weight
    )  # the other one has its factors
    return module if half or is_stacked(module) else None


def factors_name(weight: str) -> str:
    """Return under which name a weight's factors are: "gate_up_factors" for "gate_up_proj"."""
    return weight.replace("_proj", "_factors")


class LowRankExperts(nn.Module):
    """A layer of experts with stacked factors, made of a dense one by `install`.

    dense_class: the original class, whose gate it uses. It is no subclass of it, since transformers
    would then initialize the removed weights.
    """

    def forward(
        self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Mix the experts: hidden [.., k], index and weights [tokens, experts a token]."""
        base = cast(Any, self)
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        tokens, chosen, experts = hidden.shape[0], index.shape[-1], base.num_experts
        expert = index.reshape(-1)
        marks = nn.functional.one_hot(expert, experts)
        place = (marks.cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
        fixed = torch.compiler.is_compiling()
        capacity = tokens if fixed else int(marks.sum(0).max()) if tokens else 0
        slot = expert * capacity + place
        rows = hidden.repeat_interleave(chosen, dim=0)
        laid = hidden.new_zeros(experts * capacity, hidden.shape[1]).index_copy(0, slot, rows)
        y = laid.view(experts, capacity, -1)
        first, second = _projections(base)
        y = _gated(base, _product(base, first, y))
        y = _product(base, second, y).reshape(experts * capacity, -1)
        mixed = y[slot] * weights.reshape(-1, 1).to(y.dtype)
        return mixed.view(tokens, chosen, -1).sum(1).view_as(hidden_states).to(hidden_states.dtype)


def _product(base: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the product of x [experts, tokens, k] with a stacked weight, factors or dense."""
    factors = getattr(base, factors_name(name), None)
    if factors is not None:
        y = factors(x)
    else:
        weight = getattr(base, name)
        y = torch.bmm(x, weight if base.is_transposed else weight.mT)
    return y + getattr(base, f"{name}_bias")[:, None] if base.has_bias else y


def _gated(base: Any, y: torch.Tensor) -> torch.Tensor:
    if not base.has_gate:
        return cast(torch.Tensor, base.act_fn(y))
    return cast(torch.Tensor, getattr(base, "dense_class", type(base))._apply_gate(base, y))


def _projections(base: Any) -> tuple[str, str]:
    return ("gate_up_proj" if base.has_gate else "up_proj", "down_proj")


def _slices(base: Any, name: str) -> list[ExpertLinear]:
    """Return a linear per expert, whose weight and bias are views of the stacked ones."""
    stacked, wants = getattr(base, name), getattr(base, name).requires_grad
    found = []
    for i in range(base.num_experts):
        weight = stacked.detach()[i].T if base.is_transposed else stacked.detach()[i]
        linear = ExpertLinear(weight.shape[1], weight.shape[0], base.has_bias, device="meta")
        linear.weight = nn.Parameter(weight, wants)
        if base.has_bias:
            bias = getattr(base, f"{name}_bias")
            linear.bias = nn.Parameter(bias.detach()[i], bias.requires_grad)
        found.append(linear.train(base.training))
    return found


def _stacked(layers: nn.ModuleList) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (down, up) of all experts, lower ranks filled up with zeros."""
    found = [cast(LowRankLinear, layer) for layer in layers]
    rank = max(layer.rank for layer in found)
    downs = [layer.down.weight.detach() for layer in found]
    ups = [layer.up.weight.detach() for layer in found]
    downs = [nn.functional.pad(d, (0, 0, 0, rank - d.shape[0])) for d in downs]
    ups = [nn.functional.pad(u, (0, rank - u.shape[1])) for u in ups]
    wants = found[0].up.weight.requires_grad
    down, up = torch.stack(downs), torch.stack(ups)
    return down.requires_grad_(wants), up.requires_grad_(wants)
