"""Several low-rank products of one x: the spec, the schedule, the NKI kernel, the torch ops."""

from nmm_compiler.kernels.lowrank_shared.spec import LowRankSharedSpec as LowRankSharedSpec
