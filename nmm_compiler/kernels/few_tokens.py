"""Which panels of a weight few tokens move past, where its products are added in SBUF.

The NKI code is pieces/few_tokens.py; a schedule asks for it by a field of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import WEIGHTS
from nmm_compiler.kernels.tiling import chunk_rows, item_bytes, tiles
from nmm_compiler.targets import Target

FEW = 16
"""Tokens for which such candidates are made: TensorE's passes take no longer than the weights."""

# Bytes of u that arrive in less time than the first DMA takes to start.
_ASIDE_BYTES = 2**18


def panels(spec: Any, target: Target) -> list[int]:
    """Return outputs of a panel, with or without a last one that is small; none where it is moot.

    Little work is left after the load of a small one, and those before it are loaded in long runs.
    """
    if spec.m > FEW or spec.n % 128 or not target.dma_generates_descriptors:
        return []
    n_tiles, most = tiles(spec.n, 128), _products(target) // spec.m
    made = set()
    for small in (0, 4, 8):
        rest = n_tiles - small
        if rest > 0:
            least = tiles(rest, most)
            made |= {128 * tiles(rest, count) for count in range(least, least + 3)}
    return sorted(made)


def check_few(name: str, spec: Any, block: int, target: Target, *, alone: bool) -> None:
    """Raise SpecError unless one bank holds the products of a panel of whole tiles.

    alone: the schedule and the spec ask for nothing that this product does not do.
    A row result is stored in short runs, for which the device writes the descriptors.
    """
    if not target.dma_generates_descriptors:
        raise SpecError(
            f"schedule: {name} needs descriptors that the device writes, and {target.name} has none"
        )
    panel = min(block, spec.n)
    turned = spec.bias and spec.out_layout == "row"
    whole = spec.n % 128 == 0 and panel % 128 == 0
    if not (whole and alone and tiles(panel, 128) * spec.m <= _products(target)) or turned:
        raise SpecError(
            f"schedule: {name} takes one block of tokens and whole tiles, at most "
            f"{_products(target)} products of 128 rows of a weight, and no base, norm, residual or "
            f"bias of rows; m is {spec.m}, n {spec.n}, the panel {panel}"
        )


def starts_early(schedule: Any, spec: Any) -> bool:
    """Return whether x of few tokens, and the first load of u, come before all else."""
    again = schedule.m_loop or schedule.u.resident or schedule.u.stream or schedule.x.stream
    few = spec.m <= FEW and spec.norm == "none" and schedule.split != WEIGHTS
    return bool(few and schedule.own_queue and not again)


def loads_u_aside(schedule: Any, spec: Any) -> bool:
    """Return whether one load on the sync engine's queue brings u, for several beside x."""
    size = spec.k * spec.r * item_bytes(spec.dtype)
    small = spec.r <= schedule.u.block and size <= _ASIDE_BYTES and schedule.u.chunk < spec.k
    again = schedule.m_loop or schedule.u.resident or starts_early(schedule, spec)
    plain = spec.norm == "none" and schedule.u.load == "rows"
    alone = schedule.own_queue and schedule.split != WEIGHTS
    return bool(small and alone and plain and not again)


def with_added_products(spec: Any, target: Target, plain: Iterable[Any]) -> Iterator[Any]:
    """Yield variants of `lowrank` schedules with v stationary whose products of v are added."""
    if spec.base or spec.inner_norm or spec.residual or spec.tp_axis:
        return
    size = 4 if spec.wide else item_bytes(spec.dtype)
    seen: dict[Any, None] = {}
    for other in plain:
        if other.v_stationary and not other.v.resident:
            for block, wanted in itertools.product(panels(spec, target), (2048, 4096)):
                chunk = chunk_rows(spec.r, min(block, spec.n) * size, wanted)
                v = dataclasses.replace(other.v, block=block, chunk=chunk, group=1)
                seen[dataclasses.replace(other, v=v, v_added=True)] = None
    yield from seen


def _products(target: Target) -> int:
    return target.psum_bank_bytes_per_partition // 4
