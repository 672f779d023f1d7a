"""The low-rank chain: two products with constant matrices, and what a kernel computes around them.

`read_stage` turns a labelled product with a constant matrix into: data operand, a 2-D weight [k, n]
as it is stored, and how the dimensions of the data and of the result decompose into tokens and
features. Token labels become axes >= 0 of a `Dims`, features become the axis FEATURE. `trace_back`
walks from a product's data operand to the product that made it, through views and the affine steps
that a kernel can absorb: numbers, vectors, diagonals, biases. It returns a refusal for any other
step.

`read_chain` joins two products with such steps between; `read_with_function` allows an activation,
a norm, or the sum over devices of a chain cut by rows there. `trace_end` walks from a node to the
product before its steps and activation, and `ended` adds these to the chain there.
`read_projection` reads a value as a projection of some x, a chain or one dense product, for the
rules of groups (LoRA, gated MLP), and `same_tokens` says whether two read the same x alike.
`safety` refuses chains that must not move.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.passes.chains.safety import Refusal, covered, operands, part_of_one, too_wide
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Cast,
    DeviceSum,
    Form,
    Key,
    Leaf,
    Norm,
    Opaque,
    Product,
    Scale,
    Virtual,
    describe,
    once,
    owner_of,
)
from nmm_compiler.passes.graph.effects import upstream
from nmm_compiler.passes.graph.read_graph import DISTRIBUTED, is_distributed
from nmm_compiler.passes.graph.torch_names import target_name
from nmm_compiler.passes.graph.views import FEATURE, Atom, Dim, Dims, Size


@dataclass(frozen=True)
class ConstantMatrix:
    """A constant matrix: the value to pass, and whether it is stored [k, n] ("row") or [n, k]."""

    key: Key
    k: int
    n: int
    layout: str

    @property
    def stored(self) -> tuple[int, int]:
        """Return the 2-D shape that the kernel gets."""
        return (self.k, self.n) if self.layout == "row" else (self.n, self.k)


@dataclass(frozen=True)
class Stage:
    """data [tokens, k] times weight [k, n].

    x_dims and out_dims describe the data operand and the result over token axes and FEATURE.
    chosen: the token axis along which an index chooses the weight, None for one weight.
    """

    key: Key
    x: Key
    x_dims: Dims
    weight: ConstantMatrix
    out_dims: Dims
    tokens: dict[int, Size]
    chosen: int | None = None


def gathered(node: Any) -> tuple[Any, ...] | None:
    """Return (weights, index) of a node that gathers weights along their first axis."""
    name = target_name(node)
    if name == "getitem" and isinstance(node.args[1], fx.Node):
        return tuple(node.args)
    chosen = name == "index_select" and len(node.args) == 3 and node.args[1] == 0
    return tuple(node.args[::2]) if chosen else None


def _features(labels: Sequence[Atom]) -> tuple[int, dict[int, Atom]]:
    """Return the size of the feature axis that labels make up in order, and the part of each."""
    inner, parts = 1, {}
    for label in reversed(labels):
        parts[label.axis] = Atom(FEATURE, label.size, inner)
        inner *= label.size
    return inner, parts


@once
def read_stage(
    c: Canonical, key: Key, form: Product, weight_is_rhs: bool, computed: bool
) -> Stage | Refusal:
    """Read a product as data times weight, with the weight on the given side.

    computed: the weight need not be constant; the caller checks what it is made of.
    """
    (x, x_labels), (w, w_labels) = form.orders[not weight_is_rhs]
    if not computed and not c.is_weight(w):
        return Refusal("weight", "the weight is computed in the graph", w)
    base, w_dims = c.base(w)
    shape, x_shape = c.shape(base), c.sizes(x)
    by_index, chosen = computed and gathered(base) is not None, None
    if shape is None or not all(isinstance(s, int) for s in shape[by_index:]):
        return Refusal("weight", "the weight has symbolic dimensions", w)
    out = set(form.out_labels)
    real_x = {label: s for label, s in zip(x_labels, x_shape, strict=True) if s != 1}
    odd = Refusal(
        "weight",
        "the weight is no plain matrix of its parameter (batched, strided or repeated)",
        w,
    )
    held: dict[int, Dim] = {}
    for label, dim in zip(w_labels, w_dims, strict=True):
        atoms = tuple(a for a in dim if a.axis != views.BROADCAST)
        batch = label in out and label in real_x
        if by_index and batch and dim == c.whole(base)[0]:
            chosen, atoms, shape = label, (), (1, *shape[1:])
        elif atoms and batch:
            return Refusal(
                "weight",
                "both operands vary along a batch dimension (per-head weights or activations)",
                w,
            )
        if len(atoms) != len(dim) and not batch:
            return odd
        if atoms:
            held[label] = atoms
    whole = tuple((Atom(label, views.dim_size(dim), 1),) for label, dim in held.items())
    over = views.invert(tuple(held.values()), whole, dict(enumerate(shape)))
    stored = () if over is None else views.coalesce(tuple(itertools.chain(*over)))
    inputs, outputs = ([a for a in stored if (a.axis in out) == kept] for kept in (False, True))
    in_order = [*stored] in (inputs + outputs, outputs + inputs)
    if not in_order or {(a,) for a in stored} != {*whole}:
        return odd
    (k, k_parts), (n, n_parts) = _features(inputs), _features(outputs)
    weight = ConstantMatrix(base, k, n, "row" if [*stored] == inputs + outputs else "col")
    tokens = {label: size for label, size in real_x.items() if label in out}
    token_parts = {label: Atom(label, size, 1) for label, size in tokens.items()}
    of_x, of_result = k_parts | token_parts, n_parts | token_parts
    if {label: atom.size for label, atom in of_x.items()} != real_x:
        return odd
    x_dims, out_dims = (
        tuple((parts[label],) if label in parts else () for label in labels)
        for parts, labels in ((of_x, x_labels), (of_result, form.out_labels))
    )
    return Stage(key, x, x_dims, weight, out_dims, tokens, chosen)


def feature_axis(size: int) -> Dim:
    """Return the dimension of a whole feature axis."""
    return () if size == 1 else (Atom(FEATURE, size, 1),)


def is_whole_feature(atoms: views.Dim, size: int) -> bool:
    """Return whether the atoms are the feature axis, all of it, in order."""
    return views.coalesce(atoms) == feature_axis(size)


@dataclass(frozen=True)
class AffineStep:
    """One affine step on a result: kind is "scale", "vector", "gain" or "bias".

    scale: times `number`, or times the one-element tensor `key`. vector: times the constant
    vector `key` over features. gain: times the number that an index chooses for each token, as it
    does the weights. bias: plus `number` times the constant vector `key`.
    """

    kind: str
    number: float = 1.0
    key: Key | None = None
    dims: Dims = ()


def _step_over(
    c: Canonical, kind: str, factor: Key, target: Key, number: float
) -> AffineStep | None:
    """Return the step of a constant over the dimensions of `target` along which it varies; None for
    no constant, and for a bias that does not vary. A gain that an index chooses is a vector."""
    shape, own = c.shape(target), c.shape(factor)
    base = c.base(factor)[0]
    gain = kind == "vector" and gathered(base) is not None and len(c.sizes(base)) == 1
    if shape is None or own is None or not (c.is_weight(factor) or gain):
        return None
    spread = views.expand(views.identity(own), shape)
    if spread is None:
        return None
    positions = [i for i, d in enumerate(spread) if any(a.axis != views.BROADCAST for a in d)]
    if not positions:
        return None if kind == "bias" else AffineStep("scale", number, factor)
    dims = views.identity(shape)
    if isinstance(factor, Virtual) and factor.attribute is None:
        factor = c.base(factor)[0]  # the vector itself, as a view with more dimensions
    return AffineStep(kind, number, factor, tuple(dims[i] for i in positions))


def _blocked(c: Canonical, form: Form, key: Key) -> Refusal:
    """Return a refusal that names what is between two products."""
    shown, code = describe(form), "between"
    if owner_of(key) in c.effects.writers:
        shown, code = "a write in place", "mutation"
    elif isinstance(form, Cast):
        code = "dtype"
    elif isinstance(form, Opaque) and form.name in DISTRIBUTED:
        shown, code = "a move between devices", "device"
    elif "dropout" in shown.lower():
        code = "training"
    return Refusal(code, f"{shown} between the products", key)


@dataclass(frozen=True)
class Walk:
    """The position of `trace_back`: a base, its dimensions over those of the start, and the steps
    so far, last first."""

    key: Key
    dims: Dims
    steps: tuple[AffineStep, ...] = ()
    activation: str = "identity"
    addend: tuple[Key, float] | None = None

    def to(self, c: Canonical, value: Key, steps: Sequence[AffineStep] = ()) -> Walk | None:
        """Return the walk at the operand that the current base is computed from, element by
        element, with steps; None where a rearrangement cannot be followed."""
        base, inner = c.base(value)
        dims = views.compose(self.dims, inner)
        moved = []
        for step in (*self.steps, *steps):
            over = views.compose(step.dims, inner)
            if over is None:
                return None
            moved.append(replace(step, dims=over))
        if dims is None:
            return None
        return replace(self, key=base, dims=dims, steps=tuple(moved))


Trace = tuple[Walk, Product] | tuple[Walk, Refusal]
"""Where a walk ended, and the product there or why it went no further."""


@once
def trace_back(c: Canonical, start: Key) -> Trace:
    """Walk from a value to the product that made it."""
    return trace_on(c, Walk(*c.base(start)))


_WIDER = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}


def trace_on(c: Canonical, walk: Walk) -> Trace:
    """Go on with a walk to the product that made its value.

    A kernel keeps the intermediate of a chain in float32, so steps between two products may be
    computed wider. A cast back to the narrow dtype stops the walk unless one to float32 is behind
    these steps.
    """
    narrowed: Walk | None = None
    while True:
        form = c.forms[walk.key]
        if isinstance(form, Product) and narrowed is None:
            return walk, form
        behind = affine(c, walk.key, form)
        if isinstance(form, Cast):
            change = (c.dtype(walk.key), c.dtype(form.value))
            if change in _WIDER or change[::-1] in _WIDER:
                narrowed = None if change in _WIDER else walk
                behind = form.value, []
        inner = None if behind is None else walk.to(c, *behind)
        if inner is None:
            walk = narrowed or walk
            return walk, _blocked(c, c.forms[walk.key], walk.key)
        walk = inner


def affine(c: Canonical, key: Key, form: Form) -> tuple[Key, list[AffineStep]] | None:
    """Read scale and add as (value, steps last first), None when they are not affine."""
    pairs: list[tuple[Key, float, str, Key, float]] = []
    if isinstance(form, Scale):
        if isinstance(form.factor, float):
            return form.value, [AffineStep("scale", form.factor)]
        pairs = [(value, 1.0, "vector", factor, 1.0) for value, factor in form.orders]
    elif isinstance(form, Add):
        if isinstance(form.b, float):
            return (form.a, [AffineStep("scale", form.alpha)]) if form.b == 0.0 else None
        one, two = (form.a, form.alpha), (form.b, form.beta)
        pairs = [(*one, "bias", *two), (*two, "bias", *one)]
    for value, own, kind, constant, number in pairs:
        if c.shape(value) == c.shape(key) and not isinstance(c.form(value), Leaf):
            step = _step_over(c, kind, constant, key, number)
            if step is not None:
                return value, [step, AffineStep("scale", own)]
    return None


# A refused step is told if a low-rank product is among so many nodes before it.
_STEPS_BETWEEN = 4


@dataclass(frozen=True)
class Chain:
    """x -> times u -> `middle` steps -> times v -> `after` steps; without v one dense product.

    out is the value the chain ends at, out_dims its dimensions over the tokens of `first`. base is
    a dense product of the same x that is added (LoRA). addend is the addmm input, with its factor,
    which stays outside of the kernel. more are further chains of the same x that are added (several
    adapters); their factors are joined along the rank. inner is a function between the products, an
    activation or the RMS norm over the rank, behind `middle`, which then has biases only. tp,
    group: devices of a process group that sum between the products. bits: how those weights are
    stored whose bytes a kernel reads (`emit.stored.Stored`), by their letters.
    """

    first: Stage
    second: Stage | None
    middle: tuple[AffineStep, ...]
    out: Key
    out_dims: Dims
    after: tuple[AffineStep, ...] = ()
    activation: str = "identity"
    base: Stage | None = None
    addend: tuple[Key, float] | None = None
    more: tuple[Chain, ...] = ()
    inner: Activation | Norm | None = None
    tp: int = 1
    group: str = ""
    bits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def u(self) -> ConstantMatrix:
        """Return the first factor, [k, r]."""
        return self.first.weight

    @property
    def v(self) -> ConstantMatrix:
        """Return the second factor, [r, n]."""
        assert self.second is not None
        return self.second.weight

    @property
    def factors(self) -> tuple[ConstantMatrix, ...]:
        """Return u and v, or the one dense weight."""
        return (self.u,) if self.second is None else (self.u, self.v)

    @property
    def letters(self) -> dict[str, ConstantMatrix]:
        """Return the weights by the letters that ops have for them: u and v, the dense w, or all
        three."""
        if self.second is None:
            return {"w": self.u}
        dense = {} if self.base is None else {"w": self.base.weight}
        return {"u": self.u, "v": self.v, **dense}

    @property
    def ways(self) -> dict[str, str]:
        """Return how the weights are stored, which several chains need alike to be one call."""
        said = {f"{letter}_layout": weight.layout for letter, weight in self.letters.items()}
        return said | {f"{letter}_format": one.format for letter, one in self.bits.items()}

    @property
    def hidden(self) -> set[Key]:
        """Return the weights that a call does not read, but the leaves that they are made of."""
        return {self.letters[letter].key for letter in self.bits}

    @property
    def gain(self) -> Key | None:
        """Return the vector of the norm between the products."""
        return self.inner.weight if isinstance(self.inner, Norm) else None

    @property
    def n(self) -> int:
        """Return the output features."""
        return self.factors[-1].n

    @property
    def steps(self) -> tuple[AffineStep, ...]:
        """Return the steps between and after the products."""
        return (*self.middle, *self.after)

    def only_bias(self) -> bool:
        """Return whether nothing but biases surrounds the products."""
        return all(s.kind == "bias" or (s.key is None and s.number == 1.0) for s in self.steps)

    @property
    def is_plain(self) -> bool:
        """Return whether it is one product, or two, with nothing but biases."""
        alone = self.base is None and not self.more and self.inner is None
        return alone and self.only_bias()

    @property
    def r(self) -> int:
        """Return the inner dimension, summed over the chains that are added; 0 of a dense one."""
        return 0 if self.second is None else self.u.n + sum(chain.r for chain in self.more)

    @property
    def weights(self) -> list[Key]:
        """Return the matrices that the kernel reads."""
        own = [weight.key for weight in self.letters.values()]
        return own + [key for other in self.more for key in other.weights]

    @property
    def operands(self) -> list[Key]:
        """Return the values that the kernel reads, and what stays outside of it."""
        parts = (self, *self.more)
        stages = [part.first for part in parts] + ([self.base] if self.base else [])
        keys = [stage.x for stage in stages] + self.weights
        keys += [s.key for p in parts for s in p.steps if s.key is not None]
        keys += [self.gain] if self.gain is not None else []
        return keys + ([self.addend[0]] if self.addend else [])


@once
def read_chain(c: Canonical, key: Key, form: Product, also: str = "") -> Chain | Refusal | None:
    """Read the low-rank chain that ends at a product; None without a sign of one.

    also: factors may be inputs of the graph, like x ("inputs"); all are "gathered" by an index.
    """
    is_rhs = _may_be_factor(c, form.rhs, also) and not isinstance(c.form(form.rhs), Product)
    refusal: Refusal | None = None
    for weight_is_rhs in (is_rhs, not is_rhs):
        (data, _), (weight, _) = form.orders[not weight_is_rhs]
        if c.is_constant(data):
            continue
        walk, inner = trace_back(c, data)
        if not _may_be_factor(c, weight, also):
            refusal = refusal or _not_constant(c, inner, weight, data)
            continue
        second = read_stage(c, key, form, weight_is_rhs, bool(also))
        if isinstance(second, Refusal):
            refusal = second if isinstance(inner, Product) else refusal
            continue
        if isinstance(inner, Refusal):
            refusal = _worth_telling(c, walk, second, inner) or refusal
            continue
        has_weight = any(c.is_weight(key) or owner_of(key) in c.derived for key in operands(inner))
        if not (also or has_weight):  # as in attention
            mixed = Refusal("shape", "a product of two activations between the products", walk.key)
            refusal = _worth_telling(c, walk, second, mixed) or refusal
            continue
        chain = join_stages(c, second, walk, inner, bool(also))
        if isinstance(chain, Chain):
            return chain if _may_be_factor(c, chain.u.key, also) else refusal
        refusal = chain
    return refusal if refusal is not None or also else _given(c, key, form)


def _may_be_factor(c: Canonical, key: Key, also: str) -> bool:
    base = c.base(key)[0]
    if also == "gathered":
        return gathered(base) is not None
    return c.is_weight(key) or (also == "inputs" and base in c.input_matrices)


def _not_constant(c: Canonical, inner: Product | Refusal, weight: Key, data: Key) -> Refusal | None:
    """Return why a product whose `weight` is no constant is in no chain, or None for plain
    cases."""
    for key in (weight, data):
        owner, form = owner_of(key), c.form(key)
        if c.derived.get(owner):
            return Refusal("order", "factors are multiplied into a weight at each call", key)
        parts = (form.value, form.factor) if isinstance(form, Scale) else ()
        computed = owner in c.derived or any(
            not isinstance(v, float) and c.is_weight(v) for v in parts
        )
        if computed and key is weight and isinstance(inner, Product):
            return Refusal("weight", "the weight is computed in the graph", key)
    return None  # a product of two activations, as in attention, is no chain


def _given(c: Canonical, key: Key, form: Product) -> Refusal | None:
    """Name a factor that is an input of the graph, where a product ends a chain with such ones."""
    chain = read_chain(c, key, form, "inputs") if c.input_matrices else None
    if not isinstance(chain, Chain) or too_wide(c, chain):
        return None
    given = [one.key for one in chain.factors if not c.is_weight(one.key)]
    behind = upstream([owner_of(chain.first.x)])  # an input may meet itself, as in a score pattern
    why = "both operands are activations: the factor is an input of the graph"
    return next(
        (Refusal("weight", why, key) for key in given if c.base(key)[0] not in behind), None
    )


def _worth_telling(c: Canonical, walk: Walk, second: Stage, why: Refusal) -> Refusal | None:
    """Return the refusal if only refused steps lie between two products that are low-rank.

    Behind a residual sum, a rotary embedding or an attention stand other layers of the model.
    """
    if isinstance(walk.key, Virtual):
        return None
    operands = behind(c, walk.key)
    for _ in range(_STEPS_BETWEEN):
        walked = [trace_back(c, key) for key in operands]
        if any(isinstance(form, Product) and is_low(c, form, second) for _, form in walked):
            return why
        ends = [seen.key for seen, form in walked if isinstance(form, Refusal)]
        steps = [behind(c, end) for end in ends if not isinstance(end, Virtual)]
        operands = [key for step in steps if len(step) == 1 for key in step]
    return None


def behind(c: Canonical, key: Key) -> list[Key]:
    """Return the activations that a step computes from, through getitems of several results."""
    keys = operands(c.forms[key])
    for part in keys:
        if isinstance(part, fx.Node) and c.shape(part) is None:  # several results: split, chunk
            keys += part.all_input_nodes
    return [k for k in keys if k in c.views and c.shape(k) is not None and not c.is_weight(k)]


def is_low(c: Canonical, form: Product, second: Stage) -> bool:
    """Return whether a product and a second one would make a low-rank chain."""
    weight = form.rhs if c.is_weight(form.rhs) else form.lhs
    sizes = [s for s in c.sizes(c.base(weight)[0]) if isinstance(s, int) and s != 1]
    whole, n = views.product(sizes), second.weight.n
    widths = [(inner, whole // inner) for inner in sizes]
    saves = any(max(second.weight.k, inner) * (k + n) < k * n for inner, k in widths)
    return saves and c.is_weight(weight)


def join_stages(
    c: Canonical, second: Stage, walk: Walk, inner: Product, computed: bool
) -> Chain | Refusal:
    """Join a second stage with the product behind it, if features meet features."""
    contracted, _ = axes_over(second, walk.dims)
    labels = {inner.out_labels[atom.axis] for atom in contracted if atom.axis >= 0}
    in_lhs, in_rhs = (not labels.isdisjoint(own) for own in (inner.lhs_labels, inner.rhs_labels))
    if second.weight.k == 1:  # a dimension of size 1 has no label
        in_rhs = c.is_constant(inner.rhs) or not c.is_weight(inner.lhs)
        in_lhs = not in_rhs
    operand = inner.rhs if in_rhs else inner.lhs
    given = c.is_constant(operand) or owner_of(operand) in c.derived or computed
    if in_lhs == in_rhs or not given:
        return Refusal(
            "shape",
            "the second product contracts tokens, or a mixture of tokens and features",
            walk.key,
        )
    first = read_stage(c, walk.key, inner, in_rhs, computed)
    if isinstance(first, Refusal):
        return first
    inside = part_of_one(first.x)
    if inside is not None:
        return inside
    data_dims = views.compose(walk.dims, first.out_dims)
    mismatch = Refusal(
        "shape",
        "the inner dimension is reshaped, sliced, repeated or left transposed between the products",
        walk.key,
    )
    if data_dims is None:
        return mismatch
    r = second.weight.k
    features, tokens = axes_over(second, data_dims)
    if first.weight.n != r or not is_whole_feature(features, r):
        return mismatch
    out_dims = views.compose(second.out_dims, tokens)
    if out_dims is None or any(a.axis < 0 for dim in tokens.values() for a in dim):
        return mismatch
    which = () if first.chosen is None else (Atom(first.chosen, first.tokens[first.chosen], 1),)
    if which != (() if second.chosen is None else tokens[second.chosen]):
        return mismatch
    steps = tuple(
        replace(step, kind="gain")
        if which and views.compose(step.dims, first.out_dims) == (which,)
        else step
        for step in reversed(walk.steps)
    )
    odd = _along_tokens([step for step in steps if step.kind != "gain"], first.out_dims, r)
    if odd is not None:
        return Refusal(
            "between",
            "a constant between the products varies along tokens",
            odd.key or walk.key,
        )
    return Chain(first, second, steps, second.key, out_dims)


def _along_tokens(steps: Sequence[AffineStep], dims: Dims, n: int) -> AffineStep | None:
    """Return the first step with a vector that is not over all n features of a value with dims."""
    for step in steps:
        moved = views.compose(step.dims, dims)
        whole = moved is not None and is_whole_feature(tuple(itertools.chain(*moved)), n)
        if not whole and step.kind != "scale":
            return step
    return None


@once
def read_with_function(
    c: Canonical, key: Key, form: Product, kind: type[Activation] | type[Norm] | type[DeviceSum]
) -> Chain | Refusal | None:
    """Read the chain with a function of a kind that ends at a product; None where there is none.

    The rank has to save work, r (k + n) < k n: an MLP whose middle is wide is none.
    """
    weight_is_rhs = c.is_weight(form.rhs)
    data = form.lhs if weight_is_rhs else form.rhs
    walk, _ = trace_back(c, data)
    function = c.forms[walk.key]
    if not isinstance(function, kind) or not _has_kernel(function) or walk.steps:
        return None
    second = read_stage(c, key, form, weight_is_rhs, False)
    inside = walk.to(c, operands(function)[0])
    if isinstance(second, Refusal) or inside is None:
        return None
    if isinstance(function, Norm) and axes_over(second, walk.dims)[0] != c.whole(walk.key)[-1]:
        return None
    walk, first = trace_on(c, inside)
    if not isinstance(first, Product) or not is_low(c, first, second):
        return None
    chain = join_stages(c, second, walk, first, False)
    if isinstance(chain, Refusal):
        return chain
    if isinstance(function, DeviceSum):
        return None if walk.steps else _over_devices(c, chain)
    biases = tuple(step for step in chain.middle if step.kind == "bias")
    scaled = [s for s in chain.middle if s.kind != "bias" and (s.key or s.number != 1.0)]
    if scaled or (isinstance(function, Norm) and biases):
        return Refusal(
            "between",
            "a factor, or a bias before a norm, stands between the products",
            walk.key,
        )
    return replace(chain, middle=biases, inner=function)


def _has_kernel(function: Activation | Norm | DeviceSum) -> bool:
    """Return whether kernels compute a function between two products."""
    if isinstance(function, Norm):
        plain = function.kind == "rms" and function.bias is None and not function.offset
        return plain and function.weight is not None and function.eps is not None
    return isinstance(function, DeviceSum) or function.name in ACTIVATIONS


def _over_devices(c: Canonical, chain: Chain) -> Chain | None:
    """Return a chain with the devices that sum between its products; None where they do not cut x
    and u evenly by inputs, or v is not whole."""
    x, u, v = (cast("Any", c.tensor(one)) for one in (chain.first.x, chain.u.key, chain.v.key))
    if not all(map(is_distributed, (x, u, v))):
        return None
    mesh, rows = x.device_mesh, 0 if chain.u.layout == "row" else 1
    by_inputs = x.placements[0].is_shard(x.ndim - 1) and u.placements[0].is_shard(rows)
    even = x.shape[-1] == chain.u.k and chain.u.k % mesh.size() == 0
    if not (by_inputs and even and v.placements[0].is_replicate()):
        return None
    group = str(mesh.get_group().group_name)
    return replace(chain, tp=int(mesh.size()), group=group)


EPILOGUES = ("relu", "silu", "gelu", "gelu_tanh")


@once
def trace_end(c: Canonical, node: fx.Node) -> Trace:
    """Walk back from a node, over an activation that ends a kernel and the steps before it."""
    form = c.forms.get(node)
    if not isinstance(form, Activation) or form.name not in EPILOGUES:
        return trace_back(c, node)
    walk = Walk(node, c.whole(node), activation=form.name).to(c, form.value)
    assert walk is not None
    return trace_on(c, walk)


def trace_addend(c: Canonical, node: fx.Node) -> Trace | None:
    """Walk back from a sum to the product inside of it; what is added stays outside of a kernel.

    None for a sum of other values.
    """
    form = c.forms.get(node)
    if not isinstance(form, Add) or isinstance(form.b, float) or not isinstance(form.a, Virtual):
        return None
    at, scale = Walk(node, c.whole(node), addend=(form.b, form.beta)), form.alpha
    walk = at.to(c, form.a, [AffineStep("scale", scale)])
    assert walk is not None
    return trace_on(c, walk)


def ended(c: Canonical, chain: Chain, walk: Walk, node: fx.Node) -> Chain | None:
    """Return a chain at the end of a walk, with what a node computes of it; None where no kernel
    does."""
    tensor = any(step.kind != "bias" and step.key is not None for step in walk.steps)
    rounds = any(isinstance(c.forms.get(one), Cast) for one in covered(c, node, [walk.key]))
    # a scale of the result is none of the first factor, or not of it alone
    scaled = any(step.kind == "scale" and step.number != 1.0 for step in walk.steps)
    fixed = chain.base is not None or chain.more or chain.inner is not None
    return None if tensor or rounds or (scaled and fixed) else _behind_walk(chain, walk, node)


def _behind_walk(chain: Chain, walk: Walk, out: Key) -> Chain | None:
    """Return a chain with the steps of a walk that ended at it; None for steps along tokens."""
    steps = tuple(reversed(walk.steps))
    dims = views.compose(walk.dims, chain.out_dims)
    if dims is None or _along_tokens(steps, chain.out_dims, chain.n):
        return None
    return replace(
        chain, after=(*chain.after, *steps), activation=walk.activation, addend=walk.addend,
        out=out, out_dims=dims,
    )  # fmt: skip


@once
def read_projection(c: Canonical, key: Key, also: str = "") -> Chain | None:
    """Read a value as x times one or two weights, then affine steps; None when it is none.

    also: what the factors of a low-rank one may be, see `read_chain`.
    """
    walk, form = trace_back(c, key)
    if isinstance(form, Refusal) or any(step.kind == "vector" for step in walk.steps):
        return None
    chain = read_chain(c, walk.key, form, also)
    if not isinstance(chain, Chain) or too_wide(c, chain):
        # x is on the left where both may be
        stage = read_stage(c, walk.key, form, c.is_weight(form.rhs), False)
        if isinstance(stage, Refusal) or part_of_one(stage.x) is not None:
            return None
        chain = Chain(stage, None, (), walk.key, stage.out_dims)
    return _behind_walk(chain, walk, key)


def over_base(c: Canonical, stage: Stage, dims: Dims) -> Dims | None:
    """Express the features that a stage contracts, and dims over its tokens, by the axes of the
    value that x is a view of."""
    features, tokens = axes_over(stage, c.base(stage.x)[1])
    moved = views.compose(dims, tokens)
    return None if moved is None else tuple(map(views.coalesce, (features, *moved)))


def axes_over(stage: Stage, dims: Dims) -> tuple[Dim, dict[int, Dim]]:
    """Return the features that a stage contracts, and each token axis, by the axes of a value that
    x has these dims over."""
    pairs = [(own[0], over) for own, over in zip(stage.x_dims, dims, strict=True) if own]
    tokens = {atom.axis: over for atom, over in pairs if atom.axis != FEATURE}
    pieces = [(int(atom.inner), over) for atom, over in pairs if atom.axis == FEATURE]
    return tuple(a for _, over in sorted(pieces, key=lambda p: -p[0]) for a in over), tokens


def same_tokens(c: Canonical, one: Stage, one_dims: Dims, two: Stage, two_dims: Dims) -> bool:
    """Return whether two results lie over the tokens of the same x in the same way."""
    if c.base(one.x)[0] is not c.base(two.x)[0]:
        return False
    left, right = over_base(c, one, one_dims), over_base(c, two, two_dims)
    return left is not None and left == right
