"""The low-rank layers of a transformers model: what a config says of them, and in place empty.

config.json has ranks, by the name of a layer or of stacked experts, 0 for a base without a branch;
formats, of factors that are not floats; and bases, the formats of weights beside the factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nmm_compiler.errors import FileError
from nmm_compiler.kernels.packed_formats import FORMATS
from nmm_compiler.lowrank_models import experts
from nmm_compiler.lowrank_models.modeling_nmm_lowrank import empty, places
from nmm_compiler.lowrank_models.modules import LowRankLinear, QuantizedLinear, sizes_of

METHOD = "nmm_lowrank"
Saved = Mapping[str, Mapping[str, Any]]
"""What config.json says: {"ranks": {name: rank}, "formats": {name: format}, "bases": ...}."""
# No matrix of a model is this wide; more is a damaged file.
_LARGEST_RANK = 1 << 24


def compressed(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Return each layer, and each stack of experts, that has factors, few bits, or both, by name.

    That is (what has the factors, the base), None for what it has not.
    """
    weights: dict[str, tuple[Any, Any]] = {}
    for name, module in model.named_modules():
        weight = f"{name.rpartition('_')[0]}_proj"
        if isinstance(module, LowRankLinear):
            weights[name] = module, module.base
        elif isinstance(module, QuantizedLinear) and name.rpartition(".")[0] not in weights:
            weights[name] = None, module
        elif isinstance(module, experts.StackedFactors):
            weights[weight] = module, weights.get(weight, (None, None))[1]
        elif isinstance(module, experts.StackedBase):
            weights[weight] = weights.get(weight, (None, None))[0], module
    return weights


def saved_layers(model: nn.Module) -> Saved:
    """Return what config.json says of a model."""
    layers = compressed(model)
    downs = {name: getattr(factors, "down", None) for name, (factors, _) in layers.items()}
    return {
        "ranks": {n: getattr(factors, "rank", 0) for n, (factors, _) in layers.items()},
        "formats": {n: x.format for n, x in downs.items() if isinstance(x, QuantizedLinear)},
        "bases": {n: base.format for n, (_, base) in layers.items() if hasattr(base, "format")},
    }


def read_layers(fields: Mapping[str, Any]) -> Saved:
    """Return what the fields of a saved quantization_config say; raise FileError for others."""
    said: dict[str, Any] = {"ranks": fields.get("ranks")}
    said |= {key: fields.get(key) or {} for key in ("formats", "bases")}
    wrong = {key: held for key, held in said.items() if not isinstance(held, Mapping)}
    if not wrong:
        kinds = (*said["formats"].items(), *said["bases"].items())
        wrong = {n: kind for n, kind in kinds if n not in said["ranks"] or str(kind) not in FORMATS}
        for name, rank in said["ranks"].items():
            least = 0 if name in said["bases"] else 1
            if type(rank) is not int or not least <= rank < _LARGEST_RANK:
                wrong[name] = rank
    if wrong:
        raise FileError(
            f"the saved config's quantization_config has {wrong!r:.100}; a layer has a rank, a "
            "positive whole number or 0 for a base alone, and maybe a known format and base: "
            "restore config.json from the directory that the model was saved to"
        )
    return said


def prepare(model: nn.Module, saved: Saved) -> tuple[str, ...]:
    """Replace the saved layers by empty low-rank ones on the same device and dtype.

    Returns their names in this model. Raises FileError for a name that is no linear of the model.
    """
    with experts.apart(model):
        modules = dict(model.named_modules())
        layers = places(model, saved["ranks"])
        for saved_name, name in layers.items():
            stack = modules.get(name)
            each = len(stack) if isinstance(stack, nn.ModuleList) else 0
            for place in [f"{name}.{i}" for i in range(each)] or [name]:
                old: Any = modules.get(place)
                if not sizes_of(old):
                    raise FileError(
                        f"the saved config gives rank {saved['ranks'][saved_name]} to "
                        f"{saved_name!r}, which is no linear layer of {type(model).__name__}; load "
                        "it into the architecture it was saved from"
                    )
                on = {"device": old.weight.device, "dtype": old.weight.dtype}
                model.set_submodule(place, empty(old, saved_name, saved, LowRankLinear, **on))
    return tuple(layers.values())
