"""`LowRankLinear`: a linear layer kept as two factors.

y = up(down(x)), where `down` is [r, k] (no bias) and `up` is [n, r] (with the layer's bias). The
factors are two child `nn.Linear`s, so that tools which look for linears (PEFT, torchao, the passes
of this package) find them. The layer has the attributes that callers read from an `nn.Linear`
(`weight`, `bias`, `in_features`, `out_features`).

With a `base`, y = base(x) + up(down(x)): the base is the weight rounded to few bits, without bias
(`quantize.py`), and the factors are the branch that mends what rounding lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.errors import ShapeError


class LowRankLinear(nn.Module):
    """A linear layer of rank r: x [..., k] -> up(down(x)) [..., n].

    in_features, rank, out_features: k, r and n.
    bias: whether `up` has a bias.
    """

    def __init__(
        self,
        in_features: int,
        rank: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.rank, self.out_features = in_features, rank, out_features
        self.down = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)
        self.base: nn.Module | None = None

    @classmethod
    def from_factors(
        cls,
        down: torch.Tensor,
        up: torch.Tensor,
        bias: torch.Tensor | None = None,
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
    def weight(self) -> torch.Tensor:
        """The base and up @ down, [n, k]: a new tensor on each access, differentiable in both."""
        product = self.up.weight @ self.down.weight
        if self.base is None:
            return product
        return cast(torch.Tensor, self.base.weight).to(product.dtype) + product

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [n] of `up`, or None."""
        return cast("torch.Tensor | None", self.up.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [..., k] to [..., n]."""
        y = cast(torch.Tensor, self.up(self.down(x)))
        return y if self.base is None else self.base(x) + y

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
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), (module, []))[1].append(name)
    return list(found.values())


def put(model: nn.Module, names: Sequence[str], layer: nn.Module) -> None:
    """Set `layer` under every one of these dotted names."""
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
