"""The errors of predictions on held-out kernels, and the constants for which they are valid.

`held_out.json` beside this file is written by `benchmarks/timing_points.py --write` together with
the tables of docs/timing.md: the errors by class, and the hash of the constants that they were
printed with. If a constant has changed since, the figures are stale; a test recomputes the hash.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

from nmm_compiler import targets
from nmm_compiler.records import Record
from nmm_compiler.simulator.timing import repeats, resources

HELD_OUT = Path(__file__).with_name("held_out.json")
CLASSES = ("matrix", "vector", "mixed")

_CONSTANTS = {
    "resources": ("_GAPS_KEPT", "_SMALLEST_GAP_US", "_WORTH_A_SWAP"),
    "repeats": ("_DISTANCE",),
}

# Fields of a target that no prediction of one kernel on one core depends on: rules for
# instructions, and limits for tiles, models and groups of cores. The hash covers every field that
# is not named here.
NOT_OF_TIMING = frozenset({
    "absent_forms", "absent_instructions", "collective_points",
    "dma_transposes", "hbm_bytes", "matmul_adds_to_written_psum", "matmul_bfloat16_sums",
    "matmul_float8_e4m3fn", "matmul_psum_banks", "matmul_tile_min_elements",
    "moving_free_max_elements", "physical_cores_per_logical_core", "scalar_all_operators",
    "scalar_number_bias", "scalar_tensor_scalar", "tensor_indirection", "tensor_transposes_fp8",
    "device_loops", "dma_transposes_in_loops", "float8_kernels", "nki_beta_1",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorBand(Record):
    """The errors of published kernels of one class that no constant was set from.

    kind: "matrix", "vector" or "mixed"; points: how many; mean, worst: absolute relative errors.
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


def constants_hash() -> str:
    """Return the digest of every constant that a prediction depends on."""
    values: dict[str, object] = {}
    for name in targets.names():
        target = targets.get(name)
        fields = sorted(set(target.sources) - NOT_OF_TIMING)
        values |= {f"{name}.{field}": getattr(target, field) for field in fields}
    for module in (repeats, resources):
        short = module.__name__.rsplit(".", 1)[1]
        values |= {f"{short}.{name}": getattr(module, name) for name in _CONSTANTS[short]}
    text = json.dumps(values, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def bands() -> dict[str, ErrorBand]:
    """Return the error band of each class."""
    found = json.loads(HELD_OUT.read_text())["bands"]
    return {band["kind"]: ErrorBand.from_dict(band) for band in found}


def kernel_class(busy_us: dict[str, float]) -> str:
    """Return the class of a kernel by which engines are busy.

    "matrix" if TensorE works twice as long as VectorE and ScalarE each, "vector" if one of them
    works twice as long as TensorE, else "mixed".
    """
    tensor = busy_us.get("tensor", 0.0)
    others = max(busy_us.get("vector", 0.0), busy_us.get("scalar", 0.0))
    if tensor > 2.0 * others:
        return "matrix"
    return "vector" if others > 2.0 * tensor else "mixed"
