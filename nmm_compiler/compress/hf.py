"""transformers: low-rank models through save_pretrained and from_pretrained, no remote code.

`attach(model)`, which `compress` calls on a transformers model, writes {layer name: rank} into its
config, as `quantization_config` of method "nmm_lowrank"; `model.save_pretrained` then stores plain
safetensors and that config. When
`from_pretrained` meets it, the quantizer registered here replaces the named linears by empty
`LowRankLinear`s before the weights are loaded. `register()` is what a process that only loads must
call first; `import nmm_compiler` does it as soon as transformers is imported.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from nmm_compiler.compress.modules import LowRankLinear, lowrank_layers, put
from nmm_compiler.compress.select import is_conv1d
from nmm_compiler.errors import FactorsFileError, MissingPackageError, OutputError

METHOD = "nmm_lowrank"


def register() -> None:
    """Make transformers know low-rank models; calling it again changes nothing.

    Raises MissingPackageError without transformers.
    """
    try:
        from transformers.quantizers import auto
        from transformers.quantizers.base import HfQuantizer
        from transformers.utils.quantization_config import QuantizationConfigMixin
    except ImportError:
        raise MissingPackageError("transformers", "loading a saved low-rank model", "hf") from None
    if METHOD in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        return

    class LowRankConfig(QuantizationConfigMixin):
        """What config.json says of a low-rank model: {layer name: rank}."""

        def __init__(self, ranks: Mapping[str, int] | None = None, **_: Any) -> None:
            self.quant_method = cast(Any, METHOD)
            self.ranks = dict(ranks or {})

        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": METHOD, "ranks": dict(self.ranks)}

    class LowRankQuantizer(HfQuantizer):
        """Puts empty low-rank layers into the skeleton of a model that is being loaded."""

        requires_calibration = True

        def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            prepare(model, cast(LowRankConfig, self.quantization_config).ranks)
            return model

        @property
        def is_trainable(self) -> bool:
            return True

        @property
        def is_compileable(self) -> bool:
            return True

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return True

        def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            _call_unquantized(model)
            return model

        def _dequantize(self, model: nn.Module, dtype: Any = None) -> nn.Module:
            for name, layer in lowrank_layers(model).items():
                put(model, [name], layer.merge())
            return model

    for kind in (LowRankConfig, LowRankQuantizer):  # found by name, so that a model can be pickled
        kind.__qualname__ = kind.__name__
        globals()[kind.__name__] = kind
    auto.register_quantization_config(METHOD)(LowRankConfig)
    auto.register_quantizer(METHOD)(LowRankQuantizer)


def __getattr__(name: str) -> Any:
    """Give the two classes that `register` makes, registering first; what unpickling asks for."""
    if name not in ("LowRankConfig", "LowRankQuantizer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return globals()[name]


def prepare(model: nn.Module, ranks: Mapping[str, int]) -> None:
    """Replace the named linears by empty low-rank layers on the same device and dtype.

    Raises FactorsFileError for a name that is no linear of the model.
    """
    modules = dict(model.named_modules())
    base = getattr(model, "base_model_prefix", "")
    headless = getattr(model, "base_model", None) is model
    found = {saved: _find(saved, modules, base) for saved in ranks}
    if headless and any(found.values()):
        # A base model loaded from a checkpoint with a head: layers of the head have no place here.
        found = {s: n for s, n in found.items() if n or s.startswith(f"{base}.")}
    for saved_name, name in found.items():
        rank = ranks[saved_name]
        old = modules.get(name) if name is not None else None
        if name is None or not (isinstance(old, nn.Linear) or (old is not None and is_conv1d(old))):
            raise FactorsFileError(
                f"the saved config gives rank {rank} to {saved_name!r}, which is no linear layer "
                f"of {type(model).__name__}; load it into the architecture it was saved from"
            )
        weight = old.weight
        assert isinstance(weight, torch.Tensor)
        n, k = weight.shape if isinstance(old, nn.Linear) else weight.shape[::-1]
        bias = old.bias is not None
        layer = LowRankLinear(k, rank, n, bias, device=weight.device, dtype=weight.dtype)
        put(model, [name], layer)


def _find(name: str, modules: Mapping[str, nn.Module], base: str) -> str | None:
    """Return a saved name as this model has it: with or without the base model's prefix."""
    forms = [name, f"{base}.{name}", name.removeprefix(f"{base}.")]
    return next((form for form in forms if form in modules), None)


def attach(model: Any) -> None:
    """Write the ranks of a transformers model's low-rank layers into its config.

    Raises FactorsFileError when the model is quantized by another method.
    """
    register()
    from transformers.quantizers import auto

    method = _method(model)
    if method not in (None, METHOD):
        raise FactorsFileError(
            f"{type(model).__name__} is already quantized by {method!r}; transformers stores one "
            "method per model: compress before quantizing, or keep factors with save_factors"
        )
    ranks = {name: layer.rank for name, layer in lowrank_layers(model).items()}
    config = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD](ranks)
    model.config.quantization_config = config
    model.hf_quantizer = auto.AUTO_QUANTIZER_MAPPING[METHOD](config)


def attach_if_transformers(model: nn.Module) -> None:
    """`attach`, for a transformers model with low-rank layers that no other method quantizes."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not lowrank_layers(model):
        return
    if not isinstance(model, transformers.PreTrainedModel):
        return
    if _method(model) in (None, METHOD):
        attach(model)


def _method(model: Any) -> str | None:
    """Return the name of the method that the model's config says it is quantized by."""
    config = getattr(model.config, "quantization_config", None)
    if isinstance(config, dict):
        return config.get("quant_method")
    return getattr(config, "quant_method", None)


def _call_unquantized(model: Any) -> None:
    """Undo the mark of a quantized model: these weights are floats, free to be cast and trained."""
    model.is_quantized = False
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_is_quantized", False):
            del config._is_quantized


def save_pretrained(
    model: Any, directory: str | Path, *, tokenizer: Any = None, **more: Any
) -> Path:
    """Save a compressed transformers model so that `from_pretrained(directory)` gives it back.

    As `model.save_pretrained`, but all or nothing: files are written beside `directory` and moved
    into it when all are complete, so a full disk leaves the old files intact. Further files in
    `directory` are kept. Raises OutputError when the disk refuses.
    """
    attach(model)
    directory = Path(directory)
    staging = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        model.save_pretrained(staging, **more)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        move_files(staging, directory)
    except (OSError, SafetensorError) as error:  # the latter is a failed write of weights
        raise OutputError(
            f"the model cannot be written to {directory} ({error}); files that were there are as "
            "they were: make room, or pass another directory"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return directory


def move_files(staging: Path, directory: Path) -> None:
    """Move complete files into a directory; weights of an older save that are not among them go."""
    directory.mkdir(exist_ok=True)
    new = {path.name for path in staging.iterdir()}
    for path in sorted(staging.iterdir()):
        os.replace(path, directory / path.name)
    for path in directory.glob("model*.safetensors*"):
        if path.name not in new:
            path.unlink()
