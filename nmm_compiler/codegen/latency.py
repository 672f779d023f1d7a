"""What a kernel is predicted to cost on a target, before anybody builds it.

`kernel_cost` is what `compress(budget="latency")` spends: the closed-form cost of the schedule that
the search would take, with the factors in HBM as `nn.Linear` stores them. `predicted_us` is what
the passes weigh one kernel against two with: the closed form alone, so that it simulates nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.kernels.lowrank import LowRankSpec
from nmm_compiler.kernels.matmul import MatmulSpec
from nmm_compiler.targets import get


def kernel_cost(target: str, tokens: int, dtype: str) -> Callable[[int, int, int | None], float]:
    """Return (k, n, rank or None) -> predicted microseconds of the kernel for `tokens` tokens."""

    @functools.cache
    def cost(k: int, n: int, rank: int | None) -> float:
        spec: KernelSpec
        if rank is None:
            spec = MatmulSpec(m=tokens, k=k, n=n, dtype=dtype, w_layout="col")
        else:
            spec = LowRankSpec(
                m=tokens, k=k, r=rank, n=n, dtype=dtype, u_layout="col", v_layout="col"
            )
        return float(choose(spec, target)[0].cost_us)

    return cost


def predicted_us(spec: KernelSpec, target: str) -> float:
    """Return the closed-form microseconds of the best schedule, with starting and ending a kernel.

    Raises CapacityError, with the numbers of the nearest miss, when no schedule is legal.
    """
    chip = get(target)
    spec.check(chip)
    return rank(spec, chip)[0].cost_us + 1e6 * chip.kernel_start_stop_seconds
