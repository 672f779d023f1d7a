"""How many passes over zeros TensorE makes before the first product of a kernel.

TensorE runs at half its clock until it has worked for some microseconds, and in that time the first
operands arrive. The sum that the passes begin is the first real one, to which they add nothing:
nothing that is computed is left unused, and no result changes. Steps of the search try them, as
they pay only where TensorE stays busy afterwards. The NKI code is in pieces/warm_up.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.tiling import tiles

# Passes of 512 columns that TensorE makes, at half its clock, in about the time of a first load.
_PASSES = (4, 5, 6, 7, 8)


def fields(schedule: Any, spec: Any) -> tuple[str, ...]:
    """Return the field of the passes, if the family has it and tokens keep TensorE busy.

    Up to 256 tokens `matmul` has none: with 257 they cost too much in program order, and one token
    more would then cost over a tenth. So it would with 128 tokens of `lowrank_shared`.
    """
    least = 256 if "w" in schedule.operands() else 128 if hasattr(schedule, "k_chunk") else 64
    if not hasattr(schedule, "warm") or spec.m <= least or _never(schedule):
        return ()
    return ("warm",)


def changes(schedule: Any, spec: Any) -> Iterator[dict[str, int]]:
    """Yield fields to change: a number of passes.

    Fewer passes fill the time of a first load that is shorter, more that of a longer one.
    """
    weight = next(name for name in schedule.operands() if name != "x")
    yield from ({"warm": count} for count in _PASSES)
    chunk = getattr(schedule, weight).chunk
    shorter = 128 * (3 * tiles(chunk, 128) // 4)
    if shorter and schedule.x.chunk == chunk:
        for count in _PASSES[:3]:
            yield {"warm": count, f"{weight}.chunk": shorter, "x.chunk": shorter}
    for count in _PASSES[-2:]:
        yield {"warm": count, "x.chunk": 2 * schedule.x.chunk}


def left_out(schedule: Any) -> dict[str, int]:
    """Return the field to change so that there are no passes, if the family has it."""
    return {"warm": 0} if hasattr(schedule, "warm") else {}


def check(schedule: Any) -> None:
    """Raise SpecError if the passes are not possible."""
    if schedule.warm < 0 or (schedule.warm and _never(schedule)):
        raise SpecError(
            f"schedule: warm is {schedule.warm} passes over zeros before the first product; pass 0 "
            "or more, and 0 in a loop on the device, with double rows or w_stationary"
        )


def _never(schedule: Any) -> bool:
    """Return whether no sum of the schedule can begin with passes over zeros."""
    fields = ("m_loop", "double_row", "w_stationary")
    return any(getattr(schedule, name, False) for name in fields)
