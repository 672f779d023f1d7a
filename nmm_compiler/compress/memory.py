"""Estimates, before a calibration starts, how much memory it needs and whether that fits.

The estimate counts the moments (`moments.py`), the recorded passages where calibration goes block
by block (`blocks.py`), and the work of one factorization. It does not count the model, the batches
and the activations of one batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from nmm_compiler.compress.moments import moment_bytes
from nmm_compiler.compress.select import Site
from nmm_compiler.errors import MemoryBudgetError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def read_bytes(memory: str | int) -> int:
    """Return the bytes of "8GiB", "500MB", or of a number; all units are powers of 1024.

    0 is the answer to anything else.
    """
    if isinstance(memory, int):
        return max(memory, 0)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", memory.strip().upper())
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


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


def moments_need(
    sites: Sequence[Site], gradients: bool, reads: Mapping[str, str] | None = None
) -> int:
    """Return the bytes of the sites' moments.

    reads: which layers read the same tensor (`Statistics.reads`); without it, none share one.
    """
    total, shared = 0, set()
    for site in sites:
        if site.n < site.k:
            total += moment_bytes(site.k, site.n)
        else:
            reader = site.name if reads is None else reads.get(site.name, site.name)
            if reader not in shared:
                shared.add(reader)
                total += moment_bytes(site.k, None)
        if gradients:
            total += moment_bytes(site.n, site.k if site.n > site.k else None)
    return total


def work_needs(sites: Sequence[Site], sequential: bool) -> int:
    """Return the bytes of the largest factorization.

    Three matrices in float64 and a Gram matrix; sequential calibration adds the whole moments of
    x', of x and x', and a Cholesky factor.
    """
    largest = max((3 * s.n * s.k + min(s.n, s.k) ** 2 for s in sites), default=0)
    pairs = max((4 * s.k**2 for s in sites), default=0) if sequential else 0
    return 8 * (largest + pairs)


def refusal(what: str, need: int, limit: int, way_out: str) -> MemoryBudgetError:
    """Return the error that says how much does not fit, and what to do."""
    return MemoryBudgetError(
        f"{what} needs {need / 2**30:.2f} GiB for moments and factors, beside the model; "
        f"{limit / 2**30:.2f} GiB can be had: {way_out}"
    )
