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

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save as serialized
from torch import Tensor, nn

from nmm_compiler import outputs
from nmm_compiler.errors import FileError, ShapeError
from nmm_compiler.lowrank_models.hf import indexed
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers, put, sizes_of

_FORMAT = {"format": "nmm_lowrank_factors", "version": "1"}
_STYLES = ((".down", ".up"), ("_v_proj", "_u_proj"), (".V", ".U"))


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
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for linear in (layer.down, layer.up):
            if type(linear) is not nn.Linear or type(linear.weight) is not nn.Parameter:
                raise FileError(
                    f"the factors of {name} are quantized, and this file holds floats; save them "
                    "before quantizing, or a transformers model with nmm_compiler.save"
                )
        factors = {"down": layer.down.weight, "up": layer.up.weight, "bias": layer.bias}
        tensors |= {
            f"{name}.{part}": t.detach().contiguous()
            for part, t in factors.items()
            if t is not None
        }
    return outputs.write(path, lambda file: file.write(serialized(tensors, metadata=_FORMAT)))


def load_factors(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> tuple[str, ...]:
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
    rest = dict(tensors)
    factors = {name: _take(rest, name, prefix) for name in linears}
    factors = {name: parts for name, parts in factors.items() if parts}
    if not factors:
        keys = ", ".join(list(tensors)[:4])
        raise FileError(
            f"{where} has no factors of layers of {type(model).__name__} (first keys: {keys}); "
            "known names: NAME.down and NAME.up, *_v_proj and *_u_proj, NAME.V and NAME.U"
        )
    layers = {name: _layer(name, parts, linears[name], where) for name, parts in factors.items()}
    own = model.state_dict()
    renamed: dict[str, Tensor] = {}
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


def _read(source: str | Path | Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    if isinstance(source, Mapping):
        return dict(source), "the state dict"
    path = Path(source)
    files = (indexed(path) or sorted(path.glob("*.safetensors"))) if path.is_dir() else [path]
    if not files:
        raise FileError(
            f"{path} has no .safetensors file; convert a pickled one by passing "
            "torch.load(path, weights_only=True)"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise FileError(f"{file} cannot be read as safetensors: {error}") from error
    return tensors, str(path)


def _take(rest: dict[str, Tensor], name: str, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a linear by "down", "up", "bias", and take them out of the others."""
    forms = dict.fromkeys((name, name.removeprefix(f"{prefix}.")))
    stems = [stem for form in forms for stem in (form, form.removesuffix("_proj"))]
    parts: dict[str, Tensor] = {}
    for stem, (down, up) in itertools.product(stems, _STYLES):
        keys = {f"{stem}{down}.bias": "inner bias", f"{stem}{up}.bias": "bias"}
        for end in ("", ".weight"):
            keys |= {f"{stem}{down}{end}": "down", f"{stem}{up}{end}": "up"}
        parts |= {part: rest.pop(key) for key, part in keys.items() if key in rest}
    for key in (f"{form}.bias" for form in forms if parts):
        if key in rest:
            parts["bias"] = rest.pop(key)
    return parts


def _layer(name: str, parts: Mapping[str, Tensor], old: Any, where: str) -> LowRankLinear:
    """Return the layer of a pair of factors, on the old one's device.

    Raises FileError for what does not fit the old one.
    """
    if not {"down", "up"} <= parts.keys() <= {"down", "up", "bias"}:
        raise FileError(
            f"{where}: {name} has {', '.join(sorted(parts))}; a low-rank linear has down and "
            "up, and an outer bias (fold a bias between its factors into it: b_up + up @ b_down)"
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
        layer.up.bias = old.bias
    weight = old.weight
    if not weight.is_meta:
        layer.to(weight.device)
    return layer.requires_grad_(weight.requires_grad).train(old.training)
