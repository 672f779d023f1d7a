"""Predicted cost of one chain in three ways: fused, as separate products, and dense.

The separate products pass the intermediate through HBM in the layout that the second product reads
best, so that fusion is compared with the best unfused pair.
All figures are predictions of the simulator's timing model; none is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from nmm_compiler.codegen.build import Kernel, build_kernel
from nmm_compiler.codegen.latency import simulated_us
from nmm_compiler.kernels.base import KernelSpec
from nmm_compiler.records import Record


@dataclass(frozen=True, kw_only=True)
class Cost(Record):
    """Predicted cost of one way to compute a product: microseconds and HBM bytes."""

    latency_us: float
    hbm_bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            latency_us=self.latency_us + other.latency_us,
            hbm_bytes=self.hbm_bytes + other.hbm_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """One kernel's computation three ways, on one target."""

    kernel: str
    target: str
    fused: Cost
    separate: Cost
    dense: Cost

    def ways(self) -> tuple[Cost, Cost, Cost]:
        """Return the costs fused, as separate products, and dense."""
        return self.fused, self.separate, self.dense


def cost_of(spec: KernelSpec, target: str) -> Cost:
    """Return the predicted cost of the kernel that is built for `spec`."""
    profile = build_kernel(spec, target).profile()
    return Cost(
        latency_us=profile.latency_us,
        hbm_bytes=profile.hbm_read_bytes + profile.hbm_write_bytes,
    )


def compare(spec: KernelSpec, target: str) -> Comparison:
    """Return the predicted costs of `spec` fused, as separate matmuls, and dense.

    A family without a separate or dense form (a plain matmul) is compared with itself.
    """
    separate, dense = spec.as_products()
    return Comparison(
        kernel=spec.short(),
        target=target,
        fused=cost_of(spec, target),
        separate=_total(separate, target),
        dense=_total(dense, target),
    )


def compare_built(kernel: Kernel) -> Comparison:
    """Return the predicted costs of a kernel that is built, beside separate matmuls and dense.

    Nothing else is built: the others are simulated with the schedule that ranks first, and count
    the least HBM traffic that they can have.
    """
    spec, target = kernel.spec, kernel.target.name
    profile = kernel.profile()
    traffic = profile.hbm_read_bytes + profile.hbm_write_bytes
    separate, dense = (
        Cost(
            latency_us=sum(simulated_us(one, target) for one in row),
            hbm_bytes=sum(one.minimal_hbm_bytes() for one in row),
        )
        for row in spec.as_products()
    )
    return Comparison(
        kernel=spec.short(),
        target=target,
        fused=Cost(latency_us=profile.latency_us, hbm_bytes=traffic),
        separate=separate,
        dense=dense,
    )


def _total(specs: tuple[KernelSpec, ...], target: str) -> Cost:
    total = Cost(latency_us=0.0, hbm_bytes=0)
    for spec in specs:
        total = total + cost_of(spec, target)
    return total
