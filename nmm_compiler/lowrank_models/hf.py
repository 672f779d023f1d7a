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
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from nmm_compiler.errors import FileError, MissingPackageError, OptionTypeError, OutputError
from nmm_compiler.lowrank_models.experts import CompressedExperts
from nmm_compiler.lowrank_models.hf_layers import METHOD, compressed, saved_layers
from nmm_compiler.lowrank_models.modules import lowrank_layers
from nmm_compiler.outputs import read_json, replace_directory

_CODE = "modeling_nmm_lowrank"


def register() -> None:
    """Make transformers know low-rank models; calling it again changes nothing.

    Raises MissingPackageError without transformers.
    """
    require_transformers("loading a saved low-rank model")
    importlib.import_module("nmm_compiler.lowrank_models.hf_quantizer")


def require_transformers(purpose: str) -> Any:
    """Import and return transformers, or raise MissingPackageError."""
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise MissingPackageError("transformers", purpose, "hf") from None


def attach(model: Any) -> None:
    """Write the ranks of a transformers model's low-rank layers, if any, into a config of its own.

    The config is copied first, for all modules of the model: another one may share it. Raises
    FileError when the model is quantized by another method, or its factors by another library, as
    torchao does.
    """
    if not _is_transformers(model) or not compressed(model):
        return
    from nmm_compiler.lowrank_models.hf_quantizer import LowRankConfig, LowRankQuantizer

    check_savable(model)
    for name, layer in lowrank_layers(model).items():
        for weight in (layer.down.weight, layer.up.weight):
            if type(weight) not in (torch.Tensor, nn.Parameter):
                raise FileError(
                    f"the factors of {name} are {type(weight).__name__}s, which cannot be saved "
                    "with ranks; save the model before quantizing and quantize after loading, or "
                    'use quantize_factors(model, "int8" or "fp8"), which is saved with it'
                )
    kind = next(k for k in type(model.config).__mro__ if k.__name__.lower() == "pretrainedconfig")
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, kind) and id(value) in memo:
                setattr(module, key, memo[id(value)])
    config = LowRankConfig(**saved_layers(model))
    model.config.quantization_config = config
    model.hf_quantizer = LowRankQuantizer(config)


def check_savable(model: nn.Module) -> None:
    """Raise FileError for a transformers model that is quantized by another method.

    That includes models loaded from GGUF with their blocks kept.
    """
    if not _is_transformers(model):
        return
    given: Any = model
    for holder in (given.config, getattr(model, "hf_quantizer", None)):
        config = getattr(holder, "quantization_config", None)
        found = config.get if isinstance(config, dict) else partial(getattr, config)
        named = found("quant_method", None)
        method = str(getattr(named, "value", named))
        if named is not None and method != METHOD:
            raise FileError(
                f"{type(model).__name__} is already quantized by {method!r}; transformers stores "
                "one method per model, so a low-rank one could not be saved: load it as floats (of "
                "GGUF by quantization_config=GgufConfig(dequantize=True)), and quantize afterwards"
            )


def _is_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


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
    from transformers.models.auto import modeling_auto

    def write(staging: Path) -> None:
        model.save_pretrained(staging, **more)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        for name, text in (files or {}).items():
            (staging / name).write_text(text, encoding="utf-8")
        if any(isinstance(module, CompressedExperts) for module in model.modules()):
            return
        source, path = Path(__file__).with_name(f"{_CODE}.py"), staging / "config.json"
        shutil.copyfile(source, staging / source.name)
        names = {}  # the classes of the modeling file, by the Hub's convention
        for name in (one for one in dir(modeling_auto) if one.startswith("AutoModel")):
            known = getattr(getattr(modeling_auto, name), "_model_mapping", {})
            own = getattr(known.get(type(model.config), None), "__name__", "")
            if own == type(model).__name__ or (own and name == "AutoModel"):
                names[name] = f"{_CODE}.{own}"
        config = {**read_json(path), "auto_map": names}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    try:
        replace_directory(Path(directory), write, stale=("model*.safetensors*",))
    except (OSError, SafetensorError) as error:  # safetensors raises the latter for a failed write
        raise OutputError(
            f"the model cannot be written to {directory} ({error}); files that were there are as "
            "they were: make room, or pass another directory"
        ) from error
    return Path(directory)
