"""Low-rank products: the spec, the schedule, the NKI kernel, the torch op."""

from nmm_compiler.kernels.lowrank.spec import LowRankSpec as LowRankSpec
