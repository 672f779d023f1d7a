"""Folds constants around the products into a kernel's operands: factors, one bias, one scale.

Nodes of the graph compute the folded operands at each call from the stored weights, so they follow
updates of a weight, and gradients reach it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from nmm_compiler.passes.chains.chain import Chain
from nmm_compiler.passes.chains.eight_bits import FP8, Bytes, Kept
from nmm_compiler.passes.chains.linear_map import Weight
from nmm_compiler.passes.chains.product_order import Cost, order
from nmm_compiler.passes.chains.steps import Step
from nmm_compiler.passes.emit.editor import WEIGHT_ONLY, Editor, aten
from nmm_compiler.passes.graph.canonical_forms import Key

if TYPE_CHECKING:
    from nmm_compiler.passes.chains.projections import Projection


@dataclass(frozen=True)
class Factors:
    """The nodes of scale * (x u) v + bias, with u and v in the layouts of `chain`.

    inner_bias and inner_gain: of a function between the products.
    """

    chain: Chain
    u: fx.Node
    v: fx.Node
    scale: float
    bias: fx.Node | None
    inner_bias: fx.Node | None = None
    inner_gain: fx.Node | None = None


def fold_chain(editor: Editor, chain: Chain) -> Factors:
    """Fold the steps between and after the products of a chain."""
    u, v = weight_node(editor, chain.u), weight_node(editor, chain.v)
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
            bias = times(editor, bias, step.number)
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
        bias = times_matrix(editor, plain_v, chain.v.layout, bias)
    absorb(chain.after, chain.v.n)
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
        vs.append(v if same or part.scale == 1.0 else editor.call(aten.mul.Tensor, v, part.scale))
        if part.bias is not None:
            bias = part.bias if bias is None else plus(editor, bias, part.bias, 1.0)
    u = editor.call(aten.cat.default, us, 1 if first.chain.u.layout == "row" else 0)
    v = editor.call(aten.cat.default, vs, 0 if first.chain.v.layout == "row" else 1)
    return Factors(first.chain, u, v, first.scale if same else 1.0, bias)


def weight_node(editor: Editor, weight: Weight) -> fx.Node:
    """Return the 2-D node of a weight as it is stored; a product of factors is made here."""
    if weight.factors:
        return _product(editor, weight)
    return editor.reshape(editor.operand(weight.key), weight.stored)


def _product(editor: Editor, weight: Weight) -> fx.Node:
    """Emit the product of a weight's factors in the cheapest order."""
    made: dict[tuple[int, int], fx.Node] = {}
    for index, factor in enumerate(weight.factors):
        node = weight_node(editor, factor)
        made[index, index + 1] = node if factor.layout == "row" else editor.permute(node, (1, 0))
    value = editor.c.values[made[0, 1]]
    sizes = [weight.factors[0].k, *(factor.n for factor in weight.factors)]
    name = str(value.dtype).removeprefix("torch.")
    chip = editor.c.chip
    cost = Cost.on(chip, name, editor.options.price, editor.options.lnc)
    for first, cut, end in order(cost, sizes):
        node = editor.call(aten.mm.default, made[first, cut], made[cut, end])
        node.meta[WEIGHT_ONLY] = True
        made[first, end] = node
    return made[0, len(weight.factors)]


def one_dim(editor: Editor, key: Key, size: int) -> fx.Node:
    """Return a constant as the 1-D vector it is."""
    return editor.reshape(editor.operand(key), (size,))


def chain_bias(editor: Editor, chain: Chain) -> fx.Node | None:
    """Emit the bias of a chain that has only biases around its products."""
    bias = None
    for step in chain.middle:
        if step.kind == "bias" and step.key is not None:
            bias = plus(editor, bias, one_dim(editor, step.key, chain.u.n), step.number)
    if bias is not None:
        bias = _through_weight(editor, chain.v, bias)
    for step in chain.after:
        if step.kind == "bias" and step.key is not None:
            bias = plus(editor, bias, one_dim(editor, step.key, chain.v.n), step.number)
    return bias


def fold_projection(editor: Editor, projection: Projection) -> tuple[list[fx.Node], fx.Node | None]:
    """Emit the weights and the bias of a projection; scales go into a low-rank one's factors."""
    if projection.chain is not None:
        whole = dataclasses.replace(projection.chain, after=projection.after)
        folded = fold_chain(editor, whole)
        v = folded.v
        if folded.scale != 1.0:
            v = editor.call(aten.mul.Tensor, v, folded.scale)
        return [folded.u, v], folded.bias
    weights = [weight_node(editor, weight) for weight in projection.weights]
    return weights, bias_of(editor, projection)


def bias_of(editor: Editor, projection: Projection) -> fx.Node | None:
    """Emit the bias behind a projection."""
    own = () if projection.chain is None else projection.chain.after
    bias = None
    for step in (*own, *projection.after):
        if step.kind == "bias":
            assert step.key is not None
            bias = plus(editor, bias, one_dim(editor, step.key, projection.n), step.number)
    return bias


def stored_node(editor: Editor, weight: Weight, stored: Bytes) -> fx.Node:
    """Return the 2-D node of an fp8 weight as it is stored."""
    node = editor.node(stored.values)
    if editor.c.values[node].dtype != FP8:
        node = editor.call(aten.view.dtype, node, FP8)
    return editor.reshape(node, weight.stored)


def scales_of(editor: Editor, kept: Kept) -> list[fx.Node]:
    """Return the 1-D nodes of the scales of fp8 weights."""
    nodes = [editor.node(stored.scale) for stored in kept.stored]
    return [editor.reshape(node, (math.prod(editor.shape(node)),)) for node in nodes]


def _through_weight(editor: Editor, weight: Weight, bias: fx.Node) -> fx.Node:
    return times_matrix(editor, weight_node(editor, weight), weight.layout, bias)


def times_matrix(editor: Editor, node: fx.Node, layout: str, vector: fx.Node) -> fx.Node:
    """Emit vector @ matrix for a matrix stored in either layout."""
    matrix = node if layout == "col" else editor.permute(node, (1, 0))
    return editor.call(aten.mv.default, matrix, vector)


def times(editor: Editor, bias: fx.Node | None, number: float) -> fx.Node | None:
    """Emit a bias times a number; no bias stays none."""
    if bias is None or number == 1.0:
        return bias
    return editor.call(aten.mul.Tensor, bias, number)


def plus(editor: Editor, bias: fx.Node | None, own: fx.Node, number: float) -> fx.Node:
    """Emit a bias plus `number` times a vector."""
    if bias is None:
        return own if number == 1.0 else editor.call(aten.mul.Tensor, own, number)
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
