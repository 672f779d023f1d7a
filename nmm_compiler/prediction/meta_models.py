"""Models without weights: from a config, a directory, a public name, or a module that exists.

Everything happens on PyTorch's meta device, where tensors have shapes and no data.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nmm_compiler.errors import ModelError, UnknownNameError, one_line
from nmm_compiler.lowrank_models import hf_layers
from nmm_compiler.lowrank_models.hf import require_transformers
from nmm_compiler.lowrank_models.meta_copies import MetaModel, without_data
from nmm_compiler.outputs import read_json


@functools.cache
def public_models() -> dict[str, dict[str, Any]]:
    """Return the configs of public models that ship with the package, by name."""
    return read_json(Path(__file__).with_name("public_models.json"))


def meta_model(model_or_config: Any, dtype: torch.dtype) -> MetaModel:
    """Return a model on the meta device.

    model_or_config: a module (left as it is), a transformers config, a dict of its fields, a public
    name, or a directory or file with a config. Raises ModelError for anything else,
    UnknownNameError for an unknown name, MissingPackageError where transformers is missing.
    """
    if isinstance(model_or_config, nn.Module):
        return MetaModel(without_data(model_or_config), type(model_or_config).__name__)
    config = read_config(model_or_config)
    name, saved = str(config.name_or_path) or str(config.model_type), saved_layers(config)
    transformers = require_transformers("a model without its code")
    auto = transformers.models.auto.modeling_auto
    named = " ".join(getattr(config, "architectures", None) or ())
    generates = "CausalLM" in named or "LMHead" in named
    if not named:
        encoder = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING
        generates = type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING and not encoder
    kind = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
    with torch.device("meta"):
        try:
            module = kind.from_config(dense_config(config), dtype=dtype)
        except Exception as error:  # a model's code meets the sizes of any file here
            text = f"{type(error).__name__}: {one_line(error)}"
            raise ModelError(f"transformers makes no model of the config: {text}") from error
        if saved is not None:
            hf_layers.prepare(module, saved)
    return MetaModel(module.eval(), name)


def saved_layers(config: Any) -> hf_layers.SavedLayers | None:
    """Return what the config of a saved low-rank model says of its layers, None for any other.

    Raises ModelError for a config of another quantization, FileError for a damaged one.
    """
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    fields = saved if isinstance(saved, Mapping) else saved.to_dict()
    if fields.get("quant_method") != hf_layers.METHOD:
        raise ModelError(
            f"the config is of a model quantized by {fields.get('quant_method')}; pass the config "
            "of the model that it was made from, and weights= for the format"
        )
    return hf_layers.SavedLayers.read(fields)


def dense_config(given: Any) -> Any:
    """Return a config without the ranks of a saved low-rank model; a module as it is."""
    if getattr(given, "quantization_config", None) is None:
        return given
    made = copy.deepcopy(given)
    del made.quantization_config
    return made


def as_given(model_or_config: Any) -> Any:
    """Return a module as it is, or the config of anything else."""
    is_module = isinstance(model_or_config, nn.Module)
    return model_or_config if is_module else read_config(model_or_config)


def read_config(given: Any) -> Any:
    """Return the transformers config of a config, a dict, a path or a public name."""
    transformers = require_transformers("a model without its code")
    if isinstance(given, transformers.PreTrainedConfig):
        return copy.deepcopy(given)
    named = {}
    if isinstance(given, (str, Path)):
        path = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
        name = Path(given).name
        if path.is_file():
            given = read_json(path)
        elif str(given).lower() in public_models():
            name = str(given).lower()
            given = public_models()[name]
        else:
            forms = ("DIRECTORY with config.json", "CONFIG.json")
            raise UnknownNameError("model", str(given), list(public_models()), forms)
        named = {"name_or_path": name}
    if not isinstance(given, Mapping) or "model_type" not in given:
        raise ModelError(
            f"cannot predict {given!r:.80}: pass an nn.Module, a transformers config, a dict with "
            "its fields and model_type, a directory with a config.json, or a public name"
        )
    try:
        return transformers.AutoConfig.for_model(**{**given, **named})
    except Exception as error:  # each config class has checks, and errors, of its own
        raise ModelError(f"transformers refuses the config: {one_line(error)}") from error
