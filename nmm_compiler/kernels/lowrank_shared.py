"""`LowRankSharedSpec` under its earlier path."""

from nmm_compiler.kernels.linear.specs import LowRankSharedSpec as LowRankSharedSpec
