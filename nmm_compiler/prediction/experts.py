"""Experts in a predicted model: one call a layer, which reads the groups that tokens choose.

Modules that hold the weights of all experts in 3-D parameters, as transformers' do, become modules
that call `nmm.experts`. Of `tp` cores each has a part of every expert's features, or, where those
do not divide, some whole experts; either way their results are summed. How many experts a step
reads is expected of uniform routing, or of counts that somebody has measured (`read_routing`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmm_compiler.errors import ModelError, OptionTypeError
from nmm_compiler.kernels.experts.spec import FACTORS, ExpertsSpec
from nmm_compiler.lowrank_models.experts import CompressedExperts
from nmm_compiler.lowrank_models.meta_copies import MetaModel
from nmm_compiler.prediction.tensor_parallel import HOOK
from nmm_compiler.prediction.walk import Piece

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip


class ExpertsCall(nn.Module):
    """The experts of one layer that a core has, as one call; their sum over the cores follows."""

    def __init__(self, old: nn.Module, config: Any, tp: int) -> None:
        super().__init__()
        given: Any = old
        ranks = [0, 0]
        if isinstance(old, CompressedExperts):
            up, down = given.gate_up_factors, given.down_factors
            ranks = [up.rank, down.rank]
            groups, k, n, dtype = (
                down.up.shape[0],
                down.up.shape[1],
                down.down.shape[2],
                up.up.dtype,
            )
        else:
            up, down = given.gate_up_proj, given.down_proj
            turned = up.shape[1] == 2 * down.shape[2]  # stored [outputs, inputs]
            groups, n, dtype = down.shape[0], down.shape[2 if turned else 1], up.dtype
            k = down.shape[1 if turned else 2]
        if n % tp and groups % tp:
            raise ModelError(
                f"{type(old).__name__}: {tp} cores share neither {n} features nor {groups} "
                "experts evenly; use another tp"
            )
        # each share of the features would have the first factors whole
        self.tp, self.by_groups = tp, bool(n % tp) or (any(ranks) and not groups % tp)
        self.every, self.top_k = groups, getattr(config, "num_experts_per_tok", 1)
        n, groups = (n, groups // tp) if self.by_groups else (n // tp, groups)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), False)

        first, second = (rank or inputs for rank, inputs in zip(ranks, (k, n), strict=True))
        self.gate_up, self.down = made(groups, first, 2 * n), made(groups, second, k)
        self.gate_up_u = made(groups, k, first) if any(ranks) else None
        self.down_u = made(groups, n, second) if any(ranks) else None
        biased = getattr(given, "gate_up_proj_bias", None) is not None
        self.gate_up_bias = made(groups, 2 * n) if biased else None
        self.down_bias = made(groups, k) if biased else None
        self.form = FACTORS if any(ranks) else ""
        self.said: dict[str, Any] = {"activation": _activation(config)}
        if hasattr(given, "limit") and hasattr(given, "alpha"):
            self.said = {
                "halves": "interleaved", "limit": float(given.limit),
                "slope": float(given.alpha), "plus": 1.0,
            }  # fmt: skip

    # whether this call sums over the cores, or what it is added to
    alone = True

    def forward(
        self, x: Tensor, index: Tensor | None = None, gates: Tensor | None = None
    ) -> Tensor:
        """Return what the experts of this core add to y, summed over the cores.

        Without an index x has every token once for each expert, as Llama 4's have it; the experts
        that a token did not choose multiply zeros, and are not read.
        """
        if index is None or gates is None:
            return self._of_repeated(x)
        y = torch.ops.nmm.experts(
            x, self.gate_up, self.down, index, gates, self.gate_up_bias, self.down_bias,
            gate_up_u=self.gate_up_u, down_u=self.down_u, format=self.form, **self.said,
        )  # fmt: skip
        return torch.ops.nmm_prediction.all_reduce(y) if self.tp > 1 and self.alone else y

    def _of_repeated(self, x: Tensor) -> Tensor:
        tokens = x.shape[0] // self.every
        index = x.new_zeros(tokens, self.top_k, dtype=torch.int64)
        y = self(x[:tokens], index, x.new_zeros(tokens, self.top_k))
        return torch.cat([y, x[tokens:]])


def _activation(config: Any) -> str:
    name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu")
    if name not in _ACTIVATIONS:
        raise ModelError(f"experts with activation {name!r} have no kernel")
    return _ACTIVATIONS[name]


def experts_as_calls(model: MetaModel, tp: int) -> None:
    """Replace the experts of a model; raise ModelError for those that no kernel computes."""
    config = getattr(model.module, "config", None)
    for name, module in list(model.module.named_modules()):
        if "experts" not in f"{name.rpartition('.')[2]} {type(module).__name__}".lower():
            continue
        if isinstance(module, nn.Linear) or name.rpartition(".")[2].startswith("shared_expert"):
            continue
        stacked = [getattr(module, one, None) for one in ("gate_up_proj", "down_proj")]
        low = isinstance(module, CompressedExperts)
        if low and not all(hasattr(module, f"{one}_factors") for one in ("gate_up", "down")):
            raise ModelError(
                f"{model.name} has experts ({name}) of which one weight is low-rank and another is "
                "not: no kernel computes them in one call; include both, or leave both out"
            )
        if not low and not all(isinstance(p, nn.Parameter) and p.dim() == 3 for p in stacked):
            if any(isinstance(one, ExpertsCall) for one in module.modules()):
                continue
            if any(isinstance(p, nn.Parameter) and p.dim() == 3 for p in module.parameters(False)):
                raise ModelError(f"{model.name} has experts ({name}) that are no gated MLPs")
            continue
        text = getattr(config, "text_config", config)
        parent = model.module.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], ExpertsCall(module, text, tp))


def sum_shared_once(model: MetaModel, tp: int) -> None:
    """Sum over the cores once where a layer adds its shared experts to those that tokens chose."""
    for block in list(model.module.modules()) if tp > 1 else ():
        calls = [one for one in block.children() if isinstance(one, ExpertsCall)]
        shared = [one for name, one in block.named_children() if name.startswith("shared_expert")]
        ends = [end for one in shared for end in one.modules() if hasattr(end, HOOK)]
        if calls and ends:
            for end in ends:
                getattr(end, HOOK).remove()
            for call in calls:
                call.alone = False
            block.register_forward_hook(_sum_of_block)


def _sum_of_block(block: nn.Module, given: Any, made: Any) -> Any:
    """Sum the tokens of a block over the cores; a router's numbers behind them are on each core."""
    if isinstance(made, tuple):
        return (torch.ops.nmm_prediction.all_reduce(made[0]), *made[1:])
    return torch.ops.nmm_prediction.all_reduce(made)


def routed(pieces: list[Piece], routing: tuple[float, ...], model: MetaModel) -> list[Piece]:
    """Return the pieces, calls of experts with the distinct ones that the counts let expect.

    Without counts all experts of the model are equally likely, those of other cores too.
    """
    calls = [one for one in model.module.modules() if isinstance(one, ExpertsCall)]
    parts = {one.tp for one in calls if one.by_groups} or {1}
    if not routing and parts == {1}:
        return pieces

    def counted(spec: Any) -> Any:
        if not isinstance(spec, ExpertsSpec):
            return spec
        groups = spec.groups * max(parts)
        counts = routing or (1.0,) * groups
        if len(counts) != groups:
            raise ModelError(
                f"routing has {len(counts)} counts, and a layer has {groups} experts; pass one "
                "count for each"
            )
        whole = sum(counts)
        shares = (min(1.0, spec.top_k * count / whole) for count in counts)
        distinct = sum(1 - (1 - share) ** spec.m for share in shares)
        return dataclasses.replace(spec, distinct=distinct / max(parts))

    return [
        dataclasses.replace(piece, ways=tuple(tuple(map(counted, row)) for row in piece.ways))
        for piece in pieces
    ]


def read_routing(path: Path) -> tuple[float, ...]:
    """Return the counts of a file: a JSON list, one number for each expert."""
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionTypeError("routing", path, f"a file of JSON ({error})") from error
    return check_routing(given, path)


def check_routing(given: Any, said: Any) -> tuple[float, ...]:
    """Return counts, which are numbers of 0 or more and not all 0; raise OptionTypeError."""
    numbers = isinstance(given, Sequence) and not isinstance(given, str)
    if not numbers or not all(isinstance(n, (int, float)) and n >= 0 for n in given):
        raise OptionTypeError("routing", said, "a list of counts, one for each expert")
    if given and not sum(given):
        raise OptionTypeError("routing", said, "counts that are not all 0")
    return tuple(map(float, given))
