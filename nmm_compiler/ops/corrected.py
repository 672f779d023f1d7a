"""The ops of few-bit weights as they are stored, with low-rank branches.

    corrected_matmul            activation(x w + (x u) v + bias)
    corrected_matmul_shared_x   several of one x
    corrected_mlp               (activation(x gate) * (x up)) down

The weights are frozen. In MX formats they are bytes [n, k bits / 8] and scales [n, k / 32] of
`kernels/packed_formats.py`; in fp8 they are float8_e4m3fn numbers up to 240, [n, k], and scales [n]
or [1]. The references multiply them out, so that gradients reach x and the branches. A branch may
be fp8 numbers, too, frozen, with branch_scale [rank]; beside fp8 weights v is then relative to
w_scale. Of several, an empty branch_scale is of a linear without a branch. A kernel rounds x to
MXFP8 beside MX weights. Kernels take weights with the features first: a copy that is kept, as that
of any weight is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ShapeError, SpecError
from nmm_compiler.kernels.base import check_name
from nmm_compiler.kernels.linear.corrected import (
    EACH,
    MULTIPLIED,
    CorrectedMLPSpec,
    CorrectedSpec,
    first_layout,
    operand_name,
)
from nmm_compiler.kernels.packed_formats import FORMATS, MX, element_values
from nmm_compiler.kernels.tiling import RUNS
from nmm_compiler.ops import references
from nmm_compiler.ops.definition import LAYOUTS, NORM, WHERE, Operand, Placements
from nmm_compiler.ops.launches import (
    Launch,
    Transpose,
    in_runs,
    mx_weight,
    turned,
    weight,
)
from nmm_compiler.ops.linear import ENDS, LinearOp, Product
from nmm_compiler.ops.operands import (
    check_same,
    weight_shape,
)
from nmm_compiler.ops.scaled import FP8_DTYPE, refuse_gradients
from nmm_compiler.ops.sharding import Part, placements

MLP_ENDS = ("gate", "up", "down")
_ARGUMENTS = {
    "w": "ws", "w_scale": "w_scales", "u": "us", "v": "vs", "bias": "biases",
    "branch_scale": "branch_scales",
}  # fmt: skip
"""The arguments of one linear, and the lists that have those of several."""


@torch.library.custom_op("nmm::dequantize", mutates_args=())
def dequantize(
    values: torch.Tensor, scale: torch.Tensor, format: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [.., n, k] in a dtype; scale: [.., n, k / block], or [.., n, 1]."""
    form = FORMATS[format]
    if form.bits == 4:
        codes = torch.stack((values & 0xF, values >> 4), -1).flatten(-2)
        table = torch.from_numpy(element_values(form)).to(values.device, dtype)
        elements = table[codes.int()]
    else:
        elements = values.view(getattr(torch, form.element_name)).to(dtype)
    if form.power_scales:
        scale = scale.view(torch.float8_e8m0fnu)
    blocks = elements.unflatten(-1, (scale.shape[-1], -1)) * scale.to(dtype)[..., None]
    return blocks.flatten(-2)


@dequantize.register_fake
def _(values: torch.Tensor, scale: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    *rows, k = values.shape
    return values.new_empty(*rows, k * 8 // FORMATS[format].bits, dtype=dtype)


def dequantize_placements(values: Any, scale: Any, format: str, dtype: Any) -> Placements:
    """Return the placements of `nmm.dequantize` that DTensor may use: a cut leaves blocks whole."""
    from torch.distributed.tensor import Replicate, Shard

    blocks = scale.shape[1]
    check_cut(values, blocks)
    each = [one for one in (Replicate(), Shard(0), Shard(1)) if leaves_whole(one, values, blocks)]
    return [([one], [one, one, None, None]) for one in each]


def corrected_matmul(
    x: Tensor, w: Tensor, w_scale: Tensor, u: Tensor | None = None, v: Tensor | None = None,
    bias: Tensor | None = None, branch_scale: Tensor | None = None, *, format: str = "mxfp4",
    w_layout: str = "col", u_layout: str = "row", v_layout: str = "row",
    by: Any = references.ByTorch, **keywords: Any,
) -> Tensor:  # fmt: skip
    """Return activation(x w + (x u) v + bias), w and branches of fp8 numbers multiplied out."""
    if format in MX:
        whole = torch.ops.nmm.dequantize(w, w_scale, format, x.dtype)
    else:
        refuse_gradients(x, [w], [w_scale])
        scale = w_scale.to(x.dtype)
        whole = w.to(x.dtype) * (scale.unsqueeze(1) if w_layout == "col" else scale)
    said = {name: value for name, value in keywords.items() if name not in WHERE}
    said |= {"w_layout": w_layout, "by": by}
    if u is None:
        y: Tensor = references.matmul(x, whole, bias, **said)
        return y
    assert v is not None
    if branch_scale is not None:
        refuse_gradients(x, [u, v], [branch_scale])
        scale = branch_scale.to(x.dtype)
        u = u.to(x.dtype) * (scale if u_layout == "row" else scale.unsqueeze(1))
        v = v.to(x.dtype)
        if format not in MX:
            scale = w_scale.to(x.dtype)
            v = v * (scale if v_layout == "row" else scale.unsqueeze(1))
    said |= {"u_layout": u_layout, "v_layout": v_layout}
    return references.lowrank_matmul(x, u, v, bias, whole, **said)


def corrected_matmul_shared_x(
    x: Tensor, ws: Sequence[Tensor], w_scales: Sequence[Tensor], us: Sequence[Tensor | None],
    vs: Sequence[Tensor | None], biases: Sequence[Tensor | None],
    branch_scales: Sequence[Tensor | None] | None = None, *,
    activations: Sequence[str] | None = None, out_layout: str = "row",
    out_layouts: Sequence[str] | None = None, **more: Any,
) -> list[Tensor]:  # fmt: skip
    """Return activation_i(x w_i + (x u_i) v_i + bias_i) for every i."""
    each = zip(
        ws, w_scales, us, vs, biases, branch_scales or [None] * len(ws),
        activations or ["identity"] * len(ws),
        references.layouts_of(out_layout, out_layouts, len(ws)), strict=True,
    )  # fmt: skip
    return [
        corrected_matmul(x, *one, activation=activation, out_layout=layout, **more)
        for *one, activation, layout in each
    ]


def corrected_mlp(
    x: Tensor, ws: Sequence[Tensor], w_scales: Sequence[Tensor], us: Sequence[Tensor | None],
    vs: Sequence[Tensor | None], branch_scales: Sequence[Tensor | None] | None = None, *,
    activation: str = "silu", x_layout: str = "row", out_layout: str = "row", **ways: Any,
) -> Tensor:  # fmt: skip
    """Return (activation(x gate) * (x up)) down, each weight with its branch where it has one."""
    scales = branch_scales or [None] * len(ws)
    gate, up, down = zip(ws, w_scales, us, vs, [None] * len(ws), scales, strict=True)
    inside: dict[str, Any] = {"x_layout": x_layout, "read": True, **ways}
    h = corrected_matmul(x, *gate, activation=activation, **inside)
    h = h * corrected_matmul(x, *up, **inside)
    return corrected_matmul(h, *down, out_layout=out_layout, **ways)


def _weight_sizes(one: Mapping[str, Any], form: str, layout: str) -> tuple[int, int]:
    """Return (inputs, outputs) of a stored weight; SpecError or ShapeError for a wrong one."""
    w, scale = one["w"], one["w_scale"]
    if form not in MX:
        if w.dtype != FP8_DTYPE or not scale.is_floating_point():
            raise SpecError(f"w is {w.dtype}, w_scale {scale.dtype}; pass {FP8_DTYPE} and floats")
        k, n = weight_shape("w", w, layout)
        if scale.dim() != 1 or scale.shape[0] not in (1, n):
            raise ShapeError(f"w_scale has shape {tuple(scale.shape)}; pass [1] or [{n}]")
        return k, n
    for name, tensor in (("w", w), ("w_scale", scale)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 2 or layout != "col":
            raise SpecError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, layout {layout!r}; pass bytes, "
                "uint8, [n, k bits / 8] of a weight and [n, k / 32] of its scales, layout 'col'"
            )
    n, k = w.shape[0], w.shape[1] * 8 // MX[form].bits
    check_same("outputs and blocks of w and w_scale", (n, k // 32), tuple(scale.shape))
    return k, n


def check_cut(tensor: Any, blocks: int) -> None:
    """Raise ShapeError where DTensor cuts bytes or scales of an MX weight [n, ..] inside blocks."""
    mesh = getattr(tensor, "mesh", None)
    if mesh is None:  # a plain tensor
        return
    along = [dim for dim, one in enumerate(tensor.placements) if one.is_shard(1)]
    ranks = math.prod(mesh.size(dim) for dim in along)
    if blocks % ranks:
        raise ShapeError(
            f"an MX weight of {blocks} blocks of 32 inputs is cut along its inputs over {ranks} "
            f"ranks: bytes and scales would be cut apart; cut it along its outputs, or pad its "
            f"inputs with zeros to a multiple of {32 * ranks}"
        )


def leaves_whole(placement: Any, tensor: Any, blocks: int) -> bool:
    """Return whether a placement of bytes or scales of an MX weight [n, ..] leaves blocks whole."""
    mesh = getattr(tensor, "mesh", None)
    return mesh is None or not placement.is_shard(1) or blocks % mesh.size() == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedOp(LinearOp):
    """An op of few-bit weights and their branches; ends: of the names of a kernel's operands."""

    @property
    def gated(self) -> bool:
        """Whether the linears are gate, up and down of an MLP."""
        return self.spec is CorrectedMLPSpec

    def linears(self, given: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (the end of a kernel's names, arguments) of each linear, in order."""
        if "w" in given:
            yield "", {name: given[name] for name in _ARGUMENTS}
            return
        count = 3 if self.gated else len(given["ws"])
        lists = {name: given.get(many) or [None] * count for name, many in _ARGUMENTS.items()}
        for name, values in lists.items():
            check_same(f"numbers of linears and {_ARGUMENTS[name]}", count, len(values))
        for i in range(count):
            end = MLP_ENDS[i] if self.gated else str(i)
            yield end, {name: values[i] for name, values in lists.items()}

    def of_one_dtype(self, given: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the tensors, or None, that have the dtype of x: branches, biases, and the ends."""
        check_name("format", given["format"], MULTIPLIED)
        for _, one in self.linears(given):
            _check_branch(one, given["u_layout"])
            yield from () if _in_fp8(one) else (one["u"], one["v"])
            yield one["bias"]
        yield from (given.get(one.name) for one in ENDS)

    def products(self, given: Mapping[str, Any]) -> list[Product]:
        """Return the linears of a call; a weight stands there with its shape alone."""
        made = []
        for _, one in self.linears(given):
            sizes = _weight_sizes(one, given["format"], given["w_layout"])
            stored: Any = SimpleNamespace(shape=sizes, dim=lambda: 2)
            dense = ("w", stored, "row")
            bias = ("bias", one["bias"])
            check_same("factors u and v", one["u"] is None, one["v"] is None)
            factors = [(name, one[name], given[f"{name}_layout"]) for name in "uv"]
            plain = one["u"] is None
            made.append(Product([dense], bias) if plain else Product(factors, bias, dense))
        return made

    def lower(
        self, rows: Tensor, args: Any, kw: dict[str, Any], m: int, transpose: Transpose | None
    ) -> list[Launch]:
        """Return the launch of a call whose x, as a matrix of m tokens, is `rows`."""
        given = self.bound(args, kw)
        form, products = given["format"], self.products(given)
        (k, _, _), ranks = products[0].sizes, [one.sizes[1] for one in products]
        ways = {name: given[f"{name}_layout"] for name in "wuv"}
        named: dict[str, Any] = {}
        scales = []
        for (end, one), product in zip(self.linears(given), products, strict=True):
            if form not in MX:
                one["w_scale"] = one["w_scale"].float().expand(product.sizes[2])
            first = first_layout(form, product.sizes[0], end == "down")
            operands = stored_operands(one, form, ways, transpose or turned, first)
            named |= {operand_name(name, end): tensor for name, tensor in operands.items()}
            scales += [one["branch_scale"].float()] if _in_fp8(one) else []
        named |= {one.name: given[one.name] for one in ENDS if given.get(one.name) is not None}
        fields: dict[str, Any] = {one.name: one.name in named for one in ENDS}
        fields |= {"k": k, "n": products[0].sizes[2], "weight": form}
        if scales:
            if len(scales) < sum(rank > 0 for rank in ranks):
                raise SpecError("branches of one call are all fp8 numbers, or none is")
            fields["branch"] = "fp8"
            wide = 128 * (-(-max(ranks) // 128))
            pad = torch.nn.functional.pad
            filled = [pad(one, (0, wide - one.shape[0]), value=1.0) for one in scales]
            named["branch_scale"] = torch.stack(filled)
        if self.gated:
            fields["rank"] = tuple(ranks)
        elif self.many:
            count = len(products)
            layouts = references.layouts_of(given["out_layout"], given["out_layouts"], count)
            activations = given["activations"] or ["identity"] * count
            biases = [bias is not None for bias in given["biases"]]
            values = (ranks, biases, activations, layouts)
            fields |= {name: tuple(of) for name, of in zip(EACH, values, strict=True)}
            fields["n"] = tuple(one.sizes[2] for one in products)
        else:
            fields |= {"rank": ranks[0], "bias": given["bias"] is not None}
        return [self.of_operands(rows, given, m, named, fields)]

    def sharding(self, *args: Any, **kw: Any) -> Placements:
        """Return the placements that DTensor may use; ShapeError for blocks that ranks would cut.

        Bytes and scales of MX weights are cut along the inputs only between blocks.
        """
        given = self.bound(args, kw)
        form = MX.get(given["format"])
        parts: list[Part] = []
        stored: list[tuple[int, Any, int]] = []  # place, tensor, blocks
        for one in self.operands:
            for i, (_, tensor, role) in enumerate(one.parts(given[one.name])):
                layout = one.layout
                if role == "dense_scale" and form is not None:
                    role, layout = "dense", "w_layout"
                elif role == "dense_scale" and tensor.shape[0] == 1:
                    role = ""  # one number is whole on every device
                if role == "dense" and form is not None:
                    of_block = 1 if one.role == "dense_scale" else 32 * form.bits // 8
                    stored.append((len(parts), tensor, tensor.shape[1] // of_block))
                behind = self.gated and i == 2 and role
                parts.append((f"down_{role}" if behind else role, tensor, layout))
        said = given
        if self.gated:
            said = {name: value for name, value in given.items() if name != "vs"}
            said |= {"gate": given["ws"][:2], "down": given["ws"][2:]}
        rows = placements(said, parts)
        for place, tensor, blocks in stored:
            check_cut(tensor, blocks)
            rows = [row for row in rows if leaves_whole(row[1][place], tensor, blocks)]
        return rows


def _in_fp8(one: Mapping[str, Any]) -> bool:
    """Return whether a linear has a branch of fp8 numbers."""
    return one["branch_scale"] is not None and one["u"] is not None


def _check_branch(one: Mapping[str, Any], u_layout: str) -> None:
    """Raise SpecError or ShapeError for a branch that has scales and is no fp8 numbers of them."""
    if not _in_fp8(one):
        return
    kinds = {one["u"].dtype, one["v"].dtype}
    if kinds != {FP8_DTYPE}:
        raise SpecError(f"u and v are {kinds} and have a branch_scale; pass both in {FP8_DTYPE}")
    rank = weight_shape("u", one["u"], u_layout)[1]
    if tuple(one["branch_scale"].shape) != (rank,):
        raise ShapeError(
            f"branch_scale has shape {tuple(one['branch_scale'].shape)}; pass [{rank}]"
        )


def stored_operands(
    one: Mapping[str, Any], form: str, ways: Mapping[str, str], transpose: Transpose,
    first: str = "row",
) -> dict[str, Tensor]:  # fmt: skip
    """Return the operands of a linear as a kernel takes them, by their names without an end.

    one: its arguments by name, or those of a stack of linears. ways: the layouts of w, u and v;
    first: that in which the kernel takes u.
    """
    made = {name: one[name] for name in ("u", "v", "bias") if one[name] is not None}
    for name in "uv":
        if name in made and name == "u" and first in RUNS:
            made[name] = in_runs(made[name], ways[name], transpose, RUNS[first])
        elif name in made:
            made[name] = weight(made[name], ways[name], transpose)[0]
    w, scale = one["w"], one["w_scale"]
    if form in MX:
        made["w"], made["w_scale"] = mx_weight(w, scale, MX[form].bits, transpose)
        return made
    made["w"] = weight(w, ways["w"], transpose)[0]
    if scale is not None:
        made["w_scale"] = scale
        if "v" in made and not _in_fp8(one):  # w's scales multiply the sums of both products
            made["v"] = (made["v"].float() / scale.float().unsqueeze(-2)).to(made["v"].dtype)
    return made


_WAYS = {
    **LAYOUTS, "u_layout": "row", "v_layout": "row", "w_layout": "col", **WHERE,
}  # fmt: skip
_LISTS = (
    Operand("ws", "Tensor[]", "dense", "w_layout"), Operand("w_scales", "Tensor[]", "dense_scale"),
    Operand("us", "Tensor?[]", "first", "u_layout"), Operand("vs", "Tensor?[]", "last", "v_layout"),
)  # fmt: skip
_BRANCHES = Operand("branch_scales", "Tensor[]?")
CORRECTED = CorrectedOp(
    name="corrected_matmul", bare=corrected_matmul, spec=CorrectedSpec, own=6,
    operands=(
        Operand("x", role="x"), Operand("w", role="dense", layout="w_layout"),
        Operand("w_scale", role="dense_scale"), Operand("u", "Tensor?", "first", "u_layout"),
        Operand("v", "Tensor?", "last", "v_layout"), Operand("bias", "Tensor?", "bias"), *ENDS,
        Operand("branch_scale", "Tensor?"),
    ),
    keywords={**NORM, "format": "mxfp4", "activation": "identity", **_WAYS},
)  # fmt: skip
CORRECTED_SHARED = CorrectedOp(
    name="corrected_matmul_shared_x", bare=corrected_matmul_shared_x, spec=CorrectedSpec, own=6,
    operands=(
        Operand("x", role="x"), *_LISTS, Operand("biases", "Tensor?[]", "bias"), *ENDS[:2],
        _BRANCHES,
    ),
    keywords={
        **NORM, "format": "mxfp4", "activations": None, "out_layouts": None, **_WAYS,
    },
)  # fmt: skip
CORRECTED_MLP = CorrectedOp(
    name="corrected_mlp", bare=corrected_mlp, spec=CorrectedMLPSpec, own=5,
    operands=(Operand("x", role="x"), *_LISTS, *ENDS, _BRANCHES),
    keywords={**NORM, "format": "mxfp4", "activation": "silu", **_WAYS},
)  # fmt: skip
