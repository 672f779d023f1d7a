"""Products of few tokens that are added in SBUF: which panels, what they take, what is legal.

The NKI code is pieces/gated_few.py for gate and up, dense and with h transposed, and
pieces/few_tokens.py for a dense down projection.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.base import TOKENS
from nmm_compiler.kernels.few_tokens import panels
from nmm_compiler.kernels.tiling import chunk_rows, item_bytes, tiles
from nmm_compiler.kernels.work import Tally
from nmm_compiler.targets import Target


def with_added_products(spec: Any, plain: Any, target: Target) -> Iterator[Any]:
    """Yield variants of a schedule whose products are added in SBUF."""
    if not _can(spec) or plain.v.block > 128 or plain.out.block > 128:
        return  # the panels are others: once for all of them
    outs = [plain.out]
    if spec.down:
        outs = [_arriving(plain.out, spec, spec.n, block, 4096) for block in _out(spec, target)]
    for block, wanted, out in itertools.product(panels(spec, target), (2048, 4096, 8192), outs):
        v = _arriving(plain.v, spec, spec.k, block, wanted)
        yield dataclasses.replace(plain, v=v, out=out, v_added=True)


def _arriving(operand: Any, spec: Any, rows: int, block: int, wanted: int) -> Any:
    chunk = chunk_rows(rows, block * item_bytes(spec.dtype), wanted)
    return dataclasses.replace(operand, block=block, chunk=chunk, group=1)


def _out(spec: Any, target: Target) -> list[int]:
    return panels(dataclasses.replace(spec, n=spec.k), target)[-3:]


def _can(spec: Any) -> bool:
    dense = not any(map(spec.rank, spec.branches)) and not spec.fp8 and spec.n % 128 == 0
    if spec.down:
        turned = spec.down_bias and spec.out_layout == "row"
        return dense and spec.k % 128 == 0 and not turned
    return dense and spec.out_layout == "col"


def check_added(schedule: Any, spec: Any, target: Target) -> None:
    """Raise SpecError unless one bank holds the products of a panel of whole tiles."""
    most = target.psum_bank_bytes_per_partition // 4
    blocks = [min(schedule.v.block, spec.n)]
    if spec.down:
        blocks.append(min(schedule.out.block, spec.k))
    fits = all(block % 128 == 0 and tiles(block, 128) * spec.m <= most for block in blocks)
    halves = spec.down and schedule.split not in ("", TOKENS)
    one = spec.m <= schedule.m_block and not schedule.m_loop
    if not (_can(spec) and fits and one) or schedule.n_segment or halves:
        raise SpecError(
            "schedule: v_added takes one block of tokens, dense weights without fp8, h or y "
            f"transposed or no bias, and panels of whole tiles with at most {most} products of 128 "
            f"rows of a weight; m is {spec.m}, n {spec.n}, the panels {blocks}"
        )


def added_bytes(schedule: Any, spec: Any, row_bytes: int) -> dict[str, int]:
    """Return bytes per partition of a load of gate and one of up, and of their sums in fp32.

    row_bytes: of a row of a panel in SBUF.
    """
    sums = tiles(min(schedule.v.block, spec.n), 128) * spec.m * 4
    return {"v": 2 * tiles(min(schedule.v.chunk, spec.k), 128) * row_bytes, "active": 3 * sums}


def added_out_bytes(schedule: Any, spec: Any, row_bytes: int) -> dict[str, int]:
    """Return bytes per partition of a load of down, and of its sums in fp32."""
    sums = tiles(min(schedule.out.block, spec.k), 128) * spec.m * 4
    return {"out": tiles(min(schedule.out.chunk, spec.n), 128) * row_bytes + sums}


def tally_added(tally: Tally, m: int, k: int, n: int, panel: int) -> None:
    """Add the passes of a product of k by n, and the sums that VectorE adds."""
    tally.matmuls.append((tiles(k, 128) * tiles(n, 128), 64))
    panel = min(panel, n)
    count = (tiles(k, 128) + 1) * tiles(n, panel)
    tally.evictions.append((2 * count, m * tiles(panel, 128)))
