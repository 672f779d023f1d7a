"""transformers: low-rank models through save_pretrained and from_pretrained, no remote code.

`attach(model)`, which `compress` calls on a transformers model, writes {layer name: rank} into its
config, as `quantization_config` of method "nmm_lowrank"; `model.save_pretrained` then stores plain
safetensors and that config. When `from_pretrained` meets it, the quantizer registered here replaces
the named linears by empty `LowRankLinear`s before the weights are loaded, and raises
FactorsFileError when a factor is not among them. `register()` makes the quantizer known; a file
that runs when Python starts (`_nmm_compiler_startup.py`) does it as soon as transformers is
imported, and `import nmm_compiler` does it too.

Where this package is not installed, transformers would warn and initialize the low-rank layers at
random. So each is stored with a guard: a tensor NAME.weight of one element, which does not fit the
dense layer, so that transformers raises. Loading with this package passes the guards over.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from nmm_compiler.compress.experts import expert_ranks, install_empty, stacked_home
from nmm_compiler.compress.modules import LowRankLinear, lowrank_layers, put
from nmm_compiler.compress.quantize import FORMATS, empty_factors, format_of
from nmm_compiler.compress.replace import replace_directory
from nmm_compiler.compress.select import is_conv1d
from nmm_compiler.errors import FactorsFileError, MissingPackageError, OutputError

METHOD = "nmm_lowrank"
# No matrix of a model is this wide; more is a damaged file.
_LARGEST_RANK = 1 << 24


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

        def __init__(
            self,
            ranks: Mapping[str, int] | None = None,
            formats: Mapping[str, str] | None = None,
            **_: Any,
        ) -> None:
            self.quant_method = cast(Any, METHOD)
            self.ranks = checked_ranks(ranks)
            self.formats = checked_formats(formats, self.ranks)

        def to_dict(self) -> dict[str, Any]:
            formats = {"formats": dict(self.formats)} if self.formats else {}
            return {"quant_method": METHOD, "ranks": dict(self.ranks), **formats}

    class LowRankQuantizer(HfQuantizer):
        """Puts empty low-rank layers into the skeleton of a model that is being loaded."""

        requires_calibration = True

        def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            config = cast(Any, self.quantization_config)
            _ignore_guards(model, prepare(model, config.ranks, config.formats))
            return model

        def get_state_dict_and_metadata(self, model: nn.Module, *_: Any) -> tuple[Any, Any]:
            # Called before the config is written: a merged adapter has changed the rank.
            config = cast(Any, model).config.quantization_config
            config.ranks, config.formats = _ranks(model), _formats(model)
            return _guarded(model), {}

        @property
        def is_trainable(self) -> bool:
            return True

        @property
        def is_compileable(self) -> bool:
            return True

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return True

        def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
            _check_loaded(model)
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
    """Register, then return one of the two classes that `register` makes; unpickling calls this."""
    if name not in ("LowRankConfig", "LowRankQuantizer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return globals()[name]


def checked_ranks(ranks: object) -> dict[str, int]:
    """Return {layer name: rank} as a saved config gives it; raise FactorsFileError for others."""
    if not isinstance(ranks, Mapping):
        shown = "none" if ranks is None else f"a {type(ranks).__name__}"
        raise FactorsFileError(
            f"the saved config's quantization_config has {shown} where its ranks belong; restore "
            "config.json from the directory that the model was saved to"
        )
    for name, rank in ranks.items():
        whole = isinstance(rank, int) and not isinstance(rank, bool)
        if not isinstance(name, str) or not whole or not 1 <= rank < _LARGEST_RANK:
            raise FactorsFileError(
                f"the saved config gives {name!r} the rank {rank!r:.60}; a rank is a positive "
                "whole number: restore config.json from the directory the model was saved to"
            )
    return dict(ranks)


def checked_formats(formats: object, ranks: Mapping[str, int]) -> dict[str, str]:
    """Return {layer name: "int8" or "fp8"} as a saved config gives it, for some of the layers."""
    found = {} if formats is None else formats
    if isinstance(found, Mapping):
        wrong = [n for n, kind in found.items() if n not in ranks or kind not in FORMATS]
        if not wrong:
            return dict(found)
        found = {wrong[0]: found[wrong[0]]}
    raise FactorsFileError(
        f"the saved config gives factors the formats {found!r:.100}; each layer that has a rank "
        f"may have one of {', '.join(FORMATS)}: restore config.json from the saved directory"
    )


def prepare(
    model: nn.Module, ranks: Mapping[str, int], formats: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Replace the named linears by empty low-rank layers on the same device and dtype.

    formats: those whose factors are of eight bits. Returns their names in this model.

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
        home = None if name is None else stacked_home(modules, name)
        if home is not None:
            install_empty(home, str(name).rpartition(".")[2], rank)
            continue
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
        if saved_name in (formats or {}):
            empty_factors(layer, (formats or {})[saved_name])
        put(model, [name], layer)
    return tuple(name for name in found.values() if name is not None)


def _ignore_guards(model: Any, names: Sequence[str]) -> None:
    """Let transformers pass over the guards of these layers, which have no place in the model."""
    known = model._keys_to_ignore_on_load_unexpected or ()
    guards = [rf"(^|\.){re.escape(name)}\.weight$" for name in names]
    model._keys_to_ignore_on_load_unexpected = {*known, *guards}


def _guarded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with a guard per low-rank layer."""
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    for name, layer in lowrank_layers(model).items():
        guard = {f"{name}.weight": torch.zeros(1, dtype=layer.down.weight.dtype)}
        if _is_stored_as_is(model, guard):
            state.update(guard)
    return state


def _is_stored_as_is(model: nn.Module, guard: dict[str, torch.Tensor]) -> bool:
    """Return whether transformers stores this tensor by itself, and not joined with others."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 everything is stored as it is
        return True
    try:
        stored = revert_weight_conversion(cast(Any, model), dict(guard))
    except Exception:  # any failure says that the weight of this layer is converted
        return False
    return [tuple(tensor.shape) for tensor in stored.values()] == [(1,)]


def _check_loaded(model: nn.Module) -> None:
    """Raise FactorsFileError when transformers has not found a factor and has initialized it.

    transformers 5 marks each parameter that it has loaded; earlier ones leave no trace.
    """
    if int(sys.modules["transformers"].__version__.split(".")[0]) < 5:
        return
    for name, layer in lowrank_layers(model).items():
        for part, linear in (("down", layer.down), ("up", layer.up)):
            if linear.weight.is_meta:
                raise FactorsFileError(
                    f"the weights have no {name}.{part}; copy the directory again"
                )
            for kind, parameter in linear.named_parameters():
                if not getattr(parameter, "_is_hf_initialized", False):
                    raise FactorsFileError(
                        f"the weights have no {name}.{part}.{kind} [{_shape(parameter)}], which "
                        "the saved config's ranks ask for; the files are incomplete or of another "
                        "save: copy the whole directory again"
                    )
                if not parameter.is_floating_point():
                    raise FactorsFileError(
                        f"the weights have {name}.{part}.{kind} as {parameter.dtype}, which is no "
                        "floating-point type; copy the whole directory again"
                    )


def _shape(tensor: torch.Tensor) -> str:
    return ", ".join(map(str, tensor.shape))


def _find(name: str, modules: Mapping[str, nn.Module], base: str) -> str | None:
    """Return a saved name as this model has it: with or without the base model's prefix."""
    forms = [name, f"{base}.{name}", name.removeprefix(f"{base}.")]
    known = (form for form in forms if form in modules or stacked_home(modules, form))
    return next(known, None)


def attach(model: Any) -> None:
    """Write the ranks of a transformers model's low-rank layers into a config of its own.

    The config is copied first: another model may share it. Raises FactorsFileError when the model
    is quantized by another method.
    """
    register()
    from transformers.quantizers import auto

    check_savable(model)
    check_plain(model)
    _own_config(model)
    config = auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD](_ranks(model), _formats(model))
    model.config.quantization_config = config
    model.hf_quantizer = auto.AUTO_QUANTIZER_MAPPING[METHOD](config)


def _ranks(model: nn.Module) -> dict[str, int]:
    """Return {layer name, or name of stacked experts: rank}, as a saved config has it."""
    ranks = {name: layer.rank for name, layer in lowrank_layers(model).items()}
    return ranks | expert_ranks(model)


def _formats(model: nn.Module) -> dict[str, str]:
    """Return {layer name: format} of the layers with factors of eight bits."""
    found = {name: format_of(layer) for name, layer in lowrank_layers(model).items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def attach_if_transformers(model: nn.Module) -> None:
    """`attach`, for a transformers model with low-rank layers."""
    if _is_transformers(model) and _ranks(model):
        attach(model)


def check_savable(model: nn.Module) -> None:
    """Raise FactorsFileError for a transformers model that is quantized by another method.

    That includes models loaded from GGUF with their blocks kept.
    """
    if not _is_transformers(model):
        return
    method = _method(model)
    if method in (None, METHOD):
        return
    unpacked = "quantization_config=GgufConfig(dequantize=True)" if method == "gguf" else "floats"
    raise FactorsFileError(
        f"{type(model).__name__} is already quantized by {method!r}; transformers stores one "
        f"method per model, so a low-rank one could not be saved: load it as {unpacked} and "
        "quantize after compressing"
    )


def check_plain(model: nn.Module) -> None:
    """Raise FactorsFileError for factors that another library has quantized, as torchao does."""
    for name, layer in lowrank_layers(model).items():
        for linear in (layer.down, layer.up):
            weight = linear.weight
            if type(weight) not in (torch.Tensor, nn.Parameter):
                raise FactorsFileError(
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


def _call_unquantized(model: Any) -> None:
    """Remove the mark of a quantized model, since these weights are floats that can be cast and
    trained."""
    model.is_quantized = False
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_is_quantized", False):
            del config._is_quantized


def save_pretrained(
    model: Any,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    files: Mapping[str, str] | None = None,
    **more: Any,
) -> Path:
    """Save a compressed transformers model so that `from_pretrained(directory)` gives it back.

    As `model.save_pretrained`, but all or nothing: a kill at any point, or a full disk, leaves the
    model that was there or the new one (`replace.py`). Further files in `directory` are kept.

    tokenizer: saved with it. files: {name: text} of further files, saved with it.

    Raises OutputError when the disk refuses.
    """
    attach(model)

    def write(staging: Path) -> None:
        model.save_pretrained(staging, **more)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        for name, text in (files or {}).items():
            (staging / name).write_text(text, encoding="utf-8")

    try:
        replace_directory(Path(directory), write, stale=("model*.safetensors*",))
    except (OSError, SafetensorError) as error:  # safetensors raises the latter for a failed write
        if isinstance(error, OutputError):
            raise
        raise OutputError(
            f"the model cannot be written to {directory} ({error}); files that were there are as "
            "they were: make room, or pass another directory"
        ) from error
    return Path(directory)
