"""Gated products of few tokens that are added in SBUF: which panels, what they take, what is legal.

The NKI code is pieces/gated_few.py. Gate and up are dense there, and h comes out transposed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.few_tokens import panels
from nmm_compiler.kernels.tiling import chunk_rows, item_bytes, tiles
from nmm_compiler.kernels.work import Tally
from nmm_compiler.targets import Target


def with_added_products(spec: Any, plain: Any, target: Target) -> Iterator[Any]:
    """Yield variants of a schedule whose products of gate and up are added in SBUF."""
    if not _can(spec) or plain.v.block > 128:  # once for all panels
        return
    for block, wanted in itertools.product(panels(spec, target), (2048, 4096, 8192)):
        chunk = chunk_rows(spec.k, min(block, spec.n) * item_bytes(spec.dtype), wanted)
        v = dataclasses.replace(plain.v, block=block, chunk=chunk, group=1)
        yield dataclasses.replace(plain, v=v, v_added=True)


def _can(spec: Any) -> bool:
    dense = not spec.rank("gate") and not spec.rank("up") and not spec.fp8
    return dense and (spec.down or spec.out_layout == "col") and spec.n % 128 == 0


def check_added(schedule: Any, spec: Any, target: Target) -> None:
    """Raise SpecError unless one bank holds the products of a panel of whole tiles."""
    most = target.psum_bank_bytes_per_partition // 4
    block = min(schedule.v.block, spec.n)
    fits = block % 128 == 0 and tiles(block, 128) * spec.m <= most and spec.m <= schedule.m_block
    if not (_can(spec) and fits and not schedule.n_segment and not schedule.m_loop):
        raise SpecError(
            "schedule: v_added takes one block of tokens, dense gate and up without fp8, h "
            f"transposed, and panels of whole tiles with at most {most} products of 128 rows of a "
            f"weight; m is {spec.m}, n {spec.n}, the panel {block}"
        )


def added_bytes(schedule: Any, spec: Any, row_bytes: int) -> dict[str, int]:
    """Return bytes per partition of a load of gate and one of up, and of their sums in fp32.

    row_bytes: of a row of a panel in SBUF.
    """
    sums = tiles(min(schedule.v.block, spec.n), 128) * spec.m * 4
    return {"v": 2 * tiles(min(schedule.v.chunk, spec.k), 128) * row_bytes, "active": 3 * sums}


def tally_added(tally: Tally, schedule: Any, spec: Any) -> None:
    """Add the passes of gate or up, and the sums that VectorE adds."""
    k_tiles, panel = tiles(spec.k, 128), min(schedule.v.block, spec.n)
    tally.matmuls.append((k_tiles * tiles(spec.n, 128), 64))
    count = (k_tiles + 1) * tiles(spec.n, panel)
    tally.evictions.append((2 * count, spec.m * tiles(panel, 128)))
