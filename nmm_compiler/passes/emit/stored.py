"""Weights of eight bits or fewer as they are stored: which calls read the bytes, or why none does.

    mul(clamp(to(view(bytes, float8_e4m3fn), bfloat16), -240, 240), scale)   ->   bytes, scale
    nmm.dequantize(values, scale, "mxfp4", dtype)                            ->   values, scale

The clamp says that the bytes mean the same in NKI's float8_e4m3, which ends at 240. torchao's
MXTensor is read as stored, too: the graph takes its data, and its scales, which lie in blocks of
128 rows and are put in order at each call. Where no kernel can read the bytes, the weight is made
of them at each call, and the report says why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nmm_compiler.kernels.number_formats import FP8_MAX
from nmm_compiler.kernels.packed_formats import MX
from nmm_compiler.passes.chains.chain import ConstantMatrix
from nmm_compiler.passes.emit.editor import Editor, aten
from nmm_compiler.passes.graph.canonical import (
    TORCHAO_MX,
    Canonical,
    Cast,
    Key,
    Leaf,
    Opaque,
    Scale,
    dtype_name,
    owner_of,
)
from nmm_compiler.passes.graph.read_graph import is_distributed

STORED_FP8 = torch.float8_e4m3fn
NAMES = {
    STORED_FP8: "fp8",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
# dtypes of x that TensorE multiplies by fp8
X_DTYPES = (torch.bfloat16, torch.float16)
_DEQUANTIZE = "nmm::dequantize"
_LEAVES = ("get_attr", "placeholder")
_TORCHAO_FORMATS = {
    "float4_e2m1fn_x2": "mxfp4", "float8_e4m3fn": "mxfp8", "float8_e5m2": "mxfp8_e5m2",
}  # fmt: skip
_WRITTEN = "the graph writes to it, or to what is made of it, in place"
_NOT_WHOLE = (
    "its bytes are no stored tensor of its shape on one device, or its scale is not one number, or "
    "one for each output"
)


@dataclass(frozen=True)
class Stored:
    """A weight of few bits: its format, its values and the scale that multiplies them.

    Both are leaves of the graph, so that a call may read them wherever it stands; torchao's
    MXTensor is both of them. reason: why no kernel reads them, "" where one does.
    """

    format: str
    values: Any = None
    scale: Any = None
    reason: str = ""

    @property
    def is_torchao(self) -> bool:
        """Whether one tensor holds values and scales."""
        return self.values is self.scale

    def values_node(self, editor: Editor, weight: ConstantMatrix) -> fx.Node:
        """Emit the values of a weight: bytes of MX blocks, or fp8 numbers as a matrix."""
        node = editor.node(self.values)
        if self.is_torchao:
            return _as_dtype(editor, editor.call(getattr, node, "qdata"), torch.uint8)
        if self.format in MX:
            return node
        return editor.reshape(_as_dtype(editor, node, STORED_FP8), weight.stored)

    def scale_node(self, editor: Editor) -> fx.Node:
        """Emit the scales: of MX blocks [n, k / 32], else as a vector."""
        node = editor.node(self.scale)
        if self.is_torchao:
            return _torchao_scales(editor, node)
        if self.format in MX:
            return node
        return editor.reshape(node, (math.prod(editor.shape(node)),))


def _as_dtype(editor: Editor, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Emit the bytes of a tensor seen as another dtype."""
    if editor.value(node).dtype == dtype:
        return node
    return editor.call(aten.view.dtype, node, dtype)


def _torchao_scales(editor: Editor, node: fx.Node) -> fx.Node:
    """Emit the scales [n, k / 32] of torchao's MXTensor."""
    value = editor.value(node)
    scale = editor.call(getattr, node, "scale")
    scale = editor.call(aten.view.dtype, scale, torch.uint8)
    n, blocks = value.shape[0], value.shape[1] // value.block_size
    if value.is_swizzled_scales:  # row 32 a + b of 128 rows is row b, at 4 a, of [32, 16]
        high, wide = -(-n // 128), -(-blocks // 4)
        scale = editor.reshape(scale, (high, wide, 32, 4, 4))
        scale = editor.reshape(editor.permute(scale, (0, 3, 2, 1, 4)), (128 * high, 4 * wide))
        scale = editor.call(aten.slice.Tensor, scale, 0, 0, n)
        scale = editor.call(aten.slice.Tensor, scale, 1, 0, blocks)
    return editor.reshape(scale, (n, blocks))


@dataclass(frozen=True)
class Scaled:
    """A value as numbers of the graph times a tensor and a number; bound: they were clamped to the
    range of NKI's float8_e4m3. written: the graph writes to them, or to what is made of them."""

    value: Key
    scale: Key | None
    number: float
    bound: bool
    written: bool


def unscaled(c: Canonical, key: Key) -> Scaled | None:
    """Return the fp8 numbers, or the leaf, that a value is made of by casts, scales and clamps."""
    scale: Key | None = None
    number, bound, written = 1.0, False, False
    while c.is_whole(key):
        key = c.base(key)[0]
        form = c.forms.get(key)
        written = written or c.effects.is_written(owner_of(key))
        if isinstance(form, Leaf) or c.dtype(key) == STORED_FP8:
            return Scaled(key, scale, number, bound, written)
        inner: Key | None = None
        if isinstance(form, Cast):
            inner = form.value
        elif isinstance(form, Scale) and isinstance(form.factor, float):
            inner, number = form.value, number * form.factor
        elif isinstance(form, Scale) and scale is None:
            orders = (pair for pair in form.orders if c.shape(pair[0]) == c.shape(key))
            inner, scale = next(orders, (None, None))
        else:
            inner = clamped(c, key)
            bound = bound or inner is not None
        if inner is None:
            break
        key = inner
    return None


def clamped(c: Canonical, key: Key) -> Key | None:
    """Return what a value is where it lies in the range of NKI's float8_e4m3, else None."""
    form = c.forms.get(key)
    if not isinstance(key, fx.Node) or not isinstance(form, Opaque):
        return None
    limits = [*key.args[1:], key.kwargs.get("min"), key.kwargs.get("max")]
    whole = [limit for limit in limits if limit is not None] == [-FP8_MAX, FP8_MAX]
    return form.inputs[0] if whole and form.name in ("clamp", "clip") else None


def read_eight_bits(c: Canonical, weight: ConstantMatrix, by_input: bool = False) -> Stored | None:
    """Return how a weight that casts and scales make of eight bits is stored; None for another one.

    by_input: its scale is to be one for each input.
    """
    numbers = unscaled(c, weight.key)
    if numbers is None or numbers.number != 1.0 or not isinstance(c.forms.get(numbers.value), Leaf):
        return None
    format = NAMES.get(c.dtype(numbers.value))  # type: ignore[arg-type]
    if format is None:
        return None
    values, scale = owner_of(numbers.value), numbers.scale
    if values.op not in _LEAVES:  # bytes seen as fp8
        values = next(iter(values.all_input_nodes), values)
    outputs = weight.n if weight.layout == "row" else 1
    shapes = [(1,), (1, 1), (outputs,), (1, outputs)]
    if weight.layout == "col":
        shapes = [(1, weight.k)] if by_input else [(1,), (1, 1), (weight.n, 1)]
    why = ""
    if numbers.written:
        why = _WRITTEN
    elif format != "fp8":
        why = "no kernel multiplies such numbers; quantize_factors(model, 'fp8') is kept"
    elif not numbers.bound:
        why = (
            "numbers of float8_e4m3fn may lie beyond 240, where NKI's float8_e4m3 ends; quantize "
            "to 240 and clamp(-240, 240) what is cast, as nmm.quantize_factors does"
        )
    elif scale is None or c.shape(scale) not in shapes or c.shape(values) != weight.stored:
        why = _NOT_WHOLE
    stored = Stored(format, values, None if scale is None else c.base(scale)[0], why)
    return _where_it_lies(c, weight, stored, c.shape(numbers.value))


def _where_it_lies(c: Canonical, weight: ConstantMatrix, stored: Stored, shape: Any) -> Stored:
    """Return how a weight whose numbers have a shape is stored, with why no kernel reads them."""
    both, why = (stored.values, stored.scale), stored.reason
    leaves = all(isinstance(one, fx.Node) and one.op in _LEAVES for one in both)
    if not why and (not leaves or is_distributed(c.tensor(stored.values))):
        why = _NOT_WHOLE
    if not why and c.effects.is_written(owner_of(c.base(weight.key)[0]), *both):
        why = _WRITTEN
    turned = stored.format in MX and weight.layout != "col"
    if not why and (turned or shape != weight.stored):
        why = "it is read transposed, or in part"
    return dataclasses.replace(stored, reason=why)


def read_factors(
    c: Canonical, weights: Sequence[ConstantMatrix], dtype: torch.dtype | None, why: str
) -> tuple[Stored, ...]:
    """Return how a call that computes in a dtype reads its weights of eight bits: each of them, or
    one with the reason why it reads none; () without such weights.

    why: a reason of the call's own against kernels of fp8 weights, or "".
    """
    read = [read_eight_bits(c, weight) for weight in weights]
    held = [one for one in read if one is not None]
    if not held:
        return ()
    refused = [one for one in held if one.reason]
    if refused:
        return (refused[0],)
    if len(held) < len(weights):
        why = why or "the call has other weights, too"
    if not c.chip.float8_kernels:
        why = f"{c.chip.name} has no fp8 kernels; trn2 and trn3 have"
    why = why or _not_16_bits(dtype)
    return (Stored(held[0].format, reason=why),) if why else tuple(held)


def _not_16_bits(dtype: torch.dtype | None) -> str:
    """Return why kernels of few-bit weights take no x of a dtype, or ""."""
    return "" if dtype in X_DTYPES else f"x is {dtype_name(dtype)}; cast the model to bfloat16"


def read_base(
    c: Canonical, weight: ConstantMatrix, dtype: torch.dtype | None, why: str = ""
) -> Stored | None:
    """Return how a call that computes in a dtype reads a dense weight of few bits, which may have
    a branch; None for another one.

    why: a reason of the call's own against kernels of such weights, or "".
    """
    node = owner_of(c.base(weight.key)[0])
    form = c.forms.get(node)
    if node in c.quantized:
        stored = _torchao(c, weight, node)
    elif isinstance(form, Opaque) and form.name == _DEQUANTIZE:
        stored = _dequantized(c, weight, node)
    else:
        if dtype == torch.float16:  # factors divided by small scales may leave its range
            why = why or "x is float16; cast the model to bfloat16"
        factors = read_factors(c, (weight,), dtype, why)
        return factors[0] if factors else None
    why = stored.reason or why or _not_16_bits(dtype)
    return Stored(stored.format, reason=why) if why else stored


def _dequantized(c: Canonical, weight: ConstantMatrix, node: fx.Node) -> Stored:
    """Return how a weight that nmm.dequantize makes is stored."""
    values, scale, format, _ = node.args
    why = "" if format in MX else "no kernel multiplies such numbers; take base='mxfp4' or 'fp8'"
    return _where_it_lies(c, weight, Stored(str(format), values, scale, why), c.shape(node))


def _torchao(c: Canonical, weight: ConstantMatrix, node: fx.Node) -> Stored:
    """Return how a leaf that is a quantized weight [n, k], as torchao's are, is stored."""
    value, kind = c.values[node], c.subclasses[node]
    form = _TORCHAO_FORMATS.get(str(getattr(value, "elem_dtype", "")).removeprefix("torch."))
    if kind != TORCHAO_MX or form is None or value.block_size != MX[form].block:
        why = "no kernel reads it; take torchao's MX formats, or compress(base='mxfp4' or 'fp8')"
        return Stored(kind, reason=why)
    stored = Stored(form, node, node)
    return _where_it_lies(c, weight, stored, (*value.qdata.shape[:1], weight.k))
