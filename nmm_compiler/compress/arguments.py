"""The arguments of `compress`: their checks, and the records made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from nmm_compiler.compress.calibrate import OutputFn
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.layer_calls import Layer
from nmm_compiler.compress.memory import read_bytes
from nmm_compiler.compress.predicted_time import (
    Prices,
    Workload,
    given_prices,
    kernel_prices,
    read_workload,
)
from nmm_compiler.compress.quantize import read_format
from nmm_compiler.compress.ranks import Cost
from nmm_compiler.compress.select import FilterFn, Patterns, Site
from nmm_compiler.errors import OptionTypeError
from nmm_compiler.options import FACTORS, TARGETS, Values, check_fields, is_positive, is_target_file


def _is_floating_point(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _is_device(device: torch.device | str) -> bool:
    try:
        torch.device(device)
    except RuntimeError:
        return False
    return True


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
class Selection:
    """The arguments that `compress` and `calibrate` share."""

    model: nn.Module
    include: Patterns
    exclude: Patterns
    filter_fn: Annotated[FilterFn | None, Values("a function (module, name) -> bool")]
    output: Annotated[
        OutputFn | None, Values("a function (result, batch) -> the tensor whose change matters")
    ]
    progress: bool

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Request(Selection):
    """The arguments of one call of `compress`, which says what each of them means."""

    config: CompressionConfig
    calibration: Any
    dtype: Annotated[
        torch.dtype | None, Values("a floating-point torch.dtype, or None", _is_floating_point)
    ]
    device: Annotated[
        torch.device | str | None, Values("a device of PyTorch, e.g. 'cpu', or None", _is_device)
    ]
    cost: Annotated[Cost | None, Values("a function (k, n, rank or None) -> microseconds")]
    target: Annotated[str, Values(names=TARGETS, test=is_target_file)]
    tokens: Annotated[int, Values("a positive number of tokens a call", is_positive)]
    given_workload: Any
    allow_slower: bool
    resume: Annotated[str | Path | None, Values("a directory, or None")]
    memory: Annotated[
        str | int | None, Values("a size like '8GiB', or bytes as a whole number", read_bytes)
    ]
    factors: Annotated[str | None, Values(names=FACTORS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        read_workload(self.given_workload, self.tokens)

    @property
    def workload(self) -> Workload:
        """The kinds of passes that times are predicted for."""
        return read_workload(self.given_workload, self.tokens)

    @property
    def format(self) -> str | None:
        """The number format of the factors, None for that of the weights."""
        return None if self.factors is None else read_format(self.factors)

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
        made = kernel_prices(model, layers, dtype, self.workload, self.target, inputs, self.format)
        if made is None and self.config.budget == "latency":
            raise OptionTypeError("budget", "latency", f"cost= with it: no kernel computes {dtype}")
        return made

    def settings(self) -> dict[str, object]:
        """Return the arguments beside the config that decide which factors come out."""
        priced = f"the kernels' for {self.target}" if self.cost is None else _name(self.cost)
        rounded = {} if self.format is None else {"factors": self.format}
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
