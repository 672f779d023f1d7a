"""Two products with a function between them that the kernel computes: an activation, or a norm.

y = linear(act(linear(x, A, a)), B, b)      bottleneck adapters, squeeze-and-excitation
y = linear(rms_norm(linear(x, A), g), B)    multi-head latent attention
"""

from __future__ import annotations

import dataclasses

import torch

from nmm_compiler.kernels.base import ACTIVATIONS
from nmm_compiler.passes.chains.chain import Chain, Inner, is_low, join_stages
from nmm_compiler.passes.chains.linear_map import Stage, is_whole_feature, read_stage
from nmm_compiler.passes.chains.refusal import Refusal
from nmm_compiler.passes.chains.steps import Walk, trace_back, trace_on
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Activation, Key, Norm, Product


def read_with_function(
    c: Canonical, key: Key, form: Product, kind: type[Activation] | type[Norm]
) -> Chain | Refusal | None:
    """Read the chain with a function of a kind that ends at a product; None where there is none.

    The rank has to save work, r (k + n) < k n: an MLP whose middle is wide is none.
    """
    weight_is_rhs = c.is_weight(form.rhs)
    data = form.lhs if weight_is_rhs else form.rhs
    if c.is_constant(data) or not (weight_is_rhs or c.is_weight(form.lhs)):
        return None
    walk, why = trace_back(c, data)
    function = c.forms[walk.key]
    if not isinstance(why, Refusal) or not isinstance(function, kind) or walk.steps:
        return None
    inner = _inner(c, function)
    second = read_stage(c, key, form, weight_is_rhs)
    if inner is None or isinstance(second, Refusal):
        return None
    if isinstance(function, Norm) and not _is_over_rank(c, walk, second, function):
        return None
    walk.nodes |= c.helpers.get(walk.key, frozenset())
    if not walk.descend(c, function.value):
        return None
    walk, first = trace_on(c, walk)
    if not isinstance(first, Product) or not is_low(c, first, second):
        return None
    found = join_stages(c, second, walk, first)
    if isinstance(found, Refusal):
        return found
    biases = tuple(step for step in found.middle if step.kind == "bias")
    scaled = [s for s in found.middle if s.kind != "bias" and (s.key or s.number != 1.0)]
    if scaled or found.per_token or (inner.gain is not None and biases):
        what = "activation" if inner.gain is None else "norm"
        return Refusal(
            "between",
            f"a factor{'' if inner.gain is None else ' or a bias'} stands before the {what} "
            "between the products",
            walk.key,
        )
    return dataclasses.replace(found, middle=biases, inner=inner)


def _inner(c: Canonical, function: Activation | Norm) -> Inner | None:
    if isinstance(function, Activation):
        return Inner(function.name) if function.name in ACTIVATIONS else None
    eps = function.eps
    if eps is None and c.dtype(function.value) == torch.float32:
        eps = torch.finfo(torch.float32).eps  # what F.rms_norm takes then
    if function.kind != "rms" or function.bias is not None or function.weight is None:
        return None
    return None if eps is None else Inner(gain=function.weight, eps=eps)


def _is_over_rank(c: Canonical, walk: Walk, second: Stage, norm: Norm) -> bool:
    """Return whether a norm's last axis is what the second product contracts, all of it."""
    shape = c.shape(walk.key)
    if not shape or shape[-1] != second.weight.k or c.shape(norm.value) != shape:
        return False
    last = views.identity(shape)[-1]
    contracted = [
        walk.dims[i]
        for i, dim in enumerate(second.x_dims)
        if dim and is_whole_feature(dim, second.weight.k)
    ]
    base, dims = c.base(norm.value)
    same = views.identity(c.shape(base) or ())
    return contracted == [last] and bool(dims) and dims[-1] in same
