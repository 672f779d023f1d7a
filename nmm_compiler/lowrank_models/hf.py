"""Saves and loads low-rank transformers models.

`attach(model)`, which `compress` calls on a transformers model, writes {layer name: rank} into its
config, as `quantization_config` of method "nmm_lowrank"; `model.save_pretrained` then stores plain
safetensors and that config. Such a directory is loaded right, or with an error:

    nmm_compiler.load(directory)                          the quantizer of `hf_quantizer.py`
    from_pretrained(directory), nmm_compiler imported     the same
    from_pretrained(directory, trust_remote_code=True)    `modeling_nmm_lowrank.py`, which `save`
                                                          puts beside the weights

In any other way transformers would warn and initialize the low-rank layers at random. So each is
stored with a guard: a tensor NAME.weight of one element, which does not fit the dense layer, so
that transformers raises. The first two ways pass the guards over.
"""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from nmm_compiler.errors import FileError, MissingPackageError, OptionTypeError, OutputError
from nmm_compiler.lowrank_models import experts
from nmm_compiler.lowrank_models.modules import LowRankLinear, lowrank_layers, put, sizes_of
from nmm_compiler.lowrank_models.quantize import (
    FORMATS,
    QuantizedLinear,
    format_of,
    make_layer,
)
from nmm_compiler.outputs import replace_directory

METHOD = "nmm_lowrank"
_CODE = "modeling_nmm_lowrank"
# No matrix of a model is this wide; more is a damaged file.
_LARGEST_RANK = 1 << 24


def compressed(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield each layer, and each stack of experts, that has factors, few bits, or both.

    That is (name, what has the factors, the base), None for what it has not.
    """
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            inside.update(module.children())
            yield name, module, module.base
        elif isinstance(module, QuantizedLinear) and module not in inside:
            yield name, None, module
        for weight, factors, base in experts.compressed_stacks(module):
            yield f"{name}.{weight}", factors, base


@dataclass(frozen=True)
class SavedLayers:
    """What config.json says of a low-rank model.

    ranks: by the name of a layer or of stacked experts; 0 for a base without a branch. formats: of
    factors that are not floats. bases: of the weights beside the factors.
    """

    ranks: dict[str, int]
    formats: dict[str, str]
    bases: dict[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> SavedLayers:
        """Return what a model has."""
        saved = cls({}, {}, {})
        for name, factors, base in compressed(model):
            saved.ranks[name] = 0 if factors is None else factors.rank
            formats = (format_of(getattr(factors, "down", None)), format_of(base))
            for held, kind in zip((saved.formats, saved.bases), formats, strict=True):
                held.update({} if kind is None else {name: kind})
        return saved

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> SavedLayers:
        """Return what the fields of a saved quantization_config say; raise FileError for others."""
        found: dict[str, Any] = {"ranks": fields.get("ranks")}
        found |= {name: fields.get(name) or {} for name in ("formats", "bases")}
        wrong = {name: held for name, held in found.items() if not isinstance(held, Mapping)}
        if not wrong:
            ranks, bases = found["ranks"], found["bases"]
            kinds = (*found["formats"].items(), *bases.items())
            wrong = {n: kind for n, kind in kinds if n not in ranks or str(kind) not in FORMATS}
            for name, rank in ranks.items():
                if type(rank) is not int or not (name not in bases) <= rank < _LARGEST_RANK:
                    wrong[name] = rank
        if wrong:
            raise FileError(
                f"the saved config's quantization_config has {wrong!r:.100}; a layer has a rank, a "
                "positive whole number or 0 for a base alone, and maybe a format and a base, of "
                f"{', '.join(FORMATS)}: restore config.json from the directory that the model was "
                "saved to"
            )
        return cls(**{name: dict(held) for name, held in found.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json gets."""
        more = {"formats": dict(self.formats), "bases": dict(self.bases)}
        return {"ranks": dict(self.ranks), **{name: held for name, held in more.items() if held}}


def register() -> None:
    """Make transformers know low-rank models; calling it again changes nothing.

    Raises MissingPackageError without transformers.
    """
    require_transformers("loading a saved low-rank model")
    importlib.import_module("nmm_compiler.lowrank_models.hf_quantizer")


def require_transformers(purpose: str, extra: str = "hf") -> Any:
    """Import and return transformers, or raise MissingPackageError. extra: the one that has all."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise MissingPackageError("transformers", purpose, extra) from None


def attach(model: Any) -> None:
    """Write the ranks of a transformers model's low-rank layers into a config of its own.

    The config is copied first: another model may share it. Raises FileError when the model
    is quantized by another method.
    """
    register()
    from nmm_compiler.lowrank_models.hf_quantizer import LowRankConfig, LowRankQuantizer

    check_savable(model)
    check_plain(model)
    _own_config(model)
    config = LowRankConfig(**SavedLayers.of(model).to_dict())
    model.config.quantization_config = config
    model.hf_quantizer = LowRankQuantizer(config)


def attach_if_transformers(model: nn.Module) -> None:
    """`attach`, for a transformers model with low-rank layers."""
    if _is_transformers(model) and SavedLayers.of(model).ranks:
        attach(model)


def check_savable(model: nn.Module) -> None:
    """Raise FileError for a transformers model that is quantized by another method.

    That includes models loaded from GGUF with their blocks kept.
    """
    if not _is_transformers(model):
        return
    method = _method(model)
    if method in (None, METHOD):
        return
    unpacked = "quantization_config=GgufConfig(dequantize=True)" if method == "gguf" else "floats"
    raise FileError(
        f"{type(model).__name__} is already quantized by {method!r}; transformers stores one "
        f"method per model, so a low-rank one could not be saved: load it as {unpacked} and "
        "quantize after compressing"
    )


def check_plain(model: nn.Module) -> None:
    """Raise FileError for factors that another library has quantized, as torchao does."""
    for name, layer in lowrank_layers(model).items():
        for linear in (layer.down, layer.up):
            weight = linear.weight
            if type(weight) not in (torch.Tensor, nn.Parameter):
                raise FileError(
                    f"the factors of {name} are {type(weight).__name__}s, which cannot be saved "
                    "with ranks; save the model before quantizing and quantize after loading, or "
                    'use quantize_factors(model, "int8" or "fp8"), which is saved with it'
                )


def _is_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _method(model: Any) -> str | None:
    """Return the name of the method that a model says it is quantized by."""
    for holder in (model.config, getattr(model, "hf_quantizer", None)):
        config = getattr(holder, "quantization_config", None)
        found = config.get if isinstance(config, dict) else partial(getattr, config)
        method = found("quant_method", None)
        if method is not None:
            return str(getattr(method, "value", method))
    return None


def _own_config(model: Any) -> None:
    """Give a model, and all modules in it, a copy of the config objects that they hold."""
    memo: dict[int, Any] = {}
    kind = next(k for k in type(model.config).__mro__ if k.__name__.lower() == "pretrainedconfig")
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, kind) and id(value) in memo:
                setattr(module, key, memo[id(value)])


def save(
    model: Any,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    files: Mapping[str, str] | None = None,
    **more: Any,
) -> Path:
    """Save a compressed transformers model for `load`, and for transformers without this package.

    As `model.save_pretrained`, but all or nothing (`outputs.py`), and with the code that
    `from_pretrained(directory, trust_remote_code=True)` runs. Further files in `directory` are
    kept.

    Args:
        model: a transformers model that `compress` has made low-rank.
        directory: new or old.
        tokenizer: saved with it.
        files: {name: text} of further files, saved with it.
        more: what `model.save_pretrained` takes.

    Returns:
        The directory.

    Raises:
        OptionTypeError: the model is not one of transformers.
        OutputError: the disk refuses; files that were there are as they were.
    """
    if not _is_transformers(model):
        wanted = "a transformers model; lowrank_models.save.save_factors writes any other"
        raise OptionTypeError("model", type(model).__name__, wanted)
    attach(model)

    def write(staging: Path) -> None:
        model.save_pretrained(staging, **more)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        if not any(isinstance(module, experts.CompressedExperts) for module in model.modules()):
            _add_code(model, staging)
        for name, text in (files or {}).items():
            (staging / name).write_text(text, encoding="utf-8")

    try:
        replace_directory(Path(directory), write, stale=("model*.safetensors*",))
    except (OSError, SafetensorError) as error:  # safetensors raises the latter for a failed write
        raise OutputError(
            f"the model cannot be written to {directory} ({error}); files that were there are as "
            "they were: make room, or pass another directory"
        ) from error
    return Path(directory)


def _add_code(model: Any, directory: Path) -> None:
    """Copy the modeling file, and name its classes in config.json, by the Hub's convention."""
    from transformers.models.auto import modeling_auto

    source = Path(__file__).with_name(f"{_CODE}.py")
    shutil.copyfile(source, directory / source.name)
    names = {}
    for name in (one for one in dir(modeling_auto) if one.startswith("AutoModel")):
        known = getattr(getattr(modeling_auto, name), "_model_mapping", {})
        kind = known.get(type(model.config), None)
        own = getattr(kind, "__name__", "")
        if own == type(model).__name__ or (own and name == "AutoModel"):
            names[name] = f"{_CODE}.{own}"
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "auto_map": names}, indent=2) + "\n", encoding="utf-8")


def prepare(model: nn.Module, saved: SavedLayers) -> tuple[str, ...]:
    """Replace the saved layers by empty low-rank ones on the same device and dtype.

    Returns their names in this model. Raises FileError for a name that is no linear of the model.
    """
    experts.split(model)
    modules = dict(model.named_modules())
    base = getattr(model, "base_model_prefix", "")
    headless = getattr(model, "base_model", None) is model
    found = {name: _find(name, modules, base) for name in saved.ranks}
    if headless and any(found.values()):
        # A base model loaded from a checkpoint with a head: layers of the head have no place here.
        found = {s: n for s, n in found.items() if n or s.startswith(f"{base}.")}
    for saved_name, name in found.items():
        stack = modules.get(str(name))
        each = len(stack) if isinstance(stack, nn.ModuleList) else 0
        for place in [f"{name}.{i}" for i in range(each)] or [str(name)]:
            old = modules.get(place)
            if not sizes_of(old):
                raise FileError(
                    f"the saved config gives rank {saved.ranks[saved_name]} to {saved_name!r}, "
                    f"which is no linear layer of {type(model).__name__}; load it into the "
                    "architecture it was saved from"
                )
            put(model, [place], _empty(old, saved, saved_name))
    experts.join(model)
    return tuple(name for name in found.values() if name is not None)


def _empty(old: Any, saved: SavedLayers, name: str) -> nn.Module:
    """Return what is saved in the place of a linear, without values, on its device."""
    weight, (n, k), rank = old.weight, sizes_of(old), saved.ranks[name]
    down, up, dense = (
        torch.empty(shape, device="meta", dtype=weight.dtype)
        for shape in ((rank, k), (n, rank), (n, k))
    )
    bias = None if old.bias is None else nn.Parameter(torch.empty_like(dense[:, 0]))
    named = saved.bases.get(name)
    few = None if named is None else QuantizedLinear.of(dense, named)
    layer = make_layer(down, up, bias, few, saved.formats.get(name))
    return layer if weight.is_meta else layer.to_empty(device=weight.device)


def _find(name: str, modules: Mapping[str, nn.Module], base: str) -> str | None:
    """Return a saved name as this model has it: with or without the base model's prefix."""
    forms = [name, f"{base}.{name}", name.removeprefix(f"{base}.")]
    return next((form for form in forms if form in modules), None)
