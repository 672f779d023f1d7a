"""The steps after a chain that its kernel computes: constant bias, scale, activation, in this
order."""

from __future__ import annotations

import dataclasses

from torch import fx

from nmm_compiler.passes.chains.chain import Chain
from nmm_compiler.passes.chains.linear_map import (
    is_whole_feature,
)
from nmm_compiler.passes.chains.safety import real_users
from nmm_compiler.passes.chains.steps import Step, affine
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import (
    Activation,
    Add,
    Key,
    Scale,
    Virtual,
    owner_of,
)
from nmm_compiler.passes.graph.views import Dims

EPILOGUES = ("relu", "silu", "gelu", "gelu_tanh")


def _reader(c: Canonical, key: Key) -> Key | None:
    """Return the one value computed from `key`, None when there are several or none."""
    if isinstance(key, Virtual):
        return key.owner
    users = real_users(key)
    if len(users) > 1:  # several steps of one activation that is spelled out
        ends = {c.part_of.get(user, user) for user in users}
        (end,) = ends if len(ends) == 1 else (None,)
        return end if end in c.helpers else None
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def extend(c: Canonical, chain: Chain, activations: bool = True) -> Chain:
    """Absorb constant bias, scale and activation after the chain, as far as they have no others."""
    if chain.per_token:
        return _with_own_bias(c, chain)
    base, base_dims = chain.out, chain.out_dims
    pending: set[fx.Node] = set()
    key: Key = chain.out
    n = chain.v.n
    while True:
        reader = _reader(c, key)
        if reader is None or reader in c.effects.writers:
            return chain
        if c.is_view_of(owner_of(reader), key):
            if c.base(reader)[0] != base:
                return chain
            pending.add(owner_of(reader))
            key = reader
            continue
        form = c.forms.get(reader)  # no reader for a view of another value that names this one
        dims = views.compose(c.base(key)[1], base_dims)
        if dims is None:
            return chain
        new: Chain | None = None
        if isinstance(key, Virtual) and isinstance(form, Add):
            steps = _after_steps(c, reader, form, key, dims, n)
            if steps is None and not isinstance(form.b, float):
                factor = (Step("scale", form.alpha),) if form.alpha != 1.0 else ()
                return dataclasses.replace(
                    chain,
                    after=(*chain.after, *factor),
                    addend=(form.b, form.beta),
                    out=reader,
                    out_dims=dims,
                    nodes=chain.nodes | {owner_of(reader)},
                )
        if isinstance(form, Activation) and form.name in EPILOGUES and activations:
            new = dataclasses.replace(chain, activation=form.name)
        elif isinstance(form, (Scale, Add)):
            steps = _after_steps(c, reader, form, key, dims, n)
            if steps is not None and not (_keeps_its_scale(chain) and any(map(_scales, steps))):
                new = dataclasses.replace(chain, after=(*chain.after, *steps))
        if new is None or c.dtype(reader) != c.dtype(chain.out):
            return chain
        nodes = chain.nodes | pending | {owner_of(reader)} | c.helpers.get(reader, frozenset())
        chain = dataclasses.replace(new, out=reader, out_dims=dims, nodes=nodes)
        if chain.activation != "identity":
            return chain
        base, base_dims, key, pending = reader, dims, reader, set()


def _keeps_its_scale(chain: Chain) -> bool:
    """Return whether a scale of the result is none of the first factor, or not of it alone."""
    return bool(chain.base or chain.more or chain.inner)


def _with_own_bias(c: Canonical, chain: Chain) -> Chain:
    """Return a chain that a factor of tokens multiplies, with the bias of its last operation.

    The bias comes behind the factor, so it stays outside of the kernel.
    """
    form = c.forms[owner_of(chain.out)] if isinstance(chain.out, Virtual) else None
    if not isinstance(form, Add) or form.a is not chain.out or isinstance(form.b, float):
        return chain
    if isinstance(form.b, Virtual) and form.b.attribute is None:
        return chain
    scale = (Step("scale", form.alpha),) if form.alpha != 1.0 else ()
    node = owner_of(chain.out)
    return dataclasses.replace(
        chain, after=(*chain.after, *scale), addend=(form.b, form.beta), out=node
    )


def _scales(step: Step) -> bool:
    return step.kind == "scale" and step.number != 1.0


def _after_steps(
    c: Canonical, reader: Key, form: Scale | Add, key: Key, dims: Dims, n: int
) -> list[Step] | None:
    found = affine(c, reader, form)
    if found is None or found[0] != key:
        return None
    steps: list[Step] = []
    for step in reversed(found[1]):
        if step.kind in ("vector", "token") or (step.kind == "scale" and step.key is not None):
            return None
        if step.kind == "bias":
            moved = views.compose(step.dims, dims)
            if moved is None or not is_whole_feature(tuple(a for d in moved for a in d), n):
                return None
        steps.append(step)
    return steps
