"""Which linears the backend will compute in one kernel call, and what they take for any ranks.

The calls are those of the rewriter: a copy of the model without data, its linears made low-rank,
goes through `rewrite`, and the matches say which layers share a call. `call_us` prices a call for
any ranks with the functions that the rules ask, so that `compress` and the backend agree.

`Prices` answers the plan's questions, over a mix of workloads: what all layers take, which ranks
are worth a try, and which layers are slower low-rank than dense. A search over ranks asks the
closed form; what it chose is judged by the simulator, both sides of a call. Layers whose weights
load in less than a DMA needs to start have no price: latencies are their time, and parameters
decide their ranks.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import item_bytes
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, LowRankSpec, MatmulSpec
from nmm_compiler.kernels.number_formats import FP8, X_DTYPES
from nmm_compiler.lowrank_models.config import Workload
from nmm_compiler.lowrank_models.meta_copies import (
    MetaModel,
    example_inputs,
    shorten,
    without_data,
)
from nmm_compiler.lowrank_models.modules import LowRankLinear, put
from nmm_compiler.lowrank_models.ranks import Shape
from nmm_compiler.lowrank_models.report import Timed
from nmm_compiler.passes.emit.calls import Call, GatedCall, LowRankCall, SharedCall
from nmm_compiler.passes.graph.canonical import owner_of
from nmm_compiler.passes.graph.capture import all_graphs, arguments
from nmm_compiler.passes.pipeline import rewrite
from nmm_compiler.prices.ways import Row, alternatives, beside, fastest
from nmm_compiler.targets import Target

Rank = int | None


@dataclass(frozen=True)
class Group:
    """Layers that one call may compute.

    kind: "gated_mlp" (gate, up, down), "gated_mlp_up" (gate, up), "shared_x" or "lowrank".
    """

    kind: str
    layers: tuple[Shape, ...]
    activation: str = "identity"


# -- which layers are together -----------------------------------------------------------------


def groups_of(
    model: nn.Module,
    layers: Sequence[Shape],
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
    every = [found.get(layer.name) or Group("lowrank", (layer,)) for layer in layers]
    return list(dict.fromkeys(every))


def _traced(module: nn.Module, inputs: Any, target: str) -> list[tuple[list[str], str, str]]:
    """Return (names, kind, activation) of the calls that the rewriter makes of a module."""
    given: Any = arguments(inputs)
    given = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("meta"), given)
    args, kwargs = given
    forward = inspect.signature(module.forward)
    if "use_cache" in forward.parameters.keys() - forward.bind_partial(*args, **kwargs).arguments:
        kwargs["use_cache"] = False  # transformers' cache cannot be traced without data
    names = {
        id(parameter): name.removesuffix(".weight").removesuffix(".down").removesuffix(".up")
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    made: list[tuple[list[str], str, str]] = []
    for graph, values in all_graphs(module, args, kwargs):
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        at = {h.name: names.get(id(v), "") for h, v in zip(holders, values, strict=True)}
        result = rewrite(graph, tuple(values), options={"target": target})
        calls = [match.data for match in result.matches]
        made += _joined([call for call in calls if isinstance(call, Call)], at)
    return made


def _joined(calls: list[Call], at: Mapping[str, str]) -> list[tuple[list[str], str, str]]:
    """Return calls by the names of their layers; a down projection joins its gate and up.

    At the traced token count the two may be faster apart, at another one together.
    """
    made: dict[fx.Node, tuple[list[str], str, str]] = {}
    widths: dict[fx.Node, int] = {}  # of gates that no down projection has joined
    for call in sorted(calls, key=lambda call: not isinstance(call, GatedCall)):
        if isinstance(call, GatedCall):
            members = [at.get(owner_of(p.u.key).name, "") for p in call.projections]
            made[call.final] = members, "gated_mlp", call.activation
            if len(members) == 2:
                made[call.final] = members, "gated_mlp_up", call.activation
                widths[call.final] = call.source.k
        elif isinstance(call, SharedCall):
            made[call.final] = [_name(one, at) for one in call.members], "shared_x", "identity"
        elif isinstance(call, LowRankCall):
            gate, name = owner_of(call.source.key), _name(call, at)
            if widths.get(gate) == call.n:
                members, _, activation = made[gate]
                made[gate] = [*members[:2], name], "gated_mlp", activation
            else:
                made[call.final] = [name], "lowrank", "identity"
    return [one for one in made.values() if all(one[0])]


def _name(call: LowRankCall, at: Mapping[str, str]) -> str:
    return "" if call.chain is None else at.get(owner_of(call.chain.u.key).name, "")


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


# -- what all layers take -----------------------------------------------------------------------

Ranks = Mapping[str, Rank]
SEARCH, JUDGE = "closed_form", "simulated"
"""The sources of prices (`prices.kernel.PRICES`) of a search over ranks, and of what it chose."""


@dataclass(frozen=True)
class Prices:
    """What groups of layers take.

    of: (group, ranks, source) -> microseconds for each kind of pass in `workload`. note: how the
    layers are grouped.
    """

    groups: Sequence[Group]
    workload: Workload
    of: Callable[[Group, tuple[Rank, ...], str], tuple[float, ...]]
    note: str = ""

    def group_us(self, group: Group, ranks: Ranks, source: str = JUDGE) -> float:
        """Return what a group takes in the mix of workloads, at these ranks of its layers."""
        found = self.of(group, tuple(ranks.get(layer.name) for layer in group.layers), source)
        return math.fsum(w * us for (_, _, w), us in zip(self.workload, found, strict=True))

    def timed(self, ranks: Ranks) -> tuple[Timed, ...]:
        """Return what all layers take in each kind of pass, dense and at these ranks."""
        if not self.groups:
            return ()
        sums = []
        for chosen in ({}, ranks):
            given = [tuple(chosen.get(x.name) for x in group.layers) for group in self.groups]
            each = [self.of(*one, JUDGE) for one in zip(self.groups, given, strict=True)]
            sums.append([math.fsum(column) for column in zip(*each, strict=True)])
        return tuple(
            Timed(name=name, tokens=tokens, weight=weight, dense_us=dense, us=us)
            for (name, tokens, weight), dense, us in zip(self.workload, *sums, strict=True)
        )

    def slower(self, ranks: Ranks) -> dict[str, str]:
        """Return the low-rank layers of calls that are slower than dense, each with the figures."""
        slow: dict[str, str] = {}
        for group in self.groups:
            low, dense = self.group_us(group, ranks), self.group_us(group, {})
            if low > dense:
                note = f"its call would take {low:.1f} us, dense {dense:.1f}: kept dense"
                slow |= {layer.name: note for layer in group.layers if ranks.get(layer.name)}
        return slow

    def may_pay(self, name: str, rank: int, others: Ranks) -> bool:
        """Return whether the closed form finds a layer's call no slower than with it dense."""
        for group in self.groups:
            if name in [layer.name for layer in group.layers]:
                low, dense = (
                    self.group_us(group, {**others, name: one}, SEARCH) for one in (rank, None)
                )
                return low <= dense
        return True

    def shares(self, ranks: Ranks) -> dict[str, tuple[float, float]]:
        """Return each layer's (dense, low-rank) share of its call, by its dense parameters.

        Layers of a call gain alike, so that none of a call that is faster is shown as slower.
        """
        made: dict[str, tuple[float, float]] = {}
        for group in self.groups:
            dense, low = self.group_us(group, {}), self.group_us(group, ranks)
            held = sum(layer.k * layer.n for layer in group.layers)
            for layer in group.layers:
                share = layer.k * layer.n / held
                made[layer.name] = (dense * share, low * share)
        return made


def kernel_prices(
    model: nn.Module,
    layers: Sequence[Shape],
    dtype: str,
    workload: Workload,
    target: str,
    inputs: Any = None,
    factors: str | None = None,
) -> Prices | None:
    """Return prices of the kernels that the backend would call; None for a dtype that has none.

    inputs: example arguments; None where there are none. Without them, and where the model cannot
    be traced without data, each layer is a call of its own. factors: "fp8" for low-rank layers of
    such factors.
    """
    if dtype not in LowRankSpec.dtypes:
        return None
    chip = machine_target(target)
    fp8 = factors == "fp8" and dtype in X_DTYPES and chip.float8_kernels
    groups = [Group("lowrank", (layer,)) for layer in layers]
    note = "each layer as a call of its own"
    least = _loaded_at_start(chip) / item_bytes(dtype)
    if inputs is None:
        inputs = example_inputs(model, 2)
    if inputs is not None and any(layer.k * layer.n > least for layer in layers):
        try:
            groups, note = groups_of(model, layers, inputs, target), ""
        except NmmError as error:
            note += f": {error}"
        except Exception as error:  # the model's own code may not run without data
            note += f": no trace without data ({type(error).__name__})"

    priced = [g for g in groups if any(layer.k * layer.n > least for layer in g.layers)]
    if len(priced) < len(groups):
        small = sum(len(g.layers) for g in groups) - sum(len(g.layers) for g in priced)
        said = f"no time is predicted for {small} layers: a DMA's start takes longer than they load"
        note = f"{note}; {said}" if note and priced else said

    def of(group: Group, ranks: tuple[Rank, ...], source: str) -> tuple[float, ...]:
        sizes = tuple((x.k, x.n, rank) for x, rank in zip(group.layers, ranks, strict=True))
        return tuple(
            call_us(group.kind, sizes, group.activation, tokens, dtype, chip, fp8, source)
            for _, tokens, _ in workload
        )

    return Prices(priced, workload, of, note)


def _loaded_at_start(chip: Target) -> float:
    """Return the bytes that HBM gives a core in the time that a DMA needs to start and to signal.

    Start and signal are published (the target's sources).
    """
    start = chip.dma_start_latency_seconds + chip.semaphore_seconds
    return chip.memory_bytes_per_second * start
