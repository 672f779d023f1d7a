"""A model on PyTorch's meta device: shapes without data, and one of each kind of layer.

`without_data` copies a module; `shorten` keeps one of each kind of layer, so that a model of 80
equal layers is traced as one, and says which layers the kept one stands for. `example_inputs` is
what a transformers model is traced with.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(eq=False)
class MetaModel:
    """A model on the meta device, and which layers its traced layers stand for.

    layers: {"model.layers.0": ("model.layers.0", "model.layers.1", ...)}: a traced layer, by its
    name in the shortened model, and the layers of the whole model that it stands for. parameters:
    of the whole model, and experts_on: how many cores have other experts, once it is prepared for a
    prediction.
    """

    module: nn.Module
    name: str
    layers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parameters: int = 0
    experts_on: int = 1

    def originals(self, path: str) -> tuple[str, ...]:
        """Return the paths of the whole model that a traced path stands for."""
        for layer, every in self.layers.items():
            if path == layer or path.startswith(f"{layer}."):
                return tuple(one + path[len(layer) :] for one in every)
        return (path,)


def without_data(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device; tensors that are tied stay tied."""
    memo: dict[int, Any] = {id(b): b.detach().to("meta") for b in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), False)
    return copy.deepcopy(module, memo).eval()


def example_inputs(model: Any, tokens: int, batch: int = 1) -> dict[str, torch.Tensor] | None:
    """Return tokens or images for a transformers model, all zeros, where its parameters are.

    None for any other model, for one of other inputs, and for images of a size that its config
    does not say.
    """
    config, wanted = getattr(model, "config", None), getattr(model, "main_input_name", "input_ids")
    device = next((p.device for p in model.parameters()), None)
    size = getattr(config, "image_size", None)
    if wanted == "pixel_values" and size is not None:
        sizes = (size, size) if isinstance(size, int) else tuple(size)
        shape = (batch, getattr(config, "num_channels", 3), *sizes)
        return {"pixel_values": torch.zeros(shape, dtype=model.dtype, device=device)}
    if config is None or wanted != "input_ids":
        return None
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=device)
    decoder = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
    return {"input_ids": ids, **decoder}


def shorten(model: MetaModel) -> None:
    """Keep the first layer of each kind in a transformers model, in place.

    Layers are of a kind when their parameters have the same names and shapes and their settings are
    the same. The addition to the residual between two layers is then counted as the one after the
    last layer. Models whose config does not give the layers as one list, or computes their types
    (Jamba), keep all layers.
    """
    config = getattr(model.module, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    own_name = getattr(config, "attribute_map", {}).get("layer_types", "layer_types")
    computed = isinstance(getattr(type(config), own_name, None), property)
    if config is None or count is None or computed:
        return
    stacks = [
        (name, stack)
        for name, stack in model.module.named_modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == count and count > 1
    ]
    if len(stacks) != 1:
        return
    (name, stack) = stacks[0]
    kinds: dict[Any, list[int]] = {}
    for i, layer in enumerate(stack):
        kinds.setdefault(_kind(layer, config, i), []).append(i)
    kept = [members[0] for members in kinds.values()]
    if len(kept) == count:
        return
    model.module.set_submodule(name, nn.ModuleList([stack[i] for i in kept]))
    types = getattr(config, "layer_types", None)
    owners: list[Any] = [m.config for m in model.module.modules() if hasattr(m, "config")]
    for owner in owners:
        owner.num_hidden_layers = len(kept)
        if types is not None:
            owner.layer_types = [types[i] for i in kept]
    for j, members in enumerate(kinds.values()):
        for module in stack[members[0]].modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", j)  # noqa: B010
        model.layers[f"{name}.{j}"] = tuple(f"{name}.{i}" for i in members)


def _kind(layer: nn.Module, config: Any, index: int) -> Any:
    types = getattr(config, "layer_types", None)
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
    settings = tuple(
        (name, type(module).__name__, key, value)
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and key != "layer_idx"
    )
    return shapes, settings, types[index] if types else None
