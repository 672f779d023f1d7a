"""Closed-form price of a kernel, without a simulation: that of the schedule with the least one.

Its error against the simulator is in `prices.ways.ERRORS`, by tests/prices/test_estimate.py.
"""

from __future__ import annotations

import dataclasses
import functools

from nmm_compiler.codegen.choose import rank
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.targets import Target
from nmm_compiler.targets.collective_time import collective_alone_us


def estimate_us(spec: KernelSpec, target: str | Target) -> float:
    """Return microseconds of a kernel on a target, from its first instruction to its last.

    Raises CapacityError or SpecError where no schedule is legal.
    """
    return _estimate_us(spec, machine_target(target))


@functools.lru_cache(maxsize=4096)
def _estimate_us(spec: KernelSpec, chip: Target) -> float:
    if spec.exchanged_bytes():
        alone = dataclasses.replace(spec, tp=1, tp_axis="")  # type: ignore[call-arg]
        return _estimate_us(alone, chip) + collective_alone_us(
            spec.exchanged_bytes() / spec.lnc, spec.world_size, chip
        )
    return rank(spec, chip)[0].cost_us
