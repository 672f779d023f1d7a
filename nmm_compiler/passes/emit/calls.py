"""The kernel calls that matches emit; their layouts are assigned later.

A call is an op of some linears. Its arguments are what the linears have, packed by the names of the
op's schema: u and v of one linear, us and vs of several, [u, v] for each projection of a gated MLP.

Constants around the products are folded into a kernel's operands: factors, one bias, one scale.
Nodes of the graph compute the folded operands at each call from the stored weights, so they follow
updates of a weight, and gradients reach it.
"""

from __future__ import annotations

import dataclasses
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
from nmm_compiler.ops.definition import EACH
from nmm_compiler.ops.launches import view_turned
from nmm_compiler.ops.linear import CORRECTED, CORRECTED_MLP, CORRECTED_SHARED, SUFFIX
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.passes.chains.chain import AffineStep, Chain, feature_axis, is_whole_feature
from nmm_compiler.passes.chains.safety import Refusal, covered, crossed, tokens_to_judge
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
from nmm_compiler.passes.graph.views import FEATURE, Dims, Size

_OF_BASES = {
    "lowrank_matmul": CORRECTED.name,
    "lowrank_matmul_shared_x": CORRECTED_SHARED.name,
    "gated_mlp": CORRECTED_MLP.name,
}
"""The ops whose dense weights are of few bits, by those of other weights."""


def emit_linear(editor: Editor, chain: Chain) -> dict[str, Any]:
    """Emit the operands of a chain; return them by the letters that ops have for them."""
    parts = (chain, *chain.more)
    operands = join(editor, parts, [fold_chain(editor, one) for one in parts])
    operands |= {f"{letter}_scale": one.scale_node(editor) for letter, one in chain.bits.items()}
    if {"u_scale", "w_scale"} <= operands.keys():
        scales = operands["u_scale"], operands["v_scale"]
        operands["branch_scale"] = editor.call(aten.mul.Tensor, *scales)
    return operands


def fold_chain(editor: Editor, chain: Chain) -> dict[str, Any]:
    """Fold the steps between and after the products of a chain.

    Return its weights by their letters, in the layouts of the chain, and scale and bias of scale *
    (x u) v + bias; with inner_bias and inner_gain of a function between the products.
    """
    operands: dict[str, Any] = {one: weight_node(editor, chain, one) for one in chain.letters}
    plain_v: Any = operands.get("v")  # the inner bias times it: no scales are in it yet
    operands |= {"scale": 1.0, "bias": None, "inner_bias": None, "inner_gain": None}

    def absorb(steps: Sequence[AffineStep], width: int) -> None:
        for step in steps:
            bias = operands["bias"]
            if step.kind == "bias":
                assert step.key is not None
                operands["bias"] = plus(editor, bias, one_dim(editor, step.key, width), step.number)
                continue
            operands["scale"] *= step.number
            operands["bias"] = bias if bias is None else times(editor, bias, step.number)
            if step.key is not None:
                size = width if step.kind == "vector" else 1
                fold(editor, chain, operands, one_dim(editor, step.key, size))

    absorb(chain.middle, chain.u.n)
    if chain.inner is not None:
        operands |= {"inner_bias": operands["bias"], "bias": None}
        if chain.gain is not None:
            operands["inner_gain"] = one_dim(editor, chain.gain, chain.u.n)
    elif operands["bias"] is not None:
        matrix = plain_v if chain.v.layout == "col" else editor.permute(plain_v, (1, 0))
        operands["bias"] = editor.call(aten.mv.default, matrix, operands["bias"])
    absorb(chain.after, chain.n)
    return operands


def join(
    editor: Editor, chains: Sequence[Chain], parts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Join folded chains of one x that are added into one: u = [u1 | u2], v = [s1 v1; s2 v2]."""
    first, *others = parts
    if not others:
        return first
    ways = chains[0].u.layout, chains[0].v.layout
    us, vs, bias = [], [], None
    for chain, part in zip(chains, parts, strict=True):
        us.append(in_layout(editor, part["u"], chain.u.layout, ways[0]))
        v = in_layout(editor, part["v"], chain.v.layout, ways[1])
        vs.append(times(editor, v, part["scale"]))
        if part["bias"] is not None:
            bias = plus(editor, bias, part["bias"], 1.0)
    u = editor.call(aten.cat.default, us, 1 if ways[0] == "row" else 0)
    v = editor.call(aten.cat.default, vs, 0 if ways[1] == "row" else 1)
    return first | {"u": u, "v": v, "bias": bias, "scale": 1.0}


def in_layout(editor: Editor, node: fx.Node, have: str, want: str) -> fx.Node:
    """Return a weight of one layout in another one."""
    return node if have == want else editor.permute(node, (1, 0))


def weight_node(editor: Editor, chain: Chain, letter: str) -> fx.Node:
    """Return the 2-D node of a weight as it is stored; its bytes where a kernel reads these."""
    weight, stored = chain.letters[letter], chain.bits.get(letter)
    if stored is not None:
        return stored.values_node(editor, weight)
    return editor.reshape(editor.operand(weight.key), weight.stored)


def one_dim(editor: Editor, key: Key, size: int) -> fx.Node:
    """Return a constant as the 1-D vector it is."""
    return editor.reshape(editor.operand(key), (size,))


def times(editor: Editor, node: fx.Node, number: float) -> fx.Node:
    """Emit a value times a number.

    No sum has an alpha: inductor of torch 2.13 drops that of a sum with a product (pytorch issue
    167313).
    """
    return node if number == 1.0 else editor.call(aten.mul.Tensor, node, number)


def plus(editor: Editor, bias: fx.Node | None, own: fx.Node, number: float) -> fx.Node:
    """Emit a bias plus `number` times a vector."""
    if bias is None:
        return times(editor, own, number)
    return editor.call(aten.add.Tensor, bias, times(editor, own, number))


def times_x(editor: Editor, scale: fx.Node, x: Scaled) -> fx.Node:
    """Emit the scales of a weight times those of x, since both multiply the sums."""
    if x.scale is not None:
        own = editor.reshape(editor.node(x.scale), (1,))
        scale = editor.call(aten.mul.Tensor, scale, own)
    return times(editor, scale, x.number)


def fold(editor: Editor, chain: Chain, operands: dict[str, Any], factor: fx.Node) -> None:
    """Multiply the bias and the smaller factor by a vector over the rank (or by one number)."""
    over_u = chain.u.k <= chain.v.n
    letter, weight = ("u", chain.u) if over_u else ("v", chain.v)
    rank_is_last = (weight.layout == "row") == over_u
    size = editor.shape(factor)[0]
    if operands["bias"] is not None:
        operands["bias"] = editor.call(aten.mul.Tensor, operands["bias"], factor)
    if not rank_is_last and size != 1:
        factor = editor.reshape(factor, (size, 1))
    operands[letter] = editor.call(aten.mul.Tensor, operands[letter], factor)


def packed(op: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the operands of an op by name; rows: the tensors of each of its linears by letters.

    The scales of all weights have the order of these.
    """
    given: dict[str, Any] = {}
    scales: list[Any] = []
    ends = dict(zip(getattr(op, "ends", ()), rows, strict=False))
    for one in op.operands:
        own = rows if one.end == EACH else [ends.get(one.end, rows[0])]
        letters = ["u", "v", "w"] if one.letter == "uvw" else [one.letter]
        held = [(row, letter) for row in own for letter in letters]
        scales += [row[f"{letter}_scale"] for row, letter in held if f"{letter}_scale" in row]
        tensors = [row.get(letter) for row, letter in held]
        if one.letter == "uvw":
            given[one.name] = [tensor for tensor in tensors if tensor is not None]
        elif one.letter:
            given[one.name] = tensors if "[]" in one.kind else tensors[0]
    if None in given.get("branch_scales", ()):  # where one has it, all have
        given["branch_scales"] = None
    return {**given, "scales": scales}


@dataclass
class DataOperand:
    """The data operand of a call: a value, and its dimensions over tokens and FEATURE."""

    key: Key
    dims: Dims
    k: int

    def tokens(self) -> Dims:
        """Return the token dimensions in the order they have in the value."""
        rests = (tuple(a for a in dim if a.axis != FEATURE) for dim in self.dims)
        return tuple(rest for rest, dim in zip(rests, self.dims, strict=True) if rest or not dim)

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


def best_source(c: Canonical, key: Key, dims: Dims, k: int, final: fx.Node) -> DataOperand:
    """Return the operand, or the tensor that it is a view or copy of, if that needs no transpose.

    The call reads that tensor at its own place, so the views and copies move there: no write and no
    edge of a region, as of no_grad, may lie between.
    """
    here = DataOperand(key, dims, k)
    base, below = c.base(key)[0], under(c, here)
    if base is key or isinstance(base, Virtual) or below is None:
        return here
    if not below.is_col() and not below.is_row():
        return here
    moved = [owner_of(one) for one in c.through(key)]
    return here if crossed(c, moved, final, [base]) else below


def under(c: Canonical, source: DataOperand) -> DataOperand | None:
    """Return the base of an operand as the operand; None where it has no such dimensions."""
    base, inner = c.base(source.key)
    inverse = views.invert(inner, source.dims, dict(enumerate(c.sizes(base))))
    return None if inverse is None else dataclasses.replace(source, key=base, dims=inverse)


def source_over_raw(c: Canonical, producer: Call, source: DataOperand) -> DataOperand | None:
    """Return a reader's x as the [features, tokens] result of a call, None when it does not fit."""
    final = under(c, source)
    if final is None or final.key is not producer.final or producer.n != source.k:
        return None
    sizes = {**producer.chain.first.tokens, FEATURE: producer.n}
    axes = dict(zip(sizes, views.invert(producer.out_dims, final.dims, sizes) or (), strict=False))
    if not axes or not is_whole_feature(axes[FEATURE], producer.n):
        return None
    raw = views.compose(producer.dims(producer.n, "col"), axes)
    turned = None if raw is None else DataOperand(owner_of(source.key), raw, producer.n)
    return turned if turned is not None and turned.is_col() else None


class Lowering(Editor):
    """An editor that adds nothing to the graph, for the spec of a call at `at` with m tokens.

    Its nodes are tensors: without data, but for those of subclasses.
    """

    def __init__(self, c: Canonical, at: fx.Node, m: int) -> None:
        super().__init__(c, "", c.options, set())
        self.begin(at)
        self.m = m

    def kernel(self, name: str, given: Mapping[str, Any], value: Any = None) -> Any:
        """Return the spec of the kernel that an op of ours launches, of one device's parts."""
        op = DEFINITIONS[name]
        local: Any = fx.node.map_aggregate(dict(given), lambda one: without_data(local_part(one)))
        alike: Any = fx.node.map_aggregate(
            local, lambda one: (one.shape, one.dtype) if type(one) is torch.Tensor else one
        )
        question, known = (name, self.m, *alike.items()), self.c.known
        if question not in known:  # most layers of a model ask what the one before asked
            bound = op.bound((), {key: value for key, value in local.items() if key in op.defaults})
            known[question] = op.lower(bound, bound[op.operands[0].name], self.m, view_turned).spec
        return known[question]

    def call(
        self, operator: Callable[..., Any], /, *args: Any, meta_value: Any = None, **kwargs: Any
    ) -> Any:
        """Return what an operator computes."""
        value = operator(*args, **kwargs) if meta_value is None else meta_value
        return without_data(value)

    def node(self, key: Key) -> Any:
        """Return the tensor of a value."""
        return without_data(self.c.tensor(key))

    def operand(self, key: Key) -> Any:
        """Return the tensor of a value in the dtype that the kernel computes in."""
        value = self.node(key)
        if key in self.c.quantized:
            return torch.empty(value.shape, dtype=self.dtype, device="meta")
        return value if value.dtype.itemsize == 1 else value.to(self.dtype)

    def value(self, node: Any) -> Any:
        """Return the tensor."""
        return node


def without_data(value: Any) -> Any:
    """Return a plain tensor without its data, a symbolic size as 1; any other value as it is."""
    if type(value) not in PLAIN or (type(value) is torch.Tensor and value.is_meta):
        return value
    sizes = [size if isinstance(size, int) else 1 for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


@dataclass
class Call:
    """A kernel call: its chains, source and result. out_layout is "row" until `layout` assigns it.

    op: of plain weights, see `op_name`. activation: of the result of one chain, or of the gate of
    several. members: the calls of one chain each that this is in place of. format: of dense weights
    of few bits that the op has beside branches, "" for other weights. rounded: x, where it is fp8
    numbers. note: how weights of eight bits are read. turned: x is the "col" result of another
    call. said: keywords of a norm of x that is inside; ends: its vectors, and a residual of the
    result's shape, by the op's names.
    """

    op: str
    chains: tuple[Chain, ...]
    source: DataOperand
    final: fx.Node
    out_dims: Dims
    activation: str = "identity"
    members: tuple[Call, ...] = ()
    format: str = ""
    rounded: Scaled | None = None
    note: str = ""
    out_layout: str = "row"
    turned: bool = False
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
        plain = all(one.is_plain and not one.middle for one in chains)
        why = "" if plain else "more than a bias stands beside its products"
        stored = read_factors(c, weights, c.dtype(final), why)
        reason = stored[0].reason if stored else ""
        left = iter(() if reason else stored)
        note = (
            f"{stored[0].format} factors are dequantized at each call: {reason}" if reason else ""
        )
        chains = [
            dataclasses.replace(one, bits=dict(zip(one.letters, left, strict=False)))
            for one in chains
        ]
        source = best_source(c, first.x, first.x_dims, first.weight.k, final)
        given: dict[str, Any] = {"source": source, "note": note, **more}
        return cls(op, (*chains,), final=final, out_dims=out_dims, **given)

    @classmethod
    def of_chain(cls, c: Canonical, chain: Chain, op: str = "lowrank_matmul", **more: Any) -> Call:
        """Return the call that a chain, or one product, becomes."""
        end = owner_of(chain.out)
        return cls.of(c, op, (chain,), end, chain.out_dims, activation=chain.activation, **more)

    @classmethod
    def of_several(cls, op: str, members: Sequence[Call]) -> Call:
        """Return the call of several results that calls of one x become, whose weights are stored
        alike."""
        return dataclasses.replace(
            members[0], op=op, chains=tuple(one.chain for one in members), members=tuple(members),
            activation="identity", said={}, ends={},
        )  # fmt: skip

    @property
    def chain(self) -> Chain:
        """The first chain."""
        return self.chains[0]

    @property
    def x_layout(self) -> str:
        """How x lies: as the transpose of [tokens, k], or in that order."""
        return "col" if self.source.is_col() else "row"

    @property
    def n(self) -> int:
        """The features of the result."""
        return self.chains[-1].n

    @property
    def op_name(self) -> str:
        """The op that is called: another one for weights that are read as bytes."""
        if self.format:
            return _OF_BASES[self.op]
        return self.op + SUFFIX * any(one.bits for one in self.chains)

    def covered(self, c: Canonical) -> frozenset[fx.Node]:
        """Return the nodes that compute the results from what the call reads."""
        return frozenset().union(*(covered(c, one.final, one.keys()) for one in self.results()))

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
        behind = {one.first.x for one in self.chains[2:] if not self.members}
        keys = (key for one in self.chains for key in one.operands)
        return [key for key in keys if key not in behind]

    def tokens_count(self) -> Size:
        """Return m, the number of tokens."""
        return views.product(views.shape_of(self.source.tokens()))

    def prepare_x(self, editor: Editor) -> fx.Node:
        """Emit the operand in the x layout."""
        if self.turned:
            node = editor.raw[owner_of(editor.c.base(self.source.key)[0])]
        else:
            node = editor.operand(self.source.key)
        return editor.arrange(node, self.source.dims, self.dims(self.source.k, self.x_layout))

    def known_value(self, editor: Editor, x: fx.Node) -> Any:
        """Return the metadata value of the node whose place the result takes, where the kernel
        makes such a tensor; else None. To make one anew takes longer than the rest of a call."""
        lead, old = editor.shape(x), editor.c.values[self.final]
        lead = lead[:-1] if self.x_layout == "row" else lead[1:]
        sizes = [*lead, self.n] if self.out_layout == "row" else [self.n, math.prod(lead)]
        own = self.final in editor.c.forms and self.final not in editor.c.effects.writers
        static = all(isinstance(size, int) for size in (*sizes, *old.shape))
        plain = own and static and not is_distributed(old)
        return old if plain and [*old.shape] == sizes and old.is_contiguous() else None

    def dims(self, features: int, layout: str) -> Dims:
        """Return the dimensions of an operand or a result in a layout; all tokens are one dimension
        where x is "col"."""
        tokens = self.source.tokens()
        flat = tuple(a for dim in tokens for a in dim)
        if layout == "col":
            return (feature_axis(features), flat)
        return (*(tokens if self.x_layout == "row" else (flat,)), feature_axis(features))

    def named(self, editor: Editor) -> dict[str, Any]:
        """Emit what stands behind x; return it and the keywords by the names of all ops."""
        op, chain, results = DEFINITIONS[self.op_name], self.chain, self.results()
        rows, inner = [emit_linear(editor, one) for one in self.chains], chain.inner
        for row in rows if "scale" not in op.defaults else ():
            last = next(one for one in ("branch_scale", "v", "w") if row.get(one) is not None)
            row[last] = times(editor, row[last], row["scale"])
        layouts = [one.out_layout for one in results]
        activations = [one.activation for one in results]
        given = {
            **self.said, "activation": self.activation, "x_layout": self.x_layout,
            "out_layout": layouts[0] if len({*layouts}) == 1 else "row",
            "out_layouts": layouts if len({*layouts}) > 1 else None,
            "activations": activations if {*activations} != {"identity"} else None,
            "format": self.format, "scale": rows[0]["scale"], "tp": chain.tp,
            "tp_axis": "rows" if chain.tp > 1 else "", "group": chain.group,
            "inner_activation": inner.name if isinstance(inner, Activation) else "identity",
        }  # fmt: skip
        for one in self.chains:
            given |= one.ways
        if isinstance(inner, Norm):
            given["inner_eps"] = inner.eps
        if "weight_layout" in op.defaults:
            given["weight_layout"] = self._in_one_layout(editor, rows)
        given |= packed(op, rows)
        if self.rounded is not None:
            given |= {"x_scale": 1.0, "out_dtype": dtype_name(editor.dtype)}
            given["scales"] = [times_x(editor, one, self.rounded) for one in given["scales"]]
        given |= {name: editor.operand(key) for name, key in self.ends.items()}
        if "residual" in given:
            dims = self.dims(self.n, "row")
            given["residual"] = editor.arrange(given["residual"], self.out_dims, dims)
        return given

    def _in_one_layout(self, editor: Editor, rows: Sequence[dict[str, Any]]) -> str:
        """Turn the weights of a gated MLP to the layout that most of them have; return it."""
        layouts = [one.layout for chain in self.chains for one in chain.letters.values()]
        layout = "col" if layouts.count("col") * 2 >= len(layouts) else "row"
        for chain, row in zip(self.chains, rows, strict=True):
            for letter, one in chain.letters.items():
                row[letter] = in_layout(editor, row[letter], one.layout, layout)
        return layout

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the call and what surrounds it; return the node with the final value, the first of
        several, each of which is replaced.

        Refuses a call whose results are cut over devices in another way than those it replaces.
        """
        if self.members:  # the call stands where the first result is needed
            editor.hoist()
        x = self.prepare_x(editor)
        results = self.results()
        values = [one.known_value(editor, x) for one in results]
        value = None if None in values else values if self.members else values[0]
        node = editor.kernel(self.op_name, {"x": x, **self.named(editor)}, value)
        new: list[fx.Node] = []
        for i, one in enumerate(results):
            part = editor.call(operator.getitem, node, i) if self.members else node
            want, placements = (
                getattr(editor.value(n), "placements", None) for n in (one.final, part)
            )
            if placements != want:
                why = f"one call returns {placements}, the products {want}"
                raise NotEmittedError(Refusal("device", why, one.final))
            new.append(one.finish(editor, part))
            if i:
                editor.replace(one.final, new[i])
        return new[0]

    def finish(self, editor: Editor, y: fx.Node) -> fx.Node:
        """Bring a result to the dimensions of the node it replaces, and add what stays outside of
        the kernel."""
        editor.raw[self.final] = y
        y = editor.arrange(y, self.dims(self.n, self.out_layout), self.out_dims)
        if self.chain.addend is None:
            return y
        addend, factor = self.chain.addend
        return editor.call(aten.add.Tensor, y, times(editor, editor.node(addend), factor))

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call; n: of a gated MLP, features of gate and up."""
        chains, chain, inner = self.chains, self.chain, self.chain.inner
        counted = [one for one in chains if one.second or self.format or self.rounded]
        ranks = [str(one.r or "dense") for one in chains[: 1 if "shared_u" in self.op else None]]
        bytes_of = [one.format for one in chain.bits.values() if one.format != self.format]
        tokens = self.tokens_count()
        said = {
            "base_weight": self.format,
            "weights": "".join(bytes_of[:1]),
            "x": "" if self.rounded is None else "fp8",
            "inner": inner.kind if isinstance(inner, Norm) else inner and inner.name,
            "tp": chain.tp if chain.tp > 1 else 0,
        }
        return {
            "m": tokens if isinstance(tokens, int) else str(tokens),
            "k": self.source.k,
            "r": chain.r if len(chains) == 1 else "+".join(ranks),
            "n": "+".join(str(one.n) for one in self.members) or chain.n,
            "chains": sum(1 + len(one.more) for one in counted),
            "activation": self.activation,
            **{name: value for name, value in said.items() if value},
        }

    def notes(self, c: Canonical) -> tuple[str, ...]:
        """Return how its weights are read."""
        read = [key for one in self.chains for key in {*one.weights} - one.hidden]
        bits = MX[self.format].bits if self.format in MX else 8
        dense = [one.bits["w"] for one in self.chains if self.format]
        said = {
            self.note: self.note,
            "fp8 factors are read as stored: a byte an element": (
                not self.format and any(one.bits for one in self.chains)
            ),
            "a factor is dequantized or made of stored weights at each call": any(
                key in c.made or c.base(key)[0] in c.quantized for key in read
            ),
            "the fp8 branch is read as stored: a byte an element": (
                self.format and any("u" in one.bits for one in self.chains)
            ),
            f"the {self.format} weight is read as stored: {bits} bits an element": self.format,
            "a kernel rounds x to mxfp8 beside it": self.format in MX,
            "the scales of torchao's weight are put in order at each call": any(
                one.is_torchao for one in dense
            ),
        }
        return tuple(note for note, holds in said.items() if holds)

    def spec(self, c: Canonical) -> KernelSpec:
        """Return what the kernel computes, with the norm and the residual that are inside.

        Of tensors that are cut over devices: what it computes on one of them.
        """
        value, tokens = c.tensor(self.source.key), self.tokens_count()
        if is_distributed(value):
            tokens = views.product(views.sizes_of(local_part(value))[:-1])
        lowering = Lowering(c, self.final, tokens_to_judge(tokens))
        given = {"x": lowering.operand(self.source.key), **self.named(lowering)}
        return lowering.kernel(self.op_name, given)


def with_base(c: Canonical, call: Call) -> Call | Stored | None:
    """Return a call that reads its dense weight of few bits as it is stored, or how that is stored
    and why no kernel reads it; None for a dense weight of another kind, and for no such weight."""
    chain, dense = call.chain, call.chain.letters.get("w")
    if dense is None:
        return None
    why = "something stands between its factors" if chain.inner is not None else ""
    why = "several devices share it" if chain.tp > 1 else why
    base = read_base(c, dense, c.dtype(call.final), why)
    if base is None or base.reason:
        return base
    branch = _fp8_branch(c, chain) if base.format in MX else {}
    chain = dataclasses.replace(chain, bits={**branch, "w": base})
    note = "" if branch or not chain.r else call.note
    of_bytes = dataclasses.replace(call, chains=(chain,), format=base.format, note=note)
    try:
        of_bytes.spec(c).check(c.chip)
    except NmmError as error:
        return Stored(base.format, reason=str(error))
    return of_bytes


def _fp8_branch(c: Canonical, chain: Chain) -> dict[str, Stored]:
    """Return u and v of a branch of fp8 numbers as they are stored; nothing for any other."""
    plain = chain.second is not None and not chain.more and not chain.middle
    steps = [step for step in chain.after if step.kind != "bias"]
    if not plain or any(step.key is not None for step in steps):
        return {}
    factors = read_eight_bits(c, chain.u), read_eight_bits(c, chain.v, by_input=True)
    stored = [one for one in factors if one is not None and one.format == "fp8" and not one.reason]
    if len(stored) < 2 or chain.v.layout != "col":
        return {}
    of_rank = c.shape(stored[0].scale) in ((chain.r, 1), (chain.r,))
    return dict(zip("uv", stored, strict=True)) if of_rank else {}
