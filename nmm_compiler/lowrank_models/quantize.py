"""Linears of eight bits or fewer: a model's weights (`base=`), or its factors (`factors=`).

A `QuantizedLinear` keeps a weight as `kernels/packed_formats.py` packs it. Its forward multiplies
the weight out and calls `linear`. This is what graph passes find, in a traced graph:

    formats with a scale a row (fp8, int8)   values.view(dtype).to(float) * scale, clamped for fp8
    formats with blocks (MX, int4)           torch.ops.nmm.dequantize(values, scale, format, dtype)

The second factor of a branch of fp8 numbers beside MX blocks has a scale an input: those of the
rank, as are the first factor's, so that a kernel multiplies x u by both.

With a low-rank branch (`LowRankLinear.base`) a layer is linear(x, dequantized, None) +
linear(linear(x, down), up, bias).

Base and branch are fitted in turn (as CALDERA does, arXiv 2405.18886): the branch is the best one
of W - Q in the norm of the data, then Q is W - branch rounded again. Columns of a block format are
rounded one after the other, each making up for the error of those before (GPTQ, arXiv 2210.17323).
That fits the calibration more than other texts, so the moment is first pulled far to a multiple of
the identity. Formats of a scale a row have 8 bits and little to mend: they round to nearest.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from nmm_compiler.errors import ModelError, UnknownNameError
from nmm_compiler.kernels.packed_formats import FORMATS, MX, check_blocks, quantize
from nmm_compiler.lowrank_models.factorize import factorize
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers
from nmm_compiler.lowrank_models.moments import Moments
from nmm_compiler.ops import stored as stored  # defines nmm.dequantize

ROUNDS = 2
"""How often a base is fitted to its branch: more gain little."""
PULL = 0.4
"""Share of the identity in the moment that columns are rounded by. With less the outputs have less
error in the calibration's domain and more in another one."""
FORMAT_NAMES = (*FORMATS, "float8_e4m3")
"""What `base` and `factors` take; the last is fp8, as specs call it."""


def read_format(format: str) -> str:
    """Return the name of a format in the table; raise UnknownNameError for any other."""
    found = "fp8" if format == "float8_e4m3" else format
    if found not in FORMATS:
        raise UnknownNameError("format", format, FORMAT_NAMES)
    return found


class Packed(nn.Module):
    """A weight of few bits: values, uint8, and scale, floats or uint8 for powers of two."""

    scale: torch.Tensor

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, format: str) -> None:
        super().__init__()
        self.format = format
        self.register_buffer("values", values)
        if scale.is_floating_point():
            self.scale = nn.Parameter(scale, requires_grad=False)
        else:
            self.register_buffer("scale", scale)

    def extra_repr(self) -> str:
        """Show the format."""
        return self.format


class QuantizedLinear(Packed):
    """A linear of few bits: x [.., k] -> x dequantized^T + bias [.., n].

    values: uint8 [n, k bits / 8]. scale: [n, 1] or [n, k / block], in the dtype of the model, or
    uint8 for powers of two; of a factor beside MX weights [1, k].
    """

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        format: str,
        bias: nn.Parameter | None = None,
        spread: np.ndarray | None = None,
        by_input: bool = False,
    ) -> QuantizedLinear:
        """Return the linear of a weight [n, k] rounded to a format, with this bias.

        Scales of floats have the weight's dtype. spread: as `packed_formats.quantize` takes it.
        by_input: with a scale for each input.
        """
        n, k = weight.shape
        form = check_blocks(k, read_format(format), "a quantized linear")
        scale_dtype = torch.uint8 if form.power_scales else weight.dtype
        if weight.is_meta:
            sizes = (1, k) if by_input else (n, k // form.block if form.block else 1)
            values = weight.new_empty((n, k * form.bits // 8), dtype=torch.uint8)
            scale = weight.new_empty(sizes, dtype=scale_dtype)
        else:
            wide = weight.detach().float().cpu()
            rows = (wide.T if by_input else wide).numpy()
            dtype = str(weight.dtype).removeprefix("torch.")
            made = [torch.from_numpy(one) for one in quantize(rows, form, dtype, spread)]
            values, scale = (one.T if by_input else one for one in made)
            values = values.contiguous().to(weight.device)
            scale = scale.contiguous().to(weight.device, scale_dtype)
        linear = cls(values, scale, form.name)
        linear.in_features, linear.out_features, linear.bias = k, n, bias
        return linear

    @property
    def weight(self) -> torch.Tensor:
        """The weight [n, k] in the scale's dtype, float32 for MX: a new tensor on each access."""
        scale = self.scale
        return self.dequantized(scale.dtype if scale.is_floating_point() else torch.float32)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [n, k] in a dtype."""
        values, form = cast(torch.Tensor, self.values), FORMATS[self.format]
        if form.block:
            return cast(
                torch.Tensor, torch.ops.nmm.dequantize(values, self.scale, self.format, dtype)
            )
        elements = values.view(getattr(torch, form.element_name)).to(self.scale.dtype)
        if self.format == "fp8":
            # nothing is clamped here: it tells graph passes that NKI's float8_e4m3 has the bits
            elements = elements.clamp(form.lowest, form.largest)
        return elements * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [.., k] to [.., n]."""
        return functional.linear(x, self.dequantized(x.dtype), self.bias)


def residual(weight: torch.Tensor, base: QuantizedLinear) -> torch.Tensor:
    """Return what a base leaves of a weight, in the weight's dtype."""
    return (weight.float() - base.dequantized(torch.float32)).to(weight.dtype)


def rounded_beside(
    weight: torch.Tensor, format: str, rank: int, moments: Moments, name: str
) -> QuantizedLinear:
    """Return the base of a weight [n, k] beside a branch of a rank, 0 for none.

    The branch is `factorize` of what it leaves, with the same moments.
    """
    base = QuantizedLinear.of(weight, format)
    if weight.is_meta or moments.inputs is None or FORMATS[format].block is None:
        return base
    # U, upper triangular, with U^T U the inverse of the pulled moment
    matrix = moments.inputs.dense().cpu().mul_(1 - PULL)
    matrix.diagonal().add_(PULL / (1 - PULL) * matrix.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    spread = torch.linalg.cholesky(inverse).mT.float().numpy()
    for _ in range(ROUNDS if rank else 1):
        wanted = weight
        if rank:
            branch = factorize(residual(weight, base), rank, moments, name)
            wanted = (weight.double() - branch.up @ branch.down).to(weight.dtype)
        base = QuantizedLinear.of(wanted, format, spread=spread)
    return base


def quantize_factors(model: nn.Module, format: str = "int8") -> tuple[str, ...]:
    """Round the factors of all low-rank layers to few bits an element, in place; return the names.

    format: "int8", "fp8" (also called "float8_e4m3": with scales, kernels read it as it is), or
    another of `kernels/packed_formats.py`, whose blocks have to divide each rank.

    Such a model is saved and loaded as any low-rank one, but `recover` and merging adapters refuse
    it. Raises ModelError for a model without low-rank layers.
    """
    format = read_format(format)
    named = lowrank_layers(model).items()
    layers = {name: one for name, one in named if isinstance(one.down, nn.Linear)}
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no low-rank layer with factors of floats; run compress on "
            "it first"
        )
    for name, layer in layers.items():
        check_blocks(layer.in_features, format, name)
        check_blocks(layer.rank, format, f"{name}.up")
    for layer in layers.values():
        round_factors(layer, format)
    return tuple(layers)


def round_factors(layer: LowRankLinear, format: str) -> None:
    """Put linears of a format in the place of a layer's factors; on the meta device empty ones."""
    beside = format == "fp8" and getattr(layer.base, "format", None) in MX
    for name in ("down", "up"):
        linear = cast(nn.Linear, getattr(layer, name))
        by_input = beside and name == "up"
        made = QuantizedLinear.of(linear.weight, format, linear.bias, by_input=by_input)
        setattr(layer, name, made.train(linear.training))


def make_layer(
    down: torch.Tensor,
    up: torch.Tensor,
    bias: nn.Parameter | None,
    base: QuantizedLinear | None,
    factors: str | None,
) -> LowRankLinear | QuantizedLinear:
    """Return a layer of factors, in floats or a format, of a base, or of both."""
    if base is not None and not down.shape[0]:
        base.bias = bias
        return base
    layer = LowRankLinear.from_factors(down, up, bias, base)
    if factors is not None:
        round_factors(layer, factors)
    return layer


def empty_layer(
    n: int,
    k: int,
    rank: int,
    base: str | None,
    factors: str | None,
    dtype: torch.dtype,
    bias: bool = False,
) -> LowRankLinear | QuantizedLinear:
    """Return what `make_layer` does without numbers, on the meta device."""
    dense, down, up = (
        torch.empty(shape, device="meta", dtype=dtype) for shape in ((n, k), (rank, k), (n, rank))
    )
    few = None if base is None else QuantizedLinear.of(dense, base)
    return make_layer(down, up, nn.Parameter(dense[:, 0].clone()) if bias else None, few, factors)
