"""Refuses a calibration that does not fit into memory, after its first batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from nmm_compiler.errors import CapacityError
from nmm_compiler.lowrank_models.select import Site


def available_bytes() -> int | None:
    """Return the bytes of memory that processes can still get here; None where that is unknown."""
    limits = []
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            limits.append(int(found[1]) << 10)
        group = Path("/sys/fs/cgroup")
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        if most.strip() != "max":
            limits.append(int(most) - int(used))
    except (OSError, ValueError):
        pass  # not Linux, or no limit for this group
    return min(limits, default=None)


def check_fits(sites: Sequence[Site], moments: int, free: int | None) -> None:
    """Raise CapacityError unless the moments and the largest factorization fit into memory.

    moments: their bytes. The factorization takes three matrices in float64 and a Gram matrix. free:
    the bytes that there were before the calibration; the model, the batches and the activations of
    one batch are not counted.
    """
    need = moments + 8 * max((3 * s.n * s.k + min(s.n, s.k) ** 2 for s in sites), default=0)
    if free is not None and need > free:
        raise CapacityError(
            f"calibrating {len(sites)} layers at once needs {need / 2**30:.2f} GiB for moments and "
            f'factors, beside the model; {free / 2**30:.2f} GiB can be had: pass method="whitened" '
            "for about half of it, or include= some layers at a time"
        )
