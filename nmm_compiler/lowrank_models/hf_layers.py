"""The low-rank layers of a transformers model: put in place empty, guarded, and checked.

`hf_quantizer.py` calls these while transformers loads or saves a model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.errors import FileError
from nmm_compiler.lowrank_models.experts import expert_ranks, install_empty, stacked_home
from nmm_compiler.lowrank_models.modules import lowrank_layers, put
from nmm_compiler.lowrank_models.quantize import (
    FORMATS,
    QuantizedLinear,
    format_of,
    make_layer,
    quantized_layers,
)
from nmm_compiler.lowrank_models.select import is_conv1d

METHOD = "nmm_lowrank"
# No matrix of a model is this wide; more is a damaged file.
_LARGEST_RANK = 1 << 24


def checked_ranks(ranks: object, bases: object = None) -> dict[str, int]:
    """Return {layer name: rank} as a saved config gives it; raise FileError for others.

    bases: {layer name: format}; of these layers a rank may be 0.
    """
    alone = set(bases) if isinstance(bases, Mapping) else set()
    if not isinstance(ranks, Mapping):
        shown = "none" if ranks is None else f"a {type(ranks).__name__}"
        raise FileError(
            f"the saved config's quantization_config has {shown} where its ranks belong; restore "
            "config.json from the directory that the model was saved to"
        )
    for name, rank in ranks.items():
        whole = isinstance(rank, int) and not isinstance(rank, bool)
        if (
            not isinstance(name, str)
            or not whole
            or not (name not in alone) <= rank < _LARGEST_RANK
        ):
            raise FileError(
                f"the saved config gives {name!r} the rank {rank!r:.60}; a rank is a positive "
                "whole number: restore config.json from the directory the model was saved to"
            )
    return dict(ranks)


def checked_formats(formats: object, ranks: Mapping[str, int]) -> dict[str, str]:
    """Return {layer name: format} as a saved config gives it, for some of the layers."""
    found = {} if formats is None else formats
    if isinstance(found, Mapping):
        wrong = [n for n, kind in found.items() if n not in ranks or str(kind) not in FORMATS]
        if not wrong:
            return dict(found)
        found = {wrong[0]: found[wrong[0]]}
    raise FileError(
        f"the saved config gives layers the formats {found!r:.100}; each layer that has a rank "
        f"may have one of {', '.join(FORMATS)}: restore config.json from the saved directory"
    )


def prepare(
    model: nn.Module,
    ranks: Mapping[str, int],
    formats: Mapping[str, str] | None = None,
    bases: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Replace the named linears by empty low-rank layers on the same device and dtype.

    formats: of factors that are not floats. bases: of the weights beside them. Returns their names
    in this model.

    Raises FileError for a name that is no linear of the model.
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
            raise FileError(
                f"the saved config gives rank {rank} to {saved_name!r}, which is no linear layer "
                f"of {type(model).__name__}; load it into the architecture it was saved from"
            )
        weight = old.weight
        assert isinstance(weight, torch.Tensor)
        n, k = weight.shape if isinstance(old, nn.Linear) else weight.shape[::-1]
        down, up, dense = (
            torch.empty(shape, device="meta", dtype=weight.dtype)
            for shape in ((rank, k), (n, rank), (n, k))
        )
        bias = None if old.bias is None else nn.Parameter(torch.empty_like(up[:, 0], device="meta"))
        named = (bases or {}).get(saved_name)
        base = None if named is None else QuantizedLinear.of(dense, named)
        layer = make_layer(down, up, bias, base, (formats or {}).get(saved_name))
        put(model, [name], layer if weight.is_meta else layer.to_empty(device=weight.device))
    return tuple(name for name in found.values() if name is not None)


def ignore_guards(model: Any, names: Sequence[str]) -> None:
    """Let transformers pass over the guards of these layers, which have no place in the model."""
    known = model._keys_to_ignore_on_load_unexpected or ()
    guards = [rf"(^|\.){re.escape(name)}(\.weight)?$" for name in names]
    model._keys_to_ignore_on_load_unexpected = {*known, *guards}


def guarded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with a guard per low-rank layer, and per stack of experts."""
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    dtype = getattr(model, "dtype", torch.float32)
    layers = (*lowrank_layers(model), *quantized_layers(model))
    guards = {f"{name}.weight": torch.zeros(1, dtype=dtype) for name in layers}
    # Of a stack [experts, n, k] with one expert, which transformers may store as two matrices.
    guards |= {name: torch.zeros(1, 2, 1) for name in expert_ranks(model)}
    return state | {name: guard for name, guard in guards.items() if _is_stored(model, name, guard)}


def _is_stored(model: nn.Module, name: str, guard: torch.Tensor) -> bool:
    """Return whether transformers stores this tensor, and joins it with no others."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 everything is stored as it is
        return True
    try:
        stored = revert_weight_conversion(cast(Any, model), {name: guard})
    except Exception:  # any failure says that the weight of this layer is converted
        return False
    return sum(tensor.numel() for tensor in stored.values()) == guard.numel()


def check_loaded(model: nn.Module) -> None:
    """Raise FileError when transformers has not found a factor or a base and has initialized it.

    transformers 5 marks each tensor that it has loaded; earlier ones leave no trace.
    """
    if int(sys.modules["transformers"].__version__.split(".")[0]) < 5:
        return
    for name, layer in (lowrank_layers(model) | quantized_layers(model)).items():
        for key, tensor in layer.state_dict(keep_vars=True).items():
            if tensor.is_meta:
                raise FileError(f"the weights have no {name}.{key}; copy the directory again")
            if not getattr(tensor, "_is_hf_initialized", False):
                raise FileError(
                    f"the weights have no {name}.{key} [{_shape(tensor)}], which the saved "
                    "config's ranks and bases ask for; the files are incomplete or of another "
                    "save: copy the whole directory again"
                )
            if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
                raise FileError(
                    f"the weights have {name}.{key} as {tensor.dtype}, which is no "
                    "floating-point type; copy the whole directory again"
                )


def _shape(tensor: torch.Tensor) -> str:
    return ", ".join(map(str, tensor.shape))


def _find(name: str, modules: Mapping[str, nn.Module], base: str) -> str | None:
    """Return a saved name as this model has it: with or without the base model's prefix."""
    forms = [name, f"{base}.{name}", name.removeprefix(f"{base}.")]
    known = (form for form in forms if form in modules or stacked_home(modules, form))
    return next(known, None)


def describe(model: nn.Module, config: Any) -> None:
    """Write the ranks and formats of a model into its quantization config."""
    config.ranks, config.formats = saved_ranks(model), saved_formats(model)
    config.bases = saved_bases(model)


def saved_ranks(model: nn.Module) -> dict[str, int]:
    """Return {layer name, or name of stacked experts: rank}, as a saved config has it."""
    ranks = {name: layer.rank for name, layer in lowrank_layers(model).items()}
    return ranks | dict.fromkeys(quantized_layers(model), 0) | expert_ranks(model)


def saved_formats(model: nn.Module) -> dict[str, str]:
    """Return {layer name: format} of the layers whose factors are not floats."""
    found = {name: format_of(layer.down) for name, layer in lowrank_layers(model).items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def saved_bases(model: nn.Module) -> dict[str, str]:
    """Return {layer name: format} of the layers with a base."""
    found = {name: format_of(layer.base) for name, layer in lowrank_layers(model).items()}
    found |= {name: layer.format for name, layer in quantized_layers(model).items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def call_unquantized(model: Any) -> None:
    """Remove the mark of a quantized model, since these weights are floats that can be cast and
    trained."""
    model.is_quantized = False
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_is_quantized", False):
            del config._is_quantized
