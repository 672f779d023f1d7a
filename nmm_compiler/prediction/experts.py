"""Experts in a predicted model: one call a layer, which reads the groups that tokens choose.

Layers of stacked experts compute by `nmm.experts`, as compressed ones do. Of `tp` cores each has a
part of every expert's features, or, where those do not divide, some whole experts; either way their
results are summed. How many experts a step reads is expected of uniform routing, or of counts that
somebody has measured (`read_routing`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from nmm_compiler.errors import ModelError, OptionTypeError
from nmm_compiler.kernels.experts.spec import ExpertsSpec
from nmm_compiler.lowrank_models.experts import CompressedExperts, adopt, is_stacked
from nmm_compiler.lowrank_models.meta_copies import MetaModel
from nmm_compiler.prediction.tensor_parallel import HOOK, summed
from nmm_compiler.prediction.walk import Piece


class _Repeated(CompressedExperts):
    """Experts as Llama 4 calls them: x has every token once for each expert.

    Those that a token did not choose multiply zeros, and are not read.
    """

    has_gate, has_bias, is_transposed = True, False, True

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        activated: Tensor = cast(Any, self).act_fn(gate)
        return activated * up

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return what the experts that tokens chose make of them, in the place of the first."""
        given: Any = self
        tokens = x.shape[0] // given.num_experts
        index = x.new_zeros(tokens, given.top_k, dtype=torch.int64)
        y = super().forward(x[:tokens], index, x.new_zeros(tokens, given.top_k))
        return torch.cat([y, x[tokens:]])


def experts_as_calls(model: MetaModel, tp: int) -> int:
    """Make the experts of a model calls of `nmm.experts`, of what one of `tp` cores has of them.

    Returns how many cores have other experts. Raises ModelError for experts that no kernel
    computes, and for those that the cores cannot share.
    """
    config: Any = getattr(model.module, "config", None)
    shared = 1
    for name, module in model.module.named_modules():
        given: Any = module
        if type(module).__name__ == "Llama4TextExperts":
            given.top_k = getattr(config, "text_config", config).num_experts_per_tok
            module.__class__ = _Repeated
        if isinstance(module, _Repeated) or is_stacked(module):
            adopt(module)
            if given.said is None:
                raise ModelError(f"{model.name} has experts ({name}) that are no gated MLPs")
        elif not isinstance(module, CompressedExperts):
            continue
        held = dict(module.named_parameters())
        if ("gate_up_proj" in held) != ("down_proj" in held):
            raise ModelError(
                f"{model.name} has experts ({name}) of which one weight is low-rank and another is "
                "not: no kernel computes them in one call; include both, or leave both out"
            )
        if tp > 1:
            shared = max(shared, _cut(module, held, tp))
            setattr(module, HOOK, module.register_forward_hook(summed))
    return shared


def _cut(layer: nn.Module, held: dict[str, nn.Parameter], tp: int) -> int:
    """Leave one core's part of every expert's features, or some whole experts; return how many
    cores have other experts."""
    turned, low = cast(Any, layer).dense_transposed, "down_proj" not in held
    of_h = {
        "gate_up_proj": 2 if turned else 1, "gate_up_proj_bias": 1, "gate_up_factors.up": 1,
        "down_proj": 1 if turned else 2, "down_factors.down": 2,
    }  # fmt: skip
    last = "down_factors.down" if low else "down_proj"
    groups, n = held[last].shape[0], held[last].shape[of_h[last]]
    if n % tp and groups % tp:
        raise ModelError(
            f"{type(layer).__name__}: {tp} cores share neither {n} features nor {groups} "
            "experts evenly; use another tp"
        )
    # each share of the features would have the first factors whole
    by_groups = bool(n % tp) or (low and not groups % tp)
    for name, parameter in held.items():
        axis = 0 if by_groups else of_h.get(name)
        if axis is not None:
            owner, _, leaf = name.rpartition(".")
            part = parameter.narrow(axis, 0, parameter.shape[axis] // tp)
            setattr(layer.get_submodule(owner), leaf, nn.Parameter(part, False))
    return tp if by_groups else 1


def sum_shared_once(model: MetaModel, tp: int) -> None:
    """Sum over the cores once where a layer adds its shared experts to those that tokens chose."""
    for block in list(model.module.modules()) if tp > 1 else ():
        calls = [one for one in block.children() if isinstance(one, CompressedExperts)]
        shared = [one for name, one in block.named_children() if name.startswith("shared_expert")]
        ends = [end for one in shared for end in one.modules() if hasattr(end, HOOK)]
        if calls and ends:
            for end in (*calls, *ends):
                getattr(end, HOOK).remove()
            block.register_forward_hook(summed)


def routed(pieces: list[Piece], routing: tuple[float, ...], shared: int) -> list[Piece]:
    """Return the pieces, calls of experts with the distinct ones that the counts let expect.

    Without counts all experts of the model are equally likely, those of other cores too. shared:
    how many cores have other experts.
    """
    if not routing and shared == 1:
        return pieces

    def counted(spec: Any) -> Any:
        if not isinstance(spec, ExpertsSpec):
            return spec
        groups = spec.groups * shared
        counts = routing or (1.0,) * groups
        if len(counts) != groups:
            raise ModelError(
                f"routing has {len(counts)} counts, and a layer has {groups} experts; pass one "
                "count for each"
            )
        whole = sum(counts)
        shares = (min(1.0, spec.top_k * count / whole) for count in counts)
        distinct = sum(1 - (1 - share) ** spec.m for share in shares)
        return dataclasses.replace(spec, distinct=distinct / shared)

    return [
        dataclasses.replace(piece, ways=tuple(tuple(map(counted, row)) for row in piece.ways))
        for piece in pieces
    ]


def read_routing(path: Path) -> tuple[float, ...]:
    """Return the counts of a file: a JSON list, one number for each expert."""
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionTypeError("routing", path, f"a file of JSON ({error})") from error
    return check_routing(given, path)


def check_routing(given: Any, said: Any) -> tuple[float, ...]:
    """Return counts, which are numbers of 0 or more and not all 0; raise OptionTypeError."""
    numbers = isinstance(given, Sequence) and all(
        isinstance(n, (int, float)) and n >= 0 for n in given
    )
    if not numbers or (given and not sum(given)):
        raise OptionTypeError("routing", said, "a list of counts, one for each expert, not all 0")
    return tuple(map(float, given))
