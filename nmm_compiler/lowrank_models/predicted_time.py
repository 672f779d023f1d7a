"""Which linears the backend will compute in one kernel call, and what they take for any ranks.

A copy of the model without data is traced, and `together` says which layers share a call.
Predictions ask it of dense products, too. `call_us` prices a call for any ranks with the functions
that the rules ask, so that `compress` and the backend agree.

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
from nmm_compiler.errors import one_line
from nmm_compiler.kernels.base import ACTIVATIONS, item_bytes
from nmm_compiler.kernels.linear.corrected import reads_as_stored
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, GatedMLPUpSpec, LowRankSpec, MatmulSpec
from nmm_compiler.kernels.number_formats import FP8, X_DTYPES
from nmm_compiler.lowrank_models.config import CompressionConfig, Workload
from nmm_compiler.lowrank_models.meta_copies import (
    MetaModel,
    example_inputs,
    shorten,
    without_data,
)
from nmm_compiler.lowrank_models.ranks import Shape
from nmm_compiler.lowrank_models.report import Timed
from nmm_compiler.ops.launches import dtype_name
from nmm_compiler.passes.chains.safety import covered
from nmm_compiler.passes.graph.canonical import Canonical, Key, Product, owner_of
from nmm_compiler.passes.graph.capture import (
    arguments,
    collect_values,
    graphs_without_data,
)
from nmm_compiler.passes.graph.read_graph import read_graph
from nmm_compiler.passes.rules.gated_mlp import gates_at
from nmm_compiler.passes.rules.lowrank import products_at
from nmm_compiler.prices.kernel import row_us
from nmm_compiler.prices.ways import Row, alternatives, beside
from nmm_compiler.targets import Target

Rank = int | None

# -- which products are together ---------------------------------------------------------------

Names = dict[fx.Node, str]
"""The parameters among a graph's inputs, by their names in the model."""


@dataclass(frozen=True)
class Computed:
    """A dense product with a stored weight, or a call of ours: the kernel that computes it.

    weights: names of the parameters that it multiplies by, "" for another constant.
    """

    node: fx.Node
    x: Key
    spec: Any
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Together:
    """What one kernel may compute: products of one x; with an activation gate, up and maybe down.

    parts: products of a graph (`Computed`), or layers of a model (`Shape`). between: the nodes
    between the products of a gated MLP.
    """

    parts: tuple[Any, ...]
    activation: str = ""
    between: frozenset[fx.Node] = frozenset()


def parameter_names(module: nn.Module, graph: fx.GraphModule, given: Sequence[Any]) -> Names:
    """Return the parameters of a module among the inputs of a graph that was traced of it."""
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    pairs = zip(holders, given, strict=True)
    return {holder: names[id(value)] for holder, value in pairs if id(value) in names}


def dense_product(c: Canonical, node: fx.Node, form: Product, names: Names) -> Computed | None:
    """Return the product of a node with a constant matrix, None for another product."""
    weight = next((s for s in (form.rhs, form.lhs) if c.is_constant(s)), None)
    value = c.tensor(node)
    if value is None or weight is None or len(c.shape(c.base(weight)[0]) or ()) != 2:
        return None
    x = form.lhs if weight is form.rhs else form.rhs
    summed = (set(form.lhs_labels) & set(form.rhs_labels)) - set(form.out_labels)
    labels = form.rhs_labels if weight is form.rhs else form.lhs_labels
    sizes = dict(zip(labels, c.shape(weight) or (), strict=True))
    k = math.prod(int(sizes[i]) for i in summed)
    n = math.prod(int(size) for i, size in sizes.items() if i not in summed)
    spec = MatmulSpec(m=max(1, value.numel() // max(n, 1)), k=k, n=n, dtype=dtype_name(value))
    name = names.get(owner_of(c.base(weight)[0]), "")
    return Computed(node, c.base(x)[0], spec, (name,))


def together(c: Canonical, products: Sequence[Computed]) -> list[Together]:
    """Return these dense products of a graph by the kernels that may compute them."""
    at = {one.node: one for one in products}
    groups = [gated for one in products if (gated := _gated(c, one, at)) is not None]
    taken = {one.node for group in groups for one in group.parts}
    by_x: dict[Any, list[Computed]] = {}
    for one in products:
        if one.node not in taken:
            by_x.setdefault((one.x, one.spec.m, one.spec.k), []).append(one)
    return [*groups, *(Together(tuple(group)) for group in by_x.values())]


def _gated(c: Canonical, last: Computed, at: dict[fx.Node, Computed]) -> Together | None:
    """Return gate, up and down where a product is down(act(gate x) * up x), else None."""
    h = owner_of(last.x)
    for _, (activation, inner), other in gates_at(c, h):
        gate, up = (at.get(owner_of(c.base(key)[0])) for key in (inner, other))
        if gate is None or up is None or gate is up or gate.x is not up.x:
            continue
        # no kernel returns other features than those of x
        if activation in ACTIVATIONS and last.spec.n == gate.spec.k:
            return Together((gate, up, last), activation, covered(c, h, [inner, other]))
    return None


# -- which layers are together -----------------------------------------------------------------


def groups_of(
    model: nn.Module, layers: Sequence[Shape], inputs: Mapping[str, Any] | Sequence[Any]
) -> list[Together]:
    """Return the groups of these linears of a model, in the order of `layers`.

    inputs: arguments of the model; their data is not read. A layer that the trace does not show is
    alone. Raises what the model raises where it cannot be traced without data.
    """
    known = {layer.name: layer for layer in layers}
    copy = MetaModel(without_data(model), type(model).__name__)
    shorten(copy)
    given: Any = arguments(inputs)
    args, kwargs = tree_map_only(torch.Tensor, lambda t: t.detach().to("meta"), given)
    forward = inspect.signature(copy.module.forward)
    if "use_cache" in forward.parameters.keys() - forward.bind_partial(*args, **kwargs).arguments:
        kwargs["use_cache"] = False  # transformers' cache cannot be traced without data
    groups: list[Together] = []
    for graph, values in graphs_without_data(copy.module, args, kwargs):
        c = read_graph(graph, collect_values(graph, values))
        parameters = parameter_names(copy.module, graph, values)
        forms = [(node, form) for node in c.graph.nodes for _, form in products_at(c, node)]
        products = (dense_product(c, *one, parameters) for one in forms)
        groups += together(c, [one for one in products if one is not None])
    found: dict[str, Together] = {}
    for one in groups:
        weights = [product.weights[0] for product in one.parts]
        paths = [copy.originals(name.removesuffix(".weight")) for name in weights]
        for names in zip(*paths, strict=True) if all(weights) else ():
            members = [known.get(name) for name in names]  # None for one that stays as it is
            if one.activation and None in members[:2]:
                continue  # each of the others is a call of its own
            some = tuple(layer for layer in members if layer is not None)
            found |= dict.fromkeys([layer.name for layer in some], Together(some, one.activation))
    every = [found.get(layer.name) or Together((layer,)) for layer in layers]
    return list(dict.fromkeys(every))


# -- what a call takes -------------------------------------------------------------------------


def rows_of(products: Row, activation: str, fp8: bool = False) -> tuple[Row, ...]:
    """Return the rows of launches that compute products of one x; with an activation gate, up and
    perhaps down. fp8: the factors are."""
    if not activation:
        return beside(products)
    first: Any = products[0]
    ranks = [getattr(one, "r", 0) for one in products]
    fields: dict[str, Any] = dict(zip(("gate_r", "up_r", "down_r"), ranks, strict=False))
    # one call has factors of fp8, or dense weights: of both it would dequantize the factors
    fields |= {"dtype": first.dtype, "x_dtype": first.x_dtype, "scales": first.scales}
    mixed = fp8 and not all(ranks)
    if mixed:
        fields |= {"dtype": first.x_dtype or first.dtype, "x_dtype": None, "scales": None}
    family: type[GatedMLPUpSpec] = GatedMLPSpec if len(products) == 3 else GatedMLPUpSpec
    rows = alternatives(family(m=first.m, k=first.k, n=first.n, activation=activation, **fields))
    return rows + tuple((*row, *products[2:]) for row in beside(products[:2]) if mixed)


@functools.lru_cache(maxsize=65536)
def call_us(
    sizes: tuple[tuple[int, int, Rank], ...],
    activation: str,
    tokens: int,
    dtype: str,
    target: Target,
    fp8: bool = False,
    source: str = "closed_form",
) -> float:
    """Return the predicted microseconds of a group for `tokens` tokens, by its fastest launches.

    sizes: (k, n, rank) of each layer, rank None for a dense one. activation: as in `Together`. fp8:
    the factors are; dense weights are of `dtype`. source: one of `prices.kernel.PRICES`. Infinite
    where there is no kernel.
    """
    factors: dict[str, Any] = (
        {"dtype": FP8, "x_dtype": dtype, "scales": "channel"} if fp8 else {"dtype": dtype}
    )
    each: Row = tuple(
        MatmulSpec(m=tokens, k=k, n=n, dtype=dtype) if rank is None
        else LowRankSpec(m=tokens, k=k, r=rank, n=n, **factors)
        for k, n, rank in sizes
    )  # fmt: skip
    return min(row_us(row, target, 1, source) for row in rows_of(each, activation, fp8))


# -- what all layers take -----------------------------------------------------------------------

Ranks = Mapping[str, Rank]
SEARCH, JUDGE = "closed_form", "simulated"
"""The sources of prices (`prices.kernel.PRICES`) of a search over ranks, and of what it chose."""


@dataclass(frozen=True)
class Prices:
    """What groups of layers take.

    of: (group, ranks of layers, source) -> microseconds of each kind of pass in `workload`. note:
    how the layers are grouped.
    """

    groups: Sequence[Together]
    workload: Workload
    of: Callable[[Together, Ranks, str], tuple[float, ...]]
    note: str = ""

    def group_us(self, group: Together, ranks: Ranks, source: str = JUDGE) -> float:
        """Return what a group takes in the mix of workloads, at these ranks of its layers."""
        each = zip(self.workload, self.of(group, ranks, source), strict=True)
        return math.fsum(weight * us for (_, _, weight), us in each)

    def timed(self, ranks: Ranks) -> tuple[Timed, ...]:
        """Return what all layers take in each kind of pass, dense and at these ranks."""
        rows = []
        for i, (name, tokens, weight) in enumerate(self.workload if self.groups else ()):
            dense, low = (
                math.fsum(self.of(group, chosen, JUDGE)[i] for group in self.groups)
                for chosen in ({}, ranks)
            )
            rows.append(Timed(name=name, tokens=tokens, weight=weight, dense_us=dense, us=low))
        return tuple(rows)

    def slower(self, ranks: Ranks) -> dict[str, str]:
        """Return the low-rank layers of calls that are slower than dense, each with the figures."""
        return {
            name: f"its call would take {low:.1f} us, dense {dense:.1f}: kept dense"
            for name, (dense, low, _) in self.calls(ranks).items()
            if ranks.get(name) and low > dense
        }

    def may_pay(self, name: str, rank: int, others: Ranks) -> bool:
        """Return whether the closed form finds a layer's call no slower than with it dense."""
        for group in self.groups:
            if name in [layer.name for layer in group.parts]:
                dense = self.group_us(group, {**others, name: None}, SEARCH)
                return self.group_us(group, {**others, name: rank}, SEARCH) <= dense
        return True

    def calls(self, ranks: Ranks) -> dict[str, tuple[float, float, float]]:
        """Return each layer's (call dense, call at these ranks, share), by its dense parameters.

        Layers of a call gain alike, so that none of a call that is faster is shown as slower.
        """
        times: dict[str, tuple[float, float, float]] = {}
        for group in self.groups:
            dense, low = self.group_us(group, {}), self.group_us(group, ranks)
            held = sum(layer.k * layer.n for layer in group.parts)
            times |= {layer.name: (dense, low, layer.k * layer.n / held) for layer in group.parts}
        return times

    def shares(self, ranks: Ranks) -> dict[str, tuple[float, float]]:
        """Return each layer's (dense, low-rank) share of its call."""
        return {
            name: (dense * share, low * share)
            for name, (dense, low, share) in self.calls(ranks).items()
        }


def kernel_prices(
    model: nn.Module,
    layers: Sequence[Shape],
    dtype: str,
    config: CompressionConfig,
    inputs: Any = None,
) -> Prices:
    """Return prices of the kernels that the backend would call; of no group beside a base, and for
    a dtype that has none.

    inputs: example arguments; None where there are none. Without them, and where the model cannot
    be traced without data, each layer is a call of its own.
    """
    chip, base = machine_target(config.target), config.base
    fp8 = config.factors == "fp8" and dtype in X_DTYPES and chip.float8_kernels

    def of(group: Together, ranks: Ranks, source: str) -> tuple[float, ...]:
        sizes = tuple((layer.k, layer.n, ranks.get(layer.name)) for layer in group.parts)
        return tuple(
            call_us(sizes, group.activation, tokens, dtype, chip, fp8, source)
            for _, tokens, _ in config.passes
        )

    if base is not None or not layers or dtype not in LowRankSpec.dtypes:
        out = "calls multiply it out, which saves memory only"
        read = base is None or reads_as_stored(chip, base)
        note = "" if read else f"no kernel for {chip.name} reads {base}: {out}"
        return Prices((), config.passes, of, note)
    groups = [Together((layer,)) for layer in layers]
    note = "each layer as a call of its own"
    # what HBM gives a core while a DMA starts and signals, by the target's sources
    start = chip.dma_start_latency_seconds + chip.semaphore_seconds
    least = chip.memory_bytes_per_second * start / item_bytes(dtype)
    if inputs is None:
        inputs = example_inputs(model, 2)
    if inputs is not None and any(layer.k * layer.n > least for layer in layers):
        try:
            groups, note = groups_of(model, layers, inputs), ""
        except Exception as error:  # the model's own code may not run without data
            note += f", as it cannot be traced ({type(error).__name__}: {one_line(error, 120)})"
    priced = [g for g in groups if any(layer.k * layer.n > least for layer in g.parts)]
    small = len(layers) - sum(len(g.parts) for g in priced)
    if small:
        less = f"no time is predicted for {small} layers: a DMA's start takes longer than they load"
        note = f"{note}; {less}" if note else less
    return Prices(priced, config.passes, of, note)
