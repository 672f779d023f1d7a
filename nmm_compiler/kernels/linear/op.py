"""The ops of linear layers."""

from nmm_compiler.ops.chosen import ADAPTERS
from nmm_compiler.ops.corrected import CORRECTED, CORRECTED_MLP, CORRECTED_SHARED
from nmm_compiler.ops.linear import LINEAR_OPS
from nmm_compiler.ops.scaled import scaled_ops

OPS = (*LINEAR_OPS, *scaled_ops(LINEAR_OPS), CORRECTED, CORRECTED_SHARED, CORRECTED_MLP, ADAPTERS)
