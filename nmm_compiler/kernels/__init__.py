"""Kernel families: what can be computed, and the NKI functions that compute it.

FAMILIES is the list, one line per family; each has a spec, a float64 reference with an error bound,
its legal schedules, and a kernel in kernels/nki.
"""

from nmm_compiler.kernels import (
    gated_mlp_schedule,
    lowrank_schedule,
    lowrank_shared_schedule,
    matmul,
)
from nmm_compiler.kernels.base import Family

FAMILIES: dict[str, Family] = {
    "lowrank": lowrank_schedule.FAMILY,
    "lowrank_shared": lowrank_shared_schedule.FAMILY,
    "matmul": matmul.FAMILY,
    "gated_mlp_up": gated_mlp_schedule.UP_FAMILY,
    "gated_mlp": gated_mlp_schedule.FAMILY,
}
