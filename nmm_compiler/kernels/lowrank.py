"""`LowRankSpec` under its earlier path."""

from nmm_compiler.kernels.linear.specs import LowRankSpec as LowRankSpec
