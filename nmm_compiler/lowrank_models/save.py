"""Factors of any module to disk and back: safetensors, no pickle.

A file of factors holds `NAME.down`, `NAME.up` and maybe `NAME.bias` for each low-rank layer; the
rest of the model is saved by its own library. `load_factors` also reads whole checkpoints, under
the names of others. `down` is the factor that is applied first:

    down            up              written by
    NAME.down       NAME.up         this package (NAME.down.weight in a whole checkpoint)
    STEM_v_proj     STEM_u_proj     SVD-LLM; NeuronMM (u(v(x)), the v factor first)
    NAME.V          NAME.U          AA-SVD

Weights are [r, k] and [n, r], as `nn.Linear` stores them. Only safetensors files are opened; the
caller reads a pickled state dict, with `torch.load(path, weights_only=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialized
from torch import nn

from nmm_compiler import outputs
from nmm_compiler.errors import FileError, ShapeError
from nmm_compiler.lowrank_models.load import indexed
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers, put, sizes_of

_FORMAT = {"format": "nmm_lowrank_factors", "version": "1"}
_STYLES = tuple(
    re.compile(rf"(?P<name>.+){parts}(\.(?P<kind>weight|bias))?")
    for parts in (
        r"\.((?P<down>down)|(?P<up>up))",
        r"_((?P<down>v)|(?P<up>u))_proj",
        r"\.((?P<down>V)|(?P<up>U))",
    )
)


def save_factors(model: nn.Module, path: str | Path) -> Path:
    """Write the factors of all low-rank layers of `model` to a file.

    Args:
        model: any module.
        path: of a safetensors file.

    Returns:
        The path.

    Raises:
        FileError: the model has no low-rank layer.
        OutputError: the disk refuses; an older file is as it was.
    """
    layers = lowrank_layers(model)
    if not layers:
        raise FileError(
            f"{type(model).__name__} has no low-rank layer to save; run compress on it first"
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        for linear in (layer.down, layer.up):
            if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
                raise FileError(
                    f"the factors of {name} are quantized, and this file holds floats; save them "
                    "before quantizing, or a transformers model with nmm_compiler.save"
                )
        found = {"down": layer.down.weight, "up": layer.up.weight, "bias": layer.bias}
        tensors |= {
            f"{name}.{part}": t.detach().contiguous() for part, t in found.items() if t is not None
        }
    return outputs.write(path, lambda file: file.write(serialized(tensors, metadata=_FORMAT)))


def load_factors(
    model: nn.Module, source: str | Path | Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Load factors into a dense (or low-rank) model.

    Args:
        model: any module; it is unchanged when an error is raised.
        source: a safetensors file of factors or a whole checkpoint, a directory of files (with or
            without an index), or a state dict. Other tensors in it are loaded as they are.

    Returns:
        The names of the low-rank layers.

    Raises:
        FileError: there are no factors, a pair is incomplete or does not fit, or a tensor
            has no place in the model.
    """
    tensors, where = _read(source)
    prefix = getattr(model, "base_model_prefix", "")
    modules = dict(model.named_modules(remove_duplicate=False))
    linears = {name: module for name, module in modules.items() if sizes_of(module)}
    for style in _STYLES:
        factors, rest = _split(tensors, style, linears, prefix)
        if factors:
            break
    else:
        keys = ", ".join(list(tensors)[:4])
        raise FileError(
            f"{where} has no factors of layers of {type(model).__name__} (first keys: {keys}); "
            "known names: NAME.down and NAME.up, *_v_proj and *_u_proj, NAME.V and NAME.U"
        )
    layers = {name: _layer(name, parts, linears[name], where) for name, parts in factors.items()}
    own = model.state_dict()
    renamed: dict[str, torch.Tensor] = {}
    for key, tensor in rest.items():
        forms = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
        name = next((form for form in forms if form in own), key)
        if name.rpartition(".")[0] in layers:
            continue  # such as the guard of a saved low-rank layer
        if name not in own or own[name].shape != tensor.shape:
            has = f"as {list(own[name].shape)}" if name in own else "no place for it"
            raise FileError(
                f"{where} has {key!r} as {list(tensor.shape)}, and {type(model).__name__} has "
                f"{has}; load it into the architecture it was made from"
            )
        renamed[name] = tensor
    for name, layer in layers.items():
        put(model, [one for one, old in linears.items() if old is linears[name]], layer)
    model.load_state_dict(renamed, strict=False)
    return tuple(layers)


def _read(source: str | Path | Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    if isinstance(source, Mapping):
        return dict(source), "the state dict"
    path = Path(source)
    files = (indexed(path) or sorted(path.glob("*.safetensors"))) if path.is_dir() else [path]
    if not files:
        raise FileError(
            f"{path} has no .safetensors file; convert a pickled one by passing "
            "torch.load(path, weights_only=True)"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise FileError(f"{file} cannot be read as safetensors: {error}") from error
    return tensors, str(path)


def _split(
    tensors: Mapping[str, torch.Tensor],
    style: re.Pattern[str],
    linears: Mapping[str, nn.Module],
    prefix: str,
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return ({module name: {"down", "up", "bias"}}, other tensors)."""
    factors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        found = style.fullmatch(key)
        stem = found["name"] if found else ""
        forms = [f"{start}{stem}{end}" for end in ("", "_proj") for start in ("", f"{prefix}.")]
        name = next((form for form in forms if form in linears), None)
        if found is None or name is None:
            rest[key] = tensor
            continue
        part = "down" if found["down"] else "up"
        if found["kind"] == "bias":
            part = "bias" if part == "up" else "inner bias"
        factors.setdefault(name, {})[part] = tensor
    for name in factors:
        if f"{name}.bias" in rest:
            factors[name]["bias"] = rest.pop(f"{name}.bias")
    return factors, rest


def _layer(
    name: str, parts: Mapping[str, torch.Tensor], old: nn.Module, where: str
) -> LowRankLinear:
    """Return the layer of a pair of factors, on the old one's device.

    Raises FileError for what does not fit the old one.
    """
    if "inner bias" in parts:
        raise FileError(
            f"{where}: {name} has a bias between its factors, which a low-rank linear has not; "
            "fold it into the outer bias first (b = b_up + up @ b_down)"
        )
    if not {"down", "up"} <= set(parts):
        raise FileError(
            f"{where}: {name} has only {', '.join(sorted(parts))}; a pair of factors is needed"
        )
    try:
        layer = LowRankLinear.from_factors(parts["down"], parts["up"], parts.get("bias"))
    except ShapeError as error:
        raise FileError(f"{where}: {name}: {error}") from error
    shape = (layer.out_features, layer.in_features)
    if sizes_of(old) != shape:
        raise FileError(
            f"{where} has {name!r} as {list(shape)}, the model has it as {list(sizes_of(old))}; "
            "load it into the model that it was saved from"
        )
    if layer.bias is None:  # the file has none: the model's own stays
        layer.up.bias = cast(Any, old).bias
    weight = next(old.parameters())
    if not weight.is_meta:
        layer.to(weight.device)
    return layer.requires_grad_(weight.requires_grad).train(old.training)
