"""Number formats of a kernel: its operands, what is kept between its products, its result.

With dtype float8_e4m3 every operand is stored divided by a scale, which the kernel takes as an fp32
tensor and multiplies back where a sum leaves PSUM, so that the products themselves are of fp8
numbers. x and quantized intermediates have one scale, weights one ("tensor") or one per
output feature ("channel"). A scale per input feature could not leave a sum.

Between two products a value is kept in the operands' dtype, or bfloat16 for fp8 operands, whose
range of 240 it could leave; in fp32; or quantized again to fp8 by a given scale, saturating.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import DTYPES, Array, KernelSpec, TensorSpec, check_name
from nmm_compiler.kernels.numerics import FP32_ROUNDOFF, combine, rounding_error

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
