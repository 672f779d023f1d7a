"""Predicted microseconds of a model's linears for any ranks, over a mix of workloads.

`Prices` answers the plan's questions: what all layers take, what one layer adds at a rank, and
which layers are slower low-rank than dense. Layers that one call computes are priced together, once
for all groups that are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.kernels.number_formats import X_DTYPES
from nmm_compiler.lowrank_models.config import Workload
from nmm_compiler.lowrank_models.layer_calls import Group, Layer, Rank, alone, call_us, groups_of
from nmm_compiler.lowrank_models.report import Timed
from nmm_compiler.prices.kernel import LAUNCH_GAP_US

# A layer with fewer elements takes no longer than a launch: whose call it is in decides nothing.
_SMALL = 1 << 18
# A smaller difference of such a layer's times is not told from none: the gap between two kernels,
# which is fitted.
TELLABLE_US = LAUNCH_GAP_US


class Prices:
    """What groups of layers take.

    of: (group, ranks) -> microseconds for each kind of pass in `workload`. note: how the layers are
    grouped. tellable_us: of the calls of small layers.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workload: Workload,
        of: Callable[[Group, tuple[Rank, ...]], tuple[float, ...]],
        note: str = "",
        tellable_us: float = TELLABLE_US,
    ) -> None:
        self.groups, self.workload, self._of = groups, workload, of
        self.note, self.tellable_us = note, tellable_us
        self._group = {layer.name: group for group in groups for layer in group.layers}

    def group_us(self, group: Group, ranks: Mapping[str, Rank]) -> float:
        """Return what a group takes in the mix of workloads, at these ranks of its layers."""
        found = self._of(group, tuple(ranks.get(layer.name) for layer in group.layers))
        return math.fsum(w * us for (_, _, w), us in zip(self.workload, found, strict=True))

    def total_us(self, ranks: Mapping[str, Rank]) -> float:
        """Return what all layers take in the mix of workloads."""
        return math.fsum(self.group_us(group, ranks) for group in self.groups)

    def timed(self, ranks: Mapping[str, Rank]) -> tuple[Timed, ...]:
        """Return what all layers take in each kind of pass, dense and at these ranks."""
        sums = []
        for chosen in ({}, ranks):
            each = [self._of(g, tuple(chosen.get(x.name) for x in g.layers)) for g in self.groups]
            sums.append([math.fsum(column) for column in zip(*each, strict=True)])
        return tuple(
            Timed(name=name, tokens=tokens, weight=weight, dense_us=dense, us=us)
            for (name, tokens, weight), dense, us in zip(self.workload, *sums, strict=True)
        )

    def at(self, name: str, rank: Rank, others: Mapping[str, Rank]) -> float:
        """Return what a layer's group takes with this rank of it and those of the others."""
        return self.group_us(self._group[name], {**others, name: rank})

    def slower(self, ranks: Mapping[str, Rank]) -> list[str]:
        """Return the low-rank layers whose calls would be faster with them dense.

        These are single layers, beside the others as they are; else all low-rank layers of a call
        that is slower than the same call without any.
        """
        found = [n for n, rank in ranks.items() if rank and self.is_slower(n, rank, ranks)]
        single = {id(self._group[name]) for name in found}
        for group in self.groups:
            slower = self.group_us(group, ranks) > self.group_us(group, {}) + self._tellable_us(
                group
            )
            if id(group) not in single and slower:
                found += [layer.name for layer in group.layers if ranks.get(layer.name)]
        return found

    def _tellable_us(self, group: Group) -> float:
        """Return how much longer a call has to take to count as slower: 0 but for small layers."""
        return self.tellable_us if all(x.k * x.n < _SMALL for x in group.layers) else 0.0

    def faster_us(self, name: str, ranks: Mapping[str, Rank]) -> float:
        """Return what a layer's call takes with it dense, or all of its layers, if that is less."""
        return min(self.at(name, None, ranks), self.group_us(self._group[name], {}))

    def is_slower(self, name: str, rank: Rank, others: Mapping[str, Rank]) -> bool:
        """Return whether a layer takes longer at a rank than dense, beside these ranks."""
        told = self.at(name, None, others) + self._tellable_us(self._group[name])
        return self.at(name, rank, others) > told

    def shares(self, ranks: Mapping[str, Rank]) -> dict[str, tuple[float, float]]:
        """Return each layer's (dense, low-rank) share of its call, by its dense parameters.

        Layers of a call gain alike, so that none of a call that is faster is shown as slower.
        """
        made: dict[str, tuple[float, float]] = {}
        for group in self.groups:
            dense, low = self.group_us(group, {}), self.group_us(group, ranks)
            held = sum(layer.k * layer.n for layer in group.layers)
            for layer in group.layers:
                share = layer.k * layer.n / held
                made[layer.name] = (dense * share, low * share)
        return made


def kernel_prices(
    model: nn.Module,
    layers: Sequence[Layer],
    dtype: str,
    workload: Workload,
    target: str,
    inputs: Any = None,
    factors: str | None = None,
) -> Prices | None:
    """Return prices of the kernels that the backend would call; None for a dtype that has none.

    inputs: example arguments; None where there are none. Without them, and where the model cannot
    be traced without data, each layer is a call of its own, and so it is in models without a layer
    that is longer than a launch. factors: "fp8" for low-rank layers of such factors.
    """
    if dtype not in LowRankSpec.dtypes:
        return None
    chip = machine_target(target)
    fp8 = factors == "fp8" and dtype in X_DTYPES and chip.float8_kernels
    groups, note = alone(layers), "each layer as a call of its own"
    if inputs is None:
        inputs = example_inputs(model)
    if inputs is not None and max(layer.k * layer.n for layer in layers) >= _SMALL:
        try:
            groups, note = groups_of(model, layers, inputs, target), ""
        except NmmError as error:
            note += f": {error}"
        except Exception as error:  # the model's own code may not run without data
            note += f": no trace without data ({type(error).__name__})"

    def of(group: Group, ranks: tuple[Rank, ...]) -> tuple[float, ...]:
        sizes = tuple((x.k, x.n, rank) for x, rank in zip(group.layers, ranks, strict=True))
        return tuple(
            call_us(group.kind, sizes, group.activation, tokens, dtype, chip, fp8)
            for _, tokens, _ in workload
        )

    return Prices(groups, workload, of, note=note)


def example_inputs(model: nn.Module) -> dict[str, Any] | None:
    """Return two tokens of input of a transformers language model; None for any other."""
    config = getattr(model, "config", None)
    if config is None or getattr(model, "main_input_name", "") != "input_ids":
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 2, dtype=torch.long, device="meta")}
    if hasattr(config, "use_cache"):
        inputs["use_cache"] = False
    return inputs
