"""The errors of predictions for published kernels that no constant and no law was set from.

`held_out.json` beside this file is written by `benchmarks/timing_points.py --write` together with
the tables of docs/timing-evidence.md. It has the errors by class, and the hash of the constants and
prices that they were printed with; a test computes it again (benchmarks/timing_hash.py).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from nmm_compiler.records import Record

HELD_OUT = Path(__file__).with_name("held_out.json")
CLASSES = ("matrix", "vector", "dma", "mixed")


@dataclass(frozen=True, kw_only=True)
class ErrorBand(Record):
    """The errors of published kernels of one class that no constant was set from.

    kind: one of CLASSES; points: how many; mean, worst: absolute relative errors.
    """

    kind: str
    points: int
    mean: float
    worst: float

    def __str__(self) -> str:
        return (
            f"held-out error of {self.kind} kernels {self.mean:.0%} mean, {self.worst:.0%} worst "
            f"of {self.points}"
        )


@functools.cache
def bands() -> dict[str, ErrorBand]:
    """Return the error band of each class."""
    found = json.loads(HELD_OUT.read_text())["bands"]
    return {band["kind"]: ErrorBand.from_dict(band) for band in found}


def mean_error() -> float:
    """Return the mean error of the held-out kernels of all classes."""
    found = bands().values()
    return sum(band.mean * band.points for band in found) / sum(band.points for band in found)


def band_of(busy_us: dict[str, float]) -> ErrorBand:
    """Return the error band of a kernel's class."""
    return bands()[kernel_class(busy_us)]


def kernel_class(busy_us: dict[str, float]) -> str:
    """Return the class of a kernel by what is busy.

    "dma" if the DMA engines move data for twice as long as any engine computes; else "matrix" if
    TensorE works twice as long as VectorE and ScalarE each, "vector" if one of them works twice as
    long as TensorE, else "mixed".
    """
    tensor = busy_us.get("tensor", 0.0)
    others = max(busy_us.get("vector", 0.0), busy_us.get("scalar", 0.0))
    if busy_us.get("dma", 0.0) > 2.0 * max(tensor, others):
        return "dma"
    if tensor > 2.0 * others:
        return "matrix"
    return "vector" if others > 2.0 * tensor else "mixed"
