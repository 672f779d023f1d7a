"""The op of family `experts`: `nmm.experts`."""

from nmm_compiler.ops.chosen import EXPERTS

OPS = (EXPERTS,)
