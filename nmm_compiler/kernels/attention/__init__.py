"""Attention: the spec, the schedule, the NKI kernel, the torch op."""

from nmm_compiler.kernels.attention.spec import AttentionSpec as AttentionSpec
