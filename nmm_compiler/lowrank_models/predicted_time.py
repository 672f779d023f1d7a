"""Predicted microseconds of a model's linears for any ranks, over a mix of workloads.

`Prices` answers the plan's questions: what all layers take, which ranks are worth a try, and which
layers are slower low-rank than dense. Layers that one call computes are priced together, once for
all groups that are equal. A search over ranks asks the closed form; what it chose is judged by the
simulator, both sides of a call. Layers whose weights load in less than a DMA needs to start have no
price: latencies are their time, and parameters decide their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

Ranks = Mapping[str, Rank]
SEARCH, JUDGE = "closed_form", "simulated"
"""The sources of prices (`prices.kernel.PRICES`) of a search over ranks, and of what it chose."""


@dataclass(frozen=True)
class Prices:
    """What groups of layers take.

    of: (group, ranks, source) -> microseconds for each kind of pass in `workload`. note: how the
    layers are grouped.
    """

    groups: Sequence[Group]
    workload: Workload
    of: Callable[[Group, tuple[Rank, ...], str], tuple[float, ...]]
    note: str = ""

    def group_us(self, group: Group, ranks: Ranks, source: str = JUDGE) -> float:
        """Return what a group takes in the mix of workloads, at these ranks of its layers."""
        found = self.of(group, tuple(ranks.get(layer.name) for layer in group.layers), source)
        return math.fsum(w * us for (_, _, w), us in zip(self.workload, found, strict=True))

    def timed(self, ranks: Ranks) -> tuple[Timed, ...]:
        """Return what all layers take in each kind of pass, dense and at these ranks."""
        if not self.groups:
            return ()
        sums = []
        for chosen in ({}, ranks):
            given = [tuple(chosen.get(x.name) for x in group.layers) for group in self.groups]
            each = [self.of(*one, JUDGE) for one in zip(self.groups, given, strict=True)]
            sums.append([math.fsum(column) for column in zip(*each, strict=True)])
        return tuple(
            Timed(name=name, tokens=tokens, weight=weight, dense_us=dense, us=us)
            for (name, tokens, weight), dense, us in zip(self.workload, *sums, strict=True)
        )

    def slower(self, ranks: Ranks) -> dict[str, str]:
        """Return the low-rank layers of calls that are slower than dense, each with the figures."""
        slow = {}
        for group in self.groups:
            low, dense = self.group_us(group, ranks), self.group_us(group, {})
            if low > dense:
                note = f"its call would take {low:.1f} us, dense {dense:.1f}: kept dense"
                slow |= {layer.name: note for layer in group.layers if ranks.get(layer.name)}
        return slow

    def may_pay(self, name: str, rank: int, others: Ranks) -> bool:
        """Return whether the closed form finds a layer's call no slower than with it dense."""
        for group in self.groups:
            if name in [layer.name for layer in group.layers]:
                low, dense = (
                    self.group_us(group, {**others, name: one}, SEARCH) for one in (rank, None)
                )
                return low <= dense
        return True

    def shares(self, ranks: Ranks) -> dict[str, tuple[float, float]]:
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

    def of(group: Group, ranks: tuple[Rank, ...], source: str) -> tuple[float, ...]:
        sizes = tuple((x.k, x.n, rank) for x, rank in zip(group.layers, ranks, strict=True))
        return tuple(
            call_us(group.kind, sizes, group.activation, tokens, dtype, chip, fp8, source)
            for _, tokens, _ in workload
        )

    return Prices(priced, workload, of, note)


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
