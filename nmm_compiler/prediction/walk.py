"""Lists what one pass of a model computes: kernels, attention, pointwise regions.

Weights are in the layout that the kernels read best, since loading a model can change it once. The
graph has the operations that the backend would rewrite, traced on the meta device, after `rewrite`.
A piece is priced elsewhere (`prices.py`) and knows only sizes. Pointwise operations that feed each
other are one region, as an inner compiler fuses them: it reads from HBM what other pieces made and
writes what other pieces read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from nmm_compiler.errors import ModelError, NmmError, SpecError, one_line
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.lowrank_models.meta_copies import MetaModel, example_inputs
from nmm_compiler.lowrank_models.predicted_time import (
    Computed,
    dense_product,
    parameter_names,
    rows_of,
    together,
)
from nmm_compiler.ops.launches import dtype_name, view_turned
from nmm_compiler.ops.lower import graph_call, lower
from nmm_compiler.passes.graph.canonical import Add, Canonical, Norm, owner_of
from nmm_compiler.passes.graph.capture import (
    Graphs,
    arguments,
    collect_values,
    graphs_without_data,
    traced_as_compiled,
)
from nmm_compiler.passes.graph.effects import upstream
from nmm_compiler.passes.graph.read_graph import read_graph
from nmm_compiler.passes.graph.torch_names import named_arguments, target_name
from nmm_compiler.passes.pipeline import rewrite
from nmm_compiler.passes.rules.attention import unrotated
from nmm_compiler.passes.rules.base import module_path
from nmm_compiler.passes.rules.lowrank import products_at
from nmm_compiler.prices.kernel import COLLECTIVES
from nmm_compiler.prices.ways import Row
from nmm_compiler.targets import Target

_FEW_TOKENS = 128
"""Tokens of one block of a kernel: the norm of so many is computed once, while weights arrive."""

# Engine passes over a tile of scores, without a kernel of ours: a published fused kernel takes 28
# us for 512 and 188 us for 2048 tokens of one head of 128 features on trn2, so 160 us for 3.93 M
# scores more.
SCORE_PASSES = 12.3


@dataclass(frozen=True)
class Piece:
    """One piece of work to price, and how often the whole model does it.

    kind: kernel, attention, pointwise, copy, product (of two activations) or a collective.
    module: where, with equal layers as one.
    ways: for kernels, alternatives that compute the same, each a row of specs.
    ways of an attention: our kernel, where there is one that computes it.
    apart: pieces that compute the same one after the other: of a kernel with a collective, a norm
    or a residual inside.
    bytes: of HBM; elements: of the engines, one entry an operation, none of an attention of one
    query, which waits for the cache; flops: of products.
    """

    kind: str
    module: str
    count: int
    ways: tuple[Row, ...] = ()
    bytes: int = 0
    elements: tuple[int, ...] = ()
    flops: int = 0
    dtype: str = "bfloat16"
    apart: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One pass of one core's share of a model.

    name: of the phase. tokens: of the input, for "decode" of the context. given: the inputs that a
    caller passed.
    """

    model: MetaModel
    name: str
    batch: int
    tokens: int
    given: Any = field(default=None, compare=False)

    def inputs(self) -> Any:
        """Return the arguments of the pass, without data."""
        if self.given is not None:
            return tree_map_only(torch.Tensor, lambda t: t.to("meta"), self.given)
        decodes = self.name == "decode"
        once = example_inputs(self.model.module, 1 if decodes else self.tokens, self.batch)
        if once is None:
            raise ModelError(
                f"{self.model.name} is no transformers model of tokens or images: pass inputs=, "
                "its example inputs"
            )
        if decodes:
            return {**once, "use_cache": True, "past_key_values": self.cache()}
        return once | ({"use_cache": False, "logits_to_keep": 1} if self.name == "prefill" else {})

    def cache(self) -> Any:
        """Return the key-value cache before the token that is computed."""
        module: Any = self.model.module
        before: Any = example_inputs(module, max(1, self.tokens - 1), self.batch)
        with torch.no_grad(), traced_as_compiled(module):  # it asks for no data then
            return module(**before, use_cache=True, logits_to_keep=1).past_key_values


def passes_of(model: MetaModel, setting: Mapping[str, int], inputs: Any = None) -> list[Pass]:
    """Return the passes of a setting: prefill and decode, or one pass."""
    batch, kind = setting["batch"], type(model.module).__name__
    if inputs is not None:
        return [Pass(model, "pass", batch, setting["prompt"], inputs)]
    generates = "CausalLM" in kind or "LMHead" in kind
    sizes = {"prefill": "prompt", "decode": "context"} if generates else {"pass": "prompt"}
    return [Pass(model, name, batch, setting[size]) for name, size in sizes.items()]


@functools.lru_cache(maxsize=256)
def cache_bytes(one: Pass) -> int:
    """Return the bytes of the cache of all layers that the traced ones stand for."""
    held = one.cache().layers if one.name == "decode" else []
    times = [len(every) for every in one.model.layers.values()] or [1] * len(held)
    return sum(
        count * value.nbytes
        for layer, count in zip(held, times, strict=False)
        for value in vars(layer).values()
        if isinstance(value, torch.Tensor) and value.is_meta
    )


@functools.lru_cache(maxsize=256)
def graphs_of(one: Pass) -> Graphs:
    """Return the graphs of a pass with their inputs; they are of no target yet.

    Raises ModelError where the model cannot be traced.
    """
    try:
        return graphs_without_data(one.model.module, *arguments(one.inputs()))
    except NmmError:
        raise
    except Exception as error:  # the model's own code may not run without data
        text = one_line(error)
        raise ModelError(
            f"{one.model.name} cannot be traced without data: {type(error).__name__}: {text}"
        ) from error


@functools.lru_cache(maxsize=256)
def walk_pass(one: Pass, chip: Target, target: str, lnc: int, takes_norms: bool) -> list[Piece]:
    """Return the pieces of a pass, rewritten for a target of this name.

    lnc: physical cores of a logical one, on which the passes price what they fuse. takes_norms:
    norms, sums and rotations may be inside of kernels.
    """
    pieces: list[Piece] = []
    for graph, given in graphs_of(one):
        result = rewrite(graph, tuple(given), options={"target": target, "lnc": lnc})
        c = read_graph(result.graph_module, collect_values(result.graph_module, given))
        names = parameter_names(one.model.module, result.graph_module, given)
        pieces += _Walk(one.model, c, names, takes_norms).pieces()
    return pieces


def walk_graph(graph: fx.GraphModule) -> list[Piece]:
    """Return the pieces of a graph that was rewritten and whose nodes have their metadata."""
    c = read_graph(graph, collect_values(graph, None))
    holders = [n for n in graph.graph.nodes if n.op == "placeholder" and n in c.constant]
    names = {n: n.name for n in holders}
    return _Walk(MetaModel(graph, "graph"), c, names, takes_norms=False).pieces()


@dataclass
class _Walk:
    """One graph.

    names: of the parameters among the placeholders. takes_norms: kernels of dense products may have
    the norm of their input and a residual inside, those of attention RoPE. covered: pointwise nodes
    that a kernel computes, too.
    """

    model: MetaModel
    c: Canonical
    names: dict[fx.Node, str]
    takes_norms: bool
    readers: dict[fx.Node, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))
    depth: dict[fx.Node, int] = field(default_factory=lambda: defaultdict(int))
    found: list[Piece] = field(default_factory=list)
    dense: list[Computed] = field(default_factory=list)
    calls: list[Computed] = field(default_factory=list)
    pointwise: dict[fx.Node, int] = field(default_factory=dict)
    covered: set[fx.Node] = field(default_factory=set)

    def pieces(self) -> list[Piece]:
        """Return the pieces of the graph."""
        for node in self.c.graph.nodes:
            if self.c.views.get(node, (node,))[0] is node or node.op == "output":
                for source in self._sources(node):
                    self.readers[source].add(node)
        for node in self.c.graph.nodes:
            if node.op not in ("placeholder", "get_attr", "output"):
                before = max((self.depth[n] for n in node.all_input_nodes), default=0)
                self.depth[node] = before + self._visit(node)
        for call in self.calls:
            self._kernel((call,), ((call.spec,),))
        for group in together(self.c, self.dense):
            self.covered |= group.between
            rows = rows_of(tuple(one.spec for one in group.parts), group.activation)
            self._kernel(group.parts, rows, bool(group.activation))
        apart = [n for n in self.pointwise if n not in self.covered]
        region: dict[fx.Node, set[fx.Node]] = {}  # the pointwise nodes that feed each other
        for node in apart:
            near = (s for s in self._sources(node) if self.depth[s] == self.depth[node])
            joined = {node}.union(*(region[s] for s in near if s in region))
            region |= dict.fromkeys(joined, joined)
        for inside in {id(joined): joined for joined in region.values()}.values():
            self.found.append(self._region([n for n in apart if n in inside]))
        return self.found

    # -- one node -----------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> bool:
        """Add the pieces of a node; return whether the node is a kernel of its own."""
        c = self.c
        called = graph_call(node, c.values.__getitem__)
        if called is not None:
            self._our_call(node, lower(*called, transpose=view_turned).spec)
            return True
        if c.tensor(node) is None or node in c.constant or node in c.derived:
            return False
        name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
        products = list(products_at(c, node))
        if name in COLLECTIVES:
            moved = max(self._bytes(n) for n in (node, *node.all_input_nodes))
            self.found.append(self._piece(name, node, bytes=moved))
        elif "scaled_dot_product" in name:
            self._attention(node)
        elif products:
            for _, form in products:
                dense = dense_product(c, node, form, self.names)
                if dense is None:
                    self._unread_product(node, name)
                else:
                    self.dense.append(dense)
        elif c.base(node)[0] is not node:
            return False
        elif name in ("embedding", "index_select", "gather"):
            self.found.append(self._piece("copy", node, bytes=2 * self._bytes(node)))
        elif "conv" in name or name in ("bmm", "matmul", "_grouped_mm", "einsum"):
            self._unread_product(node, name)
        else:
            self._operation(node, name)
            return False
        return True

    def _operation(self, node: fx.Node, name: str) -> None:
        """Note an operation that is part of a region, or a cache that grows."""
        read = [n for n in node.all_input_nodes if n not in self.names]
        cached = {n for n in read if n.op == "placeholder"}
        if name == "cat" and cached:
            new = sum(self._bytes(n) for n in node.all_input_nodes if n not in cached)
            # one token's keys or values, written in place
            self.found.append(self._piece("copy", node, bytes=2 * new))
        elif name not in ("arange", "_log_api_usage_once", "zeros", "ones", "full", "empty"):
            self.pointwise[node] = max(map(self._size, [node, *read]))

    def _our_call(self, node: fx.Node, spec: Any) -> None:
        bases = (owner_of(self.c.base(n)[0]) for n in node.all_input_nodes if n in self.c.views)
        weights = tuple(self.names[b] for b in bases if b in self.names)
        exchanged = spec.exchanged_bytes()
        if not exchanged:
            x = self.c.base(node.args[0])[0]  # type: ignore[arg-type]
            self.calls.append(Computed(node, x, spec, weights))
            return
        # it sums over cores between its products; these and the sum apart compute the same
        piece = self._piece("kernel", node, weights, ways=((spec,),))
        products = dataclasses.replace(spec, tp=1, tp_axis="").as_products()[0]
        first, second = (dataclasses.replace(piece, ways=((one,),)) for one in products)
        summed = dataclasses.replace(piece, kind="all_reduce", ways=(), bytes=exchanged)
        self.found.append(dataclasses.replace(piece, apart=(first, summed, second)))

    def _unread_product(self, node: fx.Node, name: str) -> None:
        """Note a product that no family here computes: two activations, a convolution."""
        inputs = [n for n in node.all_input_nodes if self.c.tensor(n) is not None]
        depth = int((self.c.sizes(inputs[0]) or (1,))[-1])
        if "conv" in name:
            outputs, *_ = self.c.sizes(inputs[1]) or (1,)
            depth = self._size(inputs[1]) // max(1, int(outputs))
        moved = sum(map(self._bytes, [*inputs, node]))
        flops = 2 * self._size(node) * depth
        self.found.append(self._piece("product", node, bytes=moved, flops=flops))

    def _attention(self, node: fx.Node) -> None:
        """Add the piece of a call of attention, and the rotation of few queries, where nothing else
        reads them."""
        given = named_arguments(node)
        q, k, v = (given[name] for name in ("query", "key", "value"))
        *lead, heads, queries, features = map(int, self.c.shape(q) or ())
        keys, batch = int((self.c.shape(k) or ())[-2]), math.prod(lead)
        # repeated heads are stored once
        stored = sum(min(self._size(n), self._size(owner_of(self.c.base(n)[0]))) for n in (k, v))
        key_heads = max(1, stored // (2 * batch * keys * features))
        model = self.model.module
        encodes = getattr(model, "config", None) is not None and not hasattr(model, "lm_head")
        masked = given.get("attn_mask") is not None and not encodes
        causal = queries == keys and (bool(given.get("is_causal")) or masked)
        moved = self._bytes(node) * 2 + stored * (self._bytes(node) // max(1, self._size(node)))
        scores = batch * heads * queries * keys * (0.5 if causal else 1.0)
        piece = self._piece(
            "attention", node, bytes=moved,
            elements=(int(SCORE_PASSES * scores),) * (queries > 1),
            flops=int(4 * scores * features),
        )  # fmt: skip
        if self._size(node) == batch * heads * queries * features:  # v has as many as k
            with contextlib.suppress(NmmError):  # no kernel, as for too long a context
                kernel = AttentionSpec(
                    m=queries, heads=heads, kv_heads=key_heads, context=keys, d=features,
                    batch=batch, dtype=piece.dtype, causal=causal,
                )  # fmt: skip
                piece = dataclasses.replace(piece, ways=((kernel,),))
        rope, before, _, angles = unrotated(self.c, q, k)
        if rope == "q" and piece.ways and self.takes_norms and queries <= _FEW_TOKENS:
            turned = [n for n in upstream([q], {before, *angles}) if n in self.pointwise]
            piece = self._taking_in(turned, piece, ((dataclasses.replace(kernel, rope=rope),),))
        self.found.append(piece)

    # -- dense products that the strongest kernels take together --------------------------------

    def _kernel(
        self, products: Sequence[Computed], ways: tuple[Row, ...], gated: bool = False
    ) -> None:
        """Add the kernel of products of one x.

        It may compute the norm of x, where nothing else reads it, and the sum behind one result,
        for so few tokens that they take no time there; apart they are pieces of their own.
        """
        names = [name for one in products for name in one.weights]
        piece = self._piece("kernel", products[-1].node, names, ways=ways)
        norm = functools.partial(_with_norm, self.c.forms.get(products[0].x), gated)
        behind = self._sum_behind(products[-1]) if gated or len(products) == 1 else []
        with contextlib.suppress(SpecError, TypeError):  # kernels that take none in
            for nodes, inside in ((behind, _with_sum), (self._norm_before(products), norm)):
                if nodes:
                    piece = self._taking_in(nodes, piece, tuple(map(inside, piece.ways)))
        self.found.append(piece)

    def _taking_in(self, nodes: Sequence[fx.Node], piece: Piece, ways: tuple[Row, ...]) -> Piece:
        """Return a piece whose kernels compute pointwise nodes, too; apart these are a region."""
        self.covered.update(nodes)
        return dataclasses.replace(piece, ways=ways, apart=(self._region(nodes), piece))

    def _norm_before(self, products: Sequence[Computed]) -> list[fx.Node]:
        """Return the nodes of the norm that is x of products, where nothing but these reads it."""
        x = products[0].x
        final, form = owner_of(x), self.c.forms.get(x)
        if not self._takes(products[0]) or not isinstance(form, Norm) or form.eps is None:
            return []
        nodes = {one.node for one in products if one.x is x}
        plain = final in self.pointwise and self.c.dtype(form.value) == self.c.dtype(final)
        whole = {final, *self.c.helpers.get(final, ())}
        return [n for n in self.pointwise if n in whole and plain and self.readers[final] == nodes]

    def _sum_behind(self, last: Computed) -> list[fx.Node]:
        """Return the sum of a product with a tensor of its size, where that alone reads it."""
        readers = self.readers[last.node]
        total = next(iter(readers), last.node)
        form = self.c.forms.get(total)
        if not self._takes(last) or len(readers) != 1 or not isinstance(form, Add):
            return []
        equal = {self._bytes(owner_of(key)) for order in form.orders for key in order}
        return [total] if total in self.pointwise and equal == {self._bytes(last.node)} else []

    def _takes(self, one: Computed) -> bool:
        few = self.takes_norms and getattr(one.spec, "m", math.inf) <= _FEW_TOKENS
        return few and getattr(one.spec, "x_layout", "row") == "row"

    # -- pointwise regions ----------------------------------------------------------------------

    def _region(self, nodes: Sequence[fx.Node]) -> Piece:
        """Return the piece of pointwise nodes that are one region."""
        inside = set(nodes)
        outer = {s for n in nodes for s in self._sources(n)} - inside
        read = sum(self._bytes(s) for s in outer if s not in self.names)
        written = sum(
            self._bytes(n) for n in nodes if self.readers[n] - inside or target_name(n) == "copy_"
        )
        elements = tuple(self.pointwise[n] for n in nodes)
        return self._piece("pointwise", nodes[-1], bytes=read + written, elements=elements)

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """Return the values that a node reads, behind views."""
        read = node.all_input_nodes[target_name(node) == "copy_" :]  # it writes its first
        tensors = (n for n in read if self.c.tensor(n) is not None)
        return {owner_of(self.c.base(n)[0]) for n in tensors}

    # -- sizes and names ------------------------------------------------------------------------

    def _size(self, node: fx.Node) -> int:
        value = self.c.tensor(node)
        return 0 if value is None else int(value.numel())

    def _bytes(self, node: fx.Node) -> int:
        value = self.c.tensor(node)
        return 0 if value is None else int(value.nbytes)

    def _piece(self, kind: str, node: fx.Node, names: Sequence[str] = (), **sizes: Any) -> Piece:
        """Return a piece of a node. names: of the parameters that it multiplies by."""
        path = _common(names) if any(names) else module_path(node)
        value = self.c.tensor(node)
        dtype = dtype_name(value) if value is not None else "bfloat16"
        shown = re.sub(r"\.\d+(?=\.|$)", ".*", path) if self.model.layers else path
        count = len(self.model.originals(path))
        return Piece(kind, shown, count, dtype=dtype, **sizes)


def _with_sum(row: Any) -> Row:
    """Return the kernels of a row with a residual that the last one adds."""
    return *row[:-1], dataclasses.replace(row[-1], residual=True)


def _with_norm(norm: Any, gated: bool, row: Any) -> Row:
    """Return the kernels of a row with a norm in those that read x: all but the last of a gated
    MLP in parts."""
    fields = {
        "norm": norm.kind, "norm_eps": norm.eps, "norm_offset": norm.offset,
        "norm_gain": norm.weight is not None, "norm_bias": norm.bias is not None,
    }  # fmt: skip
    reads_x = len(row) - (gated and len(row) > 1)
    normed = (dataclasses.replace(spec, **fields) for spec in row[:reads_x])
    return *normed, *row[reads_x:]


def _common(names: Sequence[str]) -> str:
    """Return the module that all these parameters belong to."""
    paths = [re.sub(r"(\.(down|up))?\.weight$", "", name).split(".") for name in names if name]
    levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    shared = [level[0] for level in levels]
    rest = {path[len(shared)] if len(path) > len(shared) else "" for path in paths}
    return ".".join(shared if "" in rest else [*shared, "+".join(sorted(rest))])
