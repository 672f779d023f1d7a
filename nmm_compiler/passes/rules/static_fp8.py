"""Rule `static_fp8`: a product of fp8 numbers on both sides, each side with a scale, as one call.

    q = clamp(x / x_scale, -240, 240).to(float8_e4m3fn)
    linear(q.to(dtype) * x_scale, w.to(dtype) * w_scale, b)
      ->   nmm.matmul_scaled(q, [w_scale * x_scale], w, b, x_scale=1.0)

TensorE of trn2 and trn3 contracts twice as many fp8 numbers a pass (`double_row`), which pays with
many tokens. The rounding of x stays in the graph: several products may read it. An x or a weight
whose numbers may lie beyond 240, where NKI's float8_e4m3 ends, is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch import fx

from nmm_compiler.passes.chains.chain import read_projection
from nmm_compiler.passes.chains.safety import Refusal, crossed, refuse
from nmm_compiler.passes.emit.calls import (
    STORED_FP8,
    ChainCall,
    Scaled,
    clamped,
    fold_chain,
    scales_of,
    times,
    unscaled,
)
from nmm_compiler.passes.emit.editor import Editor, aten
from nmm_compiler.passes.graph.canonical import (
    Canonical,
    Cast,
    Key,
    Opaque,
    Product,
    dtype_name,
    owner_of,
)
from nmm_compiler.passes.rules.base import KernelRule, Match
from nmm_compiler.passes.rules.lowrank import products_at

_SCALED_MM = "aten::_scaled_mm"


class StaticFP8(KernelRule):
    """One product of fp8 x and an fp8 weight."""

    name = "static_fp8"
    ends_at = (Product, Opaque)

    def pattern(self, graph: Canonical, node: fx.Node) -> Iterator[Any]:
        """Propose products, with their bias where they add one, and calls of _scaled_mm."""
        form = graph.forms.get(node)
        scaled = isinstance(form, Opaque) and form.name == _SCALED_MM
        if scaled or any(True for _ in products_at(graph, node)):
            yield node

    def check(self, graph: Canonical, candidate: fx.Node) -> Match | Refusal | None:
        """Read both sides, and check that kernels read their numbers."""
        if isinstance(graph.forms.get(candidate), Opaque):
            why = (
                "the numbers of _scaled_mm may lie beyond 240, where NKI's float8_e4m3 ends; "
                "load the checkpoint with nmm_compiler.lowrank_models.static_fp8.load_static_fp8"
            )
            return Refusal("few_bits", why, candidate)
        chain = read_projection(graph, candidate)
        if chain is None or chain.second is not None or not chain.only_bias():
            return None
        rounded = _rounded(graph, chain.first.x)
        if rounded is None or chain.addend is not None:
            return None
        call = StaticCall.of(graph, chain, "matmul", rounded.value, rounded=rounded)
        kept = call.kept
        why = kept.reason if kept.format else "the weight is no fp8 numbers as they are stored"
        why = why or ("" if _bounded(graph, rounded.value) else "x may lie beyond 240")
        if why:
            why = f"fp8 x is multiplied as 16 bits: {why}"
            return Refusal("few_bits", why, candidate, report_even_if_superseded=True)
        value = owner_of(rounded.value)
        unsafe = refuse(graph, chain.nodes, candidate, chain.operands)
        unsafe = unsafe or crossed(graph, {*chain.nodes, value}, candidate, [rounded.value])
        if unsafe is not None:
            return unsafe
        if not call.source.is_row():
            return Refusal("shape", "x is rearranged behind its rounding", candidate)
        return self.matched(graph, call)


def _rounded(c: Canonical, x: Key) -> Scaled | None:
    """Return the fp8 numbers that x is made of, times one number or two; None for any other x."""
    found = unscaled(c, x)
    if found is None or found.written or found.bound or c.dtype(found.value) != STORED_FP8:
        return None
    one = found.scale is None or math.prod(c.shape(found.scale) or (0,)) == 1
    return found if one and (found.scale is None or c.is_weight(found.scale)) else None


def _bounded(c: Canonical, value: Key) -> bool:
    """Return whether fp8 numbers are made of what is clamped to those of NKI."""
    form = c.forms.get(value)
    inner = c.base(form.value)[0] if isinstance(form, Cast) else None
    if not isinstance(inner, fx.Node) or c.effects.is_written(inner):
        return False
    return clamped(c, inner) is not None


@dataclasses.dataclass
class StaticCall(ChainCall):
    """nmm.matmul_scaled of x and a weight of fp8 numbers."""

    rounded: Scaled = dataclasses.field(kw_only=True)

    @property
    def is_whole(self) -> bool:
        """Return that the result keeps its order: no kernel before it makes fp8 numbers turned."""
        return False

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        more = {"r": 0, "bias": self.chain.biased, "x": self.kept.format, "chains": 1}
        return super().info() | more

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about rounding."""
        return ("fp8 numbers are multiplied as they are; both scales multiply the sums",)

    def x_node(self, editor: Editor) -> fx.Node:
        """Return the node of the fp8 numbers."""
        return editor.node(self.source.key)

    def result_value(self, editor: Editor, x: fx.Node) -> Any:
        """Return the metadata value of the result, which has another dtype than x."""
        return super().result_value(editor, x).to(editor.dtype)

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        chain, rounded = self.chain, self.rounded
        folded = fold_chain(editor, chain, self.kept.stored)
        (scale,) = scales_of(editor, self.kept)
        if rounded.scale is not None:
            own = editor.reshape(editor.node(rounded.scale), (1,))
            scale = editor.call(aten.mul.Tensor, scale, own)
        return {
            "scales": [times(editor, scale, rounded.number)], "w": folded.u, "bias": folded.bias,
            "x_scale": 1.0, "out_dtype": dtype_name(editor.dtype), "w_layout": chain.u.layout,
        }  # fmt: skip
