"""Gated MLPs: the spec, the schedule, the NKI kernel, the torch op."""

from nmm_compiler.kernels.gated_mlp.spec import GatedMLPSpec as GatedMLPSpec
from nmm_compiler.kernels.gated_mlp.spec import GatedMLPUpSpec as GatedMLPUpSpec
