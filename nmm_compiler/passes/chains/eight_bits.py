"""Weights stored in eight bits: the bytes and the scales that a kernel reads as they are.

    mul(clamp(to(view(bytes, float8_e4m3fn), bfloat16), -240, 240), scale)   ->   bytes, scale

The clamp says that the bytes mean the same in NKI's float8_e4m3, which ends at 240. Where a kernel
cannot read the bytes, the weight is made of them at each call, and the report says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.kernels.number_formats import FP8_MAX
from nmm_compiler.passes.chains.chain import Chain
from nmm_compiler.passes.chains.linear_map import Weight
from nmm_compiler.passes.graph import views
from nmm_compiler.passes.graph.canonical import Canonical
from nmm_compiler.passes.graph.canonical_forms import Cast, Key, Leaf, Opaque, Scale, owner_of
from nmm_compiler.passes.graph.distributed import is_distributed

FP8 = torch.float8_e4m3fn
NAMES = {FP8: "fp8", torch.float8_e5m2: "float8_e5m2", torch.int8: "int8", torch.uint8: "uint8"}
# dtypes of x that TensorE multiplies by fp8
X_DTYPES = (torch.bfloat16, torch.float16)
_STEPS = 4


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
    def info(self) -> dict[str, str]:
        """Return what a match's data says of weights that are read as stored."""
        return {"weights": self.format} if self.stored else {}

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


def read_bytes(c: Canonical, weight: Weight) -> tuple[str, Bytes | str] | None:
    """Return (format, how a weight of eight bits is stored or why no kernel reads it so).

    None for a weight of another kind.
    """
    key, scale, bound = weight.key, None, False
    for _ in range(_STEPS):
        form = c.forms.get(key)
        if isinstance(form, Leaf):
            break
        inner: Key | None = None
        if isinstance(form, Scale) and scale is None and not isinstance(form.factor, float):
            sides = (form.value, form.factor)
            inner = next((s for s in sides if c.shape(s) == c.shape(key)), None)
            scale = form.factor if inner is form.value else form.value
        elif isinstance(form, Cast):
            inner = form.value
        elif isinstance(form, Opaque) and isinstance(key, fx.Node):
            limits = [key.kwargs.get("min"), key.kwargs.get("max")]
            limits = [a for a in (*key.args[1:], *limits) if a is not None]
            if form.name in ("clamp", "clip") and limits == [-FP8_MAX, FP8_MAX]:
                inner, bound = form.inputs[0], True
        if inner is None or c.base(inner)[1] != views.identity(c.shape(key) or ()):
            return None
        key = c.base(inner)[0]
    dtype = c.dtype(key)
    if not isinstance(c.forms.get(key), Leaf) or dtype not in NAMES:
        return None
    return NAMES[dtype], _stored(c, weight, key, scale, bound)


def _stored(
    c: Canonical, weight: Weight, values: Key, scale: Key | None, bound: bool
) -> Bytes | str:
    if c.dtype(values) != FP8:
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
        shapes = [(1,), (1, 1), (weight.n, 1)]
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
    if any(weight.factors for weight in weights):
        return PLAIN
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
    if dtype not in X_DTYPES:
        name = str(dtype).removeprefix("torch.")
        why = why or f"x is {name}; cast the model to bfloat16"
    return Kept(format, () if why else stored, why)


def beside_products(chain: Chain) -> str:
    """Return what stands around the products of a chain that no kernel of fp8 weights computes."""
    steps = (*chain.middle, *chain.after)
    if chain.base is not None or chain.more:
        return "the products of a base, or of several adapters, are added"
    if chain.middle or chain.inner is not None:
        return "something stands between the products"
    if any(s.kind != "bias" and (s.key is not None or s.number != 1.0) for s in steps):
        return "a scale stands behind the products"
    return ""


def kept_together(rule: str, each: Sequence[Kept]) -> Kept:
    """Return how a call of several chains reads their weights: every u, then every v."""
    named = [kept for kept in each if kept.format]
    if not named:
        return PLAIN
    if not all(kept.stored for kept in each):
        why = next(
            (kept.reason for kept in named if kept.reason), "the call has other weights, too"
        )
        return Kept(named[0].format, (), why)
    firsts = each[:1] if rule == "shared_u" else each
    stored = (*(kept.stored[0] for kept in firsts), *(kept.stored[1] for kept in each))
    return Kept(named[0].format, stored)


def kept_of_gated(c: Canonical, gated: Any) -> Kept:
    """Return how the call of a gated MLP reads its weights."""
    projections = gated.projections()
    weights = [w for p in projections for w in p.weights]
    plain = all(p.only_bias() and not p.middle for p in projections)
    why = "" if plain else "something beside biases stands around a projection"
    return keep(c, weights, c.dtype(gated.node), why)
