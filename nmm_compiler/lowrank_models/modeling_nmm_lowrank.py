"""Loads a low-rank model where nmm_compiler is not installed, with trust_remote_code=True.

`nmm_compiler.save` puts a copy of this file beside the weights. Where nmm_compiler is imported, its
own layers are used.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.quantizers import auto


class ByteLinear(nn.Module):
    """A linear whose elements are a byte each, with a scale for each output."""

    def __init__(self, inputs: int, outputs: int, bias: bool, kind: str) -> None:
        super().__init__()
        self.stored = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        self.register_buffer("values", torch.zeros(outputs, inputs, dtype=torch.uint8))
        self.scale = nn.Parameter(torch.ones(outputs, 1), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [.., inputs] to [.., outputs]."""
        values: Any = self.values
        weight = values.view(self.stored).to(self.scale.dtype) * self.scale
        return nn.functional.linear(x, weight, self.bias)


class LowRankLinear(nn.Module):
    """A linear as two factors. `weight` is stored so that the dense class refuses the file."""

    def __init__(self, inputs: int, rank: int, outputs: int, bias: bool, kind: str | None) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.down: nn.Module
        self.up: nn.Module
        if kind is None:
            self.down, self.up = nn.Linear(inputs, rank, False), nn.Linear(rank, outputs, bias)
        else:
            self.down = ByteLinear(inputs, rank, False, kind)
            self.up = ByteLinear(rank, outputs, bias, kind)
        self.register_buffer("weight", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        """Map x [.., inputs] to [.., outputs]."""
        return self.up(self.down(x))


def _with_factors(model: Any, saved: Any) -> None:
    """Replace the linears that have a rank; names may have the base model's prefix or lack it."""
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    headless = model.base_model is model
    for name, rank in saved["ranks"].items():
        forms = (name, prefix + name, name.removeprefix(prefix))
        path = next((form for form in forms if form in modules), None)
        if path is None and headless and not name.startswith(prefix):
            continue  # of the head, which this model has not
        path = path or name
        old: Any = modules[path]
        inputs, outputs = old.weight.shape[::-1] if isinstance(old, nn.Linear) else old.weight.shape
        kind = saved.get("formats", {}).get(name)
        parent, _, child = path.rpartition(".")
        new = LowRankLinear(inputs, rank, outputs, old.bias is not None, kind)
        setattr(model.get_submodule(parent), child, new)


def __getattr__(name: str) -> Any:
    """Return transformers' class of this name, with factors in the place of its linears."""
    base = getattr(transformers, name, None)
    if not (isinstance(base, type) and issubclass(base, transformers.PreTrainedModel)):
        raise AttributeError(f"transformers has no model {name!r}")

    def __init__(self: Any, config: Any, *args: Any, **keywords: Any) -> None:  # noqa: N807
        base.__init__(self, config, *args, **keywords)
        if "nmm_lowrank" not in auto.AUTO_QUANTIZER_MAPPING:
            _with_factors(self, config.quantization_config)

    kind = type(name, (base,), {"__init__": __init__, "__module__": __name__})
    globals()[name] = kind
    return kind
