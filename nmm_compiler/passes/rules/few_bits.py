"""Rules `quantized` and `static_fp8`: a product with a weight of few bits, without a branch.

    linear(x, nmm.dequantize(values, scale, "mxfp4", dtype), b)
      ->   nmm.corrected_matmul(x, values, scale, None, None, b, format="mxfp4")

    q = clamp(x / x_scale, -240, 240).to(float8_e4m3fn)
    linear(q.to(dtype) * x_scale, w.to(dtype) * w_scale, b)
      ->   nmm.matmul_scaled(q, [w_scale * x_scale], w, b, x_scale=1.0)

Rule `lora` finds a weight of few bits beside low-rank branches, and comes first. With fp8 numbers
on both sides, TensorE of trn2 and trn3 contracts twice as many a pass (`double_row`), which pays
with many tokens. The rounding of x stays in the graph: several products may read it. An x or a
weight whose numbers may lie beyond 240, where NKI's float8_e4m3 ends, is refused.
"""

from __future__ import annotations

import math

from torch import fx

from nmm_compiler.passes.chains.chain import Chain, read_projection
from nmm_compiler.passes.chains.safety import Refusal, covered, crossed
from nmm_compiler.passes.emit.calls import Call, best_source, with_base
from nmm_compiler.passes.emit.stored import (
    STORED_FP8,
    Scaled,
    Stored,
    clamped,
    read_factors,
    unscaled,
)
from nmm_compiler.passes.graph.canonical import (
    Canonical,
    Cast,
    Key,
    Opaque,
    Product,
)
from nmm_compiler.passes.rules.base import KernelRule, Match

_SCALED_MM = "aten::_scaled_mm"


def _one_product(c: Canonical, node: fx.Node) -> Chain | None:
    """Read a node as one product, with a bias where it adds one; None for any other."""
    chain = read_projection(c, node)
    return None if chain is None or chain.second is not None or not chain.only_bias() else chain


class Quantized(KernelRule):
    """One product with a stored weight of few bits."""

    name = "quantized"
    ends_at: tuple[type, ...] = (Product,)

    def check(self, graph: Canonical, candidate: fx.Node) -> Match | Refusal | None:
        """Read the product, and check that its weight is of few bits and a kernel reads it."""
        chain = _one_product(graph, candidate)
        call = None if chain is None else with_base(graph, Call.of_chain(graph, chain))
        if chain is not None and isinstance(call, Stored):
            why = f"the {call.format} weight is multiplied out at each call: {call.reason}"
            return Refusal("few_bits", why, chain.u.key)
        return self.matched(graph, call) if isinstance(call, Call) else None


class StaticFP8(Quantized):
    """One product of fp8 x and an fp8 weight."""

    name = "static_fp8"
    ends_at = (Product, Opaque)

    def check(self, graph: Canonical, candidate: fx.Node) -> Match | Refusal | None:
        """Read both sides, and check that kernels read their numbers."""
        form = graph.forms.get(candidate)
        if isinstance(form, Opaque):
            if form.name != _SCALED_MM:
                return None
            why = (
                "the numbers of _scaled_mm may lie beyond 240, where NKI's float8_e4m3 ends; "
                "load the checkpoint with nmm_compiler.lowrank_models.static_fp8.load_static_fp8"
            )
            return Refusal("few_bits", why, candidate)
        chain = _one_product(graph, candidate)
        rounded = None if chain is None else _rounded(graph, chain.first.x)
        if chain is None or rounded is None:
            return None
        (stored,) = read_factors(graph, chain.factors, graph.dtype(candidate), "") or (None,)
        why = "the weight is no fp8 numbers as they are stored" if stored is None else stored.reason
        why = why or ("" if _bounded(graph, rounded.value) else "x may lie beyond 240")
        if why:
            why = f"fp8 x is multiplied as 16 bits: {why}"
            return Refusal("few_bits", why, candidate, report_even_if_superseded=True)
        moved = covered(graph, candidate, [rounded.value, *chain.operands[1:]])
        unsafe = crossed(graph, moved, candidate, [rounded.value])
        if unsafe is not None:
            return unsafe
        source = best_source(graph, rounded.value, chain.first.x_dims, chain.u.k, candidate)
        if not source.is_row():
            return Refusal("shape", "x is rearranged behind its rounding", candidate)
        call = Call.of_chain(graph, chain, "matmul", source=source, rounded=rounded)
        return self.matched(graph, call)


def _rounded(c: Canonical, x: Key) -> Scaled | None:
    """Return the fp8 numbers that x is made of, times one number or two; None for any other x."""
    numbers = unscaled(c, x)
    if numbers is None or numbers.written or numbers.bound or c.dtype(numbers.value) != STORED_FP8:
        return None
    one = numbers.scale is None or math.prod(c.shape(numbers.scale) or (0,)) == 1
    return numbers if one and (numbers.scale is None or c.is_weight(numbers.scale)) else None


def _bounded(c: Canonical, value: Key) -> bool:
    """Return whether fp8 numbers are made of what is clamped to those of NKI."""
    form = c.forms.get(value)
    inner = c.base(form.value)[0] if isinstance(form, Cast) else None
    if not isinstance(inner, fx.Node) or c.effects.is_written(inner):
        return False
    return clamped(c, inner) is not None
