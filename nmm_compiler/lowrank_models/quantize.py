"""Factors of eight bits: call `quantize_factors` after `compress`.

Each factor becomes a `QuantizedLinear`: one byte an element, one scale a row (an output feature),
so that a row's largest element is exact. Its forward multiplies out the weight and calls `linear`;
graph passes recognize this as a constant weight with scales.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

from nmm_compiler.errors import NoMatchingModulesError, UnknownNameError
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers
from nmm_compiler.options import FACTORS

# Largest number of each format; fp8 is NKI's float8_e4m3, which ends at 240 where PyTorch's goes on
# to 448: values up to 240 have the same bits in both.
FORMATS = {"int8": 127.0, "fp8": 240.0}
_NAMES = {"float8_e4m3": "fp8"}  # as specs call it


def read_format(format: str) -> str:
    """Return "int8" or "fp8" for the name of a format; raise UnknownNameError for any other."""
    found = _NAMES.get(format, format)
    if found not in FORMATS:
        raise UnknownNameError("factor format", format, FACTORS)
    return found


class QuantizedLinear(nn.Module):
    """A linear of bytes: x [.., k] -> x (values * scale)^T + bias [.., n].

    values: uint8 [n, k], the bits of int8 or float8_e4m3fn elements (`format`). scale: [n, 1], in
    the dtype of the model.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        format: str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        format = read_format(format)
        self.in_features, self.out_features, self.format = in_features, out_features, format
        shape = (out_features, in_features)
        self.register_buffer("values", torch.zeros(shape, dtype=torch.uint8, device=device))
        ones = torch.ones(out_features, 1, dtype=dtype, device=device)
        self.scale = nn.Parameter(ones, requires_grad=False)
        self.bias = (
            nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        )

    @classmethod
    def of(cls, linear: nn.Linear, format: str) -> QuantizedLinear:
        """Return a linear's elements rounded to a format, with its original bias."""
        format = read_format(format)
        weight = linear.weight.detach()
        made = cls(
            linear.in_features, linear.out_features, linear.bias is not None, format,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        wide = weight.float()
        scale = (wide.abs().amax(1, keepdim=True) / FORMATS[format]).to(weight.dtype)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        steps = (wide / scale.float()).clamp(-FORMATS[format], FORMATS[format])
        if format == "int8":
            values = steps.round().to(torch.int8)
        else:
            values = steps.to(torch.float8_e4m3fn)
        made.values = values.view(torch.uint8)
        made.scale.data = scale
        made.bias = linear.bias
        return made.train(linear.training)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [n, k] in the scale's dtype: a new tensor on each access."""
        values, dtype = cast(torch.Tensor, self.values), self.scale.dtype
        if self.format == "int8":
            return values.view(torch.int8).to(dtype) * self.scale
        # the clamp changes nothing here: it tells graph passes that NKI's float8_e4m3 has the bits
        largest = FORMATS[self.format]
        return values.view(torch.float8_e4m3fn).to(dtype).clamp(-largest, largest) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [.., k] to [.., n]."""
        return functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show k, n and the format."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.format}"


def quantize_factors(model: nn.Module, format: str = "int8") -> tuple[str, ...]:
    """Round the factors of all low-rank layers to a byte an element, in place; return the names.

    format: "int8", or "fp8", also called "float8_e4m3": with scales, kernels read it as it is.

    Such a model is saved and loaded as any low-rank one, but `recover` and merging adapters refuse
    it. Raises NoMatchingModulesError for a model without low-rank layers.
    """
    format = read_format(format)
    layers = {
        name: layer
        for name, layer in lowrank_layers(model).items()
        if isinstance(layer.down, nn.Linear)
    }
    if not layers:
        raise NoMatchingModulesError(
            f"{type(model).__name__} has no low-rank layer with factors of floats; run compress on "
            "it first"
        )
    for layer in layers.values():
        set_factors(layer, *(QuantizedLinear.of(x, format) for x in (layer.down, layer.up)))
    return tuple(layers)


def empty_factors(layer: LowRankLinear, format: str) -> None:
    """Give a layer quantized factors without values, on its device, for weights to be loaded to."""
    made = []
    for linear in (layer.down, layer.up):
        weight = linear.weight
        empty = QuantizedLinear(
            linear.in_features, linear.out_features, linear.bias is not None, format,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        made.append(empty)
    set_factors(layer, *made)


def set_factors(layer: LowRankLinear, down: nn.Module, up: nn.Module) -> None:
    """Put two linears in the place of a layer's factors."""
    for name, factor in (("down", down), ("up", up)):
        setattr(layer, name, factor)


def format_of(layer: LowRankLinear) -> str | None:
    """Return the format of a layer's factors, None for floats."""
    return getattr(layer.down, "format", None)
