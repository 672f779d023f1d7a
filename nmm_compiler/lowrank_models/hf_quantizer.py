"""The quantizer that makes transformers load low-rank models; importing this registers it.

When `from_pretrained` meets a config whose `quantization_config` has method "nmm_lowrank", it
replaces the named linears by empty `LowRankLinear`s before the weights are loaded, and raises
FileError when a factor is not among them.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nmm_compiler.errors import FileError
from nmm_compiler.lowrank_models import experts
from nmm_compiler.lowrank_models.hf_layers import (
    METHOD,
    compressed,
    prepare,
    read_layers,
    saved_layers,
)
from nmm_compiler.lowrank_models.modules import LowRankLinear, QuantizedLinear


class LowRankConfig(QuantizationConfigMixin):
    """What config.json says of a low-rank model: {layer name: rank}."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method = cast(Any, METHOD)
        self.saved = read_layers(fields)

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json gets."""
        return {"quant_method": METHOD, **self.saved}


class LowRankQuantizer(HfQuantizer):
    """Puts empty low-rank layers into the skeleton of a model that is being loaded."""

    requires_calibration = True
    is_trainable = is_compileable = True  # low-rank layers are floats, which train and compile

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> nn.Module:
        names = prepare(model, cast(LowRankConfig, self.quantization_config).saved)
        # guards have no place in the model: transformers is to pass them over
        guards = {rf"(^|\.){re.escape(name)}(\.weight)?$" for name in names}
        known = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = guards.union(known)
        return model

    def get_state_dict_and_metadata(self, model: Any, *_: Any) -> tuple[Any, Any]:
        """Return what is stored, with a guard per low-rank layer, and per stack of experts; called
        before the config is written."""
        model.config.quantization_config.saved = saved_layers(model)
        state: dict[str, torch.Tensor] = dict(model.state_dict())
        for name, (factors, base) in compressed(model).items():
            guard = torch.zeros(1, dtype=model.dtype)
            if isinstance(factors, LowRankLinear) or isinstance(base, QuantizedLinear):
                name = f"{name}.weight"
            else:  # [experts, n, k] with one expert, which transformers may store as two matrices
                guard = torch.zeros(1, 2, 1)
            if _is_stored(model, name, guard):
                state[name] = guard
        return state, {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return that `save_pretrained` may be called."""
        return True

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> nn.Module:
        check_loaded(model)
        # these weights are floats that can be cast and trained
        model.is_quantized = False
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_is_quantized", False):
                del config._is_quantized
        return model


def _is_stored(model: Any, name: str, guard: torch.Tensor) -> bool:
    """Return whether transformers stores this tensor, and joins it with no others."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 everything is stored as it is
        return True
    try:
        stored = revert_weight_conversion(model, {name: guard})
    except Exception:  # any failure says that the weight of this layer is converted
        return False
    return sum(tensor.numel() for tensor in stored.values()) == guard.numel()


def check_loaded(model: nn.Module) -> None:
    """Raise FileError when transformers has not found a factor or a base and has initialized it.

    transformers 5 marks each tensor that it has loaded; earlier ones leave no trace.
    """
    if int(transformers.__version__.split(".")[0]) < 5:
        return
    kinds = (LowRankLinear, QuantizedLinear, experts.StackedFactors, experts.StackedBase)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, kinds)}
    for name, layer in layers.items():
        for key, tensor in layer.state_dict(keep_vars=True).items():
            if tensor.is_meta or not getattr(tensor, "_is_hf_initialized", False):
                raise FileError(
                    f"the weights have no {name}.{key} {list(tensor.shape)}, which the saved "
                    "config's ranks and bases ask for; the files are incomplete or of another "
                    "save: copy the whole directory again"
                )


if METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
    auto.register_quantization_config(METHOD)(LowRankConfig)
    auto.register_quantizer(METHOD)(LowRankQuantizer)
