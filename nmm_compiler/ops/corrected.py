"""The op of an MX weight as it is stored, with a low-rank branch: `nmm.corrected_matmul`.

The weight is frozen: bytes [n, k bits / 8] and scales [n, k / 32] of `kernels/packed_formats.py`.
The reference multiplies it out, so that gradients reach x and the branch. A kernel rounds x to
MXFP8 beside it. Kernels take the bytes with the features first: a copy that is kept, as that of
any weight is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import SpecError, UnknownNameError
from nmm_compiler.kernels.linear.corrected import CorrectedMLPSpec, CorrectedSpec
from nmm_compiler.kernels.packed_formats import FORMATS, MX, element_values
from nmm_compiler.ops import references
from nmm_compiler.ops.definition import LAYOUTS, NORM, WHERE, Operand, Placements
from nmm_compiler.ops.launches import Launch, Transpose, dtype_name, features, weight
from nmm_compiler.ops.linear import LinearOp
from nmm_compiler.ops.operands import check_same
from nmm_compiler.ops.sharding import Part, placements

EMPTY = ("u", "v", "bias", "norm_gain", "norm_bias", "residual")
"""The operands that a call may lack."""


@torch.library.custom_op("nmm::dequantize", mutates_args=())
def dequantize(
    values: torch.Tensor, scale: torch.Tensor, format: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [n, k] in a dtype, of a format with blocks of elements."""
    form = FORMATS[format]
    if form.bits == 4:
        codes = torch.stack((values & 0xF, values >> 4), -1).flatten(1)
        table = torch.from_numpy(element_values(form)).to(values.device, dtype)
        elements = table[codes.int()]
    else:
        elements = values.view(getattr(torch, form.element_name)).to(dtype)
    if form.power_scales:
        scale = scale.view(torch.float8_e8m0fnu)
    blocks = elements.unflatten(1, (-1, form.block)) * scale.to(dtype)[..., None]
    return blocks.flatten(1)


@dequantize.register_fake
def _(values: torch.Tensor, scale: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    n, k = values.shape
    return values.new_empty(n, k * 8 // FORMATS[format].bits, dtype=dtype)


def corrected_matmul(
    x: Tensor, w: Tensor, w_scale: Tensor, u: Tensor | None = None, v: Tensor | None = None,
    bias: Tensor | None = None, *, format: str = "mxfp4", by: Any = references.ByTorch,
    **keywords: Any,
) -> Tensor:  # fmt: skip
    """Return activation(x w + (x u) v + bias), w multiplied out."""
    whole = torch.ops.nmm.dequantize(w, w_scale, format, x.dtype)
    layouts = {name: value for name, value in keywords.items() if name not in (*WHERE, "w_layout")}
    if u is None:
        layouts = {n: value for n, value in layouts.items() if n not in ("u_layout", "v_layout")}
        y: Tensor = references.matmul(x, whole, bias, w_layout="col", **layouts, by=by)
        return y
    assert v is not None
    return references.lowrank_matmul(x, u, v, bias, whole, w_layout="col", **layouts, by=by)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedOp(LinearOp):
    """The op of an MX weight and its branch."""

    @property
    def many(self) -> bool:  # type: ignore[override]
        """Whether the op returns a list of tensors."""
        return False

    def _plain(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of lowrank_matmul, or matmul, with a dense weight of no data."""
        x, w = given["x"], given["w"]
        k = w.shape[1] * 8 // MX[given["format"]].bits
        dense = w.new_empty((w.shape[0], k), dtype=x.dtype)
        more = {"inner_bias": None, "inner_gain": None} if given["u"] is not None else {}
        left_out = ("w_scale", "format") if more else ("w_scale", "format", "u", "v")
        kept = {name: value for name, value in given.items() if name not in left_out}
        return {**kept, **more, "w": dense, "w_layout": "col"}

    def fake(self, *args: Any, **kw: Any) -> Any:
        """Return empty results; raises NmmError for operands that do not fit."""
        from nmm_compiler.ops.registration import DEFINITIONS

        given = self.bound(args, kw)
        if given["format"] not in MX:
            raise UnknownNameError("format", given["format"], tuple(MX))
        for name in ("w", "w_scale"):
            if given[name].dtype != torch.uint8 or given[name].dim() != 2:
                raise SpecError(
                    f"{name} is {given[name].dtype} {tuple(given[name].shape)}; pass bytes, uint8, "
                    "[n, k bits / 8] of a weight and [n, k / 32] of its scales"
                )
        plain = self._plain(given)
        n, k = plain["w"].shape
        check_same("outputs and blocks of w and w_scale", (n, k // 32), given["w_scale"].shape)
        check_same("factors u and v", given["u"] is None, given["v"] is None)
        op = DEFINITIONS["matmul" if given["u"] is None else "lowrank_matmul"]
        names = [one.name for one in op.operands]
        keywords = {name: value for name, value in plain.items() if name not in names}
        return op.fake(*(plain[name] for name in names), **keywords)

    def lower(
        self, rows: Tensor, args: Any, kw: dict[str, Any], m: int, transpose: Transpose | None
    ) -> list[Launch]:
        """Return the launch of a call whose x, as a matrix of m tokens, is `rows`."""
        given = self.bound(args, kw)
        turned = transpose or (lambda t: t.t().contiguous())
        four = torch.int16 if MX[given["format"]].bits == 4 else torch.int32
        w, u, v = given["w"].contiguous(), given["u"], given["v"]
        named = {name: given[name] for name in EMPTY if given[name] is not None}
        if u is not None:
            for name in "uv":
                way = given[f"{name}_layout"]
                named[name] = weight(given[name], way, turned)[0]
        named |= {"x": rows, "w": turned(w.view(four)).contiguous().view(torch.uint8)}
        named["w_scale"] = turned(given["w_scale"])
        if "residual" in named and given["out_layout"] == "row":
            named["residual"] = references.as_matrix(named["residual"])
        names = ("activation", "x_layout", "out_layout", *NORM)
        fields: dict[str, Any] = {name: given[name] for name in names}
        fields |= {name: name in named for name in EMPTY[2:]}
        n, k = w.shape[0], features(given["w_scale"], "col")[0] * 32
        spec = CorrectedSpec(
            m=m, k=k, n=n, rank=0 if u is None else features(v, given["v_layout"])[0],
            weight=given["format"], dtype=dtype_name(rows),
            **fields,
        )  # fmt: skip
        return [Launch(spec, tuple(named[tensor.name] for tensor in spec.inputs()))]


_ENDS = tuple(Operand(name, "Tensor?", name) for name in ("norm_gain", "norm_bias", "residual"))
CORRECTED = CorrectedOp(
    name="corrected_matmul", bare=corrected_matmul, spec=CorrectedSpec, own=6,
    operands=(
        Operand("x", role="x"), Operand("w", role="dense", layout="w_layout"),
        Operand("w_scale", role="dense", layout="w_layout"),
        Operand("u", "Tensor?", "first", "u_layout"), Operand("v", "Tensor?", "last", "v_layout"),
        Operand("bias", "Tensor?", "bias"), *_ENDS,
    ),
    keywords={
        **NORM, "format": "mxfp4", "activation": "identity", **LAYOUTS, "u_layout": "row",
        "v_layout": "row", "w_layout": "col", **WHERE,
    },
)  # fmt: skip


def corrected_mlp(
    x: Tensor, ws: Sequence[Tensor], w_scales: Sequence[Tensor], us: Sequence[Tensor | None],
    vs: Sequence[Tensor | None], *, activation: str = "silu", x_layout: str = "row",
    out_layout: str = "row", **ways: Any,
) -> Tensor:  # fmt: skip
    """Return (activation(x gate) * (x up)) down, each weight with its branch where it has one."""
    gate, up, down = zip(ws, w_scales, us, vs, strict=True)
    inside: dict[str, Any] = {"x_layout": x_layout, "read": True, **ways}
    h = corrected_matmul(x, *gate, activation=activation, **inside)
    h = h * corrected_matmul(x, *up, **inside)
    return corrected_matmul(h, *down, out_layout=out_layout, **ways)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedMLPOp(CorrectedOp):
    """The op of a gated MLP of MX weights and their branches."""

    def fake(self, *args: Any, **kw: Any) -> Any:
        """Return an empty result; raises NmmError for operands that do not fit."""
        given = self.bound(args, kw)
        for name in ("ws", "w_scales", "us", "vs"):
            check_same(f"weights of an MLP and {name}", 3, len(given[name]))
        ways = {n: given[n] for n in ("format", "u_layout", "v_layout")}
        each = list(zip(*(given[n] for n in ("ws", "w_scales", "us", "vs")), strict=True))
        h, up = (CORRECTED.fake(given["x"], *one, x_layout=given["x_layout"], **ways)
                 for one in each[:2])  # fmt: skip
        check_same("outputs of gate and up", h.shape, up.shape)
        return CORRECTED.fake(h, *each[2], out_layout=given["out_layout"], **ways)

    def lower(
        self, rows: Tensor, args: Any, kw: dict[str, Any], m: int, transpose: Transpose | None
    ) -> list[Launch]:
        """Return the launch of a call whose x, as a matrix of m tokens, is `rows`."""
        given = self.bound(args, kw)
        named, ranks, sizes = {"x": rows}, [], []
        for i, name in enumerate(("gate", "up", "down")):
            part = {"x": rows, "w": given["ws"][i], "w_scale": given["w_scales"][i]}
            part |= {"u": given["us"][i], "v": given["vs"][i], "format": given["format"]}
            part |= {n: given[n] for n in ("u_layout", "v_layout")}
            (one,) = CORRECTED.lower(rows, (), part, m, transpose)
            for tensor, operand in zip(one.spec.inputs(), one.operands, strict=True):
                named[f"{name}_{tensor.name}"] = operand
            ranks.append(one.spec.rank)
            sizes.append((one.spec.k, one.spec.n))
        spec = CorrectedMLPSpec(
            m=m, k=sizes[0][0], n=sizes[0][1], rank=tuple(ranks), weight=given["format"],
            dtype=dtype_name(rows), activation=given["activation"], x_layout=given["x_layout"],
            out_layout=given["out_layout"],
        )  # fmt: skip
        return [Launch(spec, tuple(named[tensor.name] for tensor in spec.inputs()))]

    def sharding(self, *args: Any, **kw: Any) -> Placements:
        """Return the placements that DTensor may use: those of a gated MLP."""
        given = self.bound(args, kw)
        parts: list[Part] = [("x", given["x"], "")]
        for name, role, layout in _ROLES:
            each = zip(("", "", "down_"), given[name], strict=True)
            parts += [(of + role, tensor, layout) for of, tensor in each]
        gated = {name: value for name, value in given.items() if name != "vs"}
        gated |= {"gate": given["ws"][:2], "down": given["ws"][2:], "w_layout": "col"}
        return placements(gated, parts)


_ROLES = (
    ("ws", "dense", "w_layout"), ("w_scales", "dense", "w_layout"),
    ("us", "first", "u_layout"), ("vs", "last", "v_layout"),
)  # fmt: skip
CORRECTED_MLP = CorrectedMLPOp(
    name="corrected_mlp", bare=corrected_mlp, spec=CorrectedMLPSpec,
    operands=(
        Operand("x", role="x"), Operand("ws", "Tensor[]"), Operand("w_scales", "Tensor[]"),
        Operand("us", "Tensor?[]"), Operand("vs", "Tensor?[]"),
    ),
    keywords={
        "format": "mxfp4", "activation": "silu", **LAYOUTS, "u_layout": "row", "v_layout": "row",
        **WHERE,
    },
)  # fmt: skip
