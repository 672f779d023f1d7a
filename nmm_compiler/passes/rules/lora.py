"""Rule `lora`: a dense product plus scaled low-rank branches of the same x, as one call.

    y = linear(x, W, b) + s * linear(linear(x, A), B)
    -> nmm.lowrank_matmul(x, A, B, b, W, scale=s)

    y = x w + s1 (x a1) b1 + s2 (x a2) b2
    -> nmm.lowrank_matmul(x, [a1 | a2], [s1 b1; s2 b2], w=w)

A sum of branches without a base is such a call without w.

The terms may stand in any order and nesting, and sums may be in place. The factors of several
adapters are joined in the graph at each call: they are small beside w, an update or a swap of an
adapter is seen at once, and gradients reach each of them. Beside a stored base, adapters may be
inputs of the graph, since the base tells which operand is x.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import (
    AffineStep,
    Chain,
    read_projection,
    same_tokens,
    trace_back,
    trace_end,
)
from nmm_compiler.passes.chains.safety import Refusal, covered, real_users
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import (
    Activation,
    Add,
    Canonical,
    Cast,
    Key,
    Scale,
    once,
)
from nmm_compiler.passes.rules.lowrank import Adapter

MOST_NESTED = 16


class LoRA(Adapter):
    """Base product plus adapters."""

    name = "lora"
    ends_at = (Add, Scale, Activation)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose every sum of two values, with steps and an activation behind it."""
        walk, _ = trace_end(graph, node)
        form = graph.forms[walk.key]
        if isinstance(form, Add) and not isinstance(form.b, float) and node in graph.forms:
            yield node, walk, form

    def read(self, graph: Canonical, key: Key, form: Any) -> Chain | Refusal | None:
        """Read a sum as a base and branches of one x."""
        return _read_sum(graph, key, form)


@once
def _read_sum(c: Canonical, key: Key, form: Add) -> Chain | Refusal | None:
    """Read the terms of a sum as one dense projection at most, the base, and low-rank ones, all of
    one x; None for other terms."""
    terms = [(_projection(c, value), factor) for value, factor in _terms(c, form, 1.0)]
    read = [(one, factor) for one, factor in terms if one is not None]
    branches = [
        dataclasses.replace(one, after=(*one.after, AffineStep("scale", factor)))
        for one, factor in read
        if one.second is not None
    ]
    bases = [one for one, number in read if not one.second and number == 1.0 and one.only_bias()]
    if not branches or len(bases) > 1 or len(branches) + len(bases) < len(terms):
        return None
    first, base = branches[0], next(iter(bases), None)
    tokens = first.first, first.out_dims
    others = (*branches[1:], *bases)
    if not all(same_tokens(c, *tokens, one.first, one.out_dims) for one in others):
        why = "base and branch do not read the same x in the same way"
        return None if base is None else Refusal("other_x", why, base.out)
    return dataclasses.replace(
        first,
        after=(*first.after, *(step for one in bases for step in one.after)),
        out=key,
        base=None if base is None else base.first,
        more=tuple(branches[1:]),
    )


def _projection(c: Canonical, key: Key) -> Chain | None:
    """Read a value as a projection, whose factors may be inputs where no stored ones are there."""
    stored: Chain | None = read_projection(c, key)
    by_inputs = stored is None and len(c.input_matrices) > 1
    return read_projection(c, key, "inputs") if by_inputs else stored


def read_adapted(c: Canonical, key: Key) -> Chain | None:
    """Read a value as a dense product plus branches of the same x, or as any projection; None for
    other values."""
    node, dims = c.base(key)
    form = c.forms[node]
    if not isinstance(form, Add) or not isinstance(node, fx.Node) or isinstance(form.b, float):
        return read_projection(c, key)
    adapted = _read_sum(c, node, form)
    if not isinstance(adapted, Chain) or adapted.base is None:
        return read_projection(c, key)
    out_dims = views.compose(dims, adapted.out_dims)
    return None if out_dims is None else dataclasses.replace(adapted, out=key, out_dims=out_dims)


def _terms(c: Canonical, form: Add, factor: float, depth: int = 0) -> Iterator[tuple[Key, float]]:
    """Yield the terms of a sum, and of the sums and scaled sums that only it reads, each with the
    number that multiplies it."""
    for value, own in ((form.a, form.alpha), (form.b, form.beta)):
        assert not isinstance(value, float)
        nested = _nested(c, value) if depth < MOST_NESTED else None
        if nested is None:
            yield value, factor * own
        else:
            yield from _terms(c, nested[0], factor * own * nested[1], depth + 1)


def _nested(c: Canonical, value: Key) -> tuple[Add, float] | None:
    """Return the sum of two activations, times a number, that a value is, if it has no other
    reader.

    A product plus a constant bias is no such sum: it is one term.
    """
    walk, _ = trace_back(c, value)
    node, form, nodes = walk.key, c.forms[walk.key], covered(c, value, [walk.key])
    numbers = [step.number for step in walk.steps if step.key is None]
    if not isinstance(form, Add) or isinstance(form.b, float) or not isinstance(node, fx.Node):
        return None
    if len(numbers) < len(walk.steps) or walk.dims != c.whole(node):
        return None
    if any(len(real_users(n)) != 1 or isinstance(c.forms.get(n), Cast) for n in {*nodes, node}):
        return None
    if c.is_weight(form.a) or c.is_weight(form.b):
        return None
    return form, math.prod(numbers, start=1.0)
