"""Factors to disk and back, for any module: one safetensors file, no pickle.

A file of factors holds `NAME.down`, `NAME.up` and maybe `NAME.bias` for each low-rank layer, and in
its metadata the format's version and each layer's [k, r, n]. It is written under another name and
moved into place, so a full disk leaves an older file as it was. The rest of the model is saved by
its own library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from nmm_compiler.compress.modules import LowRankLinear, lowrank_layers, put
from nmm_compiler.errors import FactorsFileError, OutputError

_FORMAT = "nmm_lowrank_factors"
_VERSION = 1


def save_factors(model: nn.Module, path: str | Path) -> Path:
    """Write the factors of all low-rank layers of `model` to `path`; return the path.

    Raises FactorsFileError when the model has none, OutputError when the disk refuses; an older
    file at `path` is then as it was.
    """
    layers = lowrank_layers(model)
    if not layers:
        raise FactorsFileError(
            f"{type(model).__name__} has no low-rank layer to save; run compress on it first"
        )
    for name, layer in layers.items():
        for linear in (layer.down, layer.up):
            if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
                raise FactorsFileError(
                    f"the factors of {name} are quantized, and this file holds floats; save them "
                    "before quantizing, or a transformers model with hf.save_pretrained"
                )
    tensors: dict[str, torch.Tensor] = {}
    shapes = {}
    for name, layer in layers.items():
        shapes[name] = [layer.in_features, layer.rank, layer.out_features]
        tensors[f"{name}.down"] = layer.down.weight.detach().contiguous()
        tensors[f"{name}.up"] = layer.up.weight.detach().contiguous()
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias.detach().contiguous()
    path = Path(path)
    metadata = {"format": _FORMAT, "version": str(_VERSION), "shapes": json.dumps(shapes)}
    replace_file(path, tensors, metadata)
    return path


def load_factors(model: nn.Module, path: str | Path) -> tuple[str, ...]:
    """Put the factors of a file into `model`, whose layers may be dense or low-rank; return names.

    Nothing is changed unless every factor fits. Raises FactorsFileError for a file that is not one
    of ours, is cut short, or names layers that the model does not have or has in another shape.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("version") != str(_VERSION):
                raise FactorsFileError(
                    f"{path} is no file of factors (format {metadata.get('format')!r}, version "
                    f"{metadata.get('version')!r}); write one with save_factors"
                )
            shapes = json.loads(metadata["shapes"])
            if not isinstance(shapes, dict):
                raise FactorsFileError(f"{path} has no list of layers; write it again")
            keys = set(file.keys())
            layers = {
                name: LowRankLinear.from_factors(
                    file.get_tensor(f"{name}.down"),
                    file.get_tensor(f"{name}.up"),
                    file.get_tensor(f"{name}.bias") if f"{name}.bias" in keys else None,
                )
                for name in shapes
            }
        for name, layer in layers.items():
            found = [layer.in_features, layer.rank, layer.out_features]
            if shapes[name] != found:
                raise FactorsFileError(f"{path} says {name} is {shapes[name]} and has {found}")
    except (SafetensorError, KeyError, ValueError, OSError, RecursionError) as error:
        if isinstance(error, FactorsFileError):
            raise
        raise FactorsFileError(f"{path} cannot be read as factors: {error}") from error
    install(model, layers, str(path))
    return tuple(layers)


def install(model: nn.Module, layers: dict[str, LowRankLinear], source: str) -> None:
    """Replace the named linears of `model` by these layers, on the old ones' device and dtype.

    Checks all before it changes any; raises FactorsFileError for what does not fit.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    shared: dict[int, list[str]] = {}
    for name, module in modules.items():
        shared.setdefault(id(module), []).append(name)
    for name, layer in layers.items():
        old = modules.get(name)
        shape = _linear_shape(old)
        if shape is None:
            raise FactorsFileError(
                f"{source} has factors for {name!r}, and the model has "
                f"{'no such module' if old is None else f'a {type(old).__name__} there'}; load it "
                "into the model that it was saved from"
            )
        if shape != (layer.out_features, layer.in_features):
            raise FactorsFileError(
                f"{source} has {name!r} as [{layer.out_features}, {layer.in_features}], the model "
                f"has it as {list(shape)}; load it into the model that it was saved from"
            )
    for name, layer in layers.items():
        old = modules[name]
        weight = old.down.weight if isinstance(old, LowRankLinear) else old.weight
        assert isinstance(weight, torch.Tensor)
        if not weight.is_meta:
            layer.to(weight.device)
        layer.requires_grad_(weight.requires_grad)
        put(model, shared[id(old)], layer.train(old.training))


def replace_file(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file and move it into place; leave nothing behind on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:  # the latter is a failed write
        raise OutputError(
            f"{path} cannot be written ({error}); an older file is as it was: make room, or pass "
            "another path"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _linear_shape(module: nn.Module | None) -> tuple[int, int] | None:
    """Return (n, k) of a dense, Conv1D or low-rank linear, else None."""
    if isinstance(module, (LowRankLinear, nn.Linear)):
        return module.out_features, module.in_features
    if module is not None and type(module).__name__ == "Conv1D":
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return weight.shape[1], weight.shape[0]
    return None
