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

`load` reads a directory, low-rank or dense, that may be incomplete, damaged or hostile, or raises
one line: `from_pretrained` raises all kinds of exceptions for damaged files, and initializes
missing weights with a warning. It first looks at the files (sizes, JSON, names in the index), then
lets transformers load them, and refuses a model with weights that are missing or of another shape.
Nothing in the directory is executed: no remote code, and pickled weights go through torch's
`weights_only` reader.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from nmm_compiler.errors import (
    FileError,
    MissingPackageError,
    NmmError,
    OptionTypeError,
    OutputError,
    one_line,
)
from nmm_compiler.lowrank_models.experts import CompressedExperts
from nmm_compiler.lowrank_models.hf_layers import METHOD, compressed, saved_layers
from nmm_compiler.lowrank_models.modules import lowrank_layers
from nmm_compiler.outputs import read_json, replace_directory

_CODE = "modeling_nmm_lowrank"
_INDEX = "model.safetensors.index.json"
# Sizes past these are damage, and would keep transformers busy for hours.
_LARGEST = {"_size": 1 << 20, "n_embd": 1 << 20, "layers": 4096, "n_layer": 4096, "experts": 65536}


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
    memo: dict[int, Any] = {}
    copy.deepcopy(model.config, memo)
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if id(value) in memo:
                setattr(module, key, memo[id(value)])
    config = LowRankConfig(**saved_layers(model))
    model.config.quantization_config = config
    model.hf_quantizer = LowRankQuantizer(config)


def check_savable(model: Any) -> None:
    """Raise FileError for a transformers model that is quantized by another method.

    That includes models loaded from GGUF with their blocks kept.
    """
    if not _is_transformers(model):
        return
    for holder in (model.config, getattr(model, "hf_quantizer", None)):
        config = getattr(holder, "quantization_config", None)
        read = config.get if isinstance(config, dict) else partial(getattr, config)
        named = read("quant_method", None)
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


def load(directory: str | Path) -> Any:
    """Return the transformers model of a directory, low-rank or dense, in eval mode.

    Args:
        directory: what `save`, or `save_pretrained` of a compressed model, wrote.

    Returns:
        The model, of the architecture that its config names. No code of the directory runs.

    Raises:
        FileError: the directory is not a whole model; the message is one line.
    """
    with _in_one_line(str(directory)):
        check_files(Path(directory))
        import transformers

        register()
        here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(directory, **here)
        kind = _model_class(config)
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # its warnings are errors here
        try:
            model, info = kind.from_pretrained(directory, output_loading_info=True, **here)
        finally:
            transformers.logging.set_verbosity(verbosity)
        for what, keys in info.items():
            if what in ("missing_keys", "mismatched_keys") and keys:
                shown = ", ".join(sorted(map(str, keys))[:4])
                raise FileError(
                    f"the weights lack {shown} ({len(keys)} in all), which "
                    f"{type(model).__name__} needs"
                )
        return model.eval()


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Turn whatever transformers raises for what is in files into a FileError of one line."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, NmmError) else f"{type(error).__name__}: "
        raise FileError(
            f"{what} cannot be loaded: {kind}{one_line(error)}; copy the whole directory again"
        ) from error


def check_files(directory: Path) -> None:
    """Raise FileError unless config and index can be read as such, and the files are there."""
    config = read_json(directory / "config.json")
    for key, value in config.items():
        largest = next((v for end, v in _LARGEST.items() if key.endswith(end)), None)
        if largest is not None and isinstance(value, (int, float)) and not 0 <= value <= largest:
            raise FileError(f"config.json has {key} {value!s:.40}; restore the file")
    whole = directory / "model.safetensors"
    for path in [whole] if whole.exists() else indexed(directory):
        if not path.is_file():  # a pipe would hang
            raise FileError(f"{path.name} is missing, or no regular file")


def indexed(directory: Path) -> list[Path]:
    """Return the safetensors files that a directory's index names, all in it; [] without one."""
    if not (directory / _INDEX).exists():
        return []
    names = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise FileError(f"{_INDEX} has no weight_map; restore the file")
    for name in names.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise FileError(
                f"{_INDEX} names {name!r:.80}, which is no safetensors file of this directory"
            )
    return [directory / name for name in sorted(set(names.values()))]


def _model_class(config: Any) -> Any:
    """Return the class that config.json names, AutoModel where it names none.

    Raises FileError for a name that transformers does not know: another class would leave
    weights out, and load.
    """
    import transformers

    named = getattr(config, "architectures", None)
    if named is None:
        return transformers.AutoModel
    name = named[0] if isinstance(named, list) and named else named
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise FileError(
            f"config.json has architectures {named!r:.100}, and transformers "
            f"{transformers.__version__} has no such model; restore the line of the original"
        )
    return kind


def load_tokenizer(directory: str | Path) -> Any:
    """Return the tokenizer of a directory, or None; FileError for one that is damaged."""
    import transformers

    files = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model")
    if not any((Path(directory) / file).is_file() for file in files):
        return None
    with _in_one_line(f"the tokenizer in {directory}"):
        return transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
