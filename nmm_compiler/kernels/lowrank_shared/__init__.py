"""Several low-rank products of one x: what (spec.py), how (schedule.py), NKI kernel, torch ops."""

from nmm_compiler.kernels.lowrank_shared.spec import LowRankSharedSpec as LowRankSharedSpec
