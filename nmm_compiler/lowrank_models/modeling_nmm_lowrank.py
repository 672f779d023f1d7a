"""The layers of a low-rank model in plain PyTorch, and what loads one without nmm_compiler.

`nmm_compiler.save` puts a copy of this file beside the weights, for trust_remote_code=True. The
layers of nmm_compiler derive from these: names and shapes of stored tensors are said here alone.
Where nmm_compiler is imported, its own layers are used.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
BYTES = {"int8": torch.int8, "fp8": E4M3, "mxfp8": E4M3, "mxfp8_e5m2": torch.float8_e5m2}
HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NIBBLES = {
    "mxfp4": [*HALF, *(-x for x in HALF)],
    "int4": [float(i) for i in (*range(8), *range(-8, 0))],
}


class FewBitLinear(nn.Module):
    """A linear of few bits, with a scale for each output, 32 elements of it, or each input.

    values: uint8 [outputs, inputs bits / 8]. scale: [outputs, 1], [outputs, inputs / 32] or [1,
    inputs], in the dtype of the model, or uint8 for powers of two. place: device and dtype.
    """

    values: Tensor
    scale: Tensor

    def __init__(
        self, inputs: int, outputs: int, bias: bool, format: str, by_input: bool = False,
        **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.format = inputs, outputs, format
        raw = {**place, "dtype": torch.uint8}
        width = inputs if format in BYTES else inputs // 2
        self.register_buffer("values", torch.zeros(outputs, width, **raw))
        sizes = (outputs, 1 if format in ("int8", "fp8") else inputs // 32)
        sizes = (1, inputs) if by_input else sizes
        kind = raw if format.startswith("mx") else place
        self.register_buffer("scale", torch.ones(sizes, **kind))
        self.bias = nn.Parameter(torch.zeros(outputs, **place)) if bias else None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [outputs, inputs] in a dtype."""
        values, scale = self.values, self.scale
        if self.format.startswith("mx"):
            scale = scale.view(torch.float8_e8m0fnu).to(dtype)
        if self.format in BYTES:
            elements = values.view(BYTES[self.format]).to(scale.dtype)
        else:
            codes = torch.stack((values & 15, values >> 4), -1).flatten(1).int()
            elements = torch.tensor(NIBBLES[self.format], device=values.device, dtype=scale.dtype)
            elements = elements[codes]
        return (elements.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [.., inputs] to [.., outputs]."""
        return nn.functional.linear(x, self.dequantized(x.dtype), self.bias)


class LowRankLinear(nn.Module):
    """A linear of rank r as two factors, down [r, inputs] and up [outputs, r] with the bias.

    format: of factors that are not floats. base: of the weight beside them, if there is one. place:
    device and dtype. few: the class of what has few bits.
    """

    few: Any = FewBitLinear

    def __init__(
        self, in_features: int, rank: int, out_features: int, bias: bool = True,
        format: str | None = None, base: str | None = None, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.rank, self.out_features = in_features, rank, out_features
        self.down: Any = nn.Linear(in_features, rank, False, **place)
        self.up: Any = nn.Linear(rank, out_features, bias, **place)
        self.base: Any = None
        if base is not None:
            self.base = self.few(in_features, out_features, False, base, **place)
        if format is not None:
            self.down = self.few(in_features, rank, False, format, **place)
            beside = format == "fp8" and (base or "").startswith("mx")
            self.up = self.few(rank, out_features, bias, format, beside, **place)

    def forward(self, x: Tensor) -> Any:
        """Map x [.., inputs] to [.., outputs]."""
        y = self.up(self.down(x))
        return y if self.base is None else self.base(x) + y


def places(model: Any, names: Any) -> dict[str, str]:
    """Return the layers of a model by the saved names, which may lack the base model's prefix or
    have it. Those of a head have no place in a base model."""
    modules = dict(model.named_modules())
    prefix = f"{model.base_model_prefix}."
    layers = {}
    for name in names:
        forms = (name, prefix + name, name.removeprefix(prefix))
        path = next((form for form in forms if form in modules), None)
        if path or model.base_model is not model or name.startswith(prefix):
            layers[name] = path or name
    return layers


def empty(old: Any, name: str, saved: Any, kind: Any = LowRankLinear, **place: Any) -> nn.Module:
    """Return a layer without numbers for a linear that was saved under a name.

    saved: what config.json says. Of rank 0 it is a base alone.
    """
    inputs, outputs = old.weight.shape[::-1] if isinstance(old, nn.Linear) else old.weight.shape
    bias, rank = old.bias is not None, saved["ranks"][name]
    format, base = (saved.get(key, {}).get(name) for key in ("formats", "bases"))
    if rank:
        return kind(inputs, rank, outputs, bias, format, base, **place)
    return kind.few(inputs, outputs, bias, base, **place)


def __getattr__(name: str) -> Any:
    """Return transformers' class of this name, with factors in the place of its linears."""
    transformers: Any = sys.modules.get("transformers")
    base: Any = getattr(transformers, name, None)
    if not (isinstance(base, type) and issubclass(base, transformers.PreTrainedModel)):
        raise AttributeError(f"transformers has no model {name!r}")

    def __init__(self: Any, config: Any, *args: Any, **keywords: Any) -> None:  # noqa: N807
        from transformers.quantizers import auto

        super(kind, self).__init__(config, *args, **keywords)
        if "nmm_lowrank" in auto.AUTO_QUANTIZER_MAPPING:
            return  # nmm_compiler puts its own
        saved = config.quantization_config
        for name, path in places(self, saved["ranks"]).items():
            new = empty(self.get_submodule(path), name, saved)
            new.register_buffer("weight", torch.zeros(1))  # the dense class then refuses the file
            self.set_submodule(path, new)

    kind: Any = type(name, (base,), {"__init__": __init__, "__module__": __name__})
    globals()[name] = kind
    return kind
