"""The bottleneck adapter: two products with a bias and an activation between them.

y = linear(act(linear(x, A, a)), B, b), the rank being small
"""

from __future__ import annotations

import dataclasses

from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.passes.chains.chain import Chain, is_low, join_stages
from nmm_compiler.passes.chains.linear_map import Refusal, read_stage
from nmm_compiler.passes.chains.steps import trace_back, trace_on
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Activation, Key, Product


def read_adapter(c: Canonical, key: Key, form: Product) -> Chain | Refusal | None:
    """Read the adapter that ends at a product; None where the product ends none.

    The rank has to save work, r (k + n) < k n: an MLP whose middle is wide is none.
    """
    weight_is_rhs = c.is_weight(form.rhs)
    data = form.lhs if weight_is_rhs else form.rhs
    if c.is_constant(data) or not (weight_is_rhs or c.is_weight(form.lhs)):
        return None
    walk, why = trace_back(c, data)
    shape = c.forms[walk.key]
    if not isinstance(why, Refusal) or not isinstance(shape, Activation) or walk.steps:
        return None
    if shape.name not in ACTIVATIONS:
        return None
    second = read_stage(c, key, form, weight_is_rhs)
    walk.nodes |= c.helpers.get(walk.key, frozenset())
    if isinstance(second, Refusal) or not walk.descend(c, shape.value):
        return None
    walk, inner = trace_on(c, walk)
    if not isinstance(inner, Product) or not is_low(c, inner, second):
        return None
    found = join_stages(c, second, walk, inner)
    if isinstance(found, Refusal):
        return found
    scaled = [s for s in found.middle if s.kind != "bias" and (s.key or s.number != 1.0)]
    if scaled or found.per_token:
        return Refusal(
            "scaled_inner",
            "a factor stands before the activation between the products",
            walk.key,
            "fold it into the first factor and its bias",
        )
    biases = tuple(step for step in found.middle if step.kind == "bias")
    return dataclasses.replace(found, middle=biases, inner_activation=shape.name)
