"""Linears with fp8 weights and fp8 activations of static scales, as ModelOpt's checkpoints have.

A checkpoint keeps `weight` (float8_e4m3fn, [n, k]), `weight_scale` and `input_scale` (a number
each): y = (input_scale q(x / input_scale)) (weight_scale weight)^T + bias. Its numbers end at 448,
those of NKI's float8_e4m3 at 240. So a weight is halved and its scale doubled, which is exact but
for its subnormals, which lose one bit; and so is the scale of x, before x is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmm_compiler.errors import ModelError
from nmm_compiler.kernels.number_formats import FP8_MAX
from nmm_compiler.lowrank_models.modules import put

_CHECKPOINT = ("weight", "weight_scale", "input_scale")


class StaticFP8Linear(nn.Module):
    """x [.., k] -> [.., n]. weight: float8_e4m3fn up to 240. weight_scale, input_scale: [1]."""

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        input_scale: Tensor,
        bias: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        halved = (weight.detach().float() / 2).to(torch.float8_e4m3fn)
        self.register_buffer("weight", halved)
        self.register_buffer("weight_scale", 2 * weight_scale.detach().float().reshape(1))
        self.register_buffer("input_scale", 2 * input_scale.detach().float().reshape(1))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x [.., k] to [.., n]."""
        steps = (x.float() / self.input_scale).clamp(-FP8_MAX, FP8_MAX)
        rounded = steps.to(torch.float8_e4m3fn).float() * self.input_scale
        # nothing is clamped here: it tells graph passes that NKI's float8_e4m3 has the bits
        weight = self.weight.float().clamp(-FP8_MAX, FP8_MAX) * self.weight_scale
        return functional.linear(rounded.to(x.dtype), weight.to(x.dtype), self.bias)


def load_static_fp8(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Replace the linears of a model whose fp8 weight a checkpoint has; return their names.

    The other tensors of the checkpoint are not loaded. Raises ModelError for a scale that is not
    one number, or a weight that does not fit its linear.
    """
    layers = []
    for name, linear in list(model.named_modules()):
        keys = [f"{name}.{part}" for part in _CHECKPOINT]
        if not isinstance(linear, nn.Linear) or not all(key in state for key in keys):
            continue
        weight, weight_scale, input_scale = (state[key] for key in keys)
        numbers = weight_scale.numel(), input_scale.numel()
        fits = weight.dtype == torch.float8_e4m3fn and weight.shape == linear.weight.shape
        if not fits or numbers != (1, 1):
            raise ModelError(
                f"{name} is {tuple(linear.weight.shape)}, the checkpoint has {weight.dtype} "
                f"{tuple(weight.shape)} and scales of {numbers} numbers: load the checkpoint of "
                "this model, in fp8 with a number a scale"
            )
        bias = linear.bias
        if bias is not None and f"{name}.bias" in state:
            bias = nn.Parameter(state[f"{name}.bias"].to(bias.dtype), requires_grad=False)
        new = StaticFP8Linear(weight, weight_scale, input_scale, bias).train(linear.training)
        put(model, (name,), new)
        layers.append(name)
    return tuple(layers)
