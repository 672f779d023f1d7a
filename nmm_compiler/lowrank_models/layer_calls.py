"""Which linears of a model the backend will compute in one kernel call, and what a call takes.

The calls are those of the rewriter: a copy of the model without data, its linears made low-rank,
goes through `rewrite`, and the matches say which layers share a call. `call_us` prices a call for
any ranks with the functions that the rules ask, so that `compress` and the backend agree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, LowRankSpec, MatmulSpec
from nmm_compiler.kernels.number_formats import FP8
from nmm_compiler.lowrank_models.meta_copies import MetaModel, shorten, without_data
from nmm_compiler.lowrank_models.modules import LowRankLinear, put
from nmm_compiler.passes.emit.calls import Call, GatedCall, LowRankCall, SharedCall
from nmm_compiler.passes.graph.canonical import owner_of
from nmm_compiler.passes.graph.capture import all_graphs
from nmm_compiler.passes.pipeline import rewrite
from nmm_compiler.prices.ways import Row, alternatives, beside, fastest
from nmm_compiler.targets import Target

Rank = int | None


@dataclass(frozen=True)
class Layer:
    """A linear to price: y = x W^T with W [n, k]."""

    name: str
    k: int
    n: int


@dataclass(frozen=True)
class Group:
    """Layers that one call may compute.

    kind: "gated_mlp" (gate, up, down), "gated_mlp_up" (gate, up), "shared_x" or "lowrank".
    """

    kind: str
    layers: tuple[Layer, ...]
    activation: str = "identity"


# -- which layers are together -----------------------------------------------------------------


def alone(layers: Iterable[Layer]) -> list[Group]:
    """Return each layer as a call of its own."""
    return [Group("lowrank", (layer,)) for layer in layers]


def groups_of(
    model: nn.Module,
    layers: Sequence[Layer],
    inputs: Mapping[str, Any] | Sequence[Any],
    target: str,
) -> list[Group]:
    """Return the groups of these linears of a model, in the order of `layers`.

    inputs: arguments of the model; their data is not read. target: what the rules decide for. A
    layer that the trace does not show in a call is alone. Raises what the model raises where it
    cannot be traced without data.
    """
    known = {layer.name: layer for layer in layers}
    copy = MetaModel(without_data(model), type(model).__name__)
    for layer in layers:
        linear = copy.module.get_submodule(layer.name)
        rank = max(1, layer.k * layer.n // (2 * (layer.k + layer.n)))
        dtype = next(linear.parameters()).dtype
        bias = getattr(linear, "bias", None) is not None
        low = LowRankLinear(layer.k, rank, layer.n, bias, device="meta", dtype=dtype)
        put(copy.module, (layer.name,), low.requires_grad_(False))
    shorten(copy)
    found: dict[str, Group] = {}
    for members, kind, activation in _traced(copy.module, inputs, target):
        originals = [copy.originals(name) for name in members]
        for names in zip(*originals, strict=True):
            if all(name in known for name in names):
                group = Group(kind, tuple(known[name] for name in names), activation)
                found |= dict.fromkeys(names, group)
    every = [found.get(layer.name) or alone((layer,))[0] for layer in layers]
    return list(dict.fromkeys(every))


def _traced(module: nn.Module, inputs: Any, target: str) -> list[tuple[list[str], str, str]]:
    """Return (names, kind, activation) of the calls that the rewriter makes of a module."""
    args = () if isinstance(inputs, Mapping) else tuple(_on_meta(value) for value in inputs)
    kwargs = {key: _on_meta(v) for key, v in inputs.items()} if isinstance(inputs, Mapping) else {}
    forward = inspect.signature(module.forward)
    if "use_cache" in forward.parameters.keys() - forward.bind_partial(*args, **kwargs).arguments:
        kwargs["use_cache"] = False  # transformers' cache cannot be traced without data
    names = {
        id(parameter): name.removesuffix(".weight").removesuffix(".down").removesuffix(".up")
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    made: list[tuple[list[str], str, str]] = []
    for graph, given in all_graphs(module, args, kwargs):
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        at = {h.name: names.get(id(v), "") for h, v in zip(holders, given, strict=True)}
        result = rewrite(graph, tuple(given), options={"target": target})
        calls = [match.data for match in result.rewritten]
        made += _joined([call for call in calls if isinstance(call, Call)], at)
    return made


def _joined(calls: list[Call], at: Mapping[str, str]) -> list[tuple[list[str], str, str]]:
    """Return calls by the names of their layers; a down projection joins its gate and up.

    At the traced token count the two may be faster apart, at another one together.
    """
    halves = {c.final: c for c in calls if isinstance(c, GatedCall) and c.gated.down is None}
    downs: dict[fx.Node, LowRankCall] = {}
    for call in calls:
        if isinstance(call, LowRankCall):
            half = halves.get(owner_of(call.source.key))
            if half is not None and call.n == half.source.k:
                downs[half.final] = call
    joined = {id(down) for down in downs.values()}
    made = []
    for call in calls:
        if isinstance(call, GatedCall):
            members = [at.get(owner_of(p.u.key).name, "") for p in call.gated.projections()]
            down = downs.get(call.final)
            members += [_name(down, at)] if down is not None else []
            kind = "gated_mlp" if len(members) == 3 else "gated_mlp_up"
            made.append((members, kind, call.gated.activation))
        elif isinstance(call, SharedCall):
            made.append(([_name(one, at) for one in call.members], "shared_x", "identity"))
        elif isinstance(call, LowRankCall) and id(call) not in joined:
            made.append(([_name(call, at)], "lowrank", "identity"))
    return [one for one in made if all(one[0])]


def _name(call: LowRankCall, at: Mapping[str, str]) -> str:
    return "" if call.chain is None else at.get(owner_of(call.chain.u.key).name, "")


def _on_meta(value: Any) -> Any:
    return value.detach().to("meta") if isinstance(value, torch.Tensor) else value


# -- what a call takes -------------------------------------------------------------------------


@functools.lru_cache(maxsize=65536)
def call_us(
    kind: str,
    sizes: tuple[tuple[int, int, Rank], ...],
    activation: str,
    tokens: int,
    dtype: str,
    target: Target,
    fp8: bool = False,
    source: str = "closed_form",
) -> float:
    """Return the predicted microseconds of a group for `tokens` tokens, by its fastest launches.

    sizes: (k, n, rank) of each layer, rank None for a dense one. fp8: the factors are; dense
    weights are of `dtype`. source: one of `prices.kernel.PRICES`. Infinite where there is no
    kernel.
    """
    factors: dict[str, Any] = (
        {"dtype": FP8, "x_dtype": dtype, "scales": "channel"} if fp8 else {"dtype": dtype}
    )
    each: Row = tuple(
        MatmulSpec(m=tokens, k=k, n=n, dtype=dtype) if rank is None
        else LowRankSpec(m=tokens, k=k, r=rank, n=n, **factors)
        for k, n, rank in sizes
    )  # fmt: skip
    if kind not in ("gated_mlp", "gated_mlp_up"):
        return fastest(beside(each), target, 1, source)[1]
    (k, n, _), *_ = sizes
    ranks = [rank or 0 for _, _, rank in sizes]
    fields: dict[str, Any] = dict(zip(("gate_r", "up_r", "down_r"), ranks, strict=False))
    # one call has factors of fp8, or dense weights: of both it would dequantize the factors
    fields |= factors if all(ranks) else {"dtype": dtype}
    family: type[GatedMLPUpSpec] = GatedMLPSpec if len(sizes) == 3 else GatedMLPUpSpec
    rows = alternatives(family(m=tokens, k=k, n=n, activation=activation, **fields))
    if fp8 and not all(ranks):
        rows += tuple((*first, *each[2:]) for first in beside(each[:2]))
    return fastest(rows, target, 1, source)[1]
