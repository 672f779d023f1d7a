"""Number formats of a kernel: of its operands and its result.

With dtype float8_e4m3 every weight is stored divided by a scale, which the kernel takes as an fp32
tensor and multiplies back where a sum leaves PSUM, so that the products themselves are of fp8
numbers. x has one scale, weights one ("tensor") or one per output feature ("channel"). A scale per
input feature could not be moved out of a sum. Between two products a value is kept in the operands'
dtype, or bfloat16 for fp8 operands, whose range of 240 it could leave.

In schedules, `double_row` makes TensorE contract 256 rows of fp8 operands in the time of 128
(trainium2_arch, Double FP8 Matmul Performance): both operands are [128, 2, free], two tiles of the
contraction. A remaining odd or ragged tile takes an ordinary pass into the same sums.
"""

from __future__ import annotations

FP8 = "float8_e4m3"
# Largest finite float8_e4m3: exponent bias 7, exponent 15 is infinity and NaN as in IEEE 754
# (nki.language.float8_e4m3; float8_e4m3fn, whose largest is 448, is another format).
FP8_MAX = 240.0
SCALES = ("tensor", "channel")
# Of an x beside fp8 weights that is no fp8 number: TensorE takes fp32 with fp32 only.
X_DTYPES = ("bfloat16", "float16")
