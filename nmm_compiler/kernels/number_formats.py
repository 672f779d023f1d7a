"""Number formats of a kernel: of its operands, its intermediates, its result.

With dtype float8_e4m3 every operand is stored divided by a scale, which the kernel takes as an fp32
tensor and multiplies back where a sum leaves PSUM, so that the products themselves are of fp8
numbers. x and quantized intermediates have one scale, weights one ("tensor") or one per
output feature ("channel"). A scale per input feature could not be moved out of a sum.

Between two products a value is kept in the operands' dtype, or bfloat16 for fp8 operands, whose
range of 240 it could leave; in fp32; or quantized again to fp8 by a given scale, saturating.

In schedules, `double_row` makes TensorE contract 256 rows of fp8 operands in the time of 128
(trainium2_arch, Double FP8 Matmul Performance): both operands are [128, 2, free], two tiles of the
contraction. A remaining odd or ragged tile takes an ordinary pass into the same sums.
"""

from __future__ import annotations

from typing import Any

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.targets import Target

FP8 = "float8_e4m3"
# Largest finite float8_e4m3: exponent bias 7, exponent 15 is infinity and NaN as in IEEE 754
# (nki.language.float8_e4m3; float8_e4m3fn, whose largest is 448, is another format).
FP8_MAX = 240.0
SCALES = ("tensor", "channel")
INTERMEDIATES = ("operand", "float32", FP8)
# Of an x beside fp8 weights that is no fp8 number: TensorE takes fp32 with fp32 only.
X_DTYPES = ("bfloat16", "float16")


def row_modes(dtype: str, target: Target) -> tuple[bool, ...]:
    """Return the values of a schedule's double_row that are worth trying."""
    return (True, False) if dtype == FP8 and target.fp8_double_row else (False,)


def check_double_row(double_row: bool, dtype: str, target: Target) -> None:
    """Raise SpecError unless operands and target have the mode."""
    if double_row and not (dtype == FP8 and target.fp8_double_row):
        raise SpecError(
            f"schedule: double_row takes {FP8} operands on trn2 or trn3, not {dtype} on "
            f"{target.name}; set it to False"
        )


def check_widened(name: str, how: str, spec: Any) -> None:
    """Raise SpecError if a load of a weight cannot widen it to fp32 for an fp32 intermediate.

    A DMA converts on its way (nki.isa.dma_copy, Data types), leaving PSUM does; a DMA transpose
    keeps the dtype.
    """
    if spec.wide and how == "dma":
        raise SpecError(
            f"schedule: {name} is 'dma', and a DMA transpose cannot widen to the fp32 of the "
            "intermediate; use 'tensor'"
        )


def pitch(free: int, aligned: bool) -> int:
    """Return elements from one tile of a contraction to the next in SBUF.

    nki-library's double-row kernels keep the distance of the two tiles of a pair a multiple of 16.
    What DMA transposes write starts at multiples of 32 bytes there (qkv_cte.py), 16 elements.
    """
    return 16 * tiles(free, 16) if aligned else free


def x_pitch(tokens: int, double_row: bool, load: str) -> int:
    """Return elements of x in SBUF for each tile, with a copy of what arrives packed."""
    packed = tokens if double_row and tokens < 16 else 0
    return pitch(tokens, double_row or load == "dma") + packed


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
