"""The kernels that the backend launches for a model, without its weights.

The model goes through what the backend does, on the meta device: Dynamo's graph, the passes, the
lowering of each call. Equal layers are traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from nmm_compiler.compress.select import Patterns
from nmm_compiler.errors import PredictionError, UnknownNameError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.ops.lower import fitting, lower, op_name, tokens
from nmm_compiler.options import LARGEST_BUCKET
from nmm_compiler.passes.graph.capture import all_graphs
from nmm_compiler.passes.graph.metadata import collect_values
from nmm_compiler.passes.pipeline import rewrite
from nmm_compiler.prediction.meta_models import read_config
from nmm_compiler.prediction.predict import WEIGHTS, model_phases, prepare

BUCKETS = tuple(1 << power for power in range(LARGEST_BUCKET.bit_length()))
"""Token counts of calls that the backend builds kernels for by default."""


def model_kernels(
    model_or_config: Any,
    targets: Sequence[str] = ("trn2",),
    *,
    ratios: Iterable[float | None] = (None,),
    tokens: Iterable[int] = BUCKETS,
    tps: Iterable[int] = (1,),
    dtype: str = "bfloat16",
    include: Patterns = None,
    exclude: Patterns = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[tuple[KernelSpec, str]]:
    """Return (spec, target) of every kernel that the model's calls launch, each once.

    model_or_config: as for `predict`. ratios: as for `compress`; None takes the model as it is.
    tokens: of a call, all sequences together. tps: cores that share the model, whose factors are
    cut as `tensor_parallel_plan` cuts them. progress: called with (setting, done, of how many).
    Raises PredictionError for a model that cannot be traced or cut, and where no kernel is found.
    """
    if dtype not in WEIGHTS[:3]:
        raise UnknownNameError("dtype", dtype, WEIGHTS[:3])
    given = model_or_config
    if not isinstance(given, torch.nn.Module):
        given = read_config(given)
    counts = list(dict.fromkeys(tokens))
    settings = [(ratio, tp) for ratio in ratios for tp in tps]
    found: dict[tuple[KernelSpec, str], None] = {}
    for i, (ratio, tp) in enumerate(settings):
        cut = None
        if ratio is not None:
            cut = {"ratio": ratio, "rank": None, "include": include, "exclude": exclude}
        prepared = prepare(given, cut, dtype, "whole", tp)
        for j, m in enumerate(counts):
            if progress is not None:
                shown = "as it is" if ratio is None else f"ratio {ratio:g}"
                at, of = i * len(counts) + j, len(settings) * len(counts)
                progress(f"{prepared.model.name}, {shown}, tp {tp}, {m:,} tokens", at, of)
            first = model_phases(prepared.model, {"batch": 1, "prompt": m, "context": m}, None)[0]
            for graph, inputs in all_graphs(prepared.model.module, (), first.inputs()):
                for target in targets:
                    found |= dict.fromkeys(_launched(graph, inputs, target))
    if not found:
        raise PredictionError(
            "the model calls no kernel of this package; pass --ratio (ratios=) to make its "
            "linears low-rank, or a directory that `nmm compress` wrote"
        )
    return list(found)


def _launched(
    graph: fx.GraphModule, inputs: Sequence[Any], target: str
) -> Iterable[tuple[KernelSpec, str]]:
    """Yield what the calls of a rewritten graph launch."""
    module = rewrite(graph, tuple(inputs), options={"target": target}).graph_module
    values = collect_values(module, inputs)
    for node in module.graph.nodes:
        name = op_name(node.target)
        if name is None:
            continue
        args: Any = fx.node.map_arg(node.args, lambda n: values[n])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: values[n])
        m = int(tokens(args[0], dict(kwargs)))
        launches = lower(name, args, dict(kwargs), m, torch.Tensor.t).launches
        for launch in fitting(launches, target):
            yield launch.spec, target
