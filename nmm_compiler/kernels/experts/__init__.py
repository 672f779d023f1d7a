"""Gated MLPs that an index chooses for each token: spec, schedule, NKI kernel, torch op."""

from nmm_compiler.kernels.experts.spec import ExpertsSpec as ExpertsSpec
