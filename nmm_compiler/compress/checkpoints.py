"""Factors under the names of public checkpoints, read into a model of the same architecture.

Known styles, `down` being the factor that is applied first:

    style       down            up              published by
    "nmm"       NAME.down       NAME.up         this package
    "svd-llm"   STEM_v_proj     STEM_u_proj     SVD-LLM; NeuronMM (u(v(x)), the v factor first)
    "uv"        NAME.V          NAME.U          AA-SVD

Weights are [r, k] and [n, r], as `nn.Linear` stores them. This module opens only safetensors files;
the caller reads a pickled state dict, with `torch.load(path, weights_only=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from nmm_compiler.compress.load import read_json, shards_of
from nmm_compiler.compress.modules import LowRankLinear
from nmm_compiler.compress.save import install
from nmm_compiler.errors import FactorsFileError, ShapeError, UnknownNameError


@dataclass(frozen=True)
class Style:
    """How a key names a factor: a pattern with the groups `name` and `part`."""

    pattern: re.Pattern[str]
    down: str
    up: str
    suffixes: tuple[str, ...]


_END = r"\.(?P<kind>weight|bias)"
STYLES: dict[str, Style] = {
    "nmm": Style(re.compile(r"(?P<name>.+)\.(?P<part>down|up)" + _END), "down", "up", ("",)),
    "svd-llm": Style(
        re.compile(r"(?P<name>.+)_(?P<part>[uv])_proj" + _END), "v", "u", ("_proj", "")
    ),
    "uv": Style(re.compile(r"(?P<name>.+)\.(?P<part>[UV])" + _END), "V", "U", ("",)),
}


def load_checkpoint(
    model: nn.Module, source: str | Path | Mapping[str, torch.Tensor], style: str = "auto"
) -> tuple[str, ...]:
    """Load a factorized checkpoint into a dense (or low-rank) model; return the low-rank names.

    source: a safetensors file, a directory of them (with or without an index), or a state dict.
    style: one of STYLES, or "auto": the one that finds complete pairs of factors.

    Other tensors of the checkpoint are loaded as they are. Raises FactorsFileError when there are
    no factors, a pair is incomplete or does not fit, or a tensor has no place in the model, which
    is then unchanged.
    """
    tensors, where = _read(source)
    if style != "auto" and style not in STYLES:
        raise UnknownNameError("checkpoint style", style, (*STYLES, "auto"))
    prefix = getattr(model, "base_model_prefix", "")
    names = dict(model.named_modules(remove_duplicate=False))
    for candidate in STYLES if style == "auto" else (style,):
        factors, rest = _split(tensors, STYLES[candidate], names, prefix)
        if factors:
            break
    else:
        keys = ", ".join(list(tensors)[:4])
        raise FactorsFileError(
            f"{where} has no factor names of style {style!r} for {type(model).__name__} (first "
            f"keys: {keys}); known styles: {', '.join(STYLES)}"
        )
    layers = {name: _layer(name, parts, where) for name, parts in factors.items()}
    renamed = _rest(model, rest, set(layers), prefix, where)
    install(model, layers, where)
    model.load_state_dict(renamed, strict=False)
    return tuple(layers)


def _read(source: str | Path | Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    if isinstance(source, Mapping):
        return dict(source), "the state dict"
    path = Path(source)
    files = [path]
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.is_file():
            files = [path / name for name in shards_of(read_json(index))]
        else:
            files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FactorsFileError(
            f"{path} has no .safetensors file; convert a pickled one by passing "
            "torch.load(path, weights_only=True)"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise FactorsFileError(f"{file} cannot be read as safetensors: {error}") from error
    return tensors, str(path)


def _split(
    tensors: Mapping[str, torch.Tensor], style: Style, names: Mapping[str, nn.Module], prefix: str
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return ({module name: {"down", "up", "bias"}}, other tensors)."""
    factors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        found = style.pattern.fullmatch(key)
        name = None
        if found:
            name = _module_name(found["name"], style.suffixes, names, prefix)
        if found is None or name is None:
            rest[key] = tensor
            continue
        part = "down" if found["part"] == style.down else "up"
        if found["kind"] == "bias":
            part = "bias" if part == "up" else "inner bias"
        factors.setdefault(name, {})[part] = tensor
    return factors, rest


def _module_name(
    stem: str, suffixes: tuple[str, ...], names: Mapping[str, nn.Module], prefix: str
) -> str | None:
    """Return the linear of the model that a stem stands for, with or without the base prefix."""
    for suffix in suffixes:
        for name in (f"{stem}{suffix}", f"{prefix}.{stem}{suffix}"):
            if name in names and not isinstance(names[name], (nn.ModuleList, nn.ModuleDict)):
                return name
    return None


def _layer(name: str, parts: Mapping[str, torch.Tensor], where: str) -> LowRankLinear:
    if "inner bias" in parts:
        raise FactorsFileError(
            f"{where}: {name} has a bias between its factors, which a low-rank linear has not; "
            "fold it into the outer bias first (b = b_up + up @ b_down)"
        )
    if not {"down", "up"} <= set(parts):
        raise FactorsFileError(
            f"{where}: {name} has only {', '.join(sorted(parts))}; a pair of factors is needed"
        )
    try:
        return LowRankLinear.from_factors(parts["down"], parts["up"], parts.get("bias"))
    except ShapeError as error:
        raise FactorsFileError(f"{where}: {name}: {error}") from error


def _rest(
    model: nn.Module,
    rest: Mapping[str, torch.Tensor],
    lowrank: set[str],
    prefix: str,
    where: str,
) -> dict[str, torch.Tensor]:
    """Return the other tensors under the model's names; raise for names that the model lacks."""
    own = model.state_dict()
    renamed: dict[str, torch.Tensor] = {}
    for key, tensor in rest.items():
        name = next(
            (k for k in (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")) if k in own), None
        )
        if name is None:
            raise FactorsFileError(
                f"{where} has a tensor {key!r} that {type(model).__name__} has no place for; load "
                "it into the architecture it was made from, or leave that key out"
            )
        if name.rpartition(".")[0] in lowrank:
            continue  # such as the guard of a saved low-rank layer
        if own[name].shape != tensor.shape:
            raise FactorsFileError(
                f"{where} has {key!r} as {list(tensor.shape)}, the model as "
                f"{list(own[name].shape)}; load it into the architecture it was made from"
            )
        renamed[name] = tensor
    return renamed
