"""Low-rank products: what (spec.py), how (schedule.py), the NKI kernel, the torch op."""

from nmm_compiler.kernels.lowrank.spec import LowRankSpec as LowRankSpec
