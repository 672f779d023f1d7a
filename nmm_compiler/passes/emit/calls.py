"""The kernel calls that matches emit; their layouts are assigned later.

A call is an op of some linears. Its arguments are what the linears have, packed by the names of the
op's schema: u and v of one linear, us and vs of several, [u, v] for each projection of a gated MLP.

Constants around the products are folded into a kernel's operands: factors, one bias, one scale.
Nodes of the graph compute the folded operands at each call from the stored weights, so they follow
updates of a weight, and gradients reach it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.launches import view_turned
from nmm_compiler.ops.linear import CORRECTED, CORRECTED_MLP, CORRECTED_SHARED, SUFFIX
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.passes.chains.chain import Chain, Step, Weight, is_whole_feature
from nmm_compiler.passes.chains.safety import Refusal, covered, tokens_to_judge
from nmm_compiler.passes.emit.editor import Editor, NotEmittedError, aten
from nmm_compiler.passes.emit.stored import (
    Scaled,
    Stored,
    read_base,
    read_eight_bits,
    read_factors,
)
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    PLAIN,
    Activation,
    Canonical,
    Key,
    Norm,
    Virtual,
    dtype_name,
    owner_of,
)
from nmm_compiler.passes.graph.read_graph import is_distributed, local_part
from nmm_compiler.passes.graph.views import FEATURE, Atom, Dim, Dims, Size

_OF_BASES = {
    "lowrank_matmul": CORRECTED.name,
    "lowrank_matmul_shared_x": CORRECTED_SHARED.name,
    "gated_mlp": CORRECTED_MLP.name,
}
"""The ops whose dense weights are of few bits, by those of other weights."""
_LISTS = {
    "u": "us", "v": "vs", "bias": "biases", "w": "ws", "w_scale": "w_scales",
    "branch_scale": "branch_scales",
}  # fmt: skip
"""What an op of several linears calls the operands of one."""


@dataclass(frozen=True)
class Linear:
    """A chain, and how its weights of few bits are stored, where a kernel reads them so.

    factors: fp8 numbers of u and v, or of the one weight. base: the dense weight of few bits, alone
    or beside the factors.
    """

    chain: Chain
    factors: tuple[Stored, ...] = ()
    base: Stored | None = None

    @property
    def dense(self) -> Weight | None:
        """The dense weight, alone or beside the factors."""
        if self.chain.base is not None:
            return self.chain.base.weight
        return self.chain.u if self.chain.second is None else None

    @property
    def rank(self) -> int:
        """The inner dimension of all its branches, 0 of a dense weight alone."""
        return 0 if self.chain.second is None else self.chain.r

    @property
    def format(self) -> str:
        """The format of the dense weight that is read as it is stored, else ""."""
        return "" if self.base is None else self.base.format

    @property
    def ways(self) -> dict[str, str]:
        """The keywords of its weights, which several linears need alike to be one call."""
        said = {} if self.dense is None else {"w_layout": self.dense.layout}
        if self.chain.second is not None:
            said |= {"u_layout": self.chain.u.layout, "v_layout": self.chain.v.layout}
        return said | ({"format": self.format} if self.format else {})

    @property
    def hidden(self) -> set[Key]:
        """The weights that the call does not read, but the leaves that they are made of."""
        weights = self.chain.factors if self.factors else ()
        if self.base is not None and self.dense is not None:
            weights = (*weights, self.dense)
        return {weight.key for weight in weights}

    def operands(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands; return them by the names that an op of one linear has."""
        chain, base = self.chain, self.base
        if base is not None and chain.second is None:
            made = fold_chain(editor, chain, (base,))
        else:
            parts = (chain, *chain.more)
            made = join(editor, parts, [fold_chain(editor, one, self.factors) for one in parts])
        if chain.second is None:
            made["w"] = made.pop("u")
        elif base is not None and self.dense is not None:
            made["w"] = base.values_node(editor, self.dense)
        elif chain.base is not None:
            made["w"] = weight_node(editor, chain.base.weight)
        if base is not None:
            made["w_scale"] = base.scale_node(editor)
            if self.factors:
                first, last = (one_dim(editor, one.scale, chain.r) for one in self.factors)
                made["branch_scale"] = editor.call(aten.mul.Tensor, first, last)
        return made

    def notes(self, c: Canonical) -> list[str]:
        """Return how its weights are read."""
        read = [key for key in self.chain.weights if key not in self.hidden]
        bits = MX[self.format].bits if self.format in MX else 8
        said = {
            "a factor is dequantized or made of stored weights at each call": any(
                key in c.made or c.base(key)[0] in c.quantized for key in read
            ),
            "the fp8 branch is read as stored: a byte an element": self.base and self.factors,
            f"the {self.format} weight is read as stored: {bits} bits an element": self.format,
            "a kernel rounds x to mxfp8 beside it": self.format in MX,
            "the scales of torchao's weight are put in order at each call": (
                self.base is not None and self.base.is_torchao
            ),
        }
        return [note for note, holds in said.items() if holds]


def fold_chain(editor: Editor, chain: Chain, stored: Sequence[Stored] = ()) -> dict[str, Any]:
    """Fold the steps between and after the products of a chain; stored: its weights as bytes.

    Return u and v, or u alone, in the layouts of the chain, and scale and bias of scale * (x u) v +
    bias; with inner_bias and inner_gain of a function between the products.
    """
    nodes: list[Any]
    if stored:
        pairs = zip(stored, chain.factors, strict=True)
        nodes = [one.values_node(editor, weight) for one, weight in pairs]
    else:
        nodes = [weight_node(editor, weight) for weight in chain.factors]
    u, v = [*nodes, None][:2]  # a dense product has no v
    plain_v = v  # the inner bias is multiplied by v before scales are folded into v
    scale, bias = 1.0, None

    def absorb(steps: Sequence[Step], width: int) -> None:
        nonlocal u, v, scale, bias
        for step in steps:
            if step.kind == "bias":
                assert step.key is not None
                bias = plus(editor, bias, one_dim(editor, step.key, width), step.number)
                continue
            scale *= step.number
            bias = bias if bias is None else times(editor, bias, step.number)
            if step.key is not None:
                size = width if step.kind == "vector" else 1
                factor = one_dim(editor, step.key, size)
                bias = bias if bias is None else editor.call(aten.mul.Tensor, bias, factor)
                u, v = fold(editor, chain, u, v, factor)

    absorb(chain.middle, chain.u.n)
    inner = gain = None
    if chain.inner is not None:
        inner, bias = bias, None
        if chain.gain is not None:
            gain = one_dim(editor, chain.gain, chain.u.n)
    elif bias is not None:
        matrix = plain_v if chain.v.layout == "col" else editor.permute(plain_v, (1, 0))
        bias = editor.call(aten.mv.default, matrix, bias)
    absorb(chain.after, chain.n)
    return {"u": u, "v": v, "scale": scale, "bias": bias, "inner_bias": inner, "inner_gain": gain}


def join(
    editor: Editor, chains: Sequence[Chain], parts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Join folded chains of one x that are added into one: u = [u1 | u2], v = [s1 v1; s2 v2]."""
    first, *others = parts
    if not others:
        return first
    ways = chains[0].u.layout, chains[0].v.layout
    scales = {part["scale"] for part in parts}
    us, vs, bias = [], [], None
    for chain, part in zip(chains, parts, strict=True):
        us.append(in_layout(editor, part["u"], chain.u.layout, ways[0]))
        v = in_layout(editor, part["v"], chain.v.layout, ways[1])
        vs.append(v if len(scales) == 1 else times(editor, v, part["scale"]))
        if part["bias"] is not None:
            bias = plus(editor, bias, part["bias"], 1.0)
    u = editor.call(aten.cat.default, us, 1 if ways[0] == "row" else 0)
    v = editor.call(aten.cat.default, vs, 0 if ways[1] == "row" else 1)
    scale = first["scale"] if len(scales) == 1 else 1.0
    return first | {"u": u, "v": v, "bias": bias, "scale": scale}


def in_layout(editor: Editor, node: fx.Node, have: str, want: str) -> fx.Node:
    """Return a weight of one layout in another one."""
    return node if have == want else editor.permute(node, (1, 0))


def weight_node(editor: Editor, weight: Weight) -> fx.Node:
    """Return the 2-D node of a weight as it is stored."""
    return editor.reshape(editor.operand(weight.key), weight.stored)


def one_dim(editor: Editor, key: Key, size: int) -> fx.Node:
    """Return a constant as the 1-D vector it is."""
    return editor.reshape(editor.operand(key), (size,))


def times(editor: Editor, node: fx.Node, number: float) -> fx.Node:
    """Emit a value times a number."""
    return node if number == 1.0 else editor.call(aten.mul.Tensor, node, number)


def plus(editor: Editor, bias: fx.Node | None, own: fx.Node, number: float) -> fx.Node:
    """Emit a bias plus `number` times a vector."""
    if bias is None:
        return times(editor, own, number)
    return editor.call(aten.add.Tensor, bias, own, alpha=number)


def fold(
    editor: Editor, chain: Chain, u: fx.Node, v: fx.Node, factor: fx.Node
) -> tuple[fx.Node, fx.Node]:
    """Multiply the smaller factor by a vector over the rank (or by one number)."""
    over_u = chain.u.k <= chain.v.n
    weight, node = (chain.u, u) if over_u else (chain.v, v)
    rank_is_last = (weight.layout == "row") == over_u
    size = editor.shape(factor)[0]
    if not rank_is_last and size != 1:
        factor = editor.reshape(factor, (size, 1))
    folded = editor.call(aten.mul.Tensor, node, factor)
    return (folded, v) if over_u else (u, folded)


@dataclass
class Source:
    """The data operand of a call: a value, and its dimensions over tokens and FEATURE."""

    key: Key
    dims: Dims
    k: int

    def tokens(self) -> Dims:
        """Return the token dimensions in the order they have in the value."""
        rests = (tuple(a for a in dim if a.axis != FEATURE) for dim in self.dims)
        out = tuple(rest for rest, dim in zip(rests, self.dims, strict=True) if rest or not dim)
        alone = self.k == 1 and out[-1:] == ((),)  # the feature dimension itself, of size 1
        return out[:-1] if alone else out

    def is_row(self) -> bool:
        """Return whether the value is [tokens..., k] as it is."""
        return bool(self.dims) and is_whole_feature(self.dims[-1], self.k)

    def is_col(self) -> bool:
        """Return whether the value is [k, tokens] as it is."""
        return (
            len(self.dims) == 2
            and is_whole_feature(self.dims[0], self.k)
            and not any(a.axis == FEATURE for a in self.dims[1])
            and not is_whole_feature(self.dims[1], self.k)
        )


def best_source(c: Canonical, key: Key, dims: Dims, k: int, final: fx.Node) -> Source:
    """Return the operand, or the tensor that it is a view or copy of, if that needs no transpose.

    The call reads that tensor at its own place, so nothing may write to it in between.
    """
    here = Source(key, dims, k)
    base, below = c.base(key)[0], under(c, here)
    if base is key or isinstance(base, Virtual) or below is None:
        return here
    if not below.is_col() and not below.is_row():
        return here
    position = c.effects.position
    seen = [owner_of(k) for k in c.through(key)]
    start = min(position[node] for node in seen)
    if c.effects.crossed(start - 1, position[final], [base, *seen]) is not None:
        return here
    return below


def under(c: Canonical, source: Source) -> Source | None:
    """Return the base of an operand as the operand; None where it has no such dimensions."""
    base, inner = c.base(source.key)
    inverse = views.invert(inner, source.dims, dict(enumerate(c.sizes(base))))
    return None if inverse is None else dataclasses.replace(source, key=base, dims=inverse)


def feature_axis(size: int) -> Dim:
    """Return the dimension of a whole feature axis."""
    return () if size == 1 else (Atom(FEATURE, size, 1),)


def source_over_raw(c: Canonical, made: Call, source: Source) -> Source | None:
    """Return a reader's x as the [features, tokens] result of a call, None when it does not fit."""
    final = under(c, source)
    if final is None or final.key is not made.final or made.n != source.k:
        return None
    sizes = {**made.chain.first.tokens, FEATURE: made.n}
    axes = dict(zip(sizes, views.invert(made.out_dims, final.dims, sizes) or (), strict=False))
    if not axes or not is_whole_feature(axes[FEATURE], made.n):
        return None
    raw = views.compose(made.dims(made.n, "col"), axes)
    turned = None if raw is None else Source(owner_of(source.key), raw, made.n)
    return turned if turned is not None and turned.is_col() else None


class Lowering(Editor):
    """An editor that adds nothing to the graph, for the spec of a call at `at` with m tokens.

    Its nodes are tensors: without data, but for those of subclasses.
    """

    def __init__(self, c: Canonical, at: fx.Node, m: int) -> None:
        super().__init__(c, "", c.options, set())
        self.at, self.m = at, m

    def kernel(self, name: str, given: Mapping[str, Any], value: Any = None) -> Any:
        """Return the spec of the kernel that an op of ours launches, of one device's parts."""
        op = DEFINITIONS[name]
        local: Any = fx.node.map_aggregate(dict(given), lambda one: without_data(local_part(one)))
        bound = op.bound((), {key: value for key, value in local.items() if key in op.defaults})
        return op.lower(bound, bound[op.operands[0].name], self.m, view_turned).spec

    def call(
        self, operator: Callable[..., Any], /, *args: Any, meta_value: Any = None, **kwargs: Any
    ) -> Any:
        """Return what an operator computes."""
        made = operator(*args, **kwargs) if meta_value is None else meta_value
        return without_data(made)

    def node(self, key: Key) -> Any:
        """Return the tensor of a value."""
        return without_data(self.c.tensor(key))

    def operand(self, key: Key) -> Any:
        """Return the tensor of a value in the dtype that the kernel computes in."""
        value = self.node(key)
        if key in self.c.quantized:
            return torch.empty(value.shape, dtype=self.dtype, device="meta")
        return value.to(self.dtype)

    def value(self, node: Any) -> Any:
        """Return the tensor."""
        return node


def without_data(value: Any) -> Any:
    """Return a plain tensor without its data, a symbolic size as 1; any other value as it is."""
    if type(value) not in PLAIN:
        return value
    sizes = [size if isinstance(size, int) else 1 for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


@dataclass
class Call:
    """A kernel call: its linears, source and result. Layouts are "row" until `layout` assigns them.

    op: of plain weights, see `op_name`. activation: of the result of one linear, or of the gate of
    several. members: the calls of one linear each that this is in place of. rounded: x, where it is
    fp8 numbers. note: how weights of eight bits are read. turned: x is the "col" result of another
    call. unread: calls that read the result as "col" are all that reads it. said: keywords of a
    norm of x that is inside; ends: its vectors, and a residual of the result's shape, by the op's
    names.
    """

    op: str
    linears: tuple[Linear, ...]
    source: Source
    final: fx.Node
    out_dims: Dims
    covered: frozenset[fx.Node] = frozenset()
    activation: str = "identity"
    members: tuple[Call, ...] = ()
    rounded: Scaled | None = None
    note: str = ""
    x_layout: str = "row"
    out_layout: str = "row"
    turned: bool = False
    unread: bool = False
    said: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, Key] = field(default_factory=dict)

    @classmethod
    def of(
        cls, c: Canonical, op: str, chains: Sequence[Chain], final: fx.Node, out_dims: Dims,
        **more: Any,
    ) -> Call:  # fmt: skip
        """Return the call of an op that chains of one x become; more: other fields."""
        first = chains[0].first
        weights = [weight for chain in chains for weight in chain.factors]
        plain = all(map(_has_a_bias_at_most, chains))
        why = "" if plain else "more than a bias stands beside its products"
        stored = read_factors(c, weights, c.dtype(final), why)
        linears, note = tuple(map(Linear, chains)), ""
        if stored and stored[0].reason:
            note = f"{stored[0].format} factors are dequantized at each call: {stored[0].reason}"
        elif stored:
            left = iter(stored)
            note = f"{stored[0].format} factors are read as stored: a byte an element"
            linears = tuple(
                Linear(chain, tuple(itertools.islice(left, len(chain.factors)))) for chain in chains
            )
        source = best_source(c, first.x, first.x_dims, first.weight.k, final)
        given: dict[str, Any] = {"source": source, "note": note, **more}
        call = cls(op, linears, final=final, out_dims=out_dims, **given)
        call.covered = covered(c, final, call.keys())
        return call

    @classmethod
    def of_chain(cls, c: Canonical, chain: Chain, op: str = "lowrank_matmul", **more: Any) -> Call:
        """Return the call that a chain, or one product, becomes."""
        end = owner_of(chain.out)
        return cls.of(c, op, (chain,), end, chain.out_dims, activation=chain.activation, **more)

    @classmethod
    def of_several(cls, c: Canonical, op: str, members: Sequence[Call]) -> Call:
        """Return the call of several results that calls of one x become."""
        first = members[0]
        chains = [one.chain for one in members]
        call = cls.of(c, op, chains, first.final, first.out_dims, members=tuple(members))
        call.covered = call.covered.union(*(one.covered for one in members))
        if any(one.linears[0].base for one in members):
            linears = tuple(one.linears[0] for one in members)
            return dataclasses.replace(call, linears=linears, note="")
        return call

    @property
    def chain(self) -> Chain:
        """The products of the first linear."""
        return self.linears[0].chain

    @property
    def n(self) -> int:
        """The features of the result."""
        return self.linears[-1].chain.n

    @property
    def format(self) -> str:
        """The format of dense weights of few bits, "" for other weights."""
        return self.linears[0].format

    @property
    def op_name(self) -> str:
        """The op that is called: another one for weights that are read as bytes."""
        if self.format:
            return _OF_BASES[self.op]
        return self.op + SUFFIX * any(one.factors for one in self.linears)

    def results(self) -> tuple[Call, ...]:
        """Return one call per result, each with a layout of its own."""
        return self.members or (self,)

    @property
    def is_whole(self) -> bool:
        """Return whether the kernel's result is the value; else it keeps the graph's own order.

        An addend outside of the kernel, or x of fp8 numbers, which no kernel makes turned, keep it.
        """
        outside = self.rounded is not None or self.chain.addend is not None
        return not outside and "residual" not in self.ends

    def keys(self) -> list[Key]:
        """Return the values that the call reads, and what stays outside of it."""
        behind = {one.chain.first.x for one in self.linears[2:] if not self.members}
        keys = (key for one in self.linears for key in one.chain.operands)
        return [key for key in keys if key not in behind]

    def tokens_count(self) -> Size:
        """Return m, the number of tokens."""
        return views.product(views.shape_of(self.source.tokens()))

    def x_node(self, editor: Editor) -> fx.Node:
        """Return the node of x as it lies."""
        read = editor.operand if self.rounded is None else editor.node
        return read(self.source.key)

    def prepare_x(self, editor: Editor) -> fx.Node:
        """Emit the operand in the x layout."""
        if self.turned:
            node = editor.raw[owner_of(editor.c.base(self.source.key)[0])]
        else:
            node = self.x_node(editor)
        if self.x_layout == "row" and self.source.is_row():
            return node
        return editor.arrange(node, self.source.dims, self.dims(self.source.k, self.x_layout))

    @property
    def lead(self) -> Dims:
        """The token dimensions of a "row" result; all tokens in one where x is "col"."""
        if self.x_layout == "row" and self.source.is_row():
            return self.source.dims[:-1]
        tokens = self.source.tokens()
        return tokens if self.x_layout == "row" else (tuple(a for d in tokens for a in d),)

    def result_value(self, editor: Editor, x: fx.Node) -> Any:
        """Return the metadata value of the result: that of the node whose place it takes, where the
        kernel makes such a tensor."""
        shape = editor.c.values[x].shape
        lead = shape[:-1] if self.x_layout == "row" else shape[1:]
        sizes = [*lead, self.n] if self.out_layout == "row" else [self.n, math.prod(lead)]
        c, old = editor.c, editor.c.values[self.final]
        own = self.final in c.forms and self.final not in c.effects.writers
        static = all(isinstance(size, int) for size in (*sizes, *old.shape))
        if own and static and [*old.shape] == sizes and old.is_contiguous():
            return old
        return c.values[x].new_empty(sizes, dtype=editor.dtype)

    def dims(self, features: int, layout: str) -> Dims:
        """Return the dimensions of an operand or a result in a layout."""
        if layout == "row":
            return (*self.lead, feature_axis(features))
        return (feature_axis(features), tuple(a for d in self.lead for a in d))

    def named(self, editor: Editor) -> dict[str, Any]:
        """Emit what stands behind x; return it and the keywords by the names of all ops."""
        names, chain, results = DEFINITIONS[self.op_name].defaults, self.chain, self.results()
        each = [one.operands(editor) for one in self.linears]
        for made in each if "scale" not in names else ():
            last = next(one for one in ("branch_scale", "v", "w") if made.get(one) is not None)
            made[last] = times(editor, made[last], made["scale"])
        inner = chain.inner
        given = {
            **each[0], **self.said, "activation": self.activation, "x_layout": self.x_layout,
            "tp": chain.tp, "tp_axis": "rows" if chain.tp > 1 else "", "group": chain.group,
            "inner_activation": inner.name if isinstance(inner, Activation) else "identity",
        }  # fmt: skip
        for one in self.linears:
            given |= one.ways
        if isinstance(inner, Norm):
            given["inner_eps"] = inner.eps
        given |= {many: [made.get(one) for made in each] for one, many in _LISTS.items()}
        if None in given["branch_scales"]:  # where one has it, all have
            del given["branch_scales"]
        if "scales" in names:
            given["scales"] = self._scales(editor)
        if "gate" in names:
            given |= self._projections(editor, each)
        if self.rounded is not None:
            given |= {"x_scale": 1.0, "out_dtype": dtype_name(editor.dtype)}
        layouts = [one.out_layout for one in results]
        activations = [one.activation for one in results]
        given["out_layout"] = layouts[0] if len({*layouts}) == 1 else "row"
        given["out_layouts"] = layouts if len({*layouts}) > 1 else None
        given["activations"] = activations if {*activations} != {"identity"} else None
        given |= {name: editor.operand(key) for name, key in self.ends.items()}
        if "residual" in given:
            dims = self.dims(self.n, "row")
            given["residual"] = editor.arrange(given["residual"], self.out_dims, dims)
        return given

    def _scales(self, editor: Editor) -> list[fx.Node]:
        """Emit the scales of fp8 weights in the order in which the op has these."""
        each: list[Sequence[Stored]] = [one.factors for one in self.linears]
        if self.members:
            each = [[first for first, _ in self._firsts(each)], [last for _, last in each]]
        scales = [one.scale_node(editor) for one in itertools.chain(*each)]
        if self.rounded is not None:  # both scales multiply the sums
            if self.rounded.scale is not None:
                own = editor.reshape(editor.node(self.rounded.scale), (1,))
                scales = [editor.call(aten.mul.Tensor, one, own) for one in scales]
            scales = [times(editor, one, self.rounded.number) for one in scales]
        return scales

    def _firsts(self, each: Sequence[Any]) -> Sequence[Any]:
        """Return those of linears that have a first factor of their own."""
        return each[:1] if self.op.endswith("shared_u") else each

    def _projections(self, editor: Editor, each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the weights and biases of a gated MLP, all weights in one layout."""
        layouts = [weight.layout for one in self.linears for weight in one.chain.factors]
        layout = "col" if layouts.count("col") * 2 >= len(layouts) else "row"
        given: dict[str, Any] = {"weight_layout": layout}
        for name, linear, made in zip(("gate", "up", "down"), self.linears, each, strict=False):
            nodes = [made["u"], made["v"]] if linear.rank else [made["w"]]
            pairs = zip(nodes, linear.chain.factors, strict=True)
            given[name] = [in_layout(editor, node, one.layout, layout) for node, one in pairs]
            given[f"{name}_bias"] = made["bias"]
        return given

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the call and what surrounds it; return the node with the final value, the first of
        several, each of which is replaced."""
        if self.members:  # the call stands where the first result is needed
            editor.hoist()
        x = self.prepare_x(editor)
        given, results = {"x": x, **self.named(editor)}, self.results()
        for one in results:
            one.x_layout = self.x_layout
        values = [one.result_value(editor, x) for one in results]
        parts = zip(results, self._op_call(editor, given, values), strict=True)
        first, *others = [one.finish(editor, part) for one, part in parts]
        for one, new in zip(results[1:], others, strict=True):
            if not one.unread:
                editor.replace(one.final, new)
        return first

    def finish(self, editor: Editor, y: fx.Node) -> fx.Node:
        """Bring a result to the dimensions and strides of the node it replaces, and add what stays
        outside of the kernel."""
        editor.raw[self.final] = y
        if self.unread:
            return y
        y = editor.arrange(y, self.dims(self.n, self.out_layout), self.out_dims)
        y = editor.like(y, self.final)
        if self.chain.addend is None:
            return y
        addend, factor = self.chain.addend
        more = {} if factor == 1.0 else {"alpha": factor}
        return editor.call(aten.add.Tensor, y, editor.node(addend), **more)

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call; n: of a gated MLP, features of gate and up."""
        linears, chain, inner = self.linears, self.chain, self.chain.inner
        chains = [one.chain for one in linears if one.rank or one.base or self.rounded]
        ranks = [str(one.rank or "dense") for one in self._firsts(linears)]
        tokens = self.tokens_count()
        said = {
            "base_weight": self.format,
            "weights": "".join(one.format for one in linears[0].factors[:1]),
            "x": "" if self.rounded is None else "fp8",
            "inner": inner.kind if isinstance(inner, Norm) else inner and inner.name,
            "tp": chain.tp if chain.tp > 1 else 0,
        }
        return {
            "m": tokens if isinstance(tokens, int) else str(tokens),
            "k": self.source.k,
            "r": linears[0].rank if len(linears) == 1 else "+".join(ranks),
            "n": "+".join(str(one.n) for one in self.members) or chain.n,
            "chains": sum(1 + len(one.more) for one in chains),
            "activation": self.activation,
            **{name: value for name, value in said.items() if value},
        }

    def notes(self, c: Canonical) -> tuple[str, ...]:
        """Return how its weights are read."""
        said = dict.fromkeys(note for one in self.linears for note in one.notes(c))
        return (*filter(None, (self.note,)), *said)

    def spec(self, c: Canonical) -> KernelSpec:
        """Return what the kernel computes, with the norm and the residual that are inside.

        Of tensors that are cut over devices: what it computes on one of them.
        """
        value, tokens = c.tensor(self.source.key), self.tokens_count()
        if is_distributed(value):
            tokens = views.product(views.sizes_of(local_part(value))[:-1])
        lowering = Lowering(c, self.final, tokens_to_judge(tokens))
        given = {"x": self.x_node(lowering), **self.named(lowering)}
        return lowering.kernel(self.op_name, given)

    def _op_call(
        self, editor: Editor, given: Mapping[str, Any], values: Sequence[Any]
    ) -> list[fx.Node]:
        """Emit the op; return its results. given: its arguments by name.

        Refuses a call whose results are cut over devices in another way than those it replaces.
        """
        cut = is_distributed(editor.c.tensor(self.final))
        value = values if self.members else values[0]
        node = editor.kernel(self.op_name, given, None if cut else value)
        each = range(len(self.members))
        parts = [editor.call(operator.getitem, node, i) for i in each] or [node]
        for one, part in zip(self.results(), parts, strict=True) if cut else ():
            want, made = (editor.value(n).placements for n in (one.final, part))
            if made != want:
                why = f"one call returns {made}, the products {want}"
                raise NotEmittedError(Refusal("device", why, one.final))
        return parts


def _has_a_bias_at_most(chain: Chain) -> bool:
    """Return whether a chain is two products and no more than a bias, as kernels of fp8 weights."""
    alone = chain.base is None and not chain.more and chain.inner is None
    return alone and not chain.middle and chain.only_bias()


def with_base(c: Canonical, call: Call) -> Call | Stored | None:
    """Return a call that reads its dense weight of few bits as it is stored, or how that is stored
    and why no kernel reads it; None for a dense weight of another kind, and for no such weight."""
    chain, (linear, *_) = call.chain, call.linears
    if linear.dense is None:
        return None
    why = "something stands between its factors" if chain.inner is not None else ""
    why = "several devices share it" if chain.tp > 1 else why
    base = read_base(c, linear.dense, c.dtype(call.final), why)
    if base is None or base.reason:
        return base
    branch = _fp8_branch(c, chain) if base.format in MX else ()
    linear = Linear(chain, branch, base)
    note = "" if branch or not linear.rank else call.note
    made = dataclasses.replace(call, linears=(linear,), note=note)
    try:
        made.spec(c).check(c.chip)
    except NmmError as error:
        return Stored(base.format, reason=str(error))
    return made


def _fp8_branch(c: Canonical, chain: Chain) -> tuple[Stored, ...]:
    """Return u and v of a branch of fp8 numbers as they are stored; () for any other."""
    plain = chain.second is not None and not chain.more and not chain.middle
    steps = [step for step in chain.after if step.kind != "bias"]
    if not plain or any(step.key is not None for step in steps):
        return ()
    found = read_eight_bits(c, chain.u), read_eight_bits(c, chain.v, by_input=True)
    stored = [one for one in found if one is not None and one.format == "fp8" and not one.reason]
    if len(stored) < 2 or chain.v.layout != "col":
        return ()
    of_rank = c.shape(stored[0].scale) in ((chain.r, 1), (chain.r,))
    return tuple(stored) if of_rank else ()
