"""The ops of linear layers."""

from nmm_compiler.ops.chosen import ADAPTERS
from nmm_compiler.ops.linear import LINEAR_OPS

OPS = (*LINEAR_OPS, ADAPTERS)
