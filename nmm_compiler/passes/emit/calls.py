"""The kernel calls that matches emit; their layouts are assigned later.

Constants around the products are folded into a kernel's operands: factors, one bias, one scale.
Nodes of the graph compute the folded operands at each call from the stored weights, so they follow
updates of a weight, and gradients reach it.

Weights stored in eight bits are read as they are:

    mul(clamp(to(view(bytes, float8_e4m3fn), bfloat16), -240, 240), scale)   ->   bytes, scale

The clamp says that the bytes mean the same in NKI's float8_e4m3, which ends at 240. Where a kernel
cannot read the bytes, the weight is made of them at each call, and the report says why.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import fx
from torch.utils._pytree import tree_map

from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.number_formats import FP8_MAX
from nmm_compiler.ops.launches import view_turned
from nmm_compiler.ops.linear import SUFFIX
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.passes.chains.chain import Chain, Step, Weight, is_whole_feature
from nmm_compiler.passes.chains.safety import Refusal, tokens_to_judge
from nmm_compiler.passes.emit.editor import Editor, NotEmittedError, aten
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    PLAIN as PLAIN_TENSORS,
)
from nmm_compiler.passes.graph.canonical import (
    Canonical,
    Cast,
    Key,
    Leaf,
    Opaque,
    Scale,
    Virtual,
    dtype_name,
    owner_of,
)
from nmm_compiler.passes.graph.read_operations import is_distributed, local_part
from nmm_compiler.passes.graph.views import FEATURE, Atom, Dim, Dims, Size

STORED_FP8 = torch.float8_e4m3fn
NAMES = {
    STORED_FP8: "fp8",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
# dtypes of x that TensorE multiplies by fp8
X_DTYPES = (torch.bfloat16, torch.float16)
_BYTES_STEPS = 4


@dataclass(frozen=True)
class Bytes:
    """A weight as stored: values (fp8, or the bytes of it), and the scale that multiplies them.

    Both are leaves of the graph, so that a call may read them wherever it stands.
    """

    values: Key
    scale: Key


@dataclass(frozen=True)
class Kept:
    """How a call reads its weights of eight bits.

    stored: of each weight in order; empty where they are dequantized, and then `reason` says why.
    format: their common format, or "" for no weights of eight bits.
    """

    format: str = ""
    stored: tuple[Bytes, ...] = ()
    reason: str = ""

    @property
    def note(self) -> str:
        """Return what a report says of them, "" without such weights."""
        if self.stored:
            return f"{self.format} factors are read as stored: a byte an element"
        if self.format:
            return f"{self.format} factors are dequantized at each call: {self.reason}"
        return ""


PLAIN = Kept()
"""Of a call without weights of eight bits."""


WRITTEN = "the graph writes to it, or to what is made of it, in place"


@dataclass(frozen=True)
class Scaled:
    """A value as numbers of the graph times a tensor and a number; bound: they were clamped to the
    range of NKI's float8_e4m3. written: the graph writes to them, or to what is made of them."""

    value: Key
    scale: Key | None
    number: float
    bound: bool
    written: bool


def unscaled(c: Canonical, key: Key) -> Scaled | None:
    """Return the fp8 numbers, or the leaf, that a value is made of by casts, scales and clamps."""
    scale: Key | None = None
    number, bound, written = 1.0, False, False
    for _ in range(_BYTES_STEPS + 1):
        if not c.is_whole(key):
            return None
        key = c.base(key)[0]
        form = c.forms.get(key)
        written = written or c.effects.is_written(owner_of(key))
        if isinstance(form, Leaf) or c.dtype(key) == STORED_FP8:
            return Scaled(key, scale, number, bound, written)
        inner: Key | None = None
        if isinstance(form, Cast):
            inner = form.value
        elif isinstance(form, Scale) and isinstance(form.factor, float):
            inner, number = form.value, number * form.factor
        elif isinstance(form, Scale) and scale is None:
            orders = (pair for pair in form.orders if c.shape(pair[0]) == c.shape(key))
            inner, scale = next(orders, (None, None))
        else:
            inner = clamped(c, key)
            bound = bound or inner is not None
        if inner is None:
            return None
        key = inner
    return None


def read_bytes(
    c: Canonical, weight: Weight, by_input: bool = False
) -> tuple[str, Bytes | str] | None:
    """Return (format, how a weight of eight bits is stored or why no kernel reads it so).

    None for a weight of another kind. by_input: its scale is to be one for each input.
    """
    found = unscaled(c, weight.key)
    if found is None or found.number != 1.0 or not isinstance(c.forms.get(found.value), Leaf):
        return None
    dtype, scale = c.dtype(found.value), found.scale
    if dtype not in NAMES:
        return None
    if found.written or (scale is not None and c.effects.is_written(owner_of(scale))):
        return NAMES[dtype], WRITTEN
    return NAMES[dtype], _stored(c, weight, found.value, scale, found.bound, by_input)


def clamped(c: Canonical, key: Key) -> Key | None:
    """Return what a value is where it lies in the range of NKI's float8_e4m3, else None."""
    form = c.forms.get(key)
    if not isinstance(key, fx.Node) or not isinstance(form, Opaque):
        return None
    limits = [*key.args[1:], key.kwargs.get("min"), key.kwargs.get("max")]
    whole = [limit for limit in limits if limit is not None] == [-FP8_MAX, FP8_MAX]
    return form.inputs[0] if whole and form.name in ("clamp", "clip") else None


def _stored(
    c: Canonical, weight: Weight, values: Key, scale: Key | None, bound: bool, by_input: bool
) -> Bytes | str:
    if c.dtype(values) != STORED_FP8:
        return "no kernel multiplies such numbers; quantize_factors(model, 'fp8') is kept"
    if not bound:
        return (
            "numbers of float8_e4m3fn may lie beyond 240, where NKI's float8_e4m3 ends; quantize "
            "to 240 and clamp(-240, 240) what is cast, as nmm.quantize_factors does"
        )
    if scale is None or not isinstance(c.form(scale), Leaf):
        return "its scale is no stored tensor that multiplies the weight"
    if is_distributed(c.tensor(values)):
        return "its bytes are cut over devices"
    outputs = weight.n if weight.layout == "row" else 1
    shapes = [(1,), (1, 1), (outputs,), (1, outputs)]
    if weight.layout == "col":
        shapes = [(1, weight.k)] if by_input else [(1,), (1, 1), (weight.n, 1)]
    if c.shape(values) != weight.stored or c.shape(scale) not in shapes:
        return "its scale is not one number, or one for each output"
    source = owner_of(values)
    if source.op not in ("placeholder", "get_attr"):  # bytes seen as fp8
        inner = source.args[0] if source.args else None
        if not isinstance(inner, fx.Node) or c.shape(inner) != c.shape(values):
            return "its bytes are a part of a stored tensor"
        values = inner
    if any(owner_of(k).op not in ("placeholder", "get_attr") for k in (values, c.base(scale)[0])):
        return "its bytes or its scale are no stored tensors"
    return Bytes(values, c.base(scale)[0])


def keep(c: Canonical, weights: Sequence[Weight], dtype: torch.dtype | None, why: str) -> Kept:
    """Return how a call that computes in a dtype reads its weights.

    why: a reason of the call's own against kernels of fp8 weights, or "".
    """
    read = [read_bytes(c, weight) for weight in weights]
    found = [one for one in read if one is not None]
    if not found:
        return PLAIN
    format = found[0][0]
    reasons = [stored for _, stored in found if isinstance(stored, str)]
    if reasons:
        return Kept(format, (), reasons[0])
    stored = tuple(stored for _, stored in found if isinstance(stored, Bytes))
    if len(found) < len(weights):
        why = why or "the call has other weights, too"
    if not c.chip.float8_kernels:
        why = f"{c.chip.name} has no fp8 kernels; trn2 and trn3 have"
    why = why or not_16_bits(dtype)
    return Kept(format, () if why else stored, why)


def not_16_bits(dtype: torch.dtype | None) -> str:
    """Return why kernels of few-bit weights take no x of a dtype, or ""."""
    return "" if dtype in X_DTYPES else f"x is {dtype_name(dtype)}; cast the model to bfloat16"


def beside_products(chain: Chain) -> str:
    """Return what stands around the products of a chain that no kernel of fp8 weights computes."""
    if chain.base is not None or chain.more:
        return "the products of a base, or of several adapters, are added"
    if chain.middle or chain.inner is not None:
        return "something stands between the products"
    if not chain.only_bias():
        return "a scale stands behind the products"
    return ""


@dataclass
class Source:
    """The data operand of a call: a value, and its dimensions over tokens and FEATURE."""

    key: Key
    dims: Dims
    k: int

    def tokens(self) -> Dims:
        """Return the token dimensions in the order they have in the value."""
        out: list[Dim] = []
        for dim in self.dims:
            rest = tuple(a for a in dim if a.axis != FEATURE)
            if rest or not dim:
                out.append(rest)
        if self.k == 1 and out and out[-1] == ():
            out.pop()  # the feature dimension itself, of size 1
        return tuple(out)

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
    base, view = c.base(source.key)
    if base is not made.final or made.n != source.k:
        return None
    lead = made.source.tokens() if made.lead is None else made.lead
    flat = tuple(a for d in lead for a in d)
    count = views.product([a.size for a in flat])
    sizes: dict[int, Size] = {}
    for atom in flat:
        sizes[atom.axis] = views.times(sizes.get(atom.axis, 1), atom.size)
    column = () if count == 1 else (Atom(1, count, 1),)
    axes = views.invert((flat,), (column,), sizes)
    places = dict(zip(sizes, axes or (), strict=False))
    over = None if axes is None else views.compose(made.out_dims, places)
    if over is None:
        return None
    raw = tuple(tuple(a._replace(axis=max(a.axis, 0)) for a in dim) for dim in over)
    seen = views.compose(view, raw)
    inverse = None if seen is None else views.invert(seen, source.dims, {0: made.n, 1: count})
    if inverse is None:
        return None
    turned = Source(owner_of(source.key), inverse, made.n)
    return turned if turned.is_col() else None


@dataclass(frozen=True)
class Factors:
    """The nodes of scale * (x u) v + bias, with u and v in the layouts of `chain`; v may be none.

    inner_bias and inner_gain: of a function between the products.
    """

    chain: Chain
    u: fx.Node
    v: Any
    scale: float
    bias: fx.Node | None
    inner_bias: fx.Node | None = None
    inner_gain: fx.Node | None = None


def fold_chain(editor: Editor, chain: Chain, stored: Sequence[Bytes] = ()) -> Factors:
    """Fold the steps between and after the products of a chain; stored: its weights as bytes."""
    u, *rest = weight_nodes(editor, chain.factors, stored)
    v: Any = rest[0] if rest else None
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
        if chain.inner.gain is not None:
            gain = one_dim(editor, chain.inner.gain, chain.u.n)
    elif bias is not None:
        matrix = plain_v if chain.v.layout == "col" else editor.permute(plain_v, (1, 0))
        bias = editor.call(aten.mv.default, matrix, bias)
    absorb(chain.after, chain.n)
    return Factors(chain, u, v, scale, bias, inner, gain)


def join(editor: Editor, parts: Sequence[Factors]) -> Factors:
    """Join chains of one x that are added into one: u = [u1 | u2], v = [s1 v1; s2 v2]."""
    first = parts[0]
    if len(parts) == 1:
        return first
    same = all(part.scale == first.scale for part in parts)
    us, vs, bias = [], [], None
    for part in parts:
        own = part.chain
        u, v = part.u, part.v
        us.append(u if own.u.layout == first.chain.u.layout else editor.permute(u, (1, 0)))
        v = v if own.v.layout == first.chain.v.layout else editor.permute(v, (1, 0))
        vs.append(v if same else times(editor, v, part.scale))
        if part.bias is not None:
            bias = part.bias if bias is None else plus(editor, bias, part.bias, 1.0)
    u = editor.call(aten.cat.default, us, 1 if first.chain.u.layout == "row" else 0)
    v = editor.call(aten.cat.default, vs, 0 if first.chain.v.layout == "row" else 1)
    return Factors(first.chain, u, v, first.scale if same else 1.0, bias)


def weight_nodes(
    editor: Editor, weights: Sequence[Weight], stored: Sequence[Bytes]
) -> list[fx.Node]:
    """Return the 2-D nodes of weights as they are stored, of their bytes where these are given."""
    if not stored:
        return [weight_node(editor, weight) for weight in weights]
    nodes = []
    for weight, one in zip(weights, stored, strict=True):
        node = editor.node(one.values)
        if editor.value(node).dtype != STORED_FP8:
            node = editor.call(aten.view.dtype, node, STORED_FP8)
        nodes.append(editor.reshape(node, weight.stored))
    return nodes


def weight_node(editor: Editor, weight: Weight) -> fx.Node:
    """Return the 2-D node of a weight as it is stored."""
    return editor.reshape(editor.operand(weight.key), weight.stored)


def one_dim(editor: Editor, key: Key, size: int) -> fx.Node:
    """Return a constant as the 1-D vector it is."""
    return editor.reshape(editor.operand(key), (size,))


def scales_of(editor: Editor, kept: Kept) -> list[fx.Node]:
    """Return the 1-D nodes of the scales of fp8 weights."""
    nodes = [editor.node(stored.scale) for stored in kept.stored]
    return [editor.reshape(node, (math.prod(editor.shape(node)),)) for node in nodes]


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
        local = tree_map(lambda one: without_data(local_part(one)), dict(given))
        own = {key: local[key] for key in op.defaults if key in local}
        return op.lower(own["x"], (), own, self.m, view_turned)[0].spec

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

    def hoist(self, keys: Iterable[Key]) -> None:
        """Leave the graph as it is."""


def without_data(value: Any) -> Any:
    """Return a plain tensor without its data, a symbolic size as 1; any other value as it is."""
    if type(value) not in PLAIN_TENSORS:
        return value
    sizes = [size if isinstance(size, int) else 1 for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device="meta")


@dataclass
class Call:
    """A kernel call: op name, source, result. Layouts are "row" until `layout` assigns them.

    unread: calls that read the result as "col" are all that reads it. kept: how it reads weights of
    eight bits; base: whether that is the dense weight beside factors. said: keywords of a norm of x
    that is inside; ends: its vectors, and a residual of the result's shape, by the op's names.
    """

    op: str
    source: Source
    final: fx.Node
    out_dims: Dims
    n: int
    x_layout: str = "row"
    out_layout: str = "row"
    lead: Dims | None = None
    covered: frozenset[fx.Node] = frozenset()
    many: bool = False
    unread: bool = False
    kept: Kept = PLAIN
    base: bool = False
    said: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, Key] = field(default_factory=dict)

    @property
    def op_name(self) -> str:
        """Return the op that is called: another one for weights that are read as bytes."""
        return self.op + SUFFIX * bool(self.kept.stored)

    def results(self) -> tuple[Call, ...]:
        """Return one call per result, each with a layout of its own."""
        return (self,)

    @property
    def is_whole(self) -> bool:
        """Return whether the kernel's result is the value; else it keeps the graph's own order."""
        return "residual" not in self.ends

    def tokens_count(self) -> Size:
        """Return m, the number of tokens."""
        return views.product([a.size for d in self.source.tokens() for a in d])

    def x_node(self, editor: Editor) -> fx.Node:
        """Return the node of x as it lies."""
        return editor.operand(self.source.key)

    def prepare_x(self, editor: Editor) -> fx.Node:
        """Emit the operand in the x layout and fix the order of tokens."""
        node, source = self._resolve(editor)
        node = node or self.x_node(editor)
        if self.x_layout == "row" and source.is_row():
            return node
        return editor.arrange(node, source.dims, self._dims(source.k, self.x_layout))

    def _resolve(self, editor: Editor) -> tuple[fx.Node | None, Source]:
        """Return the operand and its node, where a call made it turned, and set `lead`."""
        source, node = self.source, None
        made = editor.raw.get(owner_of(editor.c.base(source.key)[0]))
        if made is not None and made[0].out_layout == "col" and self.x_layout == "col":
            raw = source_over_raw(editor.c, made[0], source)
            if raw is not None:
                source, node = raw, made[1]
        if node is None and not source.is_col():
            self.x_layout = "row"
        tokens = source.tokens()
        flat = tuple(a for d in tokens for a in d)
        if self.x_layout == "col":
            self.lead = (flat,)
        else:
            self.lead = source.dims[:-1] if source.is_row() else tokens
        return node, source

    def result_value(self, editor: Editor, x: fx.Node) -> Any:
        """Return the metadata value of the result."""
        assert self.lead is not None
        lead = [editor.size_value(s, x) for s in views.shape_of(self.lead)]
        value = editor.c.values[x]
        if self.out_layout == "row":
            return value.new_empty([*lead, self.n])
        return value.new_empty([self.n, math.prod(lead)])

    def _dims(self, features: int, layout: str) -> Dims:
        """Return the dimensions of an operand or a result in a layout."""
        assert self.lead is not None
        if layout == "row":
            return (*self.lead, feature_axis(features))
        return (feature_axis(features), tuple(a for d in self.lead for a in d))

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        raise NotImplementedError

    def named(self, editor: Editor, x: fx.Node) -> dict[str, Any]:
        """Emit the operands behind x; return all arguments of the op by name."""
        given = {"x": x, **self.arguments(editor)}
        if self.kept.stored:
            given = {"scales": scales_of(editor, self.kept), **given}
        ends = {name: editor.operand(key) for name, key in self.ends.items()}
        if "residual" in ends:
            row = self._dims(self.n, "row")
            ends["residual"] = editor.arrange(ends["residual"], self.out_dims, row)
        return given | self.said | ends | {"x_layout": self.x_layout, "out_layout": self.out_layout}

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the call and what surrounds it; return the node with the final value, the first of
        several, each of which is replaced."""
        x = self.prepare_x(editor)
        given = self.named(editor, x)
        results = self.results()
        for one in results:
            one.x_layout = self.x_layout
            one._resolve(editor)
        values = [one.result_value(editor, x) for one in results]
        if not self.many:
            return self.finish(editor, self._op_call(editor, given, *values))
        y = self._op_call(editor, given, values)
        made = []
        for index, (one, value) in enumerate(zip(results, values, strict=True)):
            part = editor.call(operator.getitem, y, index, meta_value=value)
            made.append(one.finish(editor, part))
        for one, new in zip(results[1:], made[1:], strict=True):
            if not one.unread:
                editor.replace(one.final, new)
        return made[0]

    def finish(self, editor: Editor, y: fx.Node) -> fx.Node:
        """Bring a result to the dimensions and strides of the node it replaces."""
        editor.raw[self.final] = (self, y)
        if self.unread:
            return y
        y = editor.arrange(y, self._dims(self.n, self.out_layout), self.out_dims)
        return editor.like(y, self.final)

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        m = self.tokens_count()
        sizes = {"m": m if isinstance(m, int) else str(m), "k": self.source.k, "n": self.n}
        return sizes | ({"weights": self.kept.format} if self.kept.stored else {})

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about rounding and per-call work."""
        return (self.kept.note,) if self.kept.note else ()

    def spec(self, c: Canonical) -> KernelSpec:
        """Return what the kernel computes, with the norm and the residual that are inside.

        Of tensors that are cut over devices: what it computes on one of them.
        """
        lowering = Lowering(c, self.final, self._tokens_of_one(c))
        return lowering.kernel(self.op_name, self.named(lowering, self.x_node(lowering)))

    def _tokens_of_one(self, c: Canonical) -> int:
        """Return the tokens that decide, those on one device."""
        value = c.tensor(self.source.key)
        if not is_distributed(value):
            return tokens_to_judge(self.tokens_count())
        return tokens_to_judge(views.product(views.sizes_of(local_part(value))[:-1]))

    def _op_call(self, editor: Editor, given: Mapping[str, Any], value: Any) -> fx.Node:
        """Emit the op; given: its arguments by name."""
        cut = is_distributed(editor.c.tensor(self.final))
        node = editor.kernel(self.op_name, given, None if cut else value)
        if cut:
            _check_placements(editor, node, self)
        return node


def _check_placements(editor: Editor, node: fx.Node, call: Call) -> None:
    """Refuse a call whose results are cut over devices in another way than those it replaces."""
    made = editor.c.values[node]
    for one, value in zip(call.results(), made if call.many else [made], strict=True):
        want = editor.c.values[one.final].placements
        if value.placements != want:
            raise NotEmittedError(
                Refusal(
                    "device",
                    f"one call returns {value.placements}, the products {want}",
                    one.final,
                )
            )


@dataclass
class ChainCall(Call):
    """A call for a chain, or for one product; made: the graph makes a factor at each call."""

    chain: Chain = field(kw_only=True)
    made: bool = False

    @classmethod
    def of(cls, c: Canonical, chain: Chain, op: str, x: Key | None = None, **fields: Any) -> Self:
        """Return the call of an op that a chain becomes; x: another value with the dims of its x.

        fields: the others of the class.
        """
        final, first = owner_of(chain.out), chain.first
        return cls(
            op=op,
            source=best_source(c, x or first.x, first.x_dims, chain.u.k, final),
            final=final,
            out_dims=chain.out_dims,
            n=chain.n,
            covered=chain.nodes,
            chain=chain,
            made=any(k in c.made or c.base(k)[0] in c.quantized for k in chain.weights),
            kept=keep(c, chain.factors, c.dtype(final), beside_products(chain)),
            **fields,
        )


@dataclass
class LowRankCall(ChainCall):
    """nmm.lowrank_matmul for a chain."""

    @property
    def is_whole(self) -> bool:
        """Return whether nothing is added to the kernel's result, inside or outside of it."""
        return super().is_whole and self.chain.addend is None

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        chain = self.chain
        return super().info() | {
            "r": chain.r,
            "u_layout": chain.u.layout,
            "v_layout": chain.v.layout,
            "bias": chain.biased,
            "activation": chain.activation,
            "base": chain.base is not None,
            "chains": 1 + len(chain.more),
            **({} if chain.inner is None else {"inner": chain.inner.name()}),
            **({"tp": chain.tp} if chain.tp > 1 else {}),
        }

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about rounding and per-call work."""
        chain = self.chain
        parts = (chain, *chain.more)
        kinds = {s.kind for part in parts for s in part.middle}
        scales = [s for part in parts for s in part.steps if s.kind == "scale"]
        said = {
            "a scale that is a tensor is folded into a factor at each call": "vector" in kinds
            or any(s.key is not None for s in scales),
            "the inner bias becomes b v, one vector product at each call": "bias" in kinds
            and chain.inner is None,
            "a scalar moved to the epilogue, which moves a rounding": any(
                s.number != 1.0 for s in scales
            ),
            "the factors of the adapters are joined along the rank at each call": chain.more,
            self.kept.note.replace("factors are", "weight is" if self.base else "factors are"): (
                self.kept.note
            ),
            "a factor is dequantized or made of stored weights at each call": self.made
            and not self.kept.stored,
            "the addend of the last product stays a separate add": chain.addend is not None,
            f"the sum over {chain.tp} devices is inside of the call": chain.tp > 1,
        }
        return tuple(note for note, holds in said.items() if holds)

    def _keywords(self) -> dict[str, Any]:
        """Return the keywords that say what the kernel computes."""
        chain = self.chain
        keywords: dict[str, Any] = {"activation": chain.activation}
        if chain.tp > 1:
            keywords |= {"tp": chain.tp, "tp_axis": "rows"}
        if chain.inner is None:
            return keywords
        if chain.inner.gain is not None:
            return {**keywords, "inner_eps": chain.inner.eps}
        return {**keywords, "inner_activation": chain.inner.activation}

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        chain, stored = self.chain, self.kept.stored
        folded = join(editor, [fold_chain(editor, part, stored) for part in (chain, *chain.more)])
        given = {"u": folded.u, "v": folded.v, "bias": folded.bias, "scale": folded.scale}
        given |= {"inner_bias": folded.inner_bias, "inner_gain": folded.inner_gain}
        given |= {"u_layout": chain.u.layout, "v_layout": chain.v.layout}
        if chain.base is not None:
            given["w"] = weight_node(editor, chain.base.weight)
            given["w_layout"] = chain.base.weight.layout
        return given | self._keywords() | {"group": chain.group}

    def finish(self, editor: Editor, y: fx.Node) -> fx.Node:
        """Bring the result to its node's dimensions, and add what stays outside of the kernel."""
        y = super().finish(editor, y)
        if self.chain.addend is None:
            return y
        addend, factor = self.chain.addend
        more = {} if factor == 1.0 else {"alpha": factor}
        return editor.call(aten.add.Tensor, y, editor.node(addend), **more)


@dataclass
class SharedCall(Call):
    """nmm.lowrank_matmul_shared_x or _shared_u for several chains of one x."""

    members: tuple[LowRankCall, ...] = ()

    @classmethod
    def of(cls, op: str, members: Sequence[LowRankCall]) -> Self:
        """Return the call of an op that the members become."""
        return cls(
            op=op,
            source=members[0].source,
            final=members[0].final,
            out_dims=members[0].out_dims,
            n=members[0].n,
            covered=frozenset(n for m in members for n in m.covered),
            many=True,
            members=tuple(members),
        )

    @property
    def chains(self) -> list[Chain]:
        """Return the chains of the members."""
        return [member.chain for member in self.members]

    @property
    def firsts(self) -> list[Chain]:
        """Return a chain for each u."""
        return self.chains[:1] if self.op.endswith("shared_u") else self.chains

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        each = [member.info() for member in self.members]
        return {
            "m": each[0]["m"],
            "k": each[0]["k"],
            "r": "+".join(str(e["r"]) for e in each[: len(self.firsts)]),
            "n": "+".join(str(e["n"]) for e in each),
            "chains": len(each),
        }

    def notes(self) -> tuple[str, ...]:
        """Return what the members say, each once."""
        return tuple(dict.fromkeys(note for one in self.members for note in one.notes()))

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        chains, kept = self.chains, self.kept.stored
        editor.hoist([key for one in kept for key in (one.values, one.scale)])
        stored = [member.kept.stored if kept else () for member in self.members]
        folded = [fold_chain(editor, *pair) for pair in zip(chains, stored, strict=True)]
        us = [one.u for one in folded[: len(self.firsts)]]
        vs, biases = [one.v for one in folded], [one.bias for one in folded]
        return {
            "u": us[0], "us": us, "vs": vs, "biases": biases,
            "u_layout": chains[0].u.layout, "v_layout": chains[0].v.layout,
        }  # fmt: skip

    def named(self, editor: Editor, x: fx.Node) -> dict[str, Any]:
        """Emit the operands behind x; return all arguments of the op, what differs between its
        results too."""
        chains, more = self.chains, dict[str, Any]()
        if any(chain.activation != "identity" for chain in chains):
            more["activations"] = [chain.activation for chain in chains]
        layouts = [member.out_layout for member in self.members]
        self.out_layout = layouts[0]
        if len(set(layouts)) > 1:
            self.out_layout, more["out_layouts"] = "row", layouts
        made = super().named(editor, x) | more
        editor.hoist(key for chain in chains for key in chain.operands)
        return made

    def results(self) -> tuple[Call, ...]:
        """Return the members."""
        return self.members


@dataclass
class GatedCall(Call):
    """nmm.gated_mlp_up for a gate and an up projection, nmm.gated_mlp with the down projection."""

    activation: str = field(kw_only=True)
    projections: tuple[Chain, ...] = field(kw_only=True)

    @classmethod
    def of(
        cls,
        c: Canonical,
        node: fx.Node,
        activation: str,
        projections: tuple[Chain, ...],
        nodes: frozenset[fx.Node],
    ) -> GatedCall:
        """Return the call that projections become; node: the first that needs its result."""
        gate, _, *down = projections
        plain = all(p.only_bias() and not p.middle for p in projections)
        why = "" if plain else "something beside biases stands around a projection"
        weights = [weight for p in projections for weight in p.factors]
        return cls(
            op="gated_mlp" if down else "gated_mlp_up",
            source=best_source(c, gate.first.x, gate.first.x_dims, gate.u.k, node),
            final=node,
            out_dims=(down or [gate])[0].out_dims,
            n=projections[-1].n,
            covered=nodes,
            kept=keep(c, weights, c.dtype(node), why),
            activation=activation,
            projections=projections,
        )

    def keys(self) -> list[Key]:
        """Return the values that the call reads."""
        gate, up, *down = (p.operands for p in self.projections)
        return [*gate, *up, *(key for operands in down for key in operands[1:])]

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call; n: output features of gate and up."""
        ranks = [p.u.n if p.second else 0 for p in self.projections]
        return super().info() | {
            "r": "+".join(str(r) if r else "dense" for r in ranks),
            "n": self.projections[0].n,
            "activation": self.activation,
            "chains": sum(bool(r) for r in ranks),
        }

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about per-call work."""
        layouts = {w.layout for p in self.projections for w in p.factors}
        notes = ["weights of both layouts: some are passed transposed"] if len(layouts) > 1 else []
        return (*notes, *super().notes())

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        projections = self.projections
        layouts = [w.layout for p in projections for w in p.factors]
        layout = "col" if layouts.count("col") * 2 >= len(layouts) else "row"
        given: dict[str, Any] = {"activation": self.activation, "weight_layout": layout}
        left = self.kept.stored
        for name, projection in zip(("gate", "up", "down"), projections, strict=False):
            own, left = left[: len(projection.factors)], left[len(projection.factors) :]
            folded = fold_chain(editor, projection, own)
            given[f"{name}_bias"] = folded.bias
            nodes = [folded.u] if folded.v is None else [folded.u, folded.v]
            nodes[-1] = times(editor, nodes[-1], folded.scale)
            pairs = zip(nodes, projection.factors, strict=True)
            given[name] = [n if w.layout == layout else editor.permute(n, (1, 0)) for n, w in pairs]
        return given
