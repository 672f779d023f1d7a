"""Loads a low-rank model where nmm_compiler is not installed, with trust_remote_code=True.

`nmm_compiler.save` puts a copy of this file beside the weights. Where nmm_compiler is imported, its
own layers are used.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.quantizers import auto

E4M3 = torch.float8_e4m3fn
BYTES = {"int8": torch.int8, "fp8": E4M3, "mxfp8": E4M3, "mxfp8_e5m2": torch.float8_e5m2}
HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NIBBLES = {
    "mxfp4": [*HALF, *(-x for x in HALF)],
    "int4": [float(i) for i in (*range(8), *range(-8, 0))],
}


class FewBitLinear(nn.Module):
    """A linear of few bits, with a scale for each output, 32 elements of it, or each input."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, kind: str, by_input: bool = False
    ) -> None:
        super().__init__()
        self.kind = kind
        width = inputs if kind in BYTES else inputs // 2
        self.register_buffer("values", torch.zeros(outputs, width, dtype=torch.uint8))
        scales = torch.ones(outputs, 1 if kind in ("int8", "fp8") else inputs // 32)
        scales = torch.ones(1, inputs) if by_input else scales
        if kind.startswith("mx"):
            self.register_buffer("scale", scales.to(torch.uint8))
        else:
            self.scale = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [.., inputs] to [.., outputs]."""
        values: Any = self.values
        scale: Any = self.scale
        if self.kind.startswith("mx"):
            scale = scale.view(torch.float8_e8m0fnu).to(x.dtype)
        if self.kind in BYTES:
            elements = values.view(BYTES[self.kind]).to(scale.dtype)
        else:
            codes = torch.stack((values & 15, values >> 4), -1).flatten(1).int()
            elements = torch.tensor(NIBBLES[self.kind], device=x.device, dtype=scale.dtype)[codes]
        blocks = elements.unflatten(1, (scale.shape[1], -1)) * scale[..., None]
        return nn.functional.linear(x, blocks.flatten(1), self.bias)


class LowRankLinear(nn.Module):
    """A linear as two factors, perhaps beside a base of few bits."""

    def __init__(
        self, inputs: int, rank: int, outputs: int, bias: bool, kind: str | None, base: str | None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.down: nn.Module
        self.up: nn.Module
        if kind is None:
            self.down, self.up = nn.Linear(inputs, rank, False), nn.Linear(rank, outputs, bias)
        else:
            self.down = FewBitLinear(inputs, rank, False, kind)
            beside = kind == "fp8" and base is not None and base.startswith("mx")
            self.up = FewBitLinear(rank, outputs, bias, kind, beside)
        self.base = None if base is None else FewBitLinear(inputs, outputs, False, base)

    def forward(self, x: torch.Tensor) -> Any:
        """Map x [.., inputs] to [.., outputs]."""
        y = self.up(self.down(x))
        return y if self.base is None else self.base(x) + y


def places(model: Any, names: Any) -> dict[str, str]:
    """Return the layers of a model by the saved names, which may lack the base model's prefix or
    have it. Those of a head have no place in a base model."""
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    found = {}
    for name in names:
        forms = (name, prefix + name, name.removeprefix(prefix))
        path = next((form for form in forms if form in modules), None)
        if path or model.base_model is not model or name.startswith(prefix):
            found[name] = path or name
    return found


def _with_factors(model: Any, saved: Any) -> None:
    """Replace the linears that have a rank."""
    for name, path in places(model, saved["ranks"]).items():
        rank = saved["ranks"][name]
        old: Any = model.get_submodule(path)
        inputs, outputs = old.weight.shape[::-1] if isinstance(old, nn.Linear) else old.weight.shape
        kind, base = (saved.get(key, {}).get(name) for key in ("formats", "bases"))
        parent, _, child = path.rpartition(".")
        new: nn.Module
        if rank:
            new = LowRankLinear(inputs, rank, outputs, old.bias is not None, kind, base)
        else:
            new = FewBitLinear(inputs, outputs, old.bias is not None, str(base))
        new.register_buffer("weight", torch.zeros(1))  # stored: the dense class refuses the file
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
