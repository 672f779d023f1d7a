"""The low-rank chain: two products with constant matrices, and only foldable steps between.

`steps` reads the steps between, `read_chain` joins the two products, `epilogue` reads the steps
after the products, and `safety` refuses chains that must not move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from nmm_compiler.passes.chains.linear_map import Stage, Weight, is_whole_feature, read_stage
from nmm_compiler.passes.chains.refusal import Refusal, part_of_one
from nmm_compiler.passes.chains.steps import Step, Walk, trace_back
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import (
    Activation,
    Add,
    Cast,
    Form,
    Key,
    Norm,
    Product,
    Scale,
    Virtual,
    owner_of,
)
from nmm_compiler.passes.graph.views import FEATURE, Dims

_STEPS_BETWEEN = 4
_GATED = "an activation multiplies between the products"


@dataclass(frozen=True)
class Inner:
    """A function between two products: an activation, or with a gain the RMS norm over the rank."""

    activation: str = "identity"
    gain: Key | None = None
    eps: float = 0.0

    def name(self) -> str:
        """Return "rms", or the name of the activation."""
        return self.activation if self.gain is None else "rms"


@dataclass(frozen=True)
class Chain:
    """x -> times u -> `middle` steps -> times v -> `after` steps.

    out is the value the chain ends at, out_dims its dimensions over the tokens of `first`. base is
    a dense product of the same x that is added (LoRA). addend is the addmm input, with its factor,
    which stays outside of the kernel. inplace is the in-place sum that `base` was written into, if
    any. more are further chains of the same x that are added (several adapters); their factors are
    joined along the rank. per_token are factors from between the products that commute with the
    second one: they multiply the result, and then the kernel has no epilogue. inner is a function
    between the products, behind `middle`, which then has biases only.
    """

    first: Stage
    second: Stage
    middle: tuple[Step, ...]
    out: Key
    out_dims: Dims
    nodes: frozenset[fx.Node]
    before: float = 1.0
    after: tuple[Step, ...] = ()
    activation: str = "identity"
    base: Stage | None = None
    addend: tuple[Key, float] | None = None
    inplace: fx.Node | None = None
    more: tuple[Chain, ...] = ()
    per_token: tuple[Step, ...] = ()
    inner: Inner | None = None

    @property
    def u(self) -> Weight:
        """Return the first factor, [k, r]."""
        return self.first.weight

    @property
    def v(self) -> Weight:
        """Return the second factor, [r, n]."""
        return self.second.weight

    @property
    def r(self) -> int:
        """Return the inner dimension, summed over the chains that are added."""
        return self.u.n + sum(chain.r for chain in self.more)


def read_chain(
    c: Canonical, key: Key, form: Product, inputs: bool = False
) -> Chain | Refusal | None:
    """Read the low-rank chain that ends at a product; None without a sign of one.

    inputs: factors may be inputs of the graph, like x.
    """
    if _may_be_factor(c, form.rhs, inputs) and not _feeds_product(c, form.rhs):
        sides: tuple[bool, ...] = (True, False)
    else:
        sides = (False, True)
    refusal: Refusal | None = None
    for weight_is_rhs in sides:
        weight = form.rhs if weight_is_rhs else form.lhs
        data = form.lhs if weight_is_rhs else form.rhs
        if c.is_constant(data):
            continue
        walk, inner = trace_back(c, data)
        if not _may_be_factor(c, weight, inputs):
            refusal = refusal or _not_constant(c, inner, weight, data)
            continue
        second = read_stage(c, key, form, weight_is_rhs, computed=inputs)
        if isinstance(second, Refusal):
            refusal = second if isinstance(inner, Product) else refusal
            continue
        if isinstance(inner, Refusal):
            refusal = _worth_telling(c, walk, second, inner) or refusal
            continue
        if not (inputs or any(_is_made_of_weights(c, side) for side in (inner.lhs, inner.rhs))):
            mixed = _tokens_mixed(c, inner, second, walk.key)
            refusal = mixed or _first_is_given(c, inner, second) or refusal
            continue  # as in attention
        found = join_stages(c, second, walk, inner, computed=inputs)
        if isinstance(found, Refusal) and found.reason == _GATED and not is_low(c, inner, second):
            continue  # a gated MLP
        if isinstance(found, Chain):
            if inputs and part_of_one(found.first.x) is not None:
                return None
            return found if _may_be_factor(c, found.u.key, inputs) else refusal
        refusal = found
    return refusal


def _may_be_factor(c: Canonical, key: Key, inputs: bool) -> bool:
    return c.is_weight(key) or (inputs and c.base(key)[0] in c.input_matrices)


def _feeds_product(c: Canonical, key: Key) -> bool:
    return isinstance(c.form(key), Product)


def _not_constant(c: Canonical, inner: Product | Refusal, weight: Key, data: Key) -> Refusal | None:
    """Return why a product whose `weight` is no constant is in no chain, or None for plain
    cases."""
    for key in (weight, data):
        computed = owner_of(key) in c.derived
        if computed and _is_made_of_a_product(c, key):
            return Refusal("order", "factors are multiplied into a weight at each call", key)
        form = c.form(key)
        parts = (form.value, form.factor) if isinstance(form, Scale) else ()
        scaled = any(not isinstance(v, float) and c.is_weight(v) for v in parts)
        if (computed or scaled) and key is weight and isinstance(inner, Product):
            return Refusal("weight", "the weight is computed in the graph", key)
    if isinstance(inner, Product) and owner_of(data) not in c.derived:
        leaf = c.base(weight)[0]
        if leaf in c.input_matrices and not _comes_from(c, inner, leaf):
            return _given(weight)
    return None  # a product of two activations, as in attention, is no chain


def _comes_from(c: Canonical, made: Product, leaf: Key) -> bool:
    """Return whether a product is computed from an input, through products alone: then it meets
    itself, as in a score pattern."""
    found: Product | Refusal = made
    while isinstance(found, Product):
        sides = (found.lhs, found.rhs)
        if any(c.base(side)[0] is leaf for side in sides):
            return True
        data = next((side for side in sides if not c.is_weight(side)), None)
        if data is None:
            return False
        found = trace_back(c, data)[1]
    return False


def _given(factor: Key) -> Refusal:
    return Refusal(
        "weight",
        "both operands are activations: the factor is an input of the graph",
        factor,
    )


def _is_made_of_a_product(c: Canonical, key: Key, limit: int = 12) -> bool:
    """Return whether a product is among the first `limit` values that a value is computed from."""
    queue, seen = [key], {key}
    while queue and limit:
        limit -= 1
        base = c.base(queue.pop(0))[0]
        form = c.forms[base]
        if isinstance(form, Product):
            return True
        new = [k for k in _operands(c, base, form) if k not in seen and k in c.views]
        seen.update(new)
        queue += new
    return False


def _is_made_of_weights(c: Canonical, key: Key) -> bool:
    return c.is_weight(key) or owner_of(key) in c.derived


def _worth_telling(c: Canonical, walk: Walk, second: Stage, why: Refusal) -> Refusal | None:
    """Return the refusal if only refused steps lie between two products that are low-rank.

    Behind a residual sum, a rotary embedding or an attention stand other layers of the model.
    """
    if isinstance(walk.key, Virtual):
        return None
    operands = _behind(c, walk.key)
    for _ in range(_STEPS_BETWEEN):
        walked = [trace_back(c, key) for key in operands]
        if any(isinstance(form, Product) and is_low(c, form, second) for _, form in walked):
            return why
        ends = [seen.key for seen, form in walked if isinstance(form, Refusal)]
        steps = [_behind(c, end) for end in ends if not isinstance(end, Virtual)]
        operands = [key for step in steps if len(step) == 1 for key in step]
    return None


def _behind(c: Canonical, key: Key) -> list[Key]:
    """Return the activations that a step computes from, through getitems of several results."""
    found = list(_operands(c, key, c.forms[key]))
    parts = [k for k in found if isinstance(k, fx.Node) and k in c.views and c.shape(k) is None]
    found += [source for part in parts for source in part.all_input_nodes]  # split, chunk
    return [k for k in found if k in c.views and c.shape(k) is not None and not c.is_weight(k)]


def is_low(c: Canonical, form: Product, second: Stage) -> bool:
    """Return whether a product and a second one would make a low-rank chain."""
    r, n = second.weight.k, second.weight.n
    weight = form.rhs if c.is_weight(form.rhs) else form.lhs
    shape = c.shape(c.base(weight)[0])
    if not c.is_weight(weight) or shape is None:
        return False
    sizes = [s for s in shape if isinstance(s, int) and s != 1]
    for inner in sizes:
        k = views.divide(views.product(sizes), inner)
        if isinstance(k, int) and r * (k + n) < k * n and inner * (k + n) < k * n:
            return True
    return False


def _tokens_mixed(c: Canonical, inner: Product, second: Stage, at: Key) -> Refusal | None:
    """Name a product of two activations between two products that are low-rank."""
    for side in (inner.lhs, inner.rhs):
        form = trace_back(c, side)[1]
        if isinstance(form, Product) and is_low(c, form, second):
            return Refusal(
                "shape",
                "a product of two activations between the products",
                at,
            )
    return None


def _first_is_given(c: Canonical, inner: Product, second: Stage) -> Refusal | None:
    """Name a first factor that is an input of the graph, beside a stored second one."""
    for key in (inner.rhs, inner.lhs):
        base = c.base(key)[0]
        shape = c.shape(base) or ()
        if base not in c.input_matrices or second.weight.k not in shape:
            continue
        k, r, n = (
            views.divide(views.product(shape), second.weight.k),
            second.weight.k,
            second.weight.n,
        )
        if isinstance(k, int) and k > 1 and r * (k + n) < k * n:
            return _given(key)
    return None


def _operands(c: Canonical, key: Key, form: Form) -> Sequence[Key]:
    if isinstance(form, (Scale, Cast, Activation, Norm)):
        factor = getattr(form, "factor", None)
        return [form.value, *([] if factor is None or isinstance(factor, float) else [factor])]
    if isinstance(form, Add):
        return [form.a, *([] if isinstance(form.b, float) else [form.b])]
    return [] if isinstance(key, Virtual) else key.all_input_nodes


def _tokens(dim: views.Dim) -> list[views.Atom]:
    return [atom for atom in dim if atom.axis != FEATURE]


def _short(c: Canonical, key: Key) -> str:
    return str(c.dtype(key)).removeprefix("torch.")


def join_stages(
    c: Canonical, second: Stage, walk: Walk, inner: Product, computed: bool = False
) -> Chain | Refusal:
    """Join a second stage with the product behind it, if features meet features."""
    contracted = [dim for dim in second.x_dims if dim and all(a.axis == FEATURE for a in dim)]
    labels: set[int] = set()
    for position, dim in enumerate(second.x_dims):
        if dim in contracted:
            labels |= {inner.out_labels[a.axis] for a in walk.dims[position] if a.axis >= 0}
    in_lhs = bool(labels & set(inner.lhs_labels))
    in_rhs = bool(labels & set(inner.rhs_labels))
    if second.weight.k == 1 and not contracted:  # rank 1: a dimension of size 1 has no label
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
    if inside is not None and not computed:
        return inside
    if c.dtype(walk.key) != c.dtype(second.key):
        return Refusal(
            "dtype",
            f"the products compute in {_short(c, walk.key)} and {_short(c, second.key)}",
            walk.key,
        )
    data_dims = views.compose(walk.dims, first.out_dims)
    mismatch = Refusal(
        "shape",
        "the inner dimension is reshaped, sliced, repeated or left transposed between the products",
        walk.key,
    )
    if data_dims is None:
        return mismatch
    r = second.weight.k
    if first.weight.n != r:
        return mismatch
    pieces = [
        (dim[0].inner, data_dims[i])
        for i, dim in enumerate(second.x_dims)
        if dim and dim[0].axis == FEATURE
    ]
    features = [a for _, dim in sorted(pieces, key=lambda p: -int(p[0])) for a in dim]
    if not is_whole_feature(tuple(features), r):
        return mismatch
    tokens: dict[int, views.Dim] = {}
    for i, dim in enumerate(second.x_dims):
        if dim and dim[0].axis != FEATURE:
            if any(a.axis < 0 for a in data_dims[i]):
                return mismatch
            tokens[dim[0].axis] = data_dims[i]
    out_dims = tuple(
        dim if not dim or dim[0].axis == FEATURE else tokens[dim[0].axis] for dim in second.out_dims
    )
    steps: list[Step] = []
    per_token: list[Step] = []
    for step in reversed(walk.steps):
        moved = views.compose(step.dims, first.out_dims)
        if step.kind == "token" and moved is not None:
            axes = {a.axis for dim in moved for a in dim}
            whole = all(len({a.axis in axes for a in _tokens(dim)}) <= 1 for dim in out_dims)
            if any(axis < 0 for axis in axes) or not whole:
                return Refusal(
                    "between",
                    _GATED,
                    walk.key if step.key is None else step.key,
                )
            per_token.append(dataclasses.replace(step, dims=moved))
            continue
        if step.kind == "bias" and per_token:
            moved = None  # it is not multiplied by what the tokens are multiplied by
        if moved is None or (
            step.kind != "scale" and not is_whole_feature(tuple(a for d in moved for a in d), r)
        ):
            return Refusal(
                "between",
                "a constant between the products varies along tokens",
                step.key or walk.key,
            )
        steps.append(step)
    nodes = frozenset(walk.nodes) | first.nodes | second.nodes
    return Chain(
        first, second, tuple(steps), second.key, out_dims, nodes, per_token=tuple(per_token)
    )
