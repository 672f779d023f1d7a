"""The time that a kernel cannot take less than: phases that each wait for the one before.

    start     the first DMA begins, on one DMA engine after another, and its semaphore wakes the
              first product
    operands  every operand crosses HBM; or the first ones do, and TensorE makes all its passes
    between   of two products in a row: the last sum of the first leaves PSUM
    results   of two products, x as k x m: the results of the tokens that come last are made, leave
              PSUM and cross HBM
    end       the last sum is there, leaves PSUM, and is stored

Every number is one of the target's. A pass takes the cycles that are documented for its columns, at
least 64, or 128 in fp32, whatever the rank: a product of rank 16 takes as long as one of rank 128.

x as k x m arrives in rows of all its tokens, so that no token is summed before the last row is in,
and no result leaves while x comes. Tokens that come in blocks have shorter rows, of which each
costs a DMA engine a descriptor: the floor is that of the block that makes it least.
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
    results = 0.0
    cut = spec.family.startswith("lowrank") and spec.x_layout == "col"
    if two and cut and not getattr(spec, "base", False):
        tensor += min(ramp, tensor)
        operands, results = min(
            (
                _last_tokens(spec, last, read, written, moved, first + tensor, chip)
                for last in range(m, 0, -1)
            ),
            key=sum,
        )
    # each DMA engine carries an equal share of the operands, and the last one begins late
    return {
        "start": begin + chip.dma_stagger_seconds * _US,
        "operands": operands,
        "between": between,
        "results": results,
        "end": evicted + begin,
    }


def _last_tokens(
    spec: ProductSpec,
    last: int,
    read: float,
    written: float,
    moved: float,
    products: float,
    chip: Target,
) -> tuple[float, float]:
    """Return the operands' time, and that of results, if so many tokens of x come last.

    products: until TensorE is done with all of them, where nothing else holds it up.
    """
    m, dtype = spec.m, str(spec.dtype)
    weights = spec.weights()
    second = {name: size for name, size in weights.items() if spec.multiplies_kept(name)}
    made = sum(_product_us(last, k, n, 1, dtype, chip) for k, n in second.values())
    outputs = sum(math.prod(tensor.shape) for tensor in spec.outputs()) / m
    rate = (chip.vector_clock_hz + chip.scalar_clock_hz + chip.gpsimd_clock_hz) / _US
    leave = outputs * last / chip.partitions / rate
    cross = written * last / m
    results = max(made, leave, cross)
    late = sum(k * n for k, n in second.values()) * item_bytes(dtype)
    late_us = late / chip.memory_bytes_per_second * _US
    more = _cut_rows_us(spec, last, chip)
    begun = max(read + more - late_us, products - made)
    whole = max(moved + more, read + more, products)
    return begun + max(0.0, whole - begun - results), results


def _cut_rows_us(spec: ProductSpec, last: int, chip: Target) -> float:
    """Return what descriptors add to the time of x if its rows are cut before the last tokens."""
    if last == spec.m:
        return 0.0
    size = item_bytes(str(spec.x_format))
    rate = chip.memory_bytes_per_second / chip.dma_engines
    each = sum(
        max(chip.dma_descriptor_min_seconds, chip.dma_descriptor_seconds + size * tokens / rate)
        for tokens in (last, spec.m - last)
    )
    return spec.k * (each - size * spec.m / rate) / chip.dma_engines * _US


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
