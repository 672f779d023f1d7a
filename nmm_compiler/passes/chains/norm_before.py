"""The norm that a value is: of which tensor, with which vectors, and the nodes that make it.

x * rsqrt(mean(x ** 2) + eps) * w             Llama, with casts to float32 and back around it
(x.float() * rsqrt(...) * (1 + w)).to(x)      Gemma, whose gain is stored less one
F.rms_norm, F.layer_norm, nn.RMSNorm, nn.LayerNorm
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Add, Canonical, Cast, Key, Norm, Scale, owner_of
from nmm_compiler.passes.graph.norms import is_last


@dataclasses.dataclass(frozen=True)
class NormBefore:
    """A norm: its input, its vectors over the features, and the nodes between these and it.

    offset: a number that is added to the gain. final: the node of the norm.
    """

    value: Key
    kind: str
    eps: float
    gain: Key | None
    bias: Key | None
    offset: float
    final: fx.Node
    nodes: frozenset[fx.Node]

    def operands(self) -> list[Key]:
        """Return the tensors that a call reads in place of the norm."""
        return [key for key in (self.value, self.gain, self.bias) if key is not None]


def read_norm(c: Canonical, key: Key) -> NormBefore | None:
    """Return the norm that a value is, of its own dtype; None where it is none."""
    final = c.base(key)[0]
    if not isinstance(final, fx.Node):
        return None
    nodes: set[fx.Node] = set()
    dtype = c.dtype(final)
    inside = _below_cast(c, final, nodes)
    gain, offset = None, 0.0
    form = c.forms[inside]
    if isinstance(form, Scale) and not isinstance(form.factor, float):
        for value, factor in ((form.value, form.factor), (form.factor, form.value)):
            found = _vector(c, factor, nodes)
            if found is not None and is_last(c, factor, owner_of(inside)):
                gain, offset = found
                nodes |= {owner_of(inside), *(owner_of(k) for k in c.through(value))}
                inside = _below_cast(c, c.base(value)[0], nodes)
                form = c.forms[inside]
                break
    if not isinstance(form, Norm) or (gain is not None and form.weight is not None):
        return None
    nodes |= {owner_of(inside), *c.helpers.get(inside, frozenset())}
    gain = form.weight if gain is None else gain
    value = form.value
    up = c.forms[c.base(value)[0]]
    if c.dtype(value) != dtype:
        if not isinstance(up, Cast) or not _is_same(c, value):
            return None
        nodes |= {owner_of(c.base(value)[0]), *(owner_of(k) for k in c.through(value))}
        value = up.value
    eps = form.eps
    if eps is None and dtype == torch.float32:
        eps = torch.finfo(dtype).eps
    if eps is None or c.dtype(value) != dtype or c.shape(value) != c.shape(final):
        return None
    vectors = [vector for vector in (gain, form.bias) if vector is not None]
    k = (c.shape(final) or (0,))[-1]
    if any(c.shape(v) != (k,) or c.dtype(v) != dtype or not c.is_constant(v) for v in vectors):
        return None
    return NormBefore(
        value, form.kind, float(eps), gain, form.bias, offset, final, frozenset(nodes | {final})
    )


def _below_cast(c: Canonical, key: Key, nodes: set[fx.Node]) -> Key:
    """Return the base of what a value is cast from, or the value."""
    form = c.forms[key]
    if not isinstance(form, Cast) or not _is_same(c, form.value):
        return key
    nodes |= {owner_of(key), *(owner_of(k) for k in c.through(form.value))}
    return c.base(form.value)[0]


def _is_same(c: Canonical, key: Key) -> bool:
    """Return whether a value is its base as it lies."""
    base, dims = c.base(key)
    return dims == views.identity(c.shape(base) or ())


def _vector(c: Canonical, key: Key, nodes: set[fx.Node]) -> tuple[Key, float] | None:
    """Return (stored vector, number added to it) of a gain, cast or not."""
    base, offset = c.base(key)[0], 0.0
    form = c.forms[base]
    if isinstance(form, Add) and isinstance(form.b, float) and form.alpha == form.beta == 1.0:
        offset, base = form.b, c.base(form.a)[0]
        form = c.forms[base]
    if isinstance(form, Cast):
        base = c.base(form.value)[0]
    if not c.is_constant(base) or len(c.shape(base) or ()) != 1:
        return None
    return base, offset
