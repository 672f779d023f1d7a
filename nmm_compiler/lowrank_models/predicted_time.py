"""Predicted microseconds of a model's linears for any ranks, over a mix of workloads.

`Prices` answers the plan's questions: what all layers take, what one layer adds at a rank, and
which layers are slower low-rank than dense. Layers that one call computes are priced together, once
for all groups that are equal. A search over ranks asks the closed form; what it chose is judged by
`Prices.settled`, which simulates both sides. Layers whose weights load in less than a DMA needs to
start have no price: latencies are their time, and parameters decide their ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import item_bytes
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.kernels.number_formats import X_DTYPES
from nmm_compiler.lowrank_models.config import Workload
from nmm_compiler.lowrank_models.layer_calls import Group, Layer, Rank, alone, call_us, groups_of
from nmm_compiler.lowrank_models.report import Timed
from nmm_compiler.targets import Target


class Prices:
    """What groups of layers take.

    of: (group, ranks) -> microseconds for each kind of pass in `workload`. note: how the layers are
    grouped. settled: prices of both sides that decide and that reports print; default is these.
    source: of the figures, one of `prices.kernel.PRICES`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        workload: Workload,
        of: Callable[[Group, tuple[Rank, ...]], tuple[float, ...]],
        note: str = "",
        settled: Prices | None = None,
        source: str = "closed_form",
    ) -> None:
        self.groups, self.workload, self._of = groups, workload, of
        self.note, self.settled, self.source = note, settled or self, source
        self._group = {layer.name: group for group in groups for layer in group.layers}

    def group_us(self, group: Group, ranks: Mapping[str, Rank]) -> float:
        """Return what a group takes in the mix of workloads, at these ranks of its layers."""
        found = self._of(group, tuple(ranks.get(layer.name) for layer in group.layers))
        return math.fsum(w * us for (_, _, w), us in zip(self.workload, found, strict=True))

    def timed(self, ranks: Mapping[str, Rank]) -> tuple[Timed, ...]:
        """Return what all layers take in each kind of pass, dense and at these ranks."""
        if not self.groups:
            return ()
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
            slower = self.group_us(group, ranks) > self.group_us(group, {})
            if id(group) not in single and slower:
                found += [layer.name for layer in group.layers if ranks.get(layer.name)]
        return found

    def faster_us(self, name: str, ranks: Mapping[str, Rank]) -> float:
        """Return what a layer's call takes with it dense, or all of its layers, if that is less."""
        return min(self.at(name, None, ranks), self.group_us(self._group[name], {}))

    def is_slower(self, name: str, rank: Rank, others: Mapping[str, Rank]) -> bool:
        """Return whether a layer takes longer at a rank than dense, beside these ranks."""
        priced = name in self._group
        return priced and self.at(name, rank, others) > self.at(name, None, others)

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
    be traced without data, each layer is a call of its own. factors: "fp8" for low-rank layers of
    such factors.
    """
    if dtype not in LowRankSpec.dtypes:
        return None
    chip = machine_target(target)
    fp8 = factors == "fp8" and dtype in X_DTYPES and chip.float8_kernels
    groups, note = alone(layers), "each layer as a call of its own"
    least = _loaded_at_start(chip) / item_bytes(dtype)
    if inputs is None:
        inputs = example_inputs(model)
    if inputs is not None and any(layer.k * layer.n > least for layer in layers):
        try:
            groups, note = groups_of(model, layers, inputs, target), ""
        except NmmError as error:
            note += f": {error}"
        except Exception as error:  # the model's own code may not run without data
            note += f": no trace without data ({type(error).__name__})"

    priced = [g for g in groups if any(layer.k * layer.n > least for layer in g.layers)]
    if len(priced) < len(groups):
        small = sum(len(g.layers) for g in groups) - sum(len(g.layers) for g in priced)
        said = f"no time is predicted for {small} layers: a DMA's start takes longer than they load"
        note = f"{note}; {said}" if note and priced else said
    groups = priced

    def of(source: str, group: Group, ranks: tuple[Rank, ...]) -> tuple[float, ...]:
        sizes = tuple((x.k, x.n, rank) for x, rank in zip(group.layers, ranks, strict=True))
        return tuple(
            call_us(group.kind, sizes, group.activation, tokens, dtype, chip, fp8, source)
            for _, tokens, _ in workload
        )

    simulated = functools.partial(of, "simulated")
    settled = Prices(groups, workload, simulated, note, source="simulated")
    return Prices(groups, workload, functools.partial(of, "closed_form"), note, settled)


def _loaded_at_start(chip: Target) -> float:
    """Return the bytes that HBM gives a core in the time that a DMA needs to start and to signal.

    Start and signal are published (the target's sources).
    """
    start = chip.dma_start_latency_seconds + chip.semaphore_seconds
    return chip.memory_bytes_per_second * start


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
