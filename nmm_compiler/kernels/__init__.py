"""Kernel families, and the NKI functions that compute them.

FAMILIES is the list, one line per family. A family is one folder: spec.py (what is computed, its
float64 reference and error bound), schedule.py (how, and which schedules are legal), kernel.py (the
NKI kernel for any spec) and op.py (the torch op). pieces/ holds NKI code that several kernels
share, or that is too long for one file.
"""

from nmm_compiler.kernels.attention.schedule import ATTENTION
from nmm_compiler.kernels.base import Family
from nmm_compiler.kernels.gated_mlp.schedule import GATED_MLP, GATED_MLP_UP
from nmm_compiler.kernels.lowrank.schedule import LOWRANK
from nmm_compiler.kernels.lowrank_shared.schedule import LOWRANK_SHARED
from nmm_compiler.kernels.matmul.schedule import MATMUL

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (LOWRANK, LOWRANK_SHARED, MATMUL, GATED_MLP_UP, GATED_MLP, ATTENTION)
}
