"""The quantizer that makes transformers load low-rank models; importing this registers it.

When `from_pretrained` meets a config whose `quantization_config` has method "nmm_lowrank", it
replaces the named linears by empty `LowRankLinear`s before the weights are loaded, and raises
FileError when a factor is not among them.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nmm_compiler.lowrank_models import hf_layers
from nmm_compiler.lowrank_models.modules import LowRankLinear, put
from nmm_compiler.lowrank_models.quantize import QuantizedLinear


class LowRankConfig(QuantizationConfigMixin):
    """What config.json says of a low-rank model: {layer name: rank}."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method = cast(Any, hf_layers.METHOD)
        self.saved = hf_layers.SavedLayers.read(fields)

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json gets."""
        return {"quant_method": hf_layers.METHOD, **self.saved.to_dict()}


class LowRankQuantizer(HfQuantizer):
    """Puts empty low-rank layers into the skeleton of a model that is being loaded."""

    requires_calibration = True
    is_trainable = is_compileable = True  # low-rank layers are floats, which train and compile

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        saved = cast(LowRankConfig, self.quantization_config).saved
        hf_layers.ignore_guards(model, hf_layers.prepare(model, saved))
        return model

    def get_state_dict_and_metadata(self, model: nn.Module, *_: Any) -> tuple[Any, Any]:
        """Return what is stored; called before the config is written."""
        cast(Any, model).config.quantization_config.saved = hf_layers.SavedLayers.of(model)
        return hf_layers.guarded(model), {}

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return that `save_pretrained` may be called."""
        return True

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        hf_layers.check_loaded(model)
        hf_layers.call_unquantized(model)
        return model

    def _dequantize(self, model: nn.Module, dtype: Any = None) -> nn.Module:
        for name, factors, base in list(hf_layers.compressed(model)):
            layer = base if factors is None else factors
            if isinstance(layer, (LowRankLinear, QuantizedLinear)):
                put(model, [name], layer.merge())
        return model


if hf_layers.METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
    auto.register_quantization_config(hf_layers.METHOD)(LowRankConfig)
    auto.register_quantizer(hf_layers.METHOD)(LowRankQuantizer)
