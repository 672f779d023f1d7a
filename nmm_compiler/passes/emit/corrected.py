"""Calls of nmm.corrected_matmul: a few-bit weight read as it is stored, with branches or alone.

    linear(x, nmm.dequantize(values, scale, "mxfp4", dtype), b) + s * linear(linear(x, A), B)
      ->   nmm.corrected_matmul(x, values, scale, A, s B, b, format="mxfp4")

Where A is fp8 numbers with a scale a row, and B such with a scale a column, the call reads both as
they are stored. fp8 weights are those of `calls.py`. torchao's MXTensor is read
as stored, too: the graph takes its data, and its scales, which lie in blocks of 128 rows and are
put in order at each call. Where no kernel reads the bytes, the weight is multiplied out at each
call, and the report says why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from nmm_compiler.errors import NmmError
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.ops.linear import CORRECTED, CORRECTED_SHARED
from nmm_compiler.passes.chains.chain import Chain, Weight
from nmm_compiler.passes.emit.calls import (
    WRITTEN,
    Bytes,
    Call,
    Kept,
    LowRankCall,
    SharedCall,
    beside_products,
    fold_chain,
    join,
    keep,
    not_16_bits,
    one_dim,
    plus,
    read_bytes,
    scales_of,
    times,
    weight_nodes,
)
from nmm_compiler.passes.emit.editor import Editor, aten
from nmm_compiler.passes.graph.canonical import TORCHAO_MX, Canonical, Key, Opaque, owner_of
from nmm_compiler.passes.graph.read_operations import is_distributed

_DEQUANTIZE = "nmm::dequantize"
_LEAVES = ("get_attr", "placeholder")
_TORCHAO_FORMATS = {
    "float4_e2m1fn_x2": "mxfp4", "float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8_e5m2",
}  # fmt: skip


def read_stored(c: Canonical, weight: Weight, dtype: torch.dtype | None, why: str) -> Kept:
    """Return how a call that computes in a dtype reads a weight of eight bits or fewer.

    why: a reason of the call's own against kernels of such weights, or "".
    """
    key = c.base(weight.key)[0]
    form, node = c.forms.get(key), owner_of(key)
    if node in c.quantized:
        return _read_subclass(c, weight, node, why or not_16_bits(dtype))
    if not isinstance(form, Opaque) or form.name != _DEQUANTIZE:
        if dtype == torch.float16:  # factors divided by small scales may leave its range
            why = why or "x is float16; cast the model to bfloat16"
        return keep(c, (weight,), dtype, why)
    values, scale, format, _ = node.args
    if not all(isinstance(one, fx.Node) and one.op in _LEAVES for one in (values, scale)):
        why = "its bytes or its scales are no stored tensors"
    elif any(c.effects.is_written(one) for one in (node, values, scale)):  # type: ignore[arg-type]
        why = WRITTEN
    elif is_distributed(c.tensor(values)):  # type: ignore[arg-type]
        why = "its bytes are cut over devices"
    elif format not in MX:
        why = "no kernel multiplies such numbers; take base='mxfp4' or 'fp8'"
    elif weight.layout != "col" or c.shape(node) != weight.stored:
        why = "it is read transposed, or in part"
    why = why or not_16_bits(dtype)
    stored = () if why else (Bytes(values, scale),)  # type: ignore[arg-type]
    return Kept(str(format), stored, why)


def _read_subclass(c: Canonical, weight: Weight, node: fx.Node, why: str) -> Kept:
    """Return how a call reads a leaf that holds a quantized weight [n, k], as torchao's do."""
    value, kind = c.values[node], c.subclasses[node]
    form = _TORCHAO_FORMATS.get(str(getattr(value, "elem_dtype", "")).removeprefix("torch."))
    if kind != TORCHAO_MX or form is None or value.block_size != MX[form].block:
        why = "no kernel reads it; take torchao's MX formats, or compress(base='mxfp4' or 'fp8')"
        return Kept(kind, (), why)
    if c.effects.is_written(node):
        why = WRITTEN
    if weight.layout != "col" or tuple(value.qdata.shape[:1]) != weight.stored[:1]:
        why = "it is read transposed, or in part"
    return Kept(form, () if why else (Bytes(node, node),), why)


def _parts_of(editor: Editor, node: fx.Node) -> dict[str, Any]:
    """Emit bytes [n, k bits / 8] and scales [n, k / 32] of torchao's MXTensor."""
    value = editor.value(node)
    data = editor.call(getattr, node, "qdata")
    scale = editor.call(getattr, node, "scale")
    if editor.value(data).dtype != torch.uint8:
        data = editor.call(aten.view.dtype, data, torch.uint8)
    scale = editor.call(aten.view.dtype, scale, torch.uint8)
    n, blocks = value.shape[0], value.shape[1] // value.block_size
    if value.is_swizzled_scales:  # row 32 a + b of 128 rows is row b, at 4 a, of [32, 16]
        high, wide = -(-n // 128), -(-blocks // 4)
        scale = editor.reshape(scale, (high, wide, 32, 4, 4))
        scale = editor.reshape(editor.permute(scale, (0, 3, 2, 1, 4)), (128 * high, 4 * wide))
        scale = editor.call(aten.slice.Tensor, scale, 0, 0, n)
        scale = editor.call(aten.slice.Tensor, scale, 1, 0, blocks)
    return {"w": data, "w_scale": editor.reshape(scale, (n, blocks))}


def with_base(c: Canonical, call: LowRankCall) -> LowRankCall:
    """Return the call that reads its base as it is stored, where it is of eight bits or fewer."""
    chain = call.chain
    if chain.base is None:
        return call
    why = "something stands between its factors" if chain.inner is not None else ""
    why = "several devices share it" if chain.tp > 1 else why
    kept = read_stored(c, chain.base.weight, c.dtype(call.final), why)
    return _read(c, call, chain.base.weight, kept) if kept.format else call


def _fp8_branch(c: Canonical, chain: Chain) -> tuple[Bytes, Bytes] | None:
    """Return u and v of a branch of fp8 numbers as they are stored; None for any other."""
    plain = chain.second is not None and not chain.more and not chain.middle
    steps = [step for step in chain.after if step.kind != "bias"]
    if not plain or any(step.key is not None for step in steps):
        return None
    found = read_bytes(c, chain.u), read_bytes(c, chain.v, by_input=True)
    stored = [own for form, own in filter(None, found) if form == "fp8" and isinstance(own, Bytes)]
    if len(stored) < 2 or chain.v.layout != "col":
        return None
    of_rank = c.shape(stored[0].scale) in ((chain.r, 1), (chain.r,))
    return (stored[0], stored[1]) if of_rank else None


def alone(c: Canonical, chain: Chain) -> LowRankCall | None:
    """Return the call of one product with a weight of few bits; None for any other.

    Its `kept` has a reason where no kernel reads the weight.
    """
    final = owner_of(chain.out)
    kept = read_stored(c, chain.u, c.dtype(final), "")
    if not kept.format or not chain.only_bias() or chain.addend is not None:
        return None
    call = LowRankCall.of(c, dataclasses.replace(chain, base=chain.first), CORRECTED.name)
    return _read(c, call, chain.u, kept)


def _read(c: Canonical, call: LowRankCall, weight: Weight, kept: Kept) -> LowRankCall:
    if kept.stored:
        fields = vars(call) | {"op": CORRECTED.name, "format": kept.format, "weight": weight}
        made = CorrectedCall(**fields, blocks=kept.stored[0])
        if kept.format in MX:
            made.branch = _fp8_branch(c, call.chain)
            made.kept = call.kept if made.branch is None else Kept()
        try:
            made.spec(c).check(c.chip)
            return made
        except NmmError as error:
            kept = Kept(kept.format, (), str(error))
    return dataclasses.replace(call, kept=kept, base=True)


@dataclasses.dataclass
class CorrectedCall(LowRankCall):
    """nmm.corrected_matmul. Without a second product the chain is of the stored weight alone."""

    format: str = field(kw_only=True)
    blocks: Bytes = field(kw_only=True)
    weight: Weight = field(kw_only=True)
    branch: tuple[Bytes, Bytes] | None = None

    @property
    def single(self) -> bool:
        """Whether the weight has no branch."""
        return self.chain.second is None

    @property
    def ways(self) -> dict[str, str]:
        """The keywords that several calls need alike to be one."""
        said = {"format": self.format, "w_layout": self.weight.layout}
        if not self.single:
            said |= {"u_layout": self.chain.u.layout, "v_layout": self.chain.v.layout}
            said["branch"] = "fp8" if self.branch else ""  # no keyword: what two calls have alike
        return said

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        if not self.single:
            return super().info() | {"base_weight": self.format}
        return Call.info(self) | {
            "r": 0, "bias": self.chain.biased, "activation": self.chain.activation, "base": True,
            "base_weight": self.format, "chains": 1,
        }  # fmt: skip

    def notes(self) -> tuple[str, ...]:
        """Return what the reader should know about rounding and per-call work."""
        notes: tuple[str, ...] = () if self.single or self.branch else super().notes()
        notes += ("the fp8 branch is read as stored: a byte an element",) * bool(self.branch)
        if self.format not in MX:
            return (*notes, f"the {self.format} weight is read as stored: a byte an element")
        bits = MX[self.format].bits
        read = f"the {self.format} weight is read as stored: {bits} bits an element"
        notes = (*notes, read, "a kernel rounds x to mxfp8 beside it")
        if self.blocks.values is self.blocks.scale:
            notes = (*notes, "the scales of torchao's weight are put in order at each call")
        return notes

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        chain, blocks = self.chain, self.blocks
        made: dict[str, Any] = {**self.ways, "activation": chain.activation}
        if blocks.values is blocks.scale:
            made |= _parts_of(editor, editor.node(blocks.values))
        elif self.format in MX:
            made["w"] = editor.node(blocks.values)
            made["w_scale"] = editor.node(blocks.scale)
        else:
            (made["w"],) = weight_nodes(editor, (self.weight,), (blocks,))
            (made["w_scale"],) = scales_of(editor, Kept(self.format, (blocks,)))
        if self.branch is not None:
            made |= self._branch_operands(editor)
        elif not self.single:
            folded = join(editor, [fold_chain(editor, part) for part in (chain, *chain.more)])
            v = times(editor, folded.v, folded.scale)
            return made | {"u": folded.u, "v": v, "bias": folded.bias}
        for step in chain.steps:
            if step.key is not None:  # else times one
                own = one_dim(editor, step.key, self.n)
                made["bias"] = plus(editor, made.get("bias"), own, step.number)
        return made

    def _branch_operands(self, editor: Editor) -> dict[str, Any]:
        """Emit u and v as they are stored, and the scales of the rank: their product, times what
        stands behind the branch."""
        chain, branch = self.chain, self.branch
        assert branch is not None
        u, v = weight_nodes(editor, (chain.u, chain.v), branch)
        first, last = (one_dim(editor, one.scale, chain.r) for one in branch)
        scale = editor.call(aten.mul.Tensor, first, last)
        number = math.prod(step.number for step in chain.after if step.kind != "bias")
        return {"u": u, "v": v, "branch_scale": times(editor, scale, number)}


def lists_of(editor: Editor, calls: Sequence[CorrectedCall]) -> dict[str, Any]:
    """Emit the operands of linears of one call; return them as lists, and what they have alike."""
    editor.hoist([key for one in calls for key in (one.blocks.values, one.blocks.scale)])
    made = [one.arguments(editor) for one in calls]
    lists = {"w": "ws", "w_scale": "w_scales", "u": "us", "v": "vs", "bias": "biases"}
    if any("branch_scale" in one for one in made):  # all have a branch alike
        lists["branch_scale"] = "branch_scales"
    named = {many: [one.get(name) for one in made] for name, many in lists.items()}
    ways = {name: way for call in calls for name, way in call.ways.items()}
    return ways | named


@dataclasses.dataclass
class SharedCorrectedCall(SharedCall):
    """nmm.corrected_matmul_shared_x: several weights of few bits that multiply one x."""

    @property
    def each(self) -> list[CorrectedCall]:
        """The calls that become one."""
        return [one for one in self.members if isinstance(one, CorrectedCall)]

    def info(self) -> dict[str, Any]:
        """Return what a report says about the call."""
        return super().info() | {"base_weight": self.each[0].format}

    def arguments(self, editor: Editor) -> dict[str, Any]:
        """Emit the operands behind x; return them and the keywords, named as in the schema."""
        return lists_of(editor, self.each)


def several(c: Canonical, rule: str, calls: Sequence[LowRankCall]) -> SharedCall:
    """Return the call that several calls of one x become."""
    if isinstance(calls[0], CorrectedCall):
        return SharedCorrectedCall.of(CORRECTED_SHARED.name, calls)
    call = SharedCall.of(f"lowrank_matmul_{rule}", calls)
    weights = [*(chain.u for chain in call.firsts), *(chain.v for chain in call.chains)]
    why = next(filter(None, map(beside_products, call.chains)), "")
    call.kept = keep(c, weights, c.dtype(call.final), why)
    return call


def made_of_leaves(calls: Sequence[LowRankCall]) -> set[Key]:
    """Return the values that calls do not read, but the leaves that these are made of."""
    found: set[Key] = set()
    stored = all(call.kept.stored for call in calls)
    for call in calls:
        reads_bytes = stored
        if isinstance(call, CorrectedCall):
            found.add(call.weight.key)
            reads_bytes = call.branch is not None
        if reads_bytes:
            found |= {call.chain.u.key, call.chain.v.key}
    return found
