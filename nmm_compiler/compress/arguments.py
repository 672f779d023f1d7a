"""The arguments of `compress`: their checks, and the records made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from nmm_compiler.compress.calibrate import OutputFn
from nmm_compiler.compress.config import CompressionConfig
from nmm_compiler.compress.ranks import Cost
from nmm_compiler.compress.select import FilterFn, Patterns
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
    tokens: int
    output: OutputFn | None
    memory: str | int | None
    progress: bool

    def settings(self) -> dict[str, object]:
        """Return the arguments beside the config that decide which factors come out."""
        settings: dict[str, object] = {"dtype": self.dtype, "output": _name(self.output)}
        if self.config.budget == "latency":
            asked = f"the kernels' for {self.target}, {self.tokens} tokens"
            settings["cost"] = asked if self.cost is None else _name(self.cost)
        return settings


def _name(function: object) -> str:
    """Return a function's name; what it computes cannot be compared between processes."""
    return (
        "None" if function is None else getattr(function, "__qualname__", type(function).__name__)
    )
