"""The weights of a call as they are stored, multiplied out, and as kernels take them.

A weight of eight bits or fewer is frozen. In MX formats it is bytes [n, k bits / 8] and scales
[n, k / 32] of `kernels/packed_formats.py`; in fp8 float8_e4m3fn numbers up to 240, the largest of
NKI's float8_e4m3 (up to there both formats have the same bits), and scales [n] or [1]. Kernels take
weights with the features first: a copy that is kept, as that of any weight is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nmm_compiler.errors import ModelError, ShapeError, SpecError
from nmm_compiler.kernels.packed_formats import FORMATS, MX, element_values
from nmm_compiler.kernels.tiling import RUNS
from nmm_compiler.ops.definition import Placements
from nmm_compiler.ops.launches import Transpose, turned
from nmm_compiler.ops.operands import check_same, weight_shape

FP8_DTYPE = torch.float8_e4m3fn


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

    each = (Replicate(), Shard(0), Shard(1))
    rows: Placements = [([one], [one, one, None, None]) for one in each]
    return between_blocks(rows, 0, values, scale.shape[1])


def between_blocks(rows: Placements, place: int, tensor: Any, blocks: int) -> Placements:
    """Return the rows that cut bytes or scales of an MX weight [n, ..] between its blocks.

    place: of the tensor among the operands. Raises ShapeError where DTensor has cut inside blocks.
    """
    mesh = getattr(tensor, "mesh", None)
    if mesh is None:  # a plain tensor
        return rows
    along = [dim for dim, one in enumerate(tensor.placements) if one.is_shard(1)]
    ranks = math.prod(mesh.size(dim) for dim in along)
    if blocks % ranks:
        raise ShapeError(
            f"an MX weight of {blocks} blocks of 32 inputs is cut along its inputs over {ranks} "
            f"ranks: bytes and scales would be cut apart; cut it along its outputs, or pad its "
            f"inputs with zeros to a multiple of {32 * ranks}"
        )
    whole = blocks % mesh.size() == 0
    return [row for row in rows if whole or not row[1][place].is_shard(1)]


def refuse_gradients(**tensors: Tensor | None) -> None:
    """Raise ModelError if autograd watches fp8 numbers or their scales."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                f"{name} of a product of fp8 weights requires a gradient, which rounded numbers do "
                "not have; train the factors first (nmm.recover), then quantize them, or call "
                "requires_grad_(False)"
            )


@dataclass(frozen=True)
class Matrix:
    """A weight of a call; name: of a kernel's operand. layout: "col" for [outputs, inputs].

    form: "" for numbers as they multiply, "fp8" for numbers times a scale, or of MX blocks. scale:
    None also for an fp8 number that is its own value.
    """

    name: str
    tensor: Tensor
    layout: str
    form: str = ""
    scale: Tensor | None = None

    @property
    def sizes(self) -> tuple[Any, Any]:
        """Its inputs and outputs."""
        if self.form not in MX:
            return weight_shape(self.name, self.tensor, self.layout)
        n, size = self.tensor.shape
        return size * 8 // MX[self.form].bits, n

    def check(self) -> None:
        """Raise SpecError unless it is of the numbers of its format."""
        if self.form in MX:
            for name, one in ((self.name, self.tensor), (f"{self.name}_scale", self.scale)):
                if (
                    one is None
                    or one.dtype != torch.uint8
                    or one.dim() != 2
                    or self.layout != "col"
                ):
                    raise SpecError(
                        f"{name} is {one if one is None else one.dtype}, layout {self.layout!r}; "
                        "pass bytes, uint8, [n, k bits / 8] of a weight and [n, k / 32] of its "
                        "scales, layout 'col'"
                    )
        elif self.form and self.tensor.dtype != FP8_DTYPE:
            raise SpecError(
                f"{self.name} has scales and is {self.tensor.dtype}; pass {FP8_DTYPE}, or call the "
                "plain op"
            )
        elif self.scale is not None and not self.scale.is_floating_point():
            raise SpecError(f"scales of {self.name} are {self.scale.dtype}; pass floats")

    def check_scale(self) -> None:
        """Raise ShapeError unless its scales are those of its blocks, or of its outputs."""
        if self.scale is None:
            return
        k, n = self.sizes
        shape = tuple(self.scale.shape)
        if self.form in MX:
            check_same(f"outputs and blocks of {self.name} and its scales", (n, k // 32), shape)
        elif len(shape) != 1 or shape[0] not in (1, n):
            raise ShapeError(f"a scale of {self.name} has shape {shape}; pass [1] or [{n}]")

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Return the weight multiplied out, as it lies; ModelError where it would have a
        gradient."""
        if not self.form:
            return self.tensor
        if self.form in MX:
            return torch.ops.nmm.dequantize(self.tensor, self.scale, self.form, dtype)
        refuse_gradients(**{self.name: self.tensor, f"a scale of {self.name}": self.scale})
        values = self.tensor.to(dtype)
        if self.scale is None:
            return values
        scale = self.scale.to(dtype)
        return values * scale.unsqueeze(-1 if self.layout == "col" else -2)


def stored_operands(
    weights: Mapping[str, Matrix], transpose: Transpose | None, first: str = "row", kept: str = ""
) -> dict[str, Tensor]:
    """Return the operands of a linear, or of a stack of them, as a kernel takes them, by name.

    weights: u, v and w, those there are. first: the layout in which the kernel takes u, its rows as
    `rows_in_runs` says. kept: those that it takes as they lie.
    """
    made, turn = {}, transpose or turned
    for letter, one in weights.items():
        scale, scale_name = one.scale, f"{one.name}_scale"
        if one.form in MX:
            assert scale is not None
            words = torch.int16 if MX[one.form].bits == 4 else torch.int32
            fours = turn(one.tensor.contiguous().view(words)).contiguous()
            made[one.name], made[scale_name] = fours.view(torch.uint8), turn(scale)
            continue
        made[one.name] = one.tensor
        if letter == "u" and first in RUNS:
            rows = one.tensor if one.layout == "row" else one.tensor.mT
            runs = rows.unflatten(0, (-1, 128, RUNS[first])).permute(1, 0, 3, 2)
            made[one.name] = turn(runs).reshape(rows.shape)
        elif one.layout == "col" and transpose is not None and letter not in kept:
            made[one.name] = transpose(one.tensor)
        if scale is not None:
            made[scale_name] = scale
    v, w = weights.get("v"), weights.get("w")
    if v is None or w is None or v.form or w.form != "fp8" or w.scale is None:
        return made
    # w's scales multiply the sums of both products
    divided = made[v.name].float() / w.scale.float().unsqueeze(-2)
    return made | {v.name: divided.to(v.tensor.dtype)}
