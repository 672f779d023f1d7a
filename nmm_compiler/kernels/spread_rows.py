"""Contractions that fill no whole tiles of 128 rows, spread evenly over almost all partitions.

A last tile of fewer rows takes a second load of each factor, in short runs. With "spread_rows"
partition p holds rows p * depth to p * depth + depth - 1 for a depth of ceil(k / 128), and the
partition behind the last whole one what is left: k 1021 is 127 partitions of 8 rows, and 5 rows.
`load_spread` in pieces/loads_and_stores.py loads it.
"""

from __future__ import annotations

from typing import Any

from nmm_compiler.kernels.base import WEIGHTS
from nmm_compiler.kernels.tiling import ORDERS, tiles
from nmm_compiler.targets import Target

# Partitions, and their shares of the DMA engines, that have to be in use.
_LEAST_PARTITIONS = 120


def may_spread(schedule: Any, spec: Any, target: Target) -> bool:
    """Return whether a schedule's kernel can have its contraction rows in such partitions."""
    if spec.family != "lowrank" or schedule.split == WEIGHTS or schedule.m_loop:
        return False
    plain = not (spec.base or schedule.double_row) and spec.norm == "none"
    lies = {schedule.x.load, schedule.u.load} == {"rows"}
    return bool(plain and lies and target.dma_generates_descriptors)


def spread(schedule: Any, spec: Any, target: Target) -> Any:
    """Return the schedule, with its contraction rows so spread where it pays."""
    depth = tiles(spec.k, 128)
    even = depth > 1 and spec.k % 128 > 0 and spec.k // depth >= _LEAST_PARTITIONS
    if even and may_spread(schedule, spec, target):
        return schedule.changed({"k_order": ORDERS[2]})
    return schedule


def in_loop(order: str) -> str:
    """Return the order of rows of a schedule whose blocks of tokens are a loop on the device."""
    return ORDERS[0] if order == ORDERS[2] else order
