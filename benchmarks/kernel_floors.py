"""The time that a kernel cannot take less than: phases that each wait for the one before.

    start     the first DMA begins, and its semaphore wakes the first product
    operands  every operand crosses HBM; or the first ones do, and TensorE makes all its passes
    between   of two products in a row: the last sum of the first leaves PSUM
    end       the last sum is there, leaves PSUM, and is stored

Every number is one of the target's. A pass takes the cycles that are documented for its columns, at
least 64, or 128 in fp32, whatever the rank: a product of rank 16 takes as long as one of rank 128.
"""

from __future__ import annotations

import math
from typing import Any

from nmm_compiler.codegen.cost import tensor_us
from nmm_compiler.kernels.base import item_bytes
from nmm_compiler.kernels.product_spec import ProductSpec
from nmm_compiler.kernels.tiling import tiles
from nmm_compiler.targets import Target, get

_US = 1e6


def phases_us(spec: ProductSpec, target: str) -> dict[str, float]:
    """Return the microseconds of each phase; their sum is the floor."""
    chip = get(target)
    rate = chip.memory_bytes_per_second / _US
    m, dtype = spec.m, spec.dtype
    begin = (chip.dma_start_latency_seconds + chip.semaphore_seconds) * _US
    read = sum(tensor.bytes for tensor in spec.inputs()) / rate
    written = sum(tensor.bytes for tensor in spec.outputs()) / rate
    first = min(128, spec.k) * (m + 128) * item_bytes(dtype) / rate
    rows = 2 if chip.fp8_double_row and dtype.startswith("float8") else 1
    weights = spec.weights()
    tensor = sum(_product_us(m, k, n, rows, dtype, chip) for k, n in weights.values())
    ramp = chip.tensor_ramp_seconds * (1 - chip.tensor_ramp_start_fraction) * _US
    evicted = _eviction_us(chip)
    two = spec.family == "lowrank_shared" or any(map(spec.multiplies_kept, weights))
    between = evicted if two else 0.0
    # results cross HBM after the operands; only the last store's start cannot be used for that
    moved = read + written - between - evicted - begin
    operands = max(read, moved, first + tensor + min(ramp, tensor))
    return {
        "start": begin,
        "operands": operands,
        "between": between,
        "end": evicted + begin,
    }


def floor_us(spec: ProductSpec, target: str) -> float:
    """Return the sum of the phases."""
    return sum(phases_us(spec, target).values())


def _product_us(m: int, k: int, n: int, rows: int, dtype: str, chip: Target) -> float:
    """Return TensorE time of a product, that operand moving that takes less."""
    least = chip.tensor_fp32_min_columns if dtype == "float32" else 0
    ways = []
    for still, moved in ((n, m), (m, n)):
        parts = tiles(moved, 512)
        columns = max(math.ceil(moved / parts), least)
        count = tiles(tiles(k, 128), rows) * tiles(still, 128) * parts
        ways.append(tensor_us(((count, columns),), dtype, chip))
    return min(ways)


def _eviction_us(chip: Target) -> float:
    """Return the time from the last pass to the sum in SBUF: its latency, and one short copy."""
    copy = (chip.engine_min_cycles + chip.engine_isolated_overhead_cycles) / chip.vector_clock_hz
    return (chip.tensor_latency_seconds + 2 * chip.engine_semaphore_seconds + copy) * _US


def arithmetic(spec: Any, target: str) -> str:
    """Return the phases as a sum, for tables."""
    return " + ".join(f"{us:.1f}" for us in phases_us(spec, target).values())
