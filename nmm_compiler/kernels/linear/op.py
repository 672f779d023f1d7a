"""The ops of linear layers."""

from nmm_compiler.ops.gated_mlp import OPS as _GATED
from nmm_compiler.ops.lowrank import OPS as _LOWRANK
from nmm_compiler.ops.lowrank_shared import OPS as _SHARED
from nmm_compiler.ops.matmul import OPS as _MATMUL

OPS = (*_LOWRANK, *_SHARED, *_MATMUL, *_GATED)
