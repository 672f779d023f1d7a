"""Calls of nmm.corrected_matmul: an MX weight read as it is stored, with branches or alone.

    linear(x, nmm.dequantize(values, scale, "mxfp4", dtype), b) + s * linear(linear(x, A), B)
      ->   nmm.corrected_matmul(x, values, scale, A, s B, b, format="mxfp4")

Where no kernel reads the bytes, the weight is multiplied out at each call, and the report says why.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.linear.corrected import CorrectedSpec
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.corrected import CORRECTED
from nmm_compiler.passes.chains.chain import Chain, Weight
from nmm_compiler.passes.emit.calls import (
    PLAIN,
    Bytes,
    Kept,
    LowRankCall,
    best_source,
    fold_chain,
    join,
    one_dim,
    plus,
    times,
)
from nmm_compiler.passes.emit.editor import Editor
from nmm_compiler.passes.graph.canonical import Canonical, Opaque, owner_of

_DEQUANTIZE = "nmm::dequantize"


def read_blocks(c: Canonical, weight: Weight) -> tuple[str, Bytes] | None:
    """Return the format and the bytes of a weight of MX blocks; None for any other."""
    form = c.forms.get(c.base(weight.key)[0])
    node = owner_of(c.base(weight.key)[0])
    if not isinstance(form, Opaque) or form.name != _DEQUANTIZE or weight.layout != "col":
        return None
    values, scale, format, _ = node.args
    leaves = ("get_attr", "placeholder")
    stored = all(isinstance(one, fx.Node) and one.op in leaves for one in (values, scale))
    if format not in MX or not stored or c.shape(node) != weight.stored:
        return None
    return str(format), Bytes(values, scale)  # type: ignore[arg-type]


def with_blocks(c: Canonical, call: LowRankCall) -> LowRankCall:
    """Return the call that reads its base as it is stored, where it is of MX blocks."""
    chain = call.chain
    assert chain is not None
    found = None if chain.base is None else read_blocks(c, chain.base.weight)
    if found is None:
        return call
    if chain.inner is not None or call.tp > 1:
        why = "something stands between its factors, or several devices share it"
        return dataclasses.replace(call, kept=Kept(found[0], (), why), base=True)
    return _read(c, call, *found)


def alone(c: Canonical, chain: Chain) -> LowRankCall | None:
    """Return the call of one product with a weight of MX blocks; None for any other."""
    found = read_blocks(c, chain.u)
    if found is None or not chain.only_bias() or chain.addend is not None:
        return None
    final = owner_of(chain.out)
    call = LowRankCall(
        op=CORRECTED.name,
        source=best_source(c, chain.first.x, chain.first.x_dims, chain.u.k, final),
        final=final,
        out_dims=chain.out_dims,
        n=chain.n,
        covered=chain.nodes,
        chain=dataclasses.replace(chain, base=chain.first),
    )
    made = _read(c, call, *found)
    return made if isinstance(made, CorrectedCall) else None


def _read(c: Canonical, call: LowRankCall, format: str, stored: Bytes) -> LowRankCall:
    fields = {f.name: getattr(call, f.name) for f in dataclasses.fields(LowRankCall)}
    fields |= {"op": CORRECTED.name, "kept": PLAIN, "base": False, "made": False}
    made = CorrectedCall(**fields, format=format, blocks=stored)
    try:
        made.spec(c).check(c.chip)
    except NmmError as error:
        return dataclasses.replace(call, kept=Kept(format, (), str(error)), base=True)
    return made


@dataclasses.dataclass
class CorrectedCall(LowRankCall):
    """nmm.corrected_matmul. Without a second product the chain is of the stored weight alone."""

    format: str = ""
    blocks: Bytes | None = None

    @property
    def _single(self) -> bool:
        assert self.chain is not None
        return self.chain.second is None

    @property
    def _biased(self) -> bool:
        assert self.chain is not None
        return any(step.kind == "bias" for step in (*self.chain.middle, *self.chain.after))

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        assert self.chain is not None
        if not self._single:
            return super().info() | {"base_weight": self.format}
        m = self.tokens_count()
        return {
            "m": m if isinstance(m, int) else str(m), "k": self.chain.u.k, "r": 0, "n": self.n,
            "bias": self._biased, "activation": self.chain.activation, "base": True,
            "base_weight": self.format, "chains": 1,
        }  # fmt: skip

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about rounding and per-call work."""
        bits = MX[self.format].bits
        read = f"the {self.format} weight is read as stored: {bits} bits an element"
        rounded = "a kernel rounds x to mxfp8 beside it"
        return (*(() if self._single else super().notes()), read, rounded)

    def spec(self, c: Canonical) -> KernelSpec:
        """Return the spec of the weight and its branch."""
        chain = self.chain
        assert chain is not None
        return CorrectedSpec(
            **self._common(c, chain.u), n=self.n, rank=0 if self._single else chain.r,
            weight=self.format, activation=chain.activation,
            bias=self._biased,
        )  # fmt: skip

    def emit(self, c: Canonical, editor: Editor) -> fx.Node:
        """Emit the call and what surrounds it; return the node with the final value."""
        chain = self.chain
        assert chain is not None
        assert self.blocks is not None
        operands: dict[str, Any] = {
            "x": self.prepare_x(editor), "w": editor.node(self.blocks.values),
            "w_scale": editor.node(self.blocks.scale),
        }  # fmt: skip
        keywords: dict[str, Any] = {"format": self.format, "activation": chain.activation}
        if self._single:
            for step in (*chain.middle, *chain.after):
                if step.key is None:  # times one
                    continue
                own = one_dim(editor, step.key, self.n)
                operands["bias"] = plus(editor, operands.get("bias"), own, step.number)
        else:
            folded = join(editor, [fold_chain(editor, part) for part in (chain, *chain.more)])
            v = times(editor, folded.v, folded.scale)
            operands |= {"u": folded.u, "v": v, "bias": folded.bias}
            keywords |= {"u_layout": chain.u.layout, "v_layout": chain.v.layout}
        value = self.result_value(editor, operands["x"], self.n)
        y = self.op_call(editor, operands, keywords, value)
        return self.surrounded(editor, self.finish(editor, y, self.out_dims))
