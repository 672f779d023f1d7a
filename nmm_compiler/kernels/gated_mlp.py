"""`GatedMLPSpec` and `GatedMLPUpSpec` under their earlier path."""

from nmm_compiler.kernels.linear.specs import GatedMLPSpec as GatedMLPSpec
from nmm_compiler.kernels.linear.specs import GatedMLPUpSpec as GatedMLPUpSpec
