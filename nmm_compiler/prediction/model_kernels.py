"""The kernels that the backend launches for a model, without its weights.

The model goes through what the backend does, on the meta device: Dynamo's graph, the passes, the
lowering of each call. Equal layers are traced once. On several cores each low-rank linear is a
kernel of its own, of one core's share, as `tensor_parallel_plan` cuts it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nmm_compiler.errors import ModelError
from nmm_compiler.kernels.base import KernelSpec, check_name
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.lowrank_models.modules import lowrank_layers
from nmm_compiler.lowrank_models.tensor_parallel import linear_roles
from nmm_compiler.ops.launches import view_turned
from nmm_compiler.ops.lower import graph_call, lower
from nmm_compiler.options import DTYPES, LADDER, Options
from nmm_compiler.passes.graph.capture import collect_values, graphs_without_data
from nmm_compiler.passes.pipeline import rewrite
from nmm_compiler.prediction.meta_models import MetaModel, as_given, prepare
from nmm_compiler.prediction.walk import passes_of
from nmm_compiler.prices.ways import ways


def model_kernels(
    model_or_config: Any,
    targets: Sequence[str] = ("trn2",),
    *,
    ratios: Iterable[float | None] = (None,),
    tokens: Iterable[int] = LADDER,
    tps: Iterable[int] = (1,),
    dtype: str = "bfloat16",
    progress: Callable[[str, int, int], None] | None = None,
) -> list[tuple[KernelSpec, str]]:
    """Return (spec, target) of every kernel that the model's calls launch, each once.

    model_or_config: as for `predict`. ratios: as for `compress`; None takes the model as it is.
    tokens: of a call, all sequences together. tps: cores that share the model, its factors cut as
    `tensor_parallel_plan` does by default. progress: called with (setting, done, of how many).
    Raises ModelError for a model that cannot be traced or cut, and where no kernel is found,
    OptionTypeError for one without a tensor-parallel plan on several cores.
    """
    check_name("dtype", dtype, DTYPES)
    given = as_given(model_or_config)
    counts = list(dict.fromkeys(tokens))
    settings = [(ratio, tp) for ratio in ratios for tp in tps]
    found: dict[tuple[KernelSpec, str], None] = {}
    for i, (ratio, tp) in enumerate(settings):
        model = prepare(given, None if ratio is None else {"ratio": ratio}, dtype, 1)
        for j, m in enumerate(counts):
            if progress is not None:
                said = f"{model.name}, ratio {ratio or 0:g}, tp {tp}, {m:,} tokens"
                progress(said, i * len(counts) + j, len(settings) * len(counts))
            if tp == 1:
                first, *_ = passes_of(model, {"batch": 1, "prompt": m, "context": m})
                found |= dict.fromkeys(_launched(model.module, (), first.inputs(), targets))
            else:
                found |= dict.fromkeys(_shares(model, m, tp, targets))
    if not found:
        raise ModelError(
            "the model calls no kernel of this package; pass --ratio (ratios=) to make its "
            "linears low-rank, or a directory that `nmm compress` wrote"
        )
    return list(found)


def _launched(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[str]
) -> Iterator[tuple[KernelSpec, str]]:
    """Yield what the calls of a module launch, once it is rewritten."""
    for graph, inputs in graphs_without_data(module, args, kwargs):
        for target in targets:
            made = rewrite(graph, tuple(inputs), options={"target": target}).graph_module
            values = collect_values(made, inputs)
            for node in made.graph.nodes:
                called = graph_call(node, values.__getitem__)
                if called is not None:
                    yield lower(*called, view_turned).spec, target


def _shares(
    model: MetaModel, m: int, tp: int, targets: Sequence[str]
) -> Iterator[tuple[KernelSpec, str]]:
    """Yield one core's share of the kernel of each low-rank linear.

    What is worth a kernel is decided for the whole linear, as the passes do on DTensors.
    """
    roles = linear_roles(model.module)
    layers = {n: one for n, one in lowrank_layers(model.module).items() if n in roles}
    for name, layer in layers.items():
        role = roles[name]
        cut = layer.in_features if role == "rowwise" else layer.out_features
        if cut % tp:
            field = "k" if role == "rowwise" else "n"
            raise ModelError(f"{name} has {field} {cut}, which does not divide by {tp} cores")
        x = torch.empty(1, m, layer.in_features, dtype=layer.up.weight.dtype, device="meta")
        for spec, target in _launched(layer, (x,), {}, targets):
            if not isinstance(spec, LowRankSpec):
                continue
            if role != "rowwise":
                yield dataclasses.replace(spec, n=cut // tp), target
                continue
            shard = spec.sharded(tp, "rows")
            times = ways(shard, target, source=Options().price)
            if times.fused <= times.separate and math.isfinite(times.fused):
                yield shard, target  # else two products and a collective
