"""The layers that a linear becomes: of two factors, of few bits, or both.

`LowRankLinear`: y = up(down(x)), where `down` is [r, k] (no bias) and `up` is [n, r] (with the
layer's bias). The factors are two child `nn.Linear`s, so that tools which look for linears (PEFT,
torchao, the passes of this package) find them. The layer has the attributes that callers read from
an `nn.Linear` (`weight`, `bias`, `in_features`, `out_features`). With a `base`, y = base(x) +
up(down(x)): the base is the weight rounded to few bits, without bias, and the factors are the
branch that mends what rounding lost.

`QuantizedLinear` keeps a weight as `kernels/packed_formats.py` packs it: a model's weight
(`base=`), or a factor (`factors=`). Its forward multiplies the weight out and calls `linear`. This
is what graph passes find, in a traced graph:

    formats with a scale a row (fp8, int8)   values.view(dtype).to(float) * scale, clamped for fp8
    formats with blocks (MX, int4)           torch.ops.nmm.dequantize(values, scale, format, dtype)

The second factor of a branch of fp8 numbers beside MX blocks has a scale an input: those of the
rank, as are the first factor's, so that a kernel multiplies x u by both.

Base and branch are fitted in turn (as CALDERA does, arXiv 2405.18886): the branch is the best one
of W - Q in the norm of the data, then Q is W - branch rounded again. Columns of a block format are
rounded one after the other, each making up for the error of those before (GPTQ, arXiv 2210.17323).
That fits the calibration more than other texts, so the moment is first pulled far to a multiple of
the identity. Formats of a scale a row have 8 bits and little to mend: they round to nearest.

What is stored, under which names and in which shapes, is said by `modeling_nmm_lowrank.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from nmm_compiler.errors import ModelError, ShapeError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.kernels.packed_formats import FORMATS, MX, check_blocks, quantize
from nmm_compiler.lowrank_models import modeling_nmm_lowrank as stored_form
from nmm_compiler.lowrank_models.factorize import factorize
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
    check_name("format", format, FORMAT_NAMES)
    return "fp8" if format == "float8_e4m3" else format


class QuantizedLinear(stored_form.FewBitLinear):
    """A linear of few bits: x [.., k] -> x dequantized^T + bias [.., n].

    values: uint8 [n, k bits / 8]. scale: [n, 1] or [n, k / block], in the dtype of the model, or
    uint8 for powers of two; of a factor beside MX weights [1, k].
    """

    @classmethod
    def of(
        cls,
        weight: Tensor,
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
        linear = cls(k, n, False, form.name, by_input, device="meta", dtype=weight.dtype)
        linear.bias = bias
        if not weight.is_meta:
            wide = weight.detach().float().cpu()
            rows = (wide.T if by_input else wide).numpy()
            dtype = str(weight.dtype).removeprefix("torch.")
            parts = [torch.from_numpy(one) for one in quantize(rows, form, dtype, spread)]
            values, scale = (one.T if by_input else one for one in parts)
            linear.values = values.contiguous().to(weight.device)
            linear.scale = scale.contiguous().to(weight.device, linear.scale.dtype)
        return linear

    @property
    def weight(self) -> Tensor:
        """The weight [n, k] in the scale's dtype, float32 for MX: a new tensor on each access."""
        scale = self.scale
        return self.dequantized(scale.dtype if scale.is_floating_point() else torch.float32)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [n, k] in a dtype."""
        form = FORMATS[self.format]
        if form.block:
            return torch.ops.nmm.dequantize(self.values, self.scale, self.format, dtype)
        elements = self.values.view(getattr(torch, form.element_name)).to(self.scale.dtype)
        if self.format == "fp8":
            # nothing is clamped here: it tells graph passes that NKI's float8_e4m3 has the bits
            elements = elements.clamp(form.lowest, form.largest)
        return elements * self.scale

    def extra_repr(self) -> str:
        """Show the format."""
        return self.format


class LowRankLinear(stored_form.LowRankLinear):
    """A linear layer of rank r: x [..., k] -> up(down(x)) [..., n].

    in_features, rank, out_features: k, r and n.
    """

    few = QuantizedLinear

    @classmethod
    def from_factors(
        cls,
        down: Tensor,
        up: Tensor,
        bias: Tensor | None = None,
        base: nn.Module | None = None,
    ) -> LowRankLinear:
        """Return the layer whose factors are `down` [r, k] and `up` [n, r], not copied.

        Raises ShapeError when the shapes do not fit, or the dtypes are not one of floats.
        """
        fits = down.dim() == up.dim() == 2 and down.shape[0] == up.shape[1]
        fits = fits and down.is_floating_point() and up.dtype == down.dtype
        if not fits or (bias is not None and tuple(bias.shape) != (up.shape[0],)):
            raise ShapeError(
                f"factors down {down.dtype} {tuple(down.shape)} and up {up.dtype} "
                f"{tuple(up.shape)} do not chain, or do not fit the bias: pass down [r, k], up "
                "[n, r] and bias [n] of one floating-point dtype"
            )
        layer = cls(down.shape[1], down.shape[0], up.shape[0], bias is not None, device="meta")
        layer.down.weight = nn.Parameter(down, down.requires_grad)
        layer.up.weight = nn.Parameter(up, up.requires_grad)
        if bias is not None:
            layer.up.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        layer.base = base
        return layer

    @property
    def weight(self) -> Tensor:
        """The base and up @ down, [n, k]: a new tensor on each access, differentiable in both."""
        product: Tensor = self.up.weight @ self.down.weight
        if self.base is None:
            return product
        return self.base.weight.to(product.dtype) + product

    @property
    def bias(self) -> Tensor | None:
        """The bias [n] of `up`, or None."""
        return cast("Tensor | None", self.up.bias)

    def extra_repr(self) -> str:
        """Show r; the factors show k and n."""
        return f"rank={self.rank}"


def lowrank_layers(model: nn.Module) -> dict[str, LowRankLinear]:
    """Return the low-rank layers of a model by name; shared ones once, under their first name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, LowRankLinear)}


def is_conv1d(module: nn.Module | None) -> bool:
    """Return whether a module is transformers' Conv1D, a linear whose weight is stored [k, n]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def sizes_of(module: nn.Module | None) -> tuple[int, ...]:
    """Return (n, k) of a dense, Conv1D or low-rank linear, nothing for any other module."""
    if isinstance(module, (LowRankLinear, nn.Linear)):
        return module.out_features, module.in_features
    return tuple(cast(Any, module).weight.shape[::-1]) if is_conv1d(module) else ()


def distinct_modules(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Return each module of a model once, with every name that leads to it."""
    modules: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), (module, []))[1].append(name)
    return list(modules.values())


def put(model: nn.Module, names: Sequence[str], layer: nn.Module) -> None:
    """Set `layer` under every one of these dotted names."""
    for name in names:
        model.set_submodule(name, layer)


def residual(weight: Tensor, base: QuantizedLinear) -> Tensor:
    """Return what a base leaves of a weight, in the weight's dtype."""
    return (weight.float() - base.dequantized(torch.float32)).to(weight.dtype)


def rounded_beside(
    weight: Tensor, format: str, rank: int, moments: Moments, name: str
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
    down, up = layer.down, layer.up
    layer.down = QuantizedLinear.of(down.weight, format).train(down.training)
    rounded = QuantizedLinear.of(up.weight, format, up.bias, by_input=beside)
    layer.up = rounded.train(up.training)
