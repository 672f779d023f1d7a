"""The data flow of a lowrank kernel, for the header of its emitted file."""

from __future__ import annotations

from typing import Any

from nmm_compiler.kernels.lowrank.spec import LowRankSpec
from nmm_compiler.kernels.moving_tokens import described
from nmm_compiler.kernels.tiling import LOADED


def data_flow(spec: LowRankSpec, schedule: Any) -> tuple[str, ...]:
    """Return the data flow for the header of the emitted file."""
    second = "v stationary, p^T moving" if schedule.v_stationary else "p^T stationary, v moving"
    base = "x w joins the same PSUM sums; " if spec.base else ""
    ranks = {
        "rows": f" p^T is the sum of the parts of {spec.tp} ranks.",
        "rank": f" y is the sum of the parts of {spec.tp} ranks.",
    }.get(spec.tp_axis, "")
    segment = schedule.segment(spec)
    summed = "summed in PSUM over all of k"
    if segment < spec.k:
        summed = f"summed in PSUM over {segment} of k, these sums in fp32 in SBUF"
    return (
        f"x: {LOADED[schedule.x.load]}, {min(schedule.m_block, spec.m)} tokens at a time.",
        f"u: {schedule.u.arrives(spec.r)}.",
        f"stage 1: u stationary, x^T moving; p^T = (x u)^T {summed}; kept in SBUF.",
        f"v: {schedule.v.arrives(spec.n)}.",
        f"stage 2: {second}; {base}epilogue {spec.activation} while leaving PSUM.{ranks}",
        *described(schedule.moving_tokens(spec)),
    )
