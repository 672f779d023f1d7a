"""The arguments of `compress`: their checks, and the records made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nmm_compiler.compress.calibrate import OutputFn
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.layer_calls import Layer
from nmm_compiler.compress.predicted_time import (
    Prices,
    Workload,
    given_prices,
    kernel_prices,
)
from nmm_compiler.compress.ranks import Cost
from nmm_compiler.compress.select import FilterFn, Patterns, Site
from nmm_compiler.errors import OptionTypeError


def check_arguments(model: object, dtype: object, cost: object) -> None:
    """Raise OptionTypeError for a wrong type of model, dtype or cost function."""
    if not isinstance(model, nn.Module):
        raise OptionTypeError("model", type(model).__name__, "a torch.nn.Module")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionTypeError("dtype", dtype, "a floating-point torch.dtype, or None")
    if cost is not None and not callable(cost):
        raise OptionTypeError("cost", cost, "a function (k, n, rank or None) -> microseconds")


def make_config(ratio: float | CompressionConfig | None, **keywords: Any) -> CompressionConfig:
    """Return the config of a call; raise for keywords beside a config."""
    given = {name: value for name, value in keywords.items() if value is not None}
    if not isinstance(ratio, CompressionConfig):
        return CompressionConfig(ratio=ratio, **given)
    if given:
        name, value = next(iter(given.items()))
        raise OptionTypeError(
            name, value, "it inside the CompressionConfig, which takes the keywords' place"
        )
    return ratio


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """The arguments of one call of `compress`, which says what each of them means."""

    config: CompressionConfig
    calibration: Any
    include: Patterns
    exclude: Patterns
    filter_fn: FilterFn | None
    dtype: torch.dtype | None
    device: torch.device | str | None
    cost: Cost | None
    target: str
    workload: Workload
    allow_slower: bool
    output: OutputFn | None
    memory: str | int | None
    progress: bool
    factors: str | None = None

    def prices(
        self, model: nn.Module, sites: Sequence[Site], batches: list[Any] | None
    ) -> Prices | None:
        """Return the prices of the sites; None for a dtype without kernels.

        A model on the meta device whose ranks no price decides needs none either.
        """
        parameters = self.config.budget == "parameters"
        if sites[0].weight.is_meta and self.allow_slower and parameters:
            return None
        layers = [Layer(site.name, site.k, site.n) for site in sites]
        if self.cost is not None:
            return given_prices(layers, self.cost, self.workload)
        dtype = str(self.dtype or sites[0].weight.dtype).removeprefix("torch.")
        first = None if batches is None else batches[0]
        inputs = first if first is None or isinstance(first, (Mapping, tuple, list)) else (first,)
        made = kernel_prices(model, layers, dtype, self.workload, self.target, inputs, self.factors)
        if made is None and self.config.budget == "latency":
            raise OptionTypeError("budget", "latency", f"cost= with it: no kernel computes {dtype}")
        return made

    def settings(self) -> dict[str, object]:
        """Return the arguments beside the config that decide which factors come out."""
        priced = f"the kernels' for {self.target}" if self.cost is None else _name(self.cost)
        rounded = {} if self.factors is None else {"factors": self.factors}
        return rounded | {
            "dtype": self.dtype,
            "output": _name(self.output),
            "cost": priced,
            "workload": self.workload,
            "allow_slower": self.allow_slower,
        }


def _name(function: object) -> str:
    """Return a function's name; what it computes cannot be compared between processes."""
    return (
        "None" if function is None else getattr(function, "__qualname__", type(function).__name__)
    )
