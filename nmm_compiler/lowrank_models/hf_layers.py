"""The low-rank layers of a transformers model: what a config says of them, and in place empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from nmm_compiler.errors import FileError
from nmm_compiler.lowrank_models import experts
from nmm_compiler.lowrank_models.modules import LowRankLinear, put, sizes_of
from nmm_compiler.lowrank_models.quantize import (
    FORMATS,
    QuantizedLinear,
    empty_layer,
)

METHOD = "nmm_lowrank"
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
            down = getattr(factors, "down", None)
            for held, part in ((saved.formats, down), (saved.bases, base)):
                if kind := getattr(part, "format", None):
                    held[name] = kind
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
                "positive whole number or 0 for a base alone, and maybe a known format and base: "
                "restore config.json from the directory that the model was saved to"
            )
        return cls(**{name: dict(held) for name, held in found.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json gets."""
        more = {"formats": dict(self.formats), "bases": dict(self.bases)}
        return {"ranks": dict(self.ranks), **{name: held for name, held in more.items() if held}}


def prepare(model: nn.Module, saved: SavedLayers) -> tuple[str, ...]:
    """Replace the saved layers by empty low-rank ones on the same device and dtype.

    Returns their names in this model. Raises FileError for a name that is no linear of the model.
    """
    from nmm_compiler.lowrank_models.modeling_nmm_lowrank import places

    with experts.apart(model):
        modules = dict(model.named_modules())
        found = places(model, saved.ranks)
        for saved_name, name in found.items():
            stack = modules.get(name)
            each = len(stack) if isinstance(stack, nn.ModuleList) else 0
            for place in [f"{name}.{i}" for i in range(each)] or [name]:
                old: Any = modules.get(place)
                if not sizes_of(old):
                    raise FileError(
                        f"the saved config gives rank {saved.ranks[saved_name]} to {saved_name!r}, "
                        f"which is no linear layer of {type(model).__name__}; load it into the "
                        "architecture it was saved from"
                    )
                weight, (n, k) = old.weight, sizes_of(old)
                layer = empty_layer(
                    n, k, saved.ranks[saved_name], saved.bases.get(saved_name),
                    saved.formats.get(saved_name), weight.dtype, old.bias is not None,
                )  # fmt: skip
                put(
                    model,
                    [place],
                    layer if weight.is_meta else layer.to_empty(device=weight.device),
                )
    return tuple(found.values())
