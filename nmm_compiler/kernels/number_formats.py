"""Number formats of a kernel: its operands, what is kept between its products, its result.

With dtype float8_e4m3 every operand is stored divided by a scale, which the kernel takes as an fp32
tensor and multiplies back where a sum leaves PSUM, so that the products themselves are of fp8
numbers. x and quantized intermediates have one scale, weights one ("tensor") or one per
output feature ("channel"). A scale per input feature could not leave a sum.

Between two products a value is kept in the operands' dtype, or bfloat16 for fp8 operands, whose
range of 240 it could leave; in fp32; or quantized again to fp8 by a given scale, saturating.

What formats ask of schedules: `double_row` makes TensorE contract 256 rows of fp8 operands in the
time of 128 (trainium2_arch, Double FP8 Matmul Performance): both operands are [128, 2, free], two
tiles of the contraction. What is left over, an odd tile or a ragged one, takes an ordinary pass
into the same sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import DTYPES, Array, KernelSpec, TensorSpec, check_name
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF, combine, rounding_error
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.targets import Target

FP8 = "float8_e4m3"
# Largest finite float8_e4m3: exponent bias 7, exponent 15 is infinity and NaN as in IEEE 754
# (nki.language.float8_e4m3; float8_e4m3fn, whose largest is 448, is another format).
FP8_MAX = 240.0
SCALES = ("tensor", "channel")
INTERMEDIATES = ("operand", "float32", FP8)
# fp32 roundings of a scaled value: products of up to four scales, a reciprocal (2), the scaling.
_SCALE_ROUNDINGS = 7

# A value, and how far a kernel's value may be from it, element by element.
Estimate = tuple[Array, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormattedSpec(KernelSpec):
    """A spec with the fields dtype, scales, out_dtype and, with two products, intermediate."""

    @property
    def fp8(self) -> bool:
        """Whether the operands are fp8 numbers with scales."""
        return self._dtype() == FP8

    @property
    def result_dtype(self) -> str:
        """The dtype of the result, and of biases: the operands', bfloat16 for fp8."""
        return getattr(self, "out_dtype", None) or ("bfloat16" if self.fp8 else self._dtype())

    @property
    def intermediate_dtype(self) -> str:
        """The dtype of what is kept between two products."""
        kind = str(getattr(self, "intermediate", "operand"))
        if kind == "operand":
            return "bfloat16" if self.fp8 else self._dtype()
        return kind

    def formats(self) -> str:
        """Return the number formats in a word, for names: what differs from plain operands."""
        words = [self._dtype(), getattr(self, "scales", None)]
        if self.requantized or self.wide:
            words.append(f"p_{self.intermediate_dtype}")
        return "_".join(word for word in words if word)

    @property
    def requantized(self) -> bool:
        """Whether intermediates are quantized to fp8 again, by a scale that is given."""
        return self.intermediate_dtype == FP8

    @property
    def wide(self) -> bool:
        """Whether intermediates are kept in fp32 though the operands are narrower."""
        return self.intermediate_dtype == "float32" != self._dtype()

    def _format_notes(self, second: str) -> tuple[str, ...]:
        """Say what an fp32 intermediate costs, and what an fp8 one asks for."""
        if self.requantized:
            return (
                f"intermediate {FP8}: what lies beyond {FP8_MAX:g} times its scale saturates, and "
                "three bits of mantissa are kept; calibrate the scales",
            )
        if not self.wide:
            return ()
        return (
            f"intermediate float32: {second} runs with fp32 operands, at a quarter of the bf16 "
            "rate of TensorE, and its weight takes four bytes an element in SBUF",
        )

    def _settle_formats(self) -> None:
        """Check dtype, scales, out_dtype, intermediate; equal meanings become equal fields."""
        dtype = self._dtype()
        check_name("dtype", dtype, DTYPES)
        scales, wanted = getattr(self, "scales", None), getattr(self, "out_dtype", None)
        if not self.fp8 and scales is not None:
            raise SpecError(
                f"{self.family}: scales={scales!r} belongs to dtype {FP8}, and dtype is {dtype}; "
                "leave scales out"
            )
        if self.fp8:
            check_name("scales", scales or "tensor", SCALES)
            object.__setattr__(self, "scales", scales or "tensor")
        if wanted is not None:
            allowed = ("bfloat16", "float16", "float32") if self.fp8 else (dtype,)
            check_name("out_dtype", wanted, allowed)
            if wanted == ("bfloat16" if self.fp8 else dtype):
                object.__setattr__(self, "out_dtype", None)
        kind = getattr(self, "intermediate", "operand")
        check_name("intermediate", kind, INTERMEDIATES if self.fp8 else INTERMEDIATES[:2])
        if kind == dtype and not self.fp8:
            object.__setattr__(self, "intermediate", "operand")

    def _scale_tensors(
        self, weights: Mapping[str, int], intermediates: Sequence[str] = ()
    ) -> list[TensorSpec]:
        """Return the scales of x, of weights (name -> output features), of intermediates."""
        if not self.fp8:
            return []
        per_channel = getattr(self, "scales", None) == "channel"
        sizes = {"x": 1} | {name: n if per_channel else 1 for name, n in weights.items()}
        if self.requantized:
            sizes |= dict.fromkeys(intermediates, 1)
        return [
            TensorSpec(name=f"{name}_scale", shape=(size,), dtype="float32")
            for name, size in sizes.items()
        ]

    def _scaled(self, value: Array, error: Array, *scales: Array, typical: bool) -> Estimate:
        """Return the estimate after a multiplication by scales, in fp32."""
        factor = np.prod(np.broadcast_arrays(*scales), axis=0)
        value, error = value * factor, error * np.abs(factor)
        own = _SCALE_ROUNDINGS * FP32_ROUNDOFF * (np.abs(value) + error)
        return value, combine(error, own, typical)

    def _kept(
        self, value: Array, error: Array, scale: Array | None, typical: bool = False
    ) -> Estimate:
        """Return the estimate of an intermediate once it is stored.

        scale: of a quantized one, which saturates at FP8_MAX times it; the value of the
        reference does too, and limiting does not enlarge an error.
        """
        dtype = self.intermediate_dtype
        if not self.requantized:
            return value, combine(error, rounding_error(np.abs(value) + error, dtype), typical)
        assert scale is not None
        unit = float(np.abs(scale).item())
        limit = FP8_MAX * unit
        value = np.clip(value, -limit, limit)
        # dividing by the scale and multiplying by it again costs fp32 roundings
        error = combine(error, _SCALE_ROUNDINGS * FP32_ROUNDOFF * np.abs(value), typical)
        magnitude = np.minimum(np.abs(value) + error, limit) / unit
        return value, combine(error, unit * rounding_error(magnitude, dtype), typical)


def row_modes(dtype: str) -> tuple[bool, ...]:
    """Return the values of a schedule's double_row that are worth trying."""
    return (True, False) if dtype == FP8 else (False,)


def check_double_row(double_row: bool, dtype: str, target: Target) -> None:
    """Raise SpecError unless operands and target have the mode."""
    if double_row and not (dtype == FP8 and target.fp8_double_row):
        raise SpecError(
            f"schedule: double_row takes {FP8} operands on trn2 or trn3, not {dtype} on "
            f"{target.name}; set it to False"
        )


def check_widened(name: str, how: str, spec: FormattedSpec) -> None:
    """Raise SpecError if a load of a weight cannot widen it to fp32, as an fp32 intermediate asks.

    A DMA converts on its way (nki.isa.dma_copy, Data types), leaving PSUM does; a DMA transpose
    keeps the dtype.
    """
    if spec.wide and how == "dma":
        raise SpecError(
            f"schedule: {name} is 'dma', and a DMA transpose cannot widen to the fp32 of the "
            "intermediate; use 'tensor'"
        )


def pitch(free: int, double_row: bool) -> int:
    """Return elements from one tile of a contraction to the next in SBUF.

    nki-library's double-row kernels keep the distance of the two tiles of a pair a multiple of 16.
    """
    return 16 * tiles(free, 16) if double_row else free


def passes(rows: int, chunk: int, double_row: bool) -> int:
    """Return TensorE passes over a contraction of `rows`, loaded `chunk` rows at a time."""
    if not double_row:
        return tiles(rows, 128)
    whole, rest = divmod(rows, chunk)
    parts = ((whole, chunk), (1, rest))
    return sum(times * (part // 256 + tiles(part % 256, 128)) for times, part in parts)


def scale_bytes(n: int, scales: str | None, *, down: bool) -> int:
    """Return bytes per partition of a weight's scales in SBUF; down: outputs on the partitions."""
    if scales != "channel":
        return 8
    # along the free axis: the row as loaded, and spread over the partitions
    return 4 * tiles(n, 128) if down else 8 * n


def sum_bytes(spec: Any) -> dict[str, int]:
    """Return bytes per partition of fp32 tiles between PSUM and the result, none for one step."""
    if spec.out_layout == "col":
        return {}
    steps = (spec.scales == "channel") + spec.bias + (spec.activation != "identity")
    steps += bool(spec.scales == "tensor" and spec.bias)
    return {"sum": 512 * 4 * (steps - 1)} if steps > 1 else {}
